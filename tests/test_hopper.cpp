// The instructions of sm_90 as the emulator has them: layouts against plain loops, and mistakes planted in a pipeline
// of copies and products, each of which must be caught.
#if !CROSSPLY_CUDA

#include "kernels/cuda/hopper.cuh"
#include "tests/backends.h"
#include "tests/check.h"
#include "tests/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// One box, as it lies in shared memory.
template <int R, int D>
__global__ void box_kernel(bf16* to, const __grid_constant__ TensorMap map, int row, int head, int batch) {
  bf16* panels = panel_memory();
  auto* barrier = reinterpret_cast<Barrier*>(panels + R * D);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, R * D * sizeof(bf16));
    copy_box(panels, map, barrier, row, head, batch);
    barrier_wait(barrier, 0);
    for (int i = 0; i < R * D; ++i) to[i] = panels[i];
  }
}

// Element (row, column) of panels.
template <int R>
size_t place(int row, int column) {
  return static_cast<size_t>(R * 64 * (column / 64) + 64 * row + ((column % 64 / 8) ^ (row % 8)) * 8 + column % 8);
}

// d (64, N) += a b, one warpgroup. a: (64, K) in panels of 64 rows, or in registers from `a_rows`; b: (N, K), or (K, N)
// if transposed, in panels. All by ordinary stores. broken: 0, or what is left out or done wrongly.
enum class Broken { none, fence, early_look, proxy, step, touched };
template <int N, int K, bool in_registers, bool transposed>
__global__ void product_kernel(float* d, const bf16* a_rows, const bf16* b_rows, Broken broken) {
  constexpr int b_height = transposed ? K : N, b_width = transposed ? N : K;
  bf16 *a = panel_memory(), *b = a + 64 * K;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const int column = lane % 4 * 2;
  for (int i = thread; i < 64 * K; i += 128) store_shared(a + place<64>(i / K, i % K), a_rows[i]);
  for (int i = thread; i < b_height * b_width; i += 128)
    store_shared(b + place<b_height>(i / b_width, i % b_width), b_rows[i]);
  if (broken != Broken::proxy) proxy_fence();
  __syncthreads();
  const auto pair = [&](int r, int c) { return a_rows[r * K + c].bits | uint32_t{a_rows[r * K + c + 1].bits} << 16; };
  GroupSums<N> sums;
  Array<Pairs, K / 16> registers;
  for (int k = 0; k < K / 16; ++k)
    for (int r = 0; r < 4; ++r) registers[k][r] = pair(row + r % 2 * 8, 16 * k + column + r / 2 * 8);
  if (broken == Broken::fence) wgmma_fence(sums, registers);
  for (int i = 0; i < N / 2; ++i) sums[i] = d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2];
  if (broken != Broken::fence) wgmma_fence(sums, registers);
  for (int k = 0; k < K; k += 16) {
    const int of_b = broken == Broken::step ? 0 : k;
    const uint64_t second = transposed ? descriptor_of_columns<b_height>(shared_address(b), of_b, 0)
                                       : descriptor_of_rows<b_height>(shared_address(b), 0, of_b);
    if constexpr (in_registers) wgmma<N, transposed>(sums, registers[k / 16], second, true);
    else wgmma<N, transposed>(sums, descriptor_of_rows<64>(shared_address(a), 0, k), second, true);
  }
  wgmma_commit();
  float seen = 0;
  if (broken == Broken::early_look) seen = sums[0];
  if (broken == Broken::touched && thread == 7) sums[1] = 0;
  wgmma_wait<0>(sums, registers);
  if (broken == Broken::early_look) sums[0] = seen;
  for (int i = 0; i < N / 2; ++i) d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2] = sums[i];
}

