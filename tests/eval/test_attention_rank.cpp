// Ranks and masses of attention: known spectra, the values of uniform, random and sink attention, and the bounds that
// hold for sinks.
#include "eval/inside/attention_rank.h"

#include <numbers>
#include <numeric>

#include "engine/rng.h"
#include "kernels/attention/attention.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = 100;
using Matrix = std::vector<double>;

// Rows of weights over what they see, made to sum up to 1.
Matrix causal(int64_t n, const std::function<double(int64_t t, int64_t j)>& weight) {
  Matrix A(static_cast<size_t>(n * n));
  for (int64_t t = 0; t < n; ++t) {
    double sum = 0;
    for (int64_t j = 0; j <= t; ++j) sum += A[static_cast<size_t>(t * n + j)] = weight(t, j);
    for (int64_t j = 0; j <= t; ++j) A[static_cast<size_t>(t * n + j)] /= sum;
  }
  return A;
}

// Of every row but the first, which sees no more, `weight` on column 0 and the same rest on each other column.
Matrix sink(double weight) {
  return causal(T, [&](int64_t t, int64_t j) {
    return t == 0 ? 1 : j == 0 ? weight : (1 - weight) / static_cast<double>(t);
  });
}

Matrix random_softmax(uint64_t seed) {
  return causal(
      T, [&](int64_t t, int64_t j) { return std::exp(random_normal(seed, 5, static_cast<uint64_t>(t * T + j))); });
}

double sum_of(const std::vector<double>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }

// 1 - the largest singular value's share of |A|^2.
double share_of_rest(const Matrix& A, int64_t n) {
  const std::vector<double> energies = singular_energies(A.data(), n);
  return 1 - energies[0] / sum_of(energies);
}

void check_ranks(const Matrix& A, const std::vector<int64_t>& ranks, double share, int64_t mass) {
  const std::vector<double> energies = singular_energies(A.data(), T);
  CHECK(sum_of(energies) == doctest::Approx(sum_of(column_energies(A.data(), T))).epsilon(1e-12));
  const double taus[] = {0.8, 0.9, 0.95};
  for (size_t i = 0; i < 3; ++i) CHECK(fewest(energies, taus[i]) == ranks[i]);
  CHECK(std::abs(energies[0] / sum_of(energies) - share) <= 0.0005);
  CHECK(fewest(column_energies(A.data(), T), 0.9) == mass);
  const RankMass found = rank_and_mass(A.data(), T, 0.9, 0.9);
  CHECK(found.rank == ranks[1]);
  CHECK(found.mass == mass);
}

// Rows that leave at most eps to other columns than the first, at random.
Matrix random_sink(int64_t n, double eps, uint64_t seed) {
  const Matrix shares = random_vector<double>(n * n, seed);
  const auto share = [&](int64_t t, int64_t j) {
    return std::pow(std::abs(shares[static_cast<size_t>(t * n + j)]), 8);
  };
  Matrix A = causal(n, [&](int64_t t, int64_t j) { return t > 0 && j == 0 ? 0 : share(t, j) + 1e-9; });
  for (int64_t t = 1; t < n; ++t) {
    const double rest = eps * (t % 3 == 0 ? std::abs(shares[static_cast<size_t>(t)]) : 1);
    for (int64_t j = 1; j <= t; ++j) A[static_cast<size_t>(t * n + j)] *= rest;
    A[static_cast<size_t>(t * n)] = 1 - rest;
  }
  return A;
}

double distance_to_sink(const Matrix& A, int64_t n) {
  double sum = 0;
  for (int64_t t = 0; t < n; ++t)
    for (int64_t j = 0; j < n; ++j) sum += std::pow(A[static_cast<size_t>(t * n + j)] - (j == 0 ? 1 : 0), 2);
  return std::sqrt(sum);
}

// The largest singular value of the softmax's Jacobian diag(a) - a a^T, and its trace.
struct Jacobian {
  double norm, trace = 0;
  explicit Jacobian(const std::vector<double>& a) {
    const auto n = static_cast<int64_t>(a.size());
    Matrix J(static_cast<size_t>(n * n));
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j)
        J[static_cast<size_t>(i * n + j)] =
            (i == j ? a[static_cast<size_t>(i)] : 0) - a[static_cast<size_t>(i)] * a[static_cast<size_t>(j)];
    for (int64_t i = 0; i < n; ++i) trace += J[static_cast<size_t>(i * n + i)];
    norm = symmetric_eigenvalues(J.data(), n)[0];
  }
};

