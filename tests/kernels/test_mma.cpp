// The tensor core instructions as the emulator has them: fragments laid out by hand against plain loops.
#if !CROSSPLY_CUDA

#include "kernels/cuda/mma.cuh"

#include <numeric>
#include <set>

#include "kernels/attention/attention_mma.cuh"
#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// d (16,8) += a (16,16) b (16,8), every register filled from the matrices by the documented layout; `swapped`: with the
// second and third of a exchanged.
__global__ void product_kernel(float* d, const bf16* a, const bf16* b, bool swapped) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  const auto pair = [](bf16 low, bf16 high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  const auto of_a = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
  const auto of_b = [&](int row) { return pair(b[row * 8 + g], b[(row + 1) * 8 + g]); };
  Pairs pairs{{of_a(g, 2 * t), of_a(g + 8, 2 * t), of_a(g, 2 * t + 8), of_a(g + 8, 2 * t + 8)}};
  if (swapped) std::swap(pairs[1], pairs[2]);
  Floats<4> sums;
  for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  mma_m16n8k16(sums, pairs, of_b(2 * t), of_b(2 * t + 8));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// to (4, 32): the registers of each lane, the matrices being rows of `from` (32, 8).
__global__ void matrices_kernel(uint32_t* to, const bf16* from, bool transposed) {
  bf16* rows = dynamic_shared<bf16>();
  for (int i = 0; i < 8; ++i) rows[threadIdx.x * 8 + i] = from[threadIdx.x * 8 + i];
  __syncwarp();
  const Pairs pairs = transposed ? ldmatrix_transposed(rows + threadIdx.x * 8) : ldmatrix(rows + threadIdx.x * 8);
  for (int m = 0; m < 4; ++m) to[m * 32 + threadIdx.x] = pairs[m];
}

// Two groups of copies, of which the first is waited for; then both.
__global__ void copies_kernel(float* first, float* then, const float* from) {
  float* shared = dynamic_shared<float>();
  cp_async<16>(shared, from, true);
  cp_async<4>(shared + 4, from + 4, true);
  cp_async<16>(shared + 8, from, false);
  cp_async_commit();
  cp_async<16>(shared + 12, from + 8, true);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 16; ++i) first[i] = shared[i];
  cp_async_wait<0>();
  for (int i = 0; i < 16; ++i) then[i] = shared[i];
}

// s (32,32) = a (32,96) b^T, b (32,96), and out (32,96) = (s rounded to bf16) b: one warp.
__global__ void tiles_kernel(float* s, float* out, const bf16* a, const bf16* b) {
  constexpr int width = 96;
  bf16 *a_tile = dynamic_shared<bf16>(), *b_tile = a_tile + 32 * width;
  load_tile<width, 32, 32>(a_tile, a, width, 32, width);
  load_tile<width, 32, 32>(b_tile, b, width, 32, width);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  Sums<2, 4> weights{};
  multiply_rows<width>(weights, a_tile, b_tile);
  Sums<2, 12> sums{};
  multiply_weights<width>(sums, rounded(weights), b_tile, 0);
  const int g = lane_of() / 4, t = lane_of() % 4;
  for (int m = 0; m < 2; ++m)
    for (int i = 0; i < 4; ++i) {
      const int row = m * 16 + g + i / 2 * 8, column = 2 * t + i % 2;
      for (int n = 0; n < 4; ++n) s[row * 32 + n * 8 + column] = weights[m][n][i];
      for (int n = 0; n < 12; ++n) out[row * width + n * 8 + column] = sums[m][n][i];
    }
}

}  // namespace

TEST_CASE("mma: a product of fragments equals plain loops, and swapped registers do not") {
  const auto a = random_vector<bf16>(16 * 16, 1), b = random_vector<bf16>(16 * 8, 2);
  const auto before = random_vector<float>(16 * 8, 3);
  auto want = convert<double>(before);
  for (size_t m = 0; m < 16; ++m)
    for (size_t n = 0; n < 8; ++n)
      for (size_t k = 0; k < 16; ++k)
        want[m * 8 + n] += static_cast<double>(float(a[m * 16 + k])) * static_cast<double>(float(b[k * 8 + n]));
  const OnDevice d(before), wrong(before);
  const OnDevice a_there(a), b_there(b);
  launch({"product", 1, 32}, product_kernel, d.data, a_there.data, b_there.data, false);
  check_close("d", d.host(), want, 1e-6);
  launch({"product", 1, 32}, product_kernel, wrong.data, a_there.data, b_there.data, true);
  CHECK(distance(wrong.host(), want) > 0.1 * size_of(want));
}

TEST_CASE("mma: sums are cut off, eight products at a time") {
  const auto sum = [](float before, float product, int terms) {
    std::vector<bf16> a(16 * 16, bf16(0.f)), b(16 * 8, bf16(1.f));
    for (int k = 0; k < terms; ++k) a[static_cast<size_t>(k)] = bf16(product);
    const OnDevice d(std::vector<float>(16 * 8, before));
    const OnDevice a_there(a), b_there(b);
    launch({"product", 1, 32}, product_kernel, d.data, a_there.data, b_there.data, false);
    return d.host()[0];
  };
  const float part = 1.5f * 0x1p-24f;  // beside 1 a bit below the last place is kept: 2^-24 of this
  CHECK(sum(1, part, 1) == 1);
  CHECK(sum(1, part, 8) == 1 + 8 * 0x1p-24f);
  CHECK(sum(1, part, 16) == 1 + 16 * 0x1p-24f);  // 24 if they were added before rounding, 32 if rounded one by one
  CHECK(sum(-1, -part, 16) == -1 - 16 * 0x1p-24f);
  CHECK(sum(0, part, 16) == 16 * part);  // nothing is cut off of terms of one size
  CHECK(sum(1, -0x1p-24f, 1) == 1 - 0x1p-24f);
  CHECK(sum(3e38f, 3e38f, 16) == INFINITY);
  CHECK(std::isnan(sum(INFINITY, -INFINITY, 1)));
}

