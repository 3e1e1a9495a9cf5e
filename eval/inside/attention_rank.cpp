#include "eval/inside/attention_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/check.h"

namespace crossply {
namespace {

constexpr double epsilon = std::numeric_limits<double>::epsilon();

// A symmetric tridiagonal matrix with the same eigenvalues: its diagonal and what stands beside it.
struct Tridiagonal {
  std::vector<double> d, e;
};

// Householder: the reflection I - beta v v^T that takes column k, below the diagonal, to a multiple of the first unit
// vector is applied from both sides. With p = beta A v and w = p - (beta/2) (p v) v that is A - v w^T - w v^T.
Tridiagonal tridiagonal(double* a, int64_t n) {
  Tridiagonal t{std::vector<double>(static_cast<size_t>(n)), std::vector<double>(static_cast<size_t>(n))};
  std::vector<double> v(static_cast<size_t>(n)), w(static_cast<size_t>(n));
  for (int64_t k = 0; k + 1 < n; ++k) {
    const int64_t m = n - k - 1;
    double* const rest = a + (k + 1) * n + k + 1;  // (m, m), rows n apart
    std::copy_n(a + k * n + k + 1, m, v.data());   // the row is the column
    double norm = std::sqrt(std::inner_product(v.begin(), v.begin() + m, v.begin(), 0.0));
    const double reflected = v[0] > 0 ? -norm : norm, square = 2 * (norm * norm - reflected * v[0]);
    t.d[static_cast<size_t>(k)] = a[k * n + k];
    t.e[static_cast<size_t>(k)] = reflected;
    if (square <= 0) continue;  // nothing below the diagonal
    v[0] -= reflected;
    const double beta = 2 / square;
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < m; ++j) sum += rest[i * n + j] * v[static_cast<size_t>(j)];
      w[static_cast<size_t>(i)] = beta * sum;
    }
    const double along = beta / 2 * std::inner_product(v.begin(), v.begin() + m, w.begin(), 0.0);
    for (int64_t i = 0; i < m; ++i) w[static_cast<size_t>(i)] -= along * v[static_cast<size_t>(i)];
    for (int64_t i = 0; i < m; ++i) {
      const double vi = v[static_cast<size_t>(i)], wi = w[static_cast<size_t>(i)];
#pragma omp simd
      for (int64_t j = 0; j < m; ++j)
        rest[i * n + j] -= vi * w[static_cast<size_t>(j)] + wi * v[static_cast<size_t>(j)];
    }
  }
  if (n > 0) t.d.back() = a[n * n - 1];
  return t;
}

// The eigenvalue of the last 2 x 2 block that is nearer to its corner.
double wilkinson_shift(double a, double b, double corner) {
  const double half = (a - corner) / 2, root = std::hypot(half, b);
  return root == 0 ? corner : corner - b * b / (half + std::copysign(root, half));
}

// One implicit QR step on lo .. hi: the first rotation is that of the shifted matrix, the others chase the element that
// it puts beside the diagonals down to the end.
void qr_step(Tridiagonal& t, size_t lo, size_t hi) {
  std::vector<double>&d = t.d, &e = t.e;
  double x = d[lo] - wilkinson_shift(d[hi - 1], e[hi - 1], d[hi]), z = e[lo];
  for (size_t k = lo; k < hi; ++k) {
    const double r = std::hypot(x, z), c = r == 0 ? 1 : x / r, s = r == 0 ? 0 : z / r;
    if (k > lo) e[k - 1] = r;
    const double first = d[k], second = d[k + 1], beside = e[k];
    d[k] = c * c * first + 2 * c * s * beside + s * s * second;
    d[k + 1] = s * s * first - 2 * c * s * beside + c * c * second;
    e[k] = c * s * (second - first) + (c * c - s * s) * beside;
    if (k + 1 == hi) break;
    x = e[k], z = s * e[k + 1];
    e[k + 1] *= c;
  }
}

double ratio(int64_t sum, int64_t count) { return static_cast<double>(sum) / static_cast<double>(count); }

void add_lazy_groups(std::vector<LayerGroup>& groups, const std::vector<LayerCollapse>& layers, size_t begin,
                     size_t end) {
  for (size_t length = end - begin; length > 0; --length) {
    for (size_t at = begin; at + length <= end; ++at) {
      const size_t last = at + length - 1;
      // Not so for a layer without attention, of NaN.
      if (!(layers[at].max_rank() < 2 && layers[last].max_rank() < 2 && average_rank(layers, at, last + 1) < 2))
        continue;
      add_lazy_groups(groups, layers, begin, at);
      groups.push_back({at, last + 1});
      return add_lazy_groups(groups, layers, last + 1, end);
    }
  }
}

}  // namespace