// (columns, rows) x (rows, others) of a (rows, columns) and b (rows, others): a^T b.
Matrix product_t(const Matrix& a, int64_t columns, const Matrix& b, int64_t others) {
  const int64_t rows = static_cast<int64_t>(a.size()) / columns;
  Matrix out(static_cast<size_t>(columns * others));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i)
      for (int64_t j = 0; j < others; ++j)
        out[static_cast<size_t>(i * others + j)] +=
            a[static_cast<size_t>(r * columns + i)] * b[static_cast<size_t>(r * others + j)];
  return out;
}

double spectral_norm(const Matrix& a, int64_t columns) {
  Matrix gram = product_t(a, columns, a, columns);
  return std::sqrt(symmetric_eigenvalues(gram.data(), columns)[0]);
}

double norm_of(const Matrix& a) { return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0)); }

constexpr double slack = 1 + 1e-5;

}  // namespace

TEST_CASE("attention rank: eigenvalues of matrices whose spectrum is known") {
  for (const int64_t n : {1, 2, 3, 17, 100}) {
    CAPTURE(n);
    const auto at = [&](int64_t i, int64_t j) { return static_cast<size_t>(i * n + j); };
    Matrix zero(at(n, 0)), ones(at(n, 0), 1.0), chain(at(n, 0)), turned(at(n, 0));
    std::vector<double> wanted;
    for (int64_t i = 0; i < n; ++i) {
      chain[at(i, i)] = 2;
      if (i > 0) chain[at(i, i - 1)] = chain[at(i - 1, i)] = -1;
      const double angle = static_cast<double>(n - i) * std::numbers::pi / static_cast<double>(n + 1);
      wanted.push_back(2 - 2 * std::cos(angle));
    }
    check_close("chain", symmetric_eigenvalues(chain.data(), n), wanted, 1e-14);
    for (const double value : symmetric_eigenvalues(zero.data(), n)) CHECK(value == 0);
    const std::vector<double> of_ones = symmetric_eigenvalues(ones.data(), n);
    CHECK(of_ones[0] == doctest::Approx(static_cast<double>(n)).epsilon(1e-14));
    for (size_t i = 1; i < of_ones.size(); ++i) CHECK(std::abs(of_ones[i]) < 1e-13 * static_cast<double>(n));
    // (I - 2 u u^T) D (I - 2 u u^T): D of magnitudes down to 1e-12, some twice, some negative.
    Matrix u = random_vector<double>(n, 3);
    const double length = norm_of(u);
    for (double& x : u) x /= length;
    for (int64_t i = 0; i < n; ++i) wanted[static_cast<size_t>(i)] = std::pow(0.5, i / 2) * (i % 5 == 4 ? -1 : 1);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < n; ++k) {
          const double left = (i == k) - 2 * u[static_cast<size_t>(i)] * u[static_cast<size_t>(k)];
          const double right = (j == k) - 2 * u[static_cast<size_t>(j)] * u[static_cast<size_t>(k)];
          sum += left * wanted[static_cast<size_t>(k)] * right;
        }
        turned[at(i, j)] = sum;
      }
    std::sort(wanted.begin(), wanted.end(), std::greater<>());
    const std::vector<double> got = symmetric_eigenvalues(turned.data(), n);
    REQUIRE(got.size() == wanted.size());
    for (size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - wanted[i]) < 2e-14);
  }
}

TEST_CASE("attention rank: uniform, sink and identity attention over 100 tokens, to the digit") {
  check_ranks(causal(T, [](int64_t, int64_t) { return 1; }), {3, 5, 8}, 0.512, 30);
  check_ranks(sink(0.9), {1, 1, 1}, 1.000, 1);
  check_ranks(sink(0.7), {1, 1, 1}, 0.994, 1);
  check_ranks(sink(0.5), {1, 1, 1}, 0.970, 1);
  check_ranks(sink(0.3), {1, 2, 3}, 0.867, 4);
  check_ranks(causal(T, [](int64_t t, int64_t j) { return t == j; }), {80, 90, 95}, 0.01, 90);
}

