// What kernels for sm_90 take for granted, one assumption after the other, on a GPU that has it and in the emulator;
// and mistakes planted in a pipeline of copies and products, each of which the emulator must catch.
#include "kernels/cuda/hopper.h"
#include "tests/kernels/hopper_kernels.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Says once where there is nothing to test.
bool is_there() {
  static const bool there = [] {
    if (!available(Backend::cuda)) return false;
    if (!emulated && !has_hopper())
      std::fprintf(stderr, "Nothing of sm_90 is tested: another GPU, or not built for 90a\n");
    return emulated || has_hopper();
  }();
  return there;
}

const std::vector<WgmmaShape> products{{8, 64, false, false},  {8, 64, true, false},    {64, 64, false, false},
                                       {64, 64, true, false},  {64, 128, false, false}, {128, 128, false, false},
                                       {128, 64, true, false}, {64, 64, true, true},    {64, 128, true, true},
                                       {128, 64, true, true},  {128, 128, true, true}};

std::vector<float> multiplied(const WgmmaShape& f, const std::vector<bf16>& a, const std::vector<bf16>& b,
                              const std::vector<float>& before, Broken broken = Broken::none) {
  const OnDevice d(before);
  const OnDevice on_a(a), on_b(b);
  multiply(d.data, on_a.data, on_b.data, f, broken, 1);
  return d.host();
}

struct Compared {
  std::vector<float> got;
  std::vector<double> want;
};
Compared compared(const WgmmaShape& f, Broken broken = Broken::none) {
  const auto N = static_cast<size_t>(f.N), K = static_cast<size_t>(f.K);
  const auto a = random_vector<bf16>(64 * f.K, 1), b = random_vector<bf16>(f.N * f.K, 2);
  const auto before = random_vector<float>(64 * f.N, 3);
  Compared result{multiplied(f, a, b, before, broken), convert<double>(before)};
  for (size_t m = 0; m < 64; ++m)
    for (size_t n = 0; n < N; ++n)
      for (size_t k = 0; k < K; ++k)
        result.want[m * N + n] += static_cast<double>(float(a[m * K + k])) *
                                  static_cast<double>(float(f.transposed ? b[k * N + n] : b[n * K + k]));
  return result;
}

Compared piped(int tiles, Mistake mistake, uint64_t seed) {
  const auto q = random_vector<bf16>(128 * 64, 1), k = random_vector<bf16>(tiles * 64 * 64, 2);
  Compared result{{}, std::vector<double>(128 * 64)};
  for (size_t m = 0; m < 128; ++m)
    for (size_t n = 0; n < k.size() / 64; ++n)
      for (size_t c = 0; c < 64; ++c)
        result.want[m * 64 + n % 64] +=
            static_cast<double>(float(q[m * 64 + c])) * static_cast<double>(float(k[n * 64 + c]));
  const OnDevice on_q(q), on_k(k);
  const OnDevice out(std::vector<float>(128 * 64, NAN));
  pipe(out.data, on_q.data, on_k.data, tiles, mistake, seed);
  result.got = out.host();
  return result;
}

}  // namespace

TEST_CASE("hopper: barriers hand numbers from warp to warp") {
  if (!is_there()) return;
  const WithHopper hopper;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const OnDevice to(std::vector<int>(100, -1));
    hand_over(to.data, 100, seed);
    const std::vector<int> got = to.host();
    for (int i = 0; i < 100; ++i) REQUIRE(got[static_cast<size_t>(i)] == i);
  }
}

TEST_CASE("hopper: a box lies in panels as documented, zeros where there are no rows") {
  if (!is_there()) return;
  const WithHopper hopper;
  using B = Boxed;
  const auto x = random_vector<bf16>(B::batches * B::rows * B::row_stride, 1);
  const OnDevice from(x);
  for (const int row : {0, 8, 16, -3}) {
    const OnDevice to(std::vector<bf16>(B::box_rows * B::D, bf16(7.f)));
    take_box(to.data, from.data, row, 1, 1);
    const std::vector<bf16> got = to.host();
    for (int r = 0; r < B::box_rows; ++r)
      for (int c = 0; c < B::D; ++c) {
        CAPTURES(row, r, c);
        const bool there = row + r >= 0 && row + r < B::rows;
        const bf16 want = there ? x[static_cast<size_t>((B::rows + row + r) * B::row_stride + B::D + c)] : bf16(0.f);
        REQUIRE(float(got[static_cast<size_t>(place_in_panels<B::box_rows>(r, c))]) == float(want));
      }
  }
}

// Where a random product only says that something is wrong, this says what lies where.
TEST_CASE("hopper: a single one in the first factor selects a column of the second, in its row") {
  if (!is_there()) return;
  const WithHopper hopper;
  constexpr size_t N = 8, K = 64;
  for (const bool in_registers : {true, false})
    for (size_t place = 0; place < 64 * K; place += emulated ? 61 : 1) {
      const size_t row = place / K, k = place % K;
      std::vector<bf16> a(64 * K), b(N * K);
      a[place] = bf16(1.f);
      for (size_t i = 0; i < N * K; ++i) b[i] = bf16(static_cast<float>(1 + i % 256));
      const auto d = multiplied({N, K, in_registers, false}, a, b, std::vector<float>(64 * N));
      for (size_t i = 0; i < d.size(); ++i) {
        CAPTURES(in_registers, row, k, i / N, i % N);
        REQUIRE(d[i] == (i / N == row ? float(b[i % N * K + k]) : 0));
      }
    }
}