TEST_CASE("mma: sums stay within the bound of what is cut off") {
  double worst = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto a = random_vector<bf16>(16 * 16, 4 * seed + 1), b = random_vector<bf16>(16 * 8, 4 * seed + 2);
    const auto before = random_vector<float>(16 * 8, 4 * seed + 3);
    const OnDevice d(before);
    const OnDevice a_there(a), b_there(b);
    launch({"product", 1, 32}, product_kernel, d.data, a_there.data, b_there.data, false);
    const std::vector<float> got = d.host();
    for (size_t i = 0; i < got.size(); ++i) {
      double want = static_cast<double>(before[i]), sizes = std::abs(want);
      for (size_t k = 0; k < 16; ++k) {
        const double product =
            static_cast<double>(float(a[i / 8 * 16 + k])) * static_cast<double>(float(b[k * 8 + i % 8]));
        want += product, sizes += std::abs(product);
      }
      // Twice: nine terms lose less than a unit of 2^-24 of the largest, at most `sizes`, the sum less than 2^-23 of
      // it.
      const double error = std::abs(static_cast<double>(got[i]) - want);
      REQUIRE(error <= 2 * (9 * 0x1p-24 + 0x1p-23) * sizes);
      worst = std::max(worst, error / sizes);
    }
  }
  CHECK(worst > 0x1p-24);  // more than by rounding once
}

TEST_CASE("mma: ldmatrix deals out four matrices, as they are or transposed") {
  const auto from = random_vector<bf16>(32 * 8, 1);
  for (const bool transposed : {false, true}) {
    CAPTURE(transposed);
    const OnDevice registers(std::vector<uint32_t>(4 * 32));
    const OnDevice rows(from);
    launch({"matrices", 1, 32, 32 * 16}, matrices_kernel, registers.data, rows.data, transposed);
    const std::vector<uint32_t> to = registers.host();
    int wrong = 0;
    for (size_t m = 0; m < 4; ++m)
      for (size_t lane = 0; lane < 32; ++lane)
        for (size_t i = 0; i < 2; ++i) {
          const size_t g = lane / 4, at = lane % 4 * 2 + i;
          const bf16 want = from[m * 64 + (transposed ? at * 8 + g : g * 8 + at)];
          wrong += static_cast<uint16_t>(to[m * 32 + lane] >> 16 * i) != want.bits;
        }
    CHECK(wrong == 0);
  }
}

TEST_CASE("mma: copies arrive when their group has been waited for, or are zeros") {
  std::vector<float> from(16);
  std::iota(from.begin(), from.end(), 1.f);
  const OnDevice source(from), early(from), late(from);
  launch({"copies", 1, 1, 64}, copies_kernel, early.data, late.data, source.data);
  const std::vector<float> first = early.host(), then = late.host();
  for (size_t i = 0; i < 16; ++i) {
    CAPTURE(i);
    const float want = i < 5 ? from[i] : i >= 8 && i < 12 ? 0 : from[i - 4];
    if (i >= 5 && i < 8) continue;  // never written
    if (i < 12) CHECK(first[i] == want);
    else CHECK(std::isnan(first[i]));
    CHECK(then[i] == want);
  }
}

TEST_CASE("mma: tiles in shared memory are read without conflicts of banks, and hold each element once") {
  const auto check = []<int width>(std::integral_constant<int, width>) {
    CAPTURE(width);
    std::set<int> places;
    for (int row = 0; row < 32; ++row)
      for (int chunk = 0; chunk < width / 8; ++chunk) {
        places.insert(place_of<width>(row, chunk));
        if (row % 8 != 0) continue;
        std::set<int> banks;  // of 16 bytes each
        for (int i = 0; i < 8; ++i) banks.insert(place_of<width>(row + i, chunk) / 8 % 8);
        CHECK(banks.size() == 8);
      }
    CHECK(places.size() == 32 * width / 8);
    CHECK(*places.rbegin() == 32 * width - 8);
  };
  check(std::integral_constant<int, 32>{});
  check(std::integral_constant<int, 64>{});
  check(std::integral_constant<int, 96>{});
  check(std::integral_constant<int, 128>{});
  check(std::integral_constant<int, 256>{});
}

TEST_CASE("mma: products of tiles equal plain loops") {
  constexpr size_t width = 96;
  const auto a = random_vector<bf16>(32 * width, 1), b = random_vector<bf16>(32 * width, 2);
  const OnDevice a_there(a), b_there(b);
  const OnDevice products(poisoned<float>(32 * 32)), back(poisoned<float>(32 * width));
  launch({"tiles", 1, 32, 2 * 32 * width * sizeof(bf16)}, tiles_kernel, products.data, back.data, a_there.data,
         b_there.data);
  const std::vector<float> s = products.host(), out = back.host();
  std::vector<double> want_s(32 * 32), want(32 * width);
  for (size_t m = 0; m < 32; ++m)
    for (size_t n = 0; n < 32; ++n) {
      for (size_t k = 0; k < width; ++k)
        want_s[m * 32 + n] += static_cast<double>(float(a[m * width + k]) * float(b[n * width + k]));
      for (size_t c = 0; c < width; ++c)
        want[m * width + c] += static_cast<double>(float(bf16(s[m * 32 + n])) * float(b[n * width + c]));
    }
  check_close("s", s, want_s, 1e-5);
  check_close("out", out, want, 1e-5);
}

#endif