std::vector<double> symmetric_eigenvalues(double* a, int64_t n) {
  double size = 0;
  for (int64_t i = 0; i < n * n; ++i) size = std::max(size, std::abs(a[i]));
  Tridiagonal t = tridiagonal(a, n);
  int64_t left = 60 * n;  // steps; two or three each are usual
  for (size_t hi = static_cast<size_t>(std::max<int64_t>(n, 1)) - 1; hi > 0;) {
    const auto negligible = [&](size_t i) {
      return std::abs(t.e[i]) <= epsilon * (std::abs(t.d[i]) + std::abs(t.d[i + 1]) + size);
    };
    if (negligible(hi - 1)) {
      --hi;
      continue;
    }
    size_t lo = hi - 1;
    while (lo > 0 && !negligible(lo - 1)) --lo;
    CHECK_THAT(left-- > 0, "the eigenvalues of a matrix of ", n, " rows do not converge; the largest entry is ", size);
    qr_step(t, lo, hi);
  }
  std::sort(t.d.begin(), t.d.end(), std::greater<>());
  return t.d;
}

std::vector<double> singular_energies(const double* A, int64_t T) {
  std::vector<double> gram(static_cast<size_t>(T * T));  // A A^T
  for (int64_t i = 0; i < T; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k <= j; ++k) sum += A[i * T + k] * A[j * T + k];  // row j sees no more
      gram[static_cast<size_t>(i * T + j)] = gram[static_cast<size_t>(j * T + i)] = sum;
    }
  std::vector<double> energies = symmetric_eigenvalues(gram.data(), T);
  for (double& energy : energies) energy = std::max(energy, 0.0);
  return energies;
}

std::vector<double> column_energies(const double* A, int64_t T) {
  std::vector<double> energies(static_cast<size_t>(T));
  for (int64_t i = 0; i < T; ++i)
    for (int64_t j = 0; j < T; ++j) energies[static_cast<size_t>(j)] += A[i * T + j] * A[i * T + j];
  std::sort(energies.begin(), energies.end(), std::greater<>());
  return energies;
}

int64_t fewest(const std::vector<double>& energies, double share, double slack) {
  const double enough = (share - slack) * std::accumulate(energies.begin(), energies.end(), 0.0);
  int64_t count = 0;
  for (double sum = 0; sum < enough; ++count) sum += energies[static_cast<size_t>(count)];
  return count;
}

RankMass rank_and_mass(const double* A, int64_t T, double tau, double eta) {
  const std::vector<double> energies = singular_energies(A, T);
  const RankMass found{fewest(energies, tau), fewest(column_energies(A, T), eta)};
  // Twice the slack on one side, so that rounding cannot break the theorem.
  const int64_t rank = fewest(energies, eta, 2e-9);
  CHECK_THAT(rank <= found.mass, "k*(", eta, ") = ", rank, " of ", T, " is above m*(", eta, ") = ", found.mass);
  return found;
}

double LayerCollapse::rank(size_t head) const { return ratio(heads[head].ranks, N); }
double LayerCollapse::mass(size_t head) const { return ratio(heads[head].masses, N); }

double LayerCollapse::max_rank() const {
  int64_t most = 0;
  for (const HeadCollapse& head : heads) most = std::max(most, head.ranks);
  return heads.empty() ? NAN : ratio(most, N);
}

double LayerCollapse::mean_rank() const {
  int64_t sum = 0;
  for (const HeadCollapse& head : heads) sum += head.ranks;
  return heads.empty() ? NAN : ratio(sum, N * static_cast<int64_t>(heads.size()));
}

double LayerCollapse::mean_mass() const {
  int64_t sum = 0;
  for (const HeadCollapse& head : heads) sum += head.masses;
  return heads.empty() ? NAN : ratio(sum, N * static_cast<int64_t>(heads.size()));
}

bool LayerCollapse::lazy() const { return max_rank() == 1; }

int64_t LayerCollapse::collapsed() const {
  return std::count_if(heads.begin(), heads.end(),
                       [&](const HeadCollapse& head) { return ratio(head.ranks, N) < 1.5; });
}

double average_rank(const std::vector<LayerCollapse>& layers, size_t begin, size_t end) {
  double sum = 0;
  int64_t count = 0;
  for (size_t l = begin; l < end; ++l)
    if (!layers[l].heads.empty()) sum += layers[l].max_rank(), ++count;
  return count == 0 ? NAN : sum / static_cast<double>(count);
}

std::vector<LayerGroup> lazy_groups(const std::vector<LayerCollapse>& layers) {
  std::vector<LayerGroup> groups;
  add_lazy_groups(groups, layers, 0, layers.size());
  return groups;
}

}  // namespace crossply
