#include "eval/inside/tsne.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/check.h"
#include "engine/rng.h"

namespace crossply {
namespace {

double squared_distance(const double* a, const double* b, int64_t C) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < C; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

double dot_of(const double* a, const double* b, int64_t C) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < C; ++i) sum += a[i] * b[i];
  return sum;
}

// -----------------------------------------------------------------------------------------------------------------
// Barnes and Hut's tree

// The cells in the order of a walk that goes down first: the first child follows its cell, and what follows the whole
// cell is at `after`. A cell without children holds one point, or several that cannot be told apart.
class QuadTree {
 public:
  explicit QuadTree(const std::vector<PlanePoint>& Y) : Y_(Y), order_(Y.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    PlanePoint low = Y[0], high = Y[0];
    for (const PlanePoint& y : Y) {
      low = {std::min(low.x, y.x), std::min(low.y, y.y)};
      high = {std::max(high.x, y.x), std::max(high.y, y.y)};
    }
    add(0, Y.size(), low, std::max(high.x - low.x, high.y - low.y), 0);
  }

  // Adds sum_j q^2 (y - y_j) to the force and returns sum_j q, of all points j, y itself among them.
  double repel(const PlanePoint& y, double angle, PlanePoint* force) const {
    double sum = 0;
    for (size_t c = 0; c < cells_.size();) {
      const Cell& cell = cells_[c];
      const double dx = y.x - cell.centre.x, dy = y.y - cell.centre.y, squared = dx * dx + dy * dy;
      const bool leaf = cell.after == c + 1;
      if (!leaf && cell.width * cell.width >= angle * angle * squared) {
        ++c;
        continue;
      }
      const double q = 1 / (1 + squared), all = cell.points * q;
      sum += all;
      force->x += all * q * dx, force->y += all * q * dy;
      c = cell.after;
    }
    return sum;
  }

 private:
  struct Cell {
    PlanePoint centre;  // of its points' mass
    double width, points;
    size_t after;
  };
  static constexpr int deepest = 60;  // halvings; what is closer is one point

  void add(size_t begin, size_t end, const PlanePoint& corner, double width, int depth) {
    const size_t c = cells_.size();
    PlanePoint sum;
    bool one = true;
    for (size_t k = begin; k < end; ++k) {
      const PlanePoint& y = Y_[order_[k]];
      sum.x += y.x, sum.y += y.y;
      one = one && y.x == Y_[order_[begin]].x && y.y == Y_[order_[begin]].y;
    }
    const auto n = static_cast<double>(end - begin);
    cells_.push_back({one ? Y_[order_[begin]] : PlanePoint{sum.x / n, sum.y / n}, width, n, 0});
    if (!one && depth < deepest) {
      const double half = width / 2;
      const PlanePoint middle{corner.x + half, corner.y + half};
      const auto at = [&](size_t k) { return order_.begin() + static_cast<int64_t>(k); };
      const auto split = [&](size_t from, size_t to, auto&& before) {
        return static_cast<size_t>(std::partition(at(from), at(to), before) - order_.begin());
      };
      const size_t upper = split(begin, end, [&](size_t i) { return Y_[i].y < middle.y; });
      const size_t lower_right = split(begin, upper, [&](size_t i) { return Y_[i].x < middle.x; });
      const size_t upper_right = split(upper, end, [&](size_t i) { return Y_[i].x < middle.x; });
      if (begin < lower_right) add(begin, lower_right, corner, half, depth + 1);
      if (lower_right < upper) add(lower_right, upper, {middle.x, corner.y}, half, depth + 1);
      if (upper < upper_right) add(upper, upper_right, {corner.x, middle.y}, half, depth + 1);
      if (upper_right < end) add(upper_right, end, middle, half, depth + 1);
    }
    cells_[c].after = cells_.size();
  }

  const std::vector<PlanePoint>& Y_;
  std::vector<size_t> order_;
  std::vector<Cell> cells_;
};

// Rows of length 1; a row of zeros stays one.
std::vector<double> unit_rows(const std::vector<float>& rows, int64_t C) {
  std::vector<double> X(rows.begin(), rows.end());
  for (size_t begin = 0; begin < X.size(); begin += static_cast<size_t>(C)) {
    const double length = std::sqrt(dot_of(&X[begin], &X[begin], C));
    for (int64_t i = 0; i < C && length > 0; ++i) X[begin + static_cast<size_t>(i)] /= length;
  }
  return X;
}

}  // namespace

