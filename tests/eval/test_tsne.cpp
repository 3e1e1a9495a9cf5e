// t-SNE: its probabilities, its gradient against the exact one and against the divergence, and its pictures.
#include "eval/inside/tsne.h"

#include <doctest/doctest.h>

#include <cmath>

#include "engine/rng.h"
#include "eval/inside/scatter.h"

using namespace crossply;

namespace {

double normal(uint64_t stream, int64_t i) { return random_normal(11, stream, static_cast<uint64_t>(i)); }

// (classes * n, C): normal around a point of each class' own, at about `apart` from 0 in every coordinate.
std::vector<double> groups(int64_t n, int64_t classes, int64_t C, double apart) {
  std::vector<double> X;
  for (int64_t row = 0; row < n * classes; ++row)
    for (int64_t i = 0; i < C; ++i) X.push_back(normal(1, row * C + i) + apart * normal(2, row / n * C + i));
  return X;
}

std::vector<PlanePoint> scattered(int64_t n, double scale) {
  std::vector<PlanePoint> Y;
  for (int64_t i = 0; i < n; ++i) Y.push_back({scale * normal(3, 2 * i), scale * normal(3, 2 * i + 1)});
  return Y;
}

double q_of(const PlanePoint& a, const PlanePoint& b) {
  return 1 / (1 + (a.x - b.x) * (a.x - b.x) + (a.y - b.y) * (a.y - b.y));
}

// From a dense P, by two loops over all pairs.
std::vector<PlanePoint> exact_gradient(const Affinities& P, const std::vector<PlanePoint>& Y, double exaggeration) {
  const size_t N = Y.size();
  std::vector<double> dense(N * N);
  for (size_t i = 0; i < N; ++i)
    for (auto k = static_cast<size_t>(P.first[i]); k < static_cast<size_t>(P.first[i + 1]); ++k)
      dense[i * N + static_cast<size_t>(P.column[k])] = exaggeration * P.p[k];
  double Z = 0;
  for (size_t i = 0; i < N; ++i)
    for (size_t j = 0; j < N; ++j) Z += i == j ? 0 : q_of(Y[i], Y[j]);
  std::vector<PlanePoint> gradient(N);
  for (size_t i = 0; i < N; ++i)
    for (size_t j = 0; j < N; ++j) {
      const double q = q_of(Y[i], Y[j]), factor = 4 * (dense[i * N + j] - q / Z) * q;
      gradient[i].x += factor * (Y[i].x - Y[j].x), gradient[i].y += factor * (Y[i].y - Y[j].y);
    }
  return gradient;
}

// Of the difference, as a share of the length.
double difference(const std::vector<PlanePoint>& a, const std::vector<PlanePoint>& b) {
  double apart = 0, length = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    apart += (a[i].x - b[i].x) * (a[i].x - b[i].x) + (a[i].y - b[i].y) * (a[i].y - b[i].y);
    length += b[i].x * b[i].x + b[i].y * b[i].y;
  }
  return std::sqrt(apart / length);
}

}  // namespace

TEST_CASE("t-SNE: the probabilities of neighbours have the perplexity that was asked for") {
  for (const double scale : {1e-12, 1.0, 1e12})
    for (const double perplexity : {2.0, 30.0}) {
      std::vector<double> squared;
      for (int64_t i = 0; i < 91; ++i) squared.push_back(scale * (1 + std::abs(normal(4, i))));
      double entropy = 0, sum = 0;
      for (const double p : neighbour_probabilities(squared, perplexity)) {
        sum += p;
        if (p > 0) entropy -= p * std::log(p);
      }
      CHECK(sum == doctest::Approx(1).epsilon(1e-12));
      CHECK(std::exp(entropy) == doctest::Approx(perplexity).epsilon(1e-6));
    }
  for (const double p : neighbour_probabilities(std::vector<double>(91, 0.0), 30))
    CHECK(p == doctest::Approx(1.0 / 91));
}

TEST_CASE("t-SNE: affinities are symmetric, sum up to 1, and hold the nearest") {
  const Affinities P = tsne_affinities(groups(20, 3, 5, 2), 5, 6);
  double sum = 0;
  const auto at = [&](int32_t i, int32_t j) {
    for (auto k = P.first[static_cast<size_t>(i)]; k < P.first[static_cast<size_t>(i) + 1]; ++k)
      if (P.column[static_cast<size_t>(k)] == j) return P.p[static_cast<size_t>(k)];
    return 0.0;
  };
  for (int32_t i = 0; i < 60; ++i) {
    CHECK(P.first[static_cast<size_t>(i) + 1] - P.first[static_cast<size_t>(i)] >= 19);  // 3 * 6 + 1
    CHECK(at(i, i) == 0);
    for (int32_t j = 0; j < 60; ++j) {
      CHECK(at(i, j) == doctest::Approx(at(j, i)).epsilon(1e-12));
      sum += at(i, j);
    }
  }
  CHECK(sum == doctest::Approx(1).epsilon(1e-12));
}