// One draw of normal logits has ranks 12, 21 and 31, a first share of 0.297 and mass 34. From draw to draw the ranks'
// standard deviation is about 1, the mass's 1.4, the share's 0.023; a mean of 20 draws must be as near as one draw is.
TEST_CASE("attention rank: random attention over 100 tokens") {
  double ranks[3] = {}, share = 0, mass = 0;
  constexpr int draws = 20;
  for (uint64_t seed = 0; seed < draws; ++seed) {
    const Matrix A = random_softmax(seed);
    const std::vector<double> energies = singular_energies(A.data(), T);
    const double taus[] = {0.8, 0.9, 0.95};
    for (size_t i = 0; i < 3; ++i) ranks[i] += static_cast<double>(fewest(energies, taus[i])) / draws;
    share += energies[0] / sum_of(energies) / draws;
    mass += static_cast<double>(rank_and_mass(A.data(), T, 0.9, 0.9).mass) / draws;
  }
  const double wanted[] = {12, 21, 31};
  for (size_t i = 0; i < 3; ++i) CHECK(std::abs(ranks[i] - wanted[i]) < 1.5);
  CHECK(std::abs(share - 0.297) < 0.03);
  CHECK(std::abs(mass - 34) < 1.5);
}

TEST_CASE("attention rank: no rank is above its mass") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const int64_t n = 2 + static_cast<int64_t>(seed) * 2 / 3;
    const double sharpness = static_cast<double>(seed % 7);
    const Matrix A = causal(n, [&](int64_t t, int64_t j) {
      return std::exp(sharpness * random_normal(seed, 6, static_cast<uint64_t>(t * n + j)));
    });
    for (const double share : {0.5, 0.8, 0.9, 0.95, 0.99}) {
      const RankMass found = rank_and_mass(A.data(), n, share, share);  // throws where it is
      CHECK(found.rank >= 1);
      CHECK(found.rank <= found.mass);
    }
  }
}

TEST_CASE("attention rank: means, lazy layers and groups") {
  std::vector<LayerCollapse> layers;
  for (const int64_t rank : {5, 1, 1, 9, 1, 0, 1, 4}) {
    layers.push_back({4, {}});
    if (rank > 0) layers.back().heads = {{4 * rank, 8}, {4, 4}};
  }
  CHECK(layers[0].max_rank() == 5);
  CHECK(layers[0].mean_rank() == 3);
  CHECK(layers[0].mean_mass() == 1.5);
  CHECK(layers[0].collapsed() == 1);
  CHECK(!layers[0].lazy());
  CHECK(layers[1].lazy());
  CHECK(!layers[5].lazy());      // no attention
  layers[6].heads[1].ranks = 5;  // one of four sequences has rank 2
  CHECK(!layers[6].lazy());
  CHECK(layers[6].collapsed() == 2);
  CHECK(layers[6].max_rank() == 1.25);
  CHECK(average_rank(layers, 0, 4) == 4);
  CHECK(average_rank(layers, 4, 7) == 1.125);
  CHECK(std::isnan(average_rank(layers, 5, 6)));
  const std::vector<LayerGroup> groups = lazy_groups(layers);
  REQUIRE(groups.size() == 2);
  CHECK(groups[0].begin == 1);
  CHECK(groups[0].end == 3);
  CHECK(groups[1].begin == 4);
  CHECK(groups[1].end == 7);
}

TEST_CASE("sink theorem: distance, rank and mass") {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const double eps = 0.5 * std::pow(0.8, static_cast<double>(seed % 20));
    const Matrix A = random_sink(T, eps, seed);
    CAPTURE(eps);
    const std::vector<double> energies = singular_energies(A.data(), T);
    CHECK(distance_to_sink(A, T) <= eps * std::sqrt(2.0 * (T - 1)) * slack);                // (i)
    CHECK(std::sqrt(energies[1]) <= eps * std::sqrt(2.0 * T) * slack);                      // (i)
    CHECK(share_of_rest(A, T) <= eps * eps / ((1 - eps) * (1 - eps) + eps * eps) * slack);  // (i')
  }
  // Tight where a row leaves all to one other column: one for all rows, or each its own.
  constexpr double eps = 0.2;
  const Matrix one = causal(T, [](int64_t t, int64_t j) { return t == 0 ? 1 : j == 0 ? 1 - eps : j == 1 ? eps : 0; });
  CHECK(distance_to_sink(one, T) == doctest::Approx(eps * std::sqrt(2.0 * (T - 1))).epsilon(1e-12));
  const Matrix own = causal(T, [](int64_t t, int64_t j) { return t == 0 ? 1 : j == 0 ? 1 - eps : j == t ? eps : 0; });
  const double bound = eps * eps / ((1 - eps) * (1 - eps) + eps * eps);
  CHECK(share_of_rest(own, T) <= bound * slack);
  CHECK(share_of_rest(own, T) > 0.97 * bound);
  // What makes rank and mass 1.
  const double taus[] = {0.8, 0.9, 0.95, 0.99}, limits[] = {0.333, 0.25, 0.187, 0.091};
  for (size_t i = 0; i < 4; ++i) {
    const double q = std::sqrt((1 - taus[i]) / taus[i]), limit = q / (1 + q);
    CHECK(std::abs(limit - limits[i]) < 0.0011);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const RankMass found = rank_and_mass(random_sink(T, limit, seed).data(), T, taus[i], taus[i]);
      CHECK(found.rank == 1);
      CHECK(found.mass == 1);
    }
  }
}