TEST_CASE("hopper: products of a warpgroup equal plain loops, from shared memory and from registers") {
  if (!is_there()) return;
  const WithHopper hopper;
  for (const WgmmaShape& f : products) {
    CAPTURES(f.N, f.K, f.in_registers, f.transposed);
    const Compared p = compared(f);
    check_close("d", p.got, p.want, 1e-6);
  }
}

TEST_CASE("hopper: a pipeline of copies and products, whatever the lots or the pauses") {
  if (!is_there()) return;
  const WithHopper hopper;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const Compared p = piped(emulated ? 5 : 100, Mistake::none, seed);
    check_close("out", p.got, p.want, 1e-5);
  }
}

// Says what attention's budgets are made of: a product takes N / 2 clocks of a multiprocessor at its peak, whoever asks
// for it; sixteen exponentials take one; and one warpgroup's exponentials are to go on beside another one's products.
TEST_CASE("hopper: rates of products and exponentials") {
  if (!is_there()) return;
  const WithHopper hopper;
  const int rounds = emulated ? 2 : 1000;
  std::vector<Rate> rates;
  for (const int N : {64, 128})
    for (const bool in_registers : {false, true})
      for (int groups = 1; groups <= 3; ++groups) rates.push_back({N, in_registers, groups, groups});
  for (int groups = 1; groups <= 3; ++groups) rates.push_back({64, false, groups, 0});
  rates.push_back({128, true, 2, 1});
  for (const Rate& rate : rates) {
    const OnDevice out(std::vector<float>(static_cast<size_t>(rate.groups) * 128, NAN));
    const OnDevice clocks(std::vector<int64_t>(static_cast<size_t>(rate.groups), -1));
    measure(out.data, clocks.data, rate, rounds);
    const std::vector<float> got = out.host();
    const std::vector<int64_t> taken = clocks.host();
    for (size_t i = 0; i < got.size(); ++i) {
      CAPTURES(rate.N, rate.in_registers, rate.groups, rate.multiplying, i);
      const bool multiplies = i / 128 < static_cast<size_t>(rate.multiplying);
      if (multiplies) REQUIRE(got[i] == static_cast<float>(rounds * 256));
      else REQUIRE(std::abs(got[i] - 0.6411857f) < 1e-5f);
    }
    const auto longest = static_cast<double>(*std::max_element(taken.begin(), taken.end()));
    REQUIRE(longest >= 0);
    if (longest == 0) continue;  // emulated
    const int others = rate.groups - rate.multiplying;
    const double product = longest / (16.0 * rounds * rate.multiplying), exponentials = 128.0 * rounds * 128 * others;
    if (rate.multiplying > 0)
      MESSAGE(rate.multiplying, " warpgroups, products of 64 x ", rate.N, ", first factor in ",
              rate.in_registers ? "registers: " : "shared memory: ", product, " clocks each, ", rate.N / 2,
              " at the peak", others > 0 ? ", exponentials beside them" : "");
    if (others > 0)
      MESSAGE(others, " warpgroups, exponentials: ", exponentials / longest, " a clock, 16 at the peak",
              rate.multiplying > 0 ? ", until the slower of the two is done" : "");
  }
}

#if !CROSSPLY_CUDA

TEST_CASE("hopper: mistakes around a product are caught") {
  const WithHopper hopper;
  const WgmmaShape registers{64, 64, true, false}, memory{64, 64, false, false};
  const auto fails = [&](Broken broken, const std::string& says) {
    check_fails(Exit::internal, {says}, [&] { compared(registers, broken); });
  };
  fails(Broken::fence, "touched behind the last wgmma_fence");
  fails(Broken::proxy, "without a fence.proxy.async");
  fails(Broken::touched, "sums were touched while a product was under way");
  const Compared step = compared(memory, Broken::step);
  CHECK(distance(step.got, step.want) > 1);
  CHECK(std::isnan(compared(registers, Broken::early_look).got[0]));
}

TEST_CASE("hopper: mistakes in a pipeline are caught") {
  const WithHopper hopper;
  // By most lots: an error that says so, or a wrong result.
  const auto caught = [](Mistake mistake, const std::string& says) {
    CAPTURE(says);
    int times = 0;
    for (uint64_t seed = 1; seed <= 4; ++seed) try {
        const Compared p = piped(5, mistake, seed);
        if (!(distance(p.got, p.want) < 1)) ++times;
      } catch (const Error& error) {
        INFO(std::string(error.what()));
        CHECK(std::string(error.what()).find(says) != std::string::npos);
        ++times;
      }
    CHECK(times >= 3);
  };
  caught(Mistake::no_wait_full, "");  // nothing is there yet, or the producer is overtaken
  caught(Mistake::released_early, "while a product that reads it was under way");
  caught(Mistake::parity, "threads wait for others that will not come");
  caught(Mistake::count, "1 of 9 arrivals");
  caught(Mistake::few_bytes, "expected too few");
  caught(Mistake::many_bytes, "256 bytes missing");
  caught(Mistake::init_fence, "but then there was no fence");
  caught(Mistake::turns, "named barrier");
  caught(Mistake::registers, "threads wait for more registers, of which 64 a thread are free");
  caught(Mistake::no_release, "threads wait for others that will not come");
  caught(Mistake::more_arrivals, "");  // a phase too many is over, or a stage is filled too early
  caught(Mistake::loaded, "what was loaded");
}

#endif
