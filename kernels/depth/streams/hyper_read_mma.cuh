// What hyper_read_mma.cu and hyper_read_backward_mma.cu share: a block takes eight streams at a time, those of four or
// two tokens, a warp 32 columns of them at a time, the block as many as it has threads.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/depth/streams/hyper_read.cuh"

namespace crossply::hyper {

constexpr int at_once = 8, stretch = 32;
constexpr int max_threads = 512, turns = max_mma_columns / max_threads;

__device__ __forceinline__ Pairs pairs_at(const bf16* x) { return *reinterpret_cast<const Pairs*>(x); }

// Two numbers rounded to bf16; leaves what that takes from them.
__device__ __forceinline__ uint32_t split(float& a, float& b) {
  const uint32_t pair = pack(a, b);
  a -= first_of(pair), b -= second_of(pair);
  return pair;
}

// Eight columns of a row of the projections from c on; zeros behind the last row or column.
__device__ __forceinline__ Floats<8> projection_at(const DeviceReadPlan& plan, int row, int J, int c, int C) {
  Floats<8> p = {};
  if (c < C && row < J) p = load<8>(plan.projection + row * C + c);
  return p;
}

// Zeros for what is never copied: behind the ends of rows, and rows that are not there.
template <int threads>
__device__ __forceinline__ void clear(bf16* x, int size) {
  for (int e = static_cast<int>(threadIdx.x) * 8; e < size; e += threads * 8)
    store<8, Space::shared>(x + e, Floats<8>{});
  __syncthreads();
}
// Begins to copy so many rows of C columns, from the n-th on, as far as they are before the end.
template <int rows, int threads>
__device__ __forceinline__ void fetch_rows(bf16* to, int stride, const bf16* from, int n, int end, int C) {
  constexpr int threads_of_row = threads / rows;
  const int own = static_cast<int>(threadIdx.x / threads_of_row);
  const int first = static_cast<int>(threadIdx.x % threads_of_row * 8);
  from = forgotten(from + static_cast<int64_t>(n + own) * C + first);
  to += own * stride + first;
#pragma unroll
  for (int c = 0; c < turns * threads; c += threads_of_row * 8)
    if (c < C - first && n + own < end) cp_async<16>(to + c, from + c, true);
}

}  // namespace crossply::hyper