struct Compared {
  std::vector<float> got;
  std::vector<double> want;
};
template <int N, int K, bool in_registers, bool transposed>
Compared multiplied(Broken broken = Broken::none) {
  const auto a = random_vector<bf16>(64 * K, 1), b = random_vector<bf16>(N * K, 2);
  const auto before = random_vector<float>(64 * N, 3);
  Compared result{{}, convert<double>(before)};
  for (size_t m = 0; m < 64; ++m)
    for (size_t n = 0; n < N; ++n)
      for (size_t k = 0; k < K; ++k)
        result.want[m * N + n] += static_cast<double>(float(a[m * K + k])) *
                                  static_cast<double>(float(transposed ? b[k * N + n] : b[n * K + k]));
  const OnDevice d(before);
  const OnDevice on_a(a), on_b(b);
  launch({"product", 1, 128, (64 + N) * K * sizeof(bf16)}, product_kernel<N, K, in_registers, transposed>, d.data,
         on_a.data, on_b.data, broken);
  result.got = d.host();
  return result;
}
template <int N, int K, bool in_registers, bool transposed>
void check_product() {
  CAPTURES(N, K, in_registers, transposed);
  const Compared p = multiplied<N, K, in_registers, transposed>();
  check_close("d", p.got, p.want, 1e-6);
}