std::vector<double> neighbour_probabilities(const std::vector<double>& squared, double perplexity) {
  const double wanted = std::log(perplexity), nearest = *std::min_element(squared.begin(), squared.end());
  double beta = 1, low = 0, high = INFINITY;
  std::vector<double> p(squared.size());
  for (int step = 0; step < 200; ++step) {
    double sum = 0, mean = 0;
    for (size_t j = 0; j < p.size(); ++j) {
      const double further = squared[j] - nearest;  // which changes no p, but keeps the sum from vanishing
      p[j] = further == 0 ? 1 : std::exp(-beta * further);
      sum += p[j], mean += p[j] * further;
    }
    for (double& v : p) v /= sum;
    const double difference = std::log(sum) + (mean == 0 ? 0 : beta * mean / sum) - wanted;
    if (std::abs(difference) < 1e-9) break;
    if (difference > 0) low = beta, beta = std::isinf(high) ? 2 * beta : (beta + high) / 2;
    else high = beta, beta = (beta + low) / 2;
    if (!std::isfinite(beta)) break;
  }
  return p;
}

Affinities tsne_affinities(const std::vector<double>& X, int64_t C, double perplexity) {
  const int64_t N = std::ssize(X) / C, k = std::min(N - 1, static_cast<int64_t>(3 * perplexity + 1));
  std::vector<std::vector<std::pair<int32_t, double>>> both(static_cast<size_t>(N));  // p_j|i and p_i|j
  std::vector<std::pair<double, int32_t>> others;
  for (int64_t i = 0; i < N; ++i) {
    others.clear();
    for (int64_t j = 0; j < N; ++j)
      if (j != i) others.emplace_back(squared_distance(X.data() + i * C, X.data() + j * C, C), static_cast<int32_t>(j));
    std::nth_element(others.begin(), others.begin() + (k - 1), others.end());
    std::vector<double> squared;
    for (int64_t n = 0; n < k; ++n) squared.push_back(others[static_cast<size_t>(n)].first);
    const std::vector<double> p = neighbour_probabilities(squared, perplexity);
    for (size_t n = 0; n < p.size(); ++n) {
      const int32_t j = others[n].second;
      both[static_cast<size_t>(i)].emplace_back(j, p[n]);
      both[static_cast<size_t>(j)].emplace_back(static_cast<int32_t>(i), p[n]);
    }
  }
  Affinities P;
  P.first.push_back(0);
  for (auto& row : both) {
    std::sort(row.begin(), row.end());
    for (size_t n = 0; n < row.size(); ++n) {
      const double p = row[n].second / (2 * static_cast<double>(N));
      if (n > 0 && row[n].first == row[n - 1].first) P.p.back() += p;
      else P.column.push_back(row[n].first), P.p.push_back(p);
    }
    P.first.push_back(std::ssize(P.p));
  }
  return P;
}

std::vector<PlanePoint> principal_start(const std::vector<double>& X, int64_t C) {
  const int64_t N = std::ssize(X) / C;
  std::vector<double> centred = X, mean(static_cast<size_t>(C));
  const auto row = [&](int64_t n) { return centred.data() + n * C; };
  const auto add = [C](double factor, const double* from, double* to) {
    for (int64_t i = 0; i < C; ++i) to[i] += factor * from[i];
  };
  for (int64_t n = 0; n < N; ++n) add(1, row(n), mean.data());
  for (double& m : mean) m /= static_cast<double>(N);
  for (int64_t n = 0; n < N; ++n) add(-1, mean.data(), row(n));
  // Powers of X^T X on two directions, which are kept at right angles: they turn to its first two eigenvectors.
  std::vector<double> directions[2], scores[2];
  for (size_t d = 0; d < 2; ++d) {
    Random random(d, stream_of("tsne.directions"));
    for (int64_t i = 0; i < C; ++i) directions[d].push_back(random.uniform() - 0.5);
    scores[d].resize(static_cast<size_t>(N));
  }
  for (int power = 0; power < 100; ++power)
    for (size_t d = 0; d < 2; ++d) {
      double* v = directions[d].data();
      if (d == 1) add(-dot_of(v, directions[0].data(), C), directions[0].data(), v);
      const auto to_unit = [&] {
        const double length = std::sqrt(dot_of(v, v, C));
        for (int64_t i = 0; i < C; ++i) v[i] = length > 0 ? v[i] / length : 0;
      };
      to_unit();
      for (int64_t n = 0; n < N; ++n) scores[d][static_cast<size_t>(n)] = dot_of(row(n), v, C);
      std::fill_n(v, C, 0.0);
      for (int64_t n = 0; n < N; ++n) add(scores[d][static_cast<size_t>(n)], row(n), v);
      to_unit();
    }
  const double deviation = std::sqrt(dot_of(scores[0].data(), scores[0].data(), N) / static_cast<double>(N));
  const double length = std::sqrt(dot_of(X.data(), X.data(), N * C) / static_cast<double>(N));
  std::vector<PlanePoint> Y(static_cast<size_t>(N));
  for (size_t n = 0; n < Y.size() && deviation > 1e-12 * length; ++n)  // else the rows are equal but for rounding
    Y[n] = {1e-4 * scores[0][n] / deviation, 1e-4 * scores[1][n] / deviation};
  return Y;
}

