#include "kernels/optim/sum_slices.h"

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::vector<float> sum(const std::vector<float>& from, int64_t S, int64_t n, Backend backend) {
  auto to = poisoned<float>(n);
  run_on(backend, {view(to.data(), {n}), view(from.data(), {S, n})},
         [&](auto& t, Stream stream) { sum_slices(t[0], t[1], stream); });
  return to;
}

// Of sizes that differ by much, so that another order shows.
std::vector<float> slices(int64_t S, int64_t n) {
  auto x = random_vector<float>(S * n, 1);
  for (int64_t i = 0; i < S * n; ++i) x[static_cast<size_t>(i)] *= static_cast<float>(1 << (i * 7 % 13));
  return x;
}

}  // namespace

TEST_CASE("sum_slices: every backend adds in the order of the tree, bit for bit") {
  for (const int64_t S : {1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 24, 33}) {
    for (const int64_t n : {1, 5, 64, 1027, 20001}) {
      CAPTURES(S, n);
      const auto from = slices(S, n);
      std::vector<float> want(static_cast<size_t>(n));
      sum_slices_ref(want.data(), from.data(), S, n);
      for (const Backend backend : all_backends()) {
        if (is_slow(backend) && n > 2000) continue;  // slow in the emulator
        CHECK(sum(from, S, n, backend) == want);
      }
    }
  }
}

TEST_CASE("sum_slices: the tree of the parts' trees is the tree of the whole where the parts are powers of two") {
  const int64_t n = 1000;
  for (const int64_t S : {4, 8, 12, 16, 24}) {
    const auto from = slices(S, n);
    const auto want = sum(from, S, n, Backend::cpu);
    for (int64_t part = 1; part < S && S % part == 0; part *= 2) {
      CAPTURES(S, part);
      std::vector<float> parts;
      for (int64_t first = 0; first < S; first += part) {
        const auto own = sum({from.begin() + first * n, from.begin() + (first + part) * n}, part, n, Backend::cpu);
        parts.insert(parts.end(), own.begin(), own.end());
      }
      CHECK(sum(parts, S / part, n, Backend::cpu) == want);
    }
  }
}

TEST_CASE("sum_slices: another order has other bits, so these tests can fail") {
  const int64_t S = 8, n = 1000;
  auto from = slices(S, n);
  const auto want = sum(from, S, n, Backend::cpu);
  std::rotate(from.begin(), from.begin() + n, from.end());
  CHECK(sum(from, S, n, Backend::cpu) != want);
}

TEST_CASE("sum_slices: into one of the slices, as a rank sums its own") {
  const int64_t S = 5, n = 3000;
  for (const Backend backend : fast_backends()) {
    auto from = slices(S, n);
    const auto want = sum(from, S, n, backend);
    run_on(backend, {view(from.data(), {S, n})}, [&](auto& t, Stream stream) {
      sum_slices(Tensor{t[0].template as<float>() + 2 * n, Dtype::f32, Shape{n}}, t[0], stream);
    });
    CHECK(std::vector<float>(from.begin() + 2 * n, from.begin() + 3 * n) == want);
  }
}

TEST_CASE("sum_slices: the same bits on any number of threads; a NaN shows where it is") {
  const int64_t S = 3, n = 40000;
  auto from = slices(S, n);
  check_same_bits_on_any_threads<float>([&] { return sum(from, S, n, Backend::cpu); });
  from[static_cast<size_t>(n + 17)] = NAN;
  const auto got = sum(from, S, n, Backend::cpu);
  for (size_t i = 0; i < got.size(); ++i) CHECK(std::isnan(got[i]) == (i == 17));
}