// out (128, 64) = the sum over `tiles` tiles (64, 64) of q (128, 64) tile^T, as attention would: a producer that fills
// a ring of two stages, two warpgroups that take 64 rows of q each, in turns, and give the stages back.
enum class Mistake {
  none,
  no_wait_full,    // products do not wait for their tile
  released_early,  // a stage is given back before the products that read it are done
  parity,          // the producer waits for the wrong phase
  count,           // the stages' barriers count more arrivals than come
  few_bytes,       // the phase expects fewer bytes than come
  many_bytes,      // or more
  init_fence,      // barriers are not fenced
  turns,           // a warpgroup does not hand on its turn
  registers,       // warpgroups take more registers than there are
  no_release,      // stages are not given back
  more_arrivals,   // every lane gives back
  loaded,          // ordinary loads of a stage without a fence
};
constexpr int stages = 2, tile_bytes = 64 * 64 * sizeof(bf16);
__global__ void pipeline_kernel(float* out, const __grid_constant__ TensorMap q_map,
                                const __grid_constant__ TensorMap map, int tiles, Mistake mistake) {
  bf16 *q = panel_memory(), *ring = q + 128 * 64;
  auto* full = reinterpret_cast<Barrier*>(ring + stages * 64 * 64);
  Barrier *empty = full + stages, *q_there = empty + stages;
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  if (thread == 0) {
    for (int s = 0; s < stages; ++s)
      barrier_init(full + s, 1), barrier_init(empty + s, mistake == Mistake::count ? 9 : 8);
    barrier_init(q_there, 1);
    if (mistake != Mistake::init_fence) barrier_init_fence();
  }
  __syncthreads();
  if (group == 2) {
    give_registers<24>();
    if (thread != 256) return;
    barrier_expect(q_there, 2 * tile_bytes);
    copy_box(q, q_map, q_there, 0, 0, 0);
    for (int i = 0; i < tiles; ++i) {
      const int s = i % stages;
      barrier_wait(empty + s, (i / stages & 1) ^ (mistake == Mistake::parity ? 0 : 1));
      const int wrong = mistake == Mistake::few_bytes ? -256 : mistake == Mistake::many_bytes ? 256 : 0;
      barrier_expect(full + s, static_cast<uint32_t>(tile_bytes + wrong));
      copy_box(ring + s * 64 * 64, map, full + s, i * 64, 0, 0);
    }
    return;
  }
  if (mistake == Mistake::registers) take_registers<248>();
  else take_registers<240>();
  GroupSums<64> sums{};
  barrier_wait(q_there, 0);
  if (group == 0) named_barrier_arrive(1, 256);
  for (int i = 0; i < tiles; ++i) {
    const int s = i % stages;
    if (mistake != Mistake::no_wait_full) barrier_wait(full + s, i / stages & 1);
    if (mistake == Mistake::loaded) load_shared(ring + s * 64 * 64 + thread);
    named_barrier_wait(1 + group, 256);
    wgmma_fence(sums);
    for (int k = 0; k < 64; k += 16)
      wgmma<64>(sums, descriptor_of_rows<128>(shared_address(q), group * 64, k),
                descriptor_of_rows<64>(shared_address(ring + s * 64 * 64), 0, k), i > 0 || k > 0);
    wgmma_commit();
    if ((i + 1 < tiles || group == 0) && mistake != Mistake::turns) named_barrier_arrive(2 - group, 256);
    const auto release = [&] {
      if (mistake == Mistake::no_release) return;
      __syncwarp();
      if (thread % 32 == 0 || mistake == Mistake::more_arrivals) barrier_arrive(empty + s);
    };
    if (mistake == Mistake::released_early) release();
    wgmma_wait<0>(sums);
    if (mistake != Mistake::released_early) release();
  }
  const int lane = thread % 32, row = group * 64 + thread % 128 / 32 * 16 + lane / 4;
  for (int i = 0; i < 32; ++i) out[(row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

Compared piped(Mistake mistake, uint64_t seed) {
  constexpr int tiles = 5;
  const auto q = random_vector<bf16>(128 * 64, 1), k = random_vector<bf16>(tiles * 64 * 64, 2);
  Compared result{{}, std::vector<double>(128 * 64)};
  for (size_t m = 0; m < 128; ++m)
    for (size_t n = 0; n < tiles * 64; ++n)
      for (size_t c = 0; c < 64; ++c)
        result.want[m * 64 + n % 64] +=
            static_cast<double>(float(q[m * 64 + c])) * static_cast<double>(float(k[n * 64 + c]));
  const OnDevice on_q(q), on_k(k);
  const OnDevice out(std::vector<float>(128 * 64, NAN));
  const TensorMap q_map = tensor_map({on_q.data, 64, 128, 1, 1, 64, 64, 64}, 128);
  const TensorMap map = tensor_map({on_k.data, 64, tiles * 64, 1, 1, 64, 64, 64}, 64);
  emulator::seed(seed);
  launch({"pipeline", 1, 384, (2 + stages) * tile_bytes + 64}, pipeline_kernel, out.data, q_map, map, tiles, mistake);
  result.got = out.host();
  return result;
}

}  // namespace

TEST_CASE("hopper: a box lies in panels as documented, zeros where there are no rows") {
  constexpr int R = 16, D = 128, T = 21, heads = 2, row_stride = heads * D + 8;
  const auto x = random_vector<bf16>(2 * T * row_stride, 1);
  const OnDevice from(x);
  const TensorMap map = tensor_map({from.data, D, T, heads, 2, row_stride, D, T * row_stride}, R);
  for (const int row : {0, 8, 16, -3}) {
    const OnDevice to(std::vector<bf16>(R * D, bf16(7.f)));
    launch({"box", 1, 1, R * D * sizeof(bf16) + 8}, box_kernel<R, D>, to.data, map, row, 1, 1);
    const std::vector<bf16> got = to.host();
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < D; ++c) {
        const bool there = row + r >= 0 && row + r < T;
        const bf16 want = there ? x[static_cast<size_t>((T + row + r) * row_stride + D + c)] : bf16(0.f);
        REQUIRE(got[place<R>(r, c)].bits == want.bits);
      }
  }
}

TEST_CASE("hopper: products of a warpgroup equal plain loops, from shared memory and from registers") {
  check_product<8, 64, false, false>(), check_product<8, 64, true, false>();
  check_product<64, 64, false, false>(), check_product<64, 128, false, false>();
  check_product<128, 128, false, false>(), check_product<128, 64, true, false>();
  check_product<64, 64, true, true>(), check_product<64, 128, true, true>();
  check_product<128, 64, true, true>(), check_product<128, 128, true, true>();
}

TEST_CASE("hopper: mistakes around a product are caught") {
  const auto fails = [](Broken broken, const std::string& says) {
    check_fails(Exit::internal, {says}, [&] { multiplied<64, 64, true, false>(broken); });
  };
  fails(Broken::fence, "touched behind the last wgmma_fence");
  fails(Broken::proxy, "without a fence.proxy.async");
  fails(Broken::touched, "sums were touched while a product was under way");
  const Compared step = multiplied<64, 64, false, false>(Broken::step);
  CHECK(distance(step.got, step.want) > 1);
  CHECK(std::isnan(multiplied<64, 64, false, false>(Broken::early_look).got[0]));
}

TEST_CASE("hopper: a pipeline of copies and products, whatever the lots") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const Compared p = piped(Mistake::none, seed);
    check_close("out", p.got, p.want, 1e-5);
  }
}

TEST_CASE("hopper: mistakes in a pipeline are caught") {
  // By most lots: an error that says so, or a wrong result.
  const auto caught = [](Mistake mistake, const std::string& says) {
    CAPTURE(says);
    int times = 0;
    for (uint64_t seed = 1; seed <= 4; ++seed) try {
        const Compared p = piped(mistake, seed);
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
