#include "kernels/optim/gradient_norm.h"

#include <numeric>

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {
const std::vector<int64_t> sizes{0, 1, 31, 32, 33, leaf - 1, leaf, leaf + 1, 20000, 300007};

std::vector<double> leaves(const std::vector<float>& x, Backend backend = Backend::cpu) {
  auto sums = poisoned<double>(leaves_of(static_cast<int64_t>(x.size())));
  run_on(backend, {view(sums), view(x)}, [&](auto& t, Stream stream) { leaf_squares(t[0], t[1], stream); });
  return sums;
}
double norm(const std::vector<float>& x, Backend backend = Backend::cpu) {
  const auto sums = leaves(x, backend);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}
}  // namespace

// A float's square is exact in double, and n additions of positive numbers lose at most n * 2^-53 between them.
TEST_CASE("gradient_norm: the sum of squares, in double, at every magnitude of a float") {
  for (double scale : {1e-38, 1e-20, 1.0, 1e20, 3e38}) {
    for (int64_t n : sizes) {
      CAPTURES(scale, n);
      const auto x = random_vector<float>(n, 1, scale);
      long double want = 0;
      for (float value : x) want += static_cast<long double>(value) * static_cast<long double>(value);
      for (const Backend backend : all_backends()) {
        if (is_slow(backend) && n > 20000) continue;  // slow in the emulator
        const double got = norm(x, backend);
        const double allowed = static_cast<double>(n) * 0x1p-53 * static_cast<double>(want);
        CHECK(std::abs(got - static_cast<double>(want)) <= allowed);
      }
    }
  }
}

TEST_CASE("gradient_norm: a leaf has the same bits alone as among others") {
  const auto x = random_vector<float>(5 * leaf + 7, 3);
  for (const Backend backend : fast_backends()) {
    const auto all = leaves(x, backend);
    const auto tail = leaves({x.begin() + 3 * leaf, x.end()}, backend);
    CHECK(std::vector<double>(all.begin() + 3, all.end()) == tail);
  }
}

TEST_CASE("gradient_norm: every element counts once, wherever a leaf ends") {
  for (int64_t n : sizes) {
    CAPTURE(n);
    for (const Backend backend : fast_backends())
      CHECK(norm(std::vector<float>(static_cast<size_t>(n), 3.f), backend) == 9.0 * static_cast<double>(n));
  }
}

TEST_CASE("gradient_norm: the same bits on any number of threads") {
  for (int64_t n : sizes) {
    const auto x = random_vector<float>(n, 1);
    check_same_bits_on_any_threads<double>([&] { return leaves(x); });
  }
}

TEST_CASE("gradient_norm: one NaN or infinity anywhere shows") {
  for (size_t n : {1u, 33u, 20001u}) {
    for (size_t at : {size_t{0}, n / 2, n - 1}) {
      std::vector<float> x(n, 1.f);
      for (const Backend backend : fast_backends()) {
        x[at] = NAN;
        CHECK(std::isnan(norm(x, backend)));
        x[at] = -INFINITY;
        CHECK(norm(x, backend) == std::numeric_limits<double>::infinity());
      }
    }
  }
}

TEST_CASE("gradient_norm: sums add to what is there, in double") {
  for (const int64_t n : sizes) {
    CAPTURE(n);
    const auto x = random_vector<float>(n, 2);
    long double want = 0.25, size = 0.25;
    for (const float value : x) want += static_cast<long double>(value), size += std::abs(value);
    for (const Backend backend : all_backends()) {
      if (is_slow(backend) && n > 20000) continue;  // slow in the emulator
      double sum = 0.25;
      run_on(backend, {view(&sum, {1}), view(x)}, [&](auto& t, Stream stream) { add_sum(t[0], t[1], stream); });
      CHECK(std::abs(sum - static_cast<double>(want)) <= static_cast<double>(n) * 0x1p-53 * static_cast<double>(size));
    }
  }
}

TEST_CASE("gradient_norm: sums listed in an order, each as often as it is there") {
  for (const int64_t n : {0, 1, 255, 257, 1023, 1024, 1025, 3000}) {
    CAPTURE(n);
    const auto numbers = random_vector<float>(5000, 4);
    std::vector<double> sums(numbers.begin(), numbers.end());
    std::vector<int32_t> order;
    long double want = 0, size = 0;
    for (int64_t k = 0; k < n; ++k) {
      order.push_back(static_cast<int32_t>((k * 37 + 11) % 4001));
      const double x = sums[static_cast<size_t>(order.back())];
      want += x, size += std::abs(x);
    }
    for (const Backend backend : all_backends()) {
      CAPTURE(backend);
      double sum = NAN;
      run_on(backend, {view(&sum, {1}), view(sums), view(order.data(), {n})},
             [&](auto& t, Stream stream) { ordered_sum(t[0], t[1], t[2], stream); });
      CHECK(std::abs(sum - static_cast<double>(want)) <= static_cast<double>(n) * 0x1p-53 * static_cast<double>(size));
      if (n == 0) continue;
      double weighted = NAN;
      const std::vector<double> half(static_cast<size_t>(n), 0.5);  // exact
      run_on(backend, {view(&weighted, {1}), view(sums), view(order.data(), {n}), view(half)},
             [&](auto& t, Stream stream) { ordered_sum(t[0], t[1], t[2], stream, t[3]); });
      CHECK(weighted == sum / 2);
      sums[static_cast<size_t>(order[static_cast<size_t>(n - 1)])] += 1e9;
      double other = NAN;
      run_on(backend, {view(&other, {1}), view(sums), view(order.data(), {n})},
             [&](auto& t, Stream stream) { ordered_sum(t[0], t[1], t[2], stream); });
      sums[static_cast<size_t>(order[static_cast<size_t>(n - 1)])] = numbers[static_cast<size_t>(order.back())];
      CHECK(other - sum == doctest::Approx(1e9));
    }
  }
}
