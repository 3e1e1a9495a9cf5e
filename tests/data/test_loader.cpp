#include "data/loader.h"

#include <cmath>
#include <map>
#include <numeric>

#include "engine/rng.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Sample i is (2i, 2i + 1), its targets are the negatives: what was read says where it came from.
struct Numbered : Source {
  int64_t n;
  explicit Numbered(int64_t size) : n(size) {}
  int64_t size() const override { return n; }
  int64_t seq_len() const override { return 2; }
  int64_t vocab_size() const override { return 0; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    for (int64_t t = 0; t < 2; ++t) targets[t] = -(tokens[t] = static_cast<int32_t>(2 * index + t));
  }
};

// The next `batches` batches as sample indices.
std::vector<int64_t> draw(Loader& loader, int64_t batch, int64_t batches) {
  std::vector<int64_t> out;
  std::vector<int32_t> tokens(static_cast<size_t>(2 * batch)), targets(tokens);
  for (int64_t i = 0; i < batches; ++i) {
    loader.next(tokens.data(), targets.data());
    for (size_t b = 0; b < static_cast<size_t>(batch); ++b) {
      CHECK((tokens[2 * b + 1] == tokens[2 * b] + 1 && targets[2 * b] == -tokens[2 * b]));
      out.push_back(tokens[2 * b] / 2);
    }
  }
  return out;
}

std::vector<int64_t> permutation(int64_t n, uint64_t key) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(permute(i, n, key));
  return out;
}

std::vector<int64_t> in_order(int64_t n) {
  std::vector<int64_t> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

}  // namespace

TEST_CASE("loader: the permutation is a bijection for every size and key") {
  std::vector<int64_t> sizes = in_order(70);
  for (int64_t n : {255, 256, 257, 1023, 1025, 4096, 4097, 50000}) sizes.push_back(n);
  for (int64_t n : sizes)
    for (uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      auto p = permutation(n, key);
      std::sort(p.begin(), p.end());
      CHECK(p == in_order(n));
    }
  // Sizes that no table could hold.
  for (int64_t n : {int64_t{1} << 40, (int64_t{1} << 40) + 1, (int64_t{1} << 62) + 12345}) {
    std::vector<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) seen.push_back(permute(n - 1 - i, n, 5));
    std::sort(seen.begin(), seen.end());
    CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
    CHECK((seen.front() >= 0 && seen.back() < n));
  }
}

TEST_CASE("loader: the permutation looks shuffled") {
  // Large: correlations with the own place, the next element and the next epoch are those of random numbers, which have
  // a standard deviation of n^(-1/2); fixed points are Poisson(1).
  constexpr int64_t n = 50000;
  for (uint64_t key = 0; key < 5; ++key) {
    const auto p = permutation(n, key), q = permutation(n, key + 1);
    const double mean = (n - 1) / 2., variance = (static_cast<double>(n) * n - 1) / 12;
    double place = 0, next = 0, epoch = 0, fixed = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double x = static_cast<double>(p[static_cast<size_t>(i)]) - mean;
      place += x * (static_cast<double>(i) - mean);
      next += x * (static_cast<double>(p[static_cast<size_t>((i + 1) % n)]) - mean);
      epoch += x * (static_cast<double>(q[static_cast<size_t>(i)]) - mean);
      fixed += p[static_cast<size_t>(i)] == i;
    }
    for (double sum : {place, next, epoch}) CHECK(std::abs(sum / (n * variance)) < 5 / std::sqrt(n));
    CHECK(fixed < 9);
  }
  // Small: over many keys all 120 orders of five are equally likely: chi-square / 119 is 1 +- .13.
  std::map<std::vector<int64_t>, double> orders;
  for (uint64_t key = 0; key < 120000; ++key) ++orders[permutation(5, mix_bits(key + 1))];
  CHECK(orders.size() == 120);
  double chi_square = 0;
  for (const auto& [order, count] : orders) chi_square += (count - 1000) * (count - 1000) / 1000;
  CHECK(chi_square / 119 < 1.5);
  // And every element is equally often at every place, within five standard deviations.
  for (int64_t small : {2, 3, 5, 10, 17}) {
    constexpr int keys = 20000;
    std::vector<double> count(static_cast<size_t>(small * small), 0.);
    for (uint64_t key = 0; key < keys; ++key)
      for (int64_t i = 0; i < small; ++i) ++count[static_cast<size_t>(i * small + permute(i, small, mix_bits(key)))];
    const double share = 1. / static_cast<double>(small);
    for (double c : count) CHECK(std::abs(c - keys * share) < 5 * std::sqrt(keys * share * (1 - share)));
  }
}

TEST_CASE("loader: each epoch has every sample once, in an order of its own, also where a batch straddles epochs") {
  const Numbered source(10);
  Loader loader(source, 4, 3, true);
  const auto all = draw(loader, 4, 10);  // 40 samples: 4 epochs of 2.5 batches
  CHECK(loader.position() == 40);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t e = 0; e < 4; ++e) {
    std::vector<int64_t> epoch(all.begin() + 10 * e, all.begin() + 10 * (e + 1));
    CHECK(std::find(epochs.begin(), epochs.end(), epoch) == epochs.end());
    epochs.push_back(epoch);
    std::sort(epoch.begin(), epoch.end());
    CHECK(epoch == in_order(10));
  }
  Loader other_seed(source, 4, 4, true), plain(source, 4, 3, false), larger_than_an_epoch(source, 25, 3, true);
  CHECK(draw(other_seed, 4, 10) != all);
  CHECK(draw(plain, 4, 3) == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1});
  const auto wide = draw(larger_than_an_epoch, 25, 1);
  CHECK(wide == std::vector<int64_t>(all.begin(), all.begin() + 25));
}

TEST_CASE("loader: seeking anywhere continues as if nothing had happened") {
  const Numbered source(11);
  constexpr int64_t total = 60;
  Loader whole(source, 3, 9, true);
  const auto want = draw(whole, 3, total / 3);
  for (int64_t position = 0; position < total; ++position) {
    Loader resumed(source, 1, 9, true);
    resumed.seek(position);
    CHECK(resumed.position() == position);
    CHECK(draw(resumed, 1, total - position) == std::vector<int64_t>(want.begin() + position, want.end()));
  }
  // Ranks share a global batch of 6: rank r reads the r-th half, and together they read the same stream.
  std::vector<int64_t> shared;
  Loader rank(source, 3, 9, true);
  for (int64_t step = 0; step < total / 6; ++step)
    for (int64_t r = 0; r < 2; ++r) {
      rank.seek(6 * step + 3 * r);
      for (int64_t index : draw(rank, 3, 1)) shared.push_back(index);
    }
  CHECK(shared == want);
  // Far beyond 32 bits.
  const int64_t far = (int64_t{1} << 40) + 7;
  Loader a(source, 5, 9, true), b(source, 1, 9, true);
  a.seek(far), b.seek(far);
  CHECK(draw(a, 5, 2) == draw(b, 1, 10));
  CHECK(a.position() == far + 10);
}

TEST_CASE("loader: an empty source and a negative position are refused") {
  const Numbered empty(0), one(1);
  check_fails(Exit::internal, {"source of 0"}, [&] { Loader(empty, 1, 0, true); });
  Loader loader(one, 1, 0, true);
  check_fails(Exit::internal, {"seek"}, [&] { loader.seek(-1); });
  CHECK(draw(loader, 1, 3) == std::vector<int64_t>{0, 0, 0});
}
