// Not yet run on hardware: only in the emulator.
#include "tests/kernels/hopper_kernels.h"

#include "kernels/cuda/hopper.cuh"

namespace crossply::test {
namespace {

#if CROSSPLY_HOPPER
// Lets time pass, differently from call to call; in the emulator lots do that.
__device__ __forceinline__ void pause(uint32_t& state) {
  state = state * 1664525 + 1013904223;
#if CROSSPLY_CUDA
  __nanosleep(state >> 22);
#endif
}
#endif

__global__ void hand_over_kernel(int* to, int rounds, uint32_t seed) {
#if CROSSPLY_HOPPER
  int* slot = reinterpret_cast<int*>(panel_memory());
  auto *full = reinterpret_cast<Barrier*>(slot + 4), *empty = full + 1;
  if (threadIdx.x == 0) {
    barrier_init(full, 1), barrier_init(empty, 1);
    barrier_init_fence();
  }
  __syncthreads();
  uint32_t state = seed + threadIdx.x;
  if (threadIdx.x == 0) {
    for (int i = 0; i < rounds; ++i) {
      barrier_wait(empty, (i & 1) ^ 1);
      pause(state);
      *slot = i;
      barrier_arrive(full);
    }
  } else if (threadIdx.x == warp_size) {
    for (int i = 0; i < rounds; ++i) {
      barrier_wait(full, i & 1);
      to[i] = *slot;
      pause(state);
      barrier_arrive(empty);
    }
  }
#endif
}

__global__ void box_kernel(bf16* to, const __grid_constant__ TensorMap map, int row, int head, int batch) {
#if CROSSPLY_HOPPER
  constexpr int size = Boxed::box_rows * Boxed::D;
  bf16* panels = panel_memory();
  auto* barrier = reinterpret_cast<Barrier*>(panels + size);
  if (threadIdx.x != 0) return;
  barrier_init(barrier, 1);
  barrier_init_fence();
  barrier_expect(barrier, size * sizeof(bf16));
  copy_box(panels, map, barrier, row, head, batch);
  barrier_wait(barrier, 0);
  for (int i = 0; i < size; ++i) to[i] = panels[i];
#endif
}

// Both factors come into panels by ordinary stores.
template <int N, int K, bool in_registers, bool transposed, Broken broken>
__global__ void product_kernel(float* d, const bf16* a_rows, const bf16* b_rows) {
#if CROSSPLY_HOPPER
  constexpr int b_height = transposed ? K : N, b_width = transposed ? N : K;
  bf16 *a = panel_memory(), *b = a + 64 * K;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const int column = lane % 4 * 2;
  for (int i = thread; i < 64 * K; i += 128) store_shared(a + place_in_panels<64>(i / K, i % K), a_rows[i]);
  for (int i = thread; i < b_height * b_width; i += 128)
    store_shared(b + place_in_panels<b_height>(i / b_width, i % b_width), b_rows[i]);
  if constexpr (broken != Broken::proxy) proxy_fence();
  __syncthreads();
  const auto pair = [&](int r, int c) { return a_rows[r * K + c].bits | uint32_t{a_rows[r * K + c + 1].bits} << 16; };
  GroupSums<N> sums;
  Array<Pairs, K / 16> registers;
#pragma unroll
  for (int k = 0; k < K / 16; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) registers[k][r] = pair(row + r % 2 * 8, 16 * k + column + r / 2 * 8);
  if constexpr (broken == Broken::fence) wgmma_fence(sums, registers);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2];
  if constexpr (broken != Broken::fence) wgmma_fence(sums, registers);
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    const int of_b = broken == Broken::step ? 0 : k;
    const uint64_t second = transposed ? descriptor_of_columns<b_height>(shared_address(b), of_b, 0)
                                       : descriptor_of_rows<b_height>(shared_address(b), 0, of_b);
    if constexpr (in_registers) wgmma<N, transposed>(sums, registers[k / 16], second, true);
    else wgmma<N, transposed>(sums, descriptor_of_rows<64>(shared_address(a), 0, k), second, true);
  }
  wgmma_commit();
  [[maybe_unused]] float seen;
  if constexpr (broken == Broken::early_look) seen = sums[0];
  if constexpr (broken == Broken::touched)
    if (thread == 7) sums[1] = 0;
  wgmma_wait<0>(sums, registers);
  if constexpr (broken == Broken::early_look) sums[0] = seen;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2] = sums[i];
#endif
}

constexpr int stages = 2, tile_size = 64 * 64, tile_bytes = tile_size * sizeof(bf16);