std::vector<PlanePoint> tsne_gradient(const Affinities& P, const std::vector<PlanePoint>& Y, double exaggeration,
                                      double angle, double* Z) {
  const QuadTree tree(Y);
  std::vector<PlanePoint> apart(Y.size());
  double z = -static_cast<double>(Y.size());  // without every point's q of itself, 1
  for (size_t i = 0; i < Y.size(); ++i) z += tree.repel(Y[i], angle, &apart[i]);
  for (size_t i = 0; i < Y.size(); ++i) {
    PlanePoint together;
    for (auto k = static_cast<size_t>(P.first[i]); k < static_cast<size_t>(P.first[i + 1]); ++k) {
      const PlanePoint& other = Y[static_cast<size_t>(P.column[k])];
      const double dx = Y[i].x - other.x, dy = Y[i].y - other.y;
      const double pull = P.p[k] / (1 + dx * dx + dy * dy);
      together.x += pull * dx, together.y += pull * dy;
    }
    apart[i] = {4 * (exaggeration * together.x - apart[i].x / z), 4 * (exaggeration * together.y - apart[i].y / z)};
  }
  if (Z != nullptr) *Z = z;
  return apart;
}

double tsne_divergence(const Affinities& P, const std::vector<PlanePoint>& Y) {
  const auto q = [&](size_t i, size_t j) {
    const double dx = Y[i].x - Y[j].x, dy = Y[i].y - Y[j].y;
    return 1 / (1 + dx * dx + dy * dy);
  };
  double Z = 0, sum = 0;
  for (size_t i = 0; i < Y.size(); ++i)
    for (size_t j = 0; j < i; ++j) Z += 2 * q(i, j);
  for (size_t i = 0; i < Y.size(); ++i)
    for (auto k = static_cast<size_t>(P.first[i]); k < static_cast<size_t>(P.first[i + 1]); ++k)
      if (P.p[k] > 0) sum += P.p[k] * std::log(P.p[k] * Z / q(i, static_cast<size_t>(P.column[k])));
  return sum;
}

double tsne_flops(int64_t N, int64_t C, const TsneOptions& o) {
  const auto n = static_cast<double>(N), c = static_cast<double>(C);
  const double cells = 15 * std::log2(n);  // of the tree that a point looks at, at angle 0.5
  return 3 * n * n * c + 800 * n * c + static_cast<double>(o.iterations) * n * (12 * cells + 10 * 6 * o.perplexity) +
         10 * n * n;
}

TsneResult tsne(const std::vector<float>& rows, int64_t C, const TsneOptions& o, const std::function<void()>& stepped) {
  const std::vector<double> X = unit_rows(rows, C);
  const auto N = static_cast<double>(std::ssize(X) / C);
  CHECK_THAT(N > o.perplexity, "t-SNE of ", N, " rows with perplexity ", o.perplexity);
  const Affinities P = tsne_affinities(X, C, o.perplexity);
  TsneResult result{principal_start(X, C), 0};
  std::vector<PlanePoint>& Y = result.points;
  const double rate = std::max(N / o.exaggeration / 4, 50.0);
  std::vector<PlanePoint> update, gain;
  const auto move = [&](double* at, double gradient, double* last, double* factor, double momentum) {
    *factor = std::max(0.01, *last * gradient < 0 ? *factor + 0.2 : *factor * 0.8);
    *last = momentum * *last - rate * *factor * gradient;
    *at += *last;
  };
  for (int64_t step = 0; step < o.iterations; ++step) {
    const bool exaggerated = step < o.exaggerated;
    if (step == 0 || step == o.exaggerated)  // both parts start at rest
      update.assign(Y.size(), {0, 0}), gain.assign(Y.size(), {1, 1});
    const std::vector<PlanePoint> gradient = tsne_gradient(P, Y, exaggerated ? o.exaggeration : 1, o.angle);
    for (size_t i = 0; i < Y.size(); ++i) {
      const double momentum = exaggerated ? 0.5 : 0.8;
      move(&Y[i].x, gradient[i].x, &update[i].x, &gain[i].x, momentum);
      move(&Y[i].y, gradient[i].y, &update[i].y, &gain[i].y, momentum);
    }
    stepped();
  }
  result.divergence = tsne_divergence(P, Y);
  return result;
}

}  // namespace crossply