TEST_CASE("t-SNE: the gradient is exact at angle 0, and close at 0.5") {
  const Affinities P = tsne_affinities(groups(50, 4, 8, 2), 8, 10);
  for (const double scale : {1e-4, 1.0, 30.0})
    for (const double exaggeration : {1.0, 12.0}) {
      std::vector<PlanePoint> Y = scattered(200, scale);
      Y[7] = Y[8] = Y[9];  // some in the same place
      const std::vector<PlanePoint> exact = exact_gradient(P, Y, exaggeration);
      CHECK(difference(tsne_gradient(P, Y, exaggeration, 0), exact) < 1e-11);
      CHECK(difference(tsne_gradient(P, Y, exaggeration, 0.5), exact) < 0.05);
    }
}

TEST_CASE("t-SNE: the gradient is that of the divergence") {
  const Affinities P = tsne_affinities(groups(15, 2, 4, 1), 4, 5);
  std::vector<PlanePoint> Y = scattered(30, 1);
  const std::vector<PlanePoint> gradient = tsne_gradient(P, Y, 1, 0);
  for (size_t i = 0; i < Y.size(); i += 7)
    for (double PlanePoint::*part : {&PlanePoint::x, &PlanePoint::y}) {
      const double step = 1e-5, here = Y[i].*part;
      Y[i].*part = here + step;
      const double more = tsne_divergence(P, Y);
      Y[i].*part = here - step;
      const double less = tsne_divergence(P, Y);
      Y[i].*part = here;
      CHECK((more - less) / (2 * step) == doctest::Approx(gradient[i].*part).epsilon(1e-6).scale(1e-3));
    }
}

TEST_CASE("t-SNE: starts from the two directions in which the rows differ most") {
  const int64_t N = 200, C = 5;
  std::vector<double> X;
  for (int64_t n = 0; n < N; ++n) {
    const double u = normal(5, n), v = normal(6, n);
    for (const double x : {7.0, u, 9 * v + 1, 0.1 * normal(7, n), -2 * u}) X.push_back(x);
  }
  const std::vector<PlanePoint> Y = principal_start(X, C);
  double xx = 0, yy = 0, xy = 0, along = 0, vv = 0, mean = 0;
  for (int64_t n = 0; n < N; ++n) mean += normal(6, n) / static_cast<double>(N);
  for (size_t n = 0; n < Y.size(); ++n) {
    const double v = normal(6, static_cast<int64_t>(n)) - mean;
    xx += Y[n].x * Y[n].x, yy += Y[n].y * Y[n].y, xy += Y[n].x * Y[n].y;
    along += Y[n].x * v, vv += v * v;
  }
  CHECK(std::sqrt(xx / static_cast<double>(N)) == doctest::Approx(1e-4).epsilon(1e-9));
  CHECK(std::abs(xy) / std::sqrt(xx * yy) < 1e-6);
  CHECK(std::abs(along) / std::sqrt(xx * vv) > 0.98);  // v, whose variance is 81, of u's 5
  CHECK(yy < xx);
  for (const PlanePoint& y : principal_start(std::vector<double>(50, 2.0), 5))
    CHECK(std::abs(y.x) + std::abs(y.y) == 0);
}

TEST_CASE("t-SNE: groups that lie apart do so in the plane, and equal rows in one place") {
  const std::vector<double> X = groups(25, 3, 6, 8);
  TsneOptions o;
  o.perplexity = 8;
  const TsneResult result = tsne({X.begin(), X.end()}, 6, o);
  for (size_t i = 0; i < result.points.size(); ++i) {
    size_t nearest = i == 0 ? 1 : 0;
    for (size_t j = 0; j < result.points.size(); ++j)
      if (j != i && q_of(result.points[i], result.points[j]) > q_of(result.points[i], result.points[nearest]))
        nearest = j;
    CHECK(nearest / 25 == i / 25);
  }
  CHECK(result.divergence > 0);
  CHECK(result.divergence < 1);
  std::vector<float> equal;
  for (int64_t row = 0; row < 80; ++row)
    for (int64_t i = 0; i < 4; ++i) equal.push_back(i == row / 40 ? 1.0F : 0.5F);
  o.perplexity = 10, o.iterations = 300;
  int64_t steps = 0;
  for (const PlanePoint& y : tsne(equal, 4, o, [&] { ++steps; }).points) CHECK(std::isfinite(y.x + y.y));
  CHECK(steps == 300);
  CHECK(std::isfinite(tsne(std::vector<float>(80, 0.0F), 2, o).divergence));  // rows of zeros
}

TEST_CASE("scatter plots: a mark for every point, classes that look different, escaped names") {
  const std::vector<PlanePoint> some = scattered(5, 1);
  const std::string svg = scatter_svg("<title>", {"a & b", "<script>"},
                                      {{"model\x01<", {{"layer 1", {some, some}}, {"layer 2", {some, {}}}}}});
  size_t marks = 0;
  for (size_t at = svg.find('M'); at != std::string::npos; at = svg.find('M', at + 1)) ++marks;
  CHECK(marks == 15 + 2);  // and in the legend
  for (const char* part :
       {"&lt;title&gt;", "a &amp; b", "&lt;script&gt;", "model &lt;", "layer 2", "#0072B2", "#D55E00"})
    CHECK_MESSAGE(svg.find(part) != std::string::npos, part);
  for (const char* part : {"<script", "nan", "inf"}) CHECK(svg.find(part) == std::string::npos);
  const std::string one = scatter_svg("", {"a"}, {{"", {{"", {{{1, 1}}}}}}});  // a single point has no extent
  CHECK(one.find("nan") == std::string::npos);
}