template <Mistake mistake>
__global__ void __launch_bounds__(384, 1)
    pipeline_kernel(float* out, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap map,
                    int tiles, uint32_t seed) {
#if CROSSPLY_HOPPER
  bf16 *q = panel_memory(), *ring = q + 128 * 64;
  auto* full = reinterpret_cast<Barrier*>(ring + stages * tile_size);
  Barrier *empty = full + stages, *q_there = empty + stages;
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  uint32_t state = seed + threadIdx.x / warp_size;
  if (thread == 0) {
    for (int s = 0; s < stages; ++s)
      barrier_init(full + s, 1), barrier_init(empty + s, mistake == Mistake::count ? 9 : 8);
    barrier_init(q_there, 1);
    if constexpr (mistake != Mistake::init_fence) barrier_init_fence();
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
      pause(state);
      const int wrong = mistake == Mistake::few_bytes ? -256 : mistake == Mistake::many_bytes ? 256 : 0;
      barrier_expect(full + s, static_cast<uint32_t>(tile_bytes + wrong));
      copy_box(ring + s * tile_size, map, full + s, i * 64, 0, 0);
    }
    return;
  }
  take_registers<mistake == Mistake::registers ? 248 : 240>();
  GroupSums<64> sums{};
  barrier_wait(q_there, 0);
  if (group == 0) named_barrier_arrive(1, 256);
  for (int i = 0; i < tiles; ++i) {
    const int s = i % stages;
    if constexpr (mistake != Mistake::no_wait_full) barrier_wait(full + s, i / stages & 1);
    if constexpr (mistake == Mistake::loaded) load_shared(ring + s * tile_size + thread);
    named_barrier_wait(1 + group, 256);
    wgmma_fence(sums);
#pragma unroll
    for (int k = 0; k < 64; k += 16)
      wgmma<64>(sums, descriptor_of_rows<128>(shared_address(q), group * 64, k),
                descriptor_of_rows<64>(shared_address(ring + s * tile_size), 0, k), i > 0 || k > 0);
    wgmma_commit();
    if ((i + 1 < tiles || group == 0) && mistake != Mistake::turns) named_barrier_arrive(2 - group, 256);
    const auto release = [&] {
      if constexpr (mistake == Mistake::no_release) return;
      __syncwarp();
      if (thread % 32 == 0 || mistake == Mistake::more_arrivals) barrier_arrive(empty + s);
    };
    if constexpr (mistake == Mistake::released_early) release();
    wgmma_wait<0>(sums);
    pause(state);
    if constexpr (mistake != Mistake::released_early) release();
  }
  const int lane = thread % 32, row = group * 64 + thread % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) out[(row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
#endif
}

#if CROSSPLY_HOPPER
__device__ __forceinline__ int64_t clocks_now() {
#if CROSSPLY_CUDA
  return clock64();
#else
  return 0;
#endif
}
#endif

template <int N, bool in_registers>
__global__ void __launch_bounds__(384, 1) rate_kernel(float* out, int64_t* clocks, int multiplying, int rounds) {
#if CROSSPLY_HOPPER
  bf16 *a = panel_memory(), *b = a + 64 * 64;  // (64,64), (N,64)
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  bf16 one;
  from_float(one, 1.f);
  for (int i = thread; i < (64 + N) * 64; i += static_cast<int>(blockDim.x)) store_shared(a + i, one);
  proxy_fence();
  __syncthreads();
  const int64_t begin = clocks_now();
  if (group < multiplying) {
    GroupSums<N> sums{};
    Array<Pairs, 4> ones;
#pragma unroll
    for (int i = 0; i < 16; ++i) ones[i / 4][i % 4] = 0x3F803F80;
    for (int round = 0; round < rounds; ++round) {
      wgmma_fence(sums, ones);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint64_t second = descriptor_of_rows<N>(shared_address(b), 0, i % 4 * 16);
        if constexpr (in_registers) wgmma<N>(sums, ones[i % 4], second, true);
        else wgmma<N>(sums, descriptor_of_rows<64>(shared_address(a), 0, i % 4 * 16), second, true);
      }
      wgmma_commit();
      wgmma_wait<0>(sums, ones);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum += sums[i];
    out[thread] = sum / (N / 2);
  } else {
    Array<float, 8> x;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.125f * static_cast<float>(i);
    for (int i = 0; i < 16 * rounds; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = exp2_fast(-x[j]);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x[j];
    out[thread] = sum / 8;
  }
  if (thread % 128 == 0) clocks[group] = clocks_now() - begin;
#endif
}

// -----------------------------------------------------------------------------------------------------------------

// The emulator gets the seed, a GPU what is left of it for pauses.
uint32_t seeded(uint64_t seed) {
#if !CROSSPLY_CUDA
  emulator::seed(seed);
#endif
  CHECK_THAT(has_hopper(), "no instructions of sm_90 here");
  return static_cast<uint32_t>(seed) * 2654435761u;
}

#if CROSSPLY_CUDA
constexpr bool is_gpu = true;
#else
constexpr bool is_gpu = false;
#endif
// What was planted exists in the emulator only: nvcc would put the products of a kernel that touches its sums too early
// one after the other.
template <auto mistake>
constexpr bool there = mistake == decltype(mistake){} || !is_gpu;

template <Broken broken, int N, int K, bool in_registers, bool transposed>
bool multiplied(float* d, const bf16* a, const bf16* b, const WgmmaShape& f) {
  if (f.N != N || f.K != K || f.in_registers != in_registers || f.transposed != transposed) return false;
  launch({"product", 1, 128, (64 + N) * K * sizeof(bf16)}, product_kernel<N, K, in_registers, transposed, broken>, d, a,
         b);
  return true;
}

template <Broken broken>
bool multiplied_small(float* d, const bf16* a, const bf16* b, const WgmmaShape& f) {
  if constexpr (there<broken>)
    return multiplied<broken, 64, 64, false, false>(d, a, b, f) || multiplied<broken, 64, 64, true, false>(d, a, b, f);
  return false;
}

template <Mistake mistake>
void launch_pipeline(float* out, const TensorMap& q, const TensorMap& k, int tiles, uint32_t seed) {
  CHECK_THAT(there<mistake>, "a mistake that is not compiled here");
  if constexpr (there<mistake>)
    launch({"pipeline", 1, 384, (2 + stages) * tile_bytes + 64}, pipeline_kernel<mistake>, out, q, k, tiles, seed);
}

}  // namespace

void hand_over(int* to, int rounds, uint64_t seed) {
  launch({"hand_over", 1, 2 * warp_size, 64}, hand_over_kernel, to, rounds, seeded(seed));
}

void take_box(bf16* to, const bf16* x, int row, int head, int batch) {
  using B = Boxed;
  seeded(1);
  const TensorMap map =
      tensor_map({x, B::D, B::rows, B::heads, B::batches, B::row_stride, B::D, B::rows * B::row_stride}, B::box_rows);
  launch({"box", 1, 32, B::box_rows * B::D * sizeof(bf16) + 8}, box_kernel, to, map, row, head, batch);
}

void multiply(float* d, const bf16* a, const bf16* b, const WgmmaShape& f, Broken broken, uint64_t seed) {
  seeded(seed);
  bool done = false;
  const auto with = [&]<Broken... all>(std::integer_sequence<Broken, all...>) {
    ((broken == all ? void(done = multiplied_small<all>(d, a, b, f)) : void()), ...);
  };
  using enum Broken;
  with(std::integer_sequence<Broken, none, fence, early_look, proxy, step, touched>{});
  if (broken == none && !done)
    done = multiplied<none, 8, 64, false, false>(d, a, b, f) || multiplied<none, 8, 64, true, false>(d, a, b, f) ||
           multiplied<none, 64, 128, false, false>(d, a, b, f) ||
           multiplied<none, 128, 128, false, false>(d, a, b, f) || multiplied<none, 128, 64, true, false>(d, a, b, f) ||
           multiplied<none, 64, 64, true, true>(d, a, b, f) || multiplied<none, 64, 128, true, true>(d, a, b, f) ||
           multiplied<none, 128, 64, true, true>(d, a, b, f) || multiplied<none, 128, 128, true, true>(d, a, b, f);
  CHECK_THAT(done, "no product (64, ", f.K, ") (", f.K, ", ", f.N, ") of this kind");
}

void measure(float* out, int64_t* clocks, const Rate& rate, int rounds) {
  seeded(1);
  CHECK_THAT((rate.N == 64 || rate.N == 128) && rate.groups <= 3, "no such rate");
  const auto kernel = rate.N == 64 ? (rate.in_registers ? rate_kernel<64, true> : rate_kernel<64, false>)
                                   : (rate.in_registers ? rate_kernel<128, true> : rate_kernel<128, false>);
  launch({"rate", 1, static_cast<uint32_t>(rate.groups * 128), static_cast<size_t>(64 + rate.N) * 64 * sizeof(bf16)},
         kernel, out, clocks, rate.multiplying, rounds);
}

void pipe(float* out, const bf16* q, const bf16* k, int tiles, Mistake mistake, uint64_t seed) {
  const uint32_t pauses = seeded(seed);
  const TensorMap of_q = tensor_map({q, 64, 128, 1, 1, 64, 64, 64}, 128);
  const TensorMap of_k = tensor_map({k, 64, tiles * 64, 1, 1, 64, 64, 64}, 64);
  const auto with = [&]<Mistake... all>(std::integer_sequence<Mistake, all...>) {
    ((mistake == all ? launch_pipeline<all>(out, of_q, of_k, tiles, pauses) : void()), ...);
  };
  using enum Mistake;
  with(std::integer_sequence<Mistake, none, no_wait_full, released_early, parity, count, few_bytes, many_bytes>{});
  with(std::integer_sequence<Mistake, init_fence, turns, registers, no_release, more_arrivals, loaded>{});
}

}  // namespace crossply::test