TEST_CASE("sink theorem: the gradient through the softmax") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const double eps = 0.5 * std::pow(0.8, static_cast<double>(seed % 20));
    const int64_t n = 3 + static_cast<int64_t>(seed);
    const Matrix A = random_sink(n, eps, seed);
    for (int64_t t = 1; t < n; ++t) {
      const Jacobian J({A.begin() + t * n, A.begin() + t * n + t + 1});
      CHECK(J.norm <= 2 * eps * (1 - eps) * slack);
      CHECK(J.norm <= J.trace * slack);
      CHECK(J.trace <= (1 - (1 - eps) * (1 - eps)) * slack);
    }
  }
  for (const double eps : {0.5, 0.1, 1e-3, 1e-6})
    CHECK(Jacobian({1 - eps, eps}).norm == doctest::Approx(2 * eps * (1 - eps)).epsilon(1e-9));
}

// One head, by the plain loops in double: queries X Wq^T, keys X Wk^T, of which position 0 attracts every query.
TEST_CASE("sink theorem: the gradients of the queries' and keys' weights") {
  constexpr int64_t n = 24, C = 10, D = 6;
  double closest = 0;
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    const double divisor = static_cast<double>(1 + seed % 4), scale = 1 / (std::sqrt(double{D}) * divisor);
    Matrix X = random_vector<double>(n * C, seed), Wq = random_vector<double>(D * C, seed + 100, 0.3);
    Matrix Wk = random_vector<double>(D * C, seed + 200, 0.3);
    const Matrix V = random_vector<double>(n * D, seed + 300), dO = random_vector<double>(n * D, seed + 400);
    for (int64_t t = 0; t < n; ++t) X[static_cast<size_t>(t * C)] = 1, X[static_cast<size_t>(t * C + 1)] = t == 0;
    const double pull = std::sqrt((3.0 + 0.3 * static_cast<double>(seed)) / scale);
    Wq[0] = pull, Wk[1] = pull;               // logits of about 3 to 10 more on position 0
    const auto rows = [&](const Matrix& W) {  // X W^T
      Matrix out(n * D);
      for (int64_t t = 0; t < n; ++t)
        for (int64_t d = 0; d < D; ++d)
          for (int64_t c = 0; c < C; ++c)
            out[static_cast<size_t>(t * D + d)] +=
                X[static_cast<size_t>(t * C + c)] * W[static_cast<size_t>(d * C + c)];
      return out;
    };
    const Matrix Q = rows(Wq), K = rows(Wk);
    Matrix out(n * D), lse(n), dQ(n * D), dK(n * D), dV(n * D), G(n * n);
    attention_forward_ref(out.data(), lse.data(), Q.data(), K.data(), V.data(), {1, n, 1, 1, D, n, 0}, scale);
    attention_backward_ref(dQ.data(), dK.data(), dV.data(), dO.data(), out.data(), Q.data(), K.data(), V.data(),
                           lse.data(), {1, n, 1, 1, D, n, 0}, scale, false, false, false);
    double eps = 0;
    for (int64_t t = 0; t < n; ++t) {
      double s = 0;
      for (int64_t d = 0; d < D; ++d) s += Q[static_cast<size_t>(t * D + d)] * K[static_cast<size_t>(d)];
      eps = std::max(eps, 1 - std::exp(scale * s - lse[static_cast<size_t>(t)]));
      for (int64_t j = 0; j <= t; ++j)
        for (int64_t d = 0; d < D; ++d)
          G[static_cast<size_t>(t * n + j)] += dO[static_cast<size_t>(t * D + d)] * V[static_cast<size_t>(j * D + d)];
    }
    CAPTURE(eps);
    REQUIRE(eps < 0.5);
    const double bound = 2 * eps * (1 - eps) * scale * spectral_norm(X, C) * norm_of(G);
    const double query = norm_of(product_t(dQ, D, X, C)), key = norm_of(product_t(dK, D, X, C));
    CHECK(query <= bound * spectral_norm(K, D) * slack);
    CHECK(key <= bound * spectral_norm(Q, D) * slack);
    closest = std::max({closest, query / (bound * spectral_norm(K, D)), key / (bound * spectral_norm(Q, D))});
  }
  CHECK(closest > 0.01);  // not a bound that anything would keep
}
