// Not yet run on hardware: only in the emulator.
#include "kernels/block/top_k.h"

#include <bit>

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int top_k_threads = 256;

// Positive floats are ordered as their bits are: one integer holds an entry and, inverted, its index. 0: not positive.
__device__ __forceinline__ uint64_t top_k_key(float x, int64_t m) {
  if (x <= 0.f) return 0;
  const uint32_t bits = x != x ? 0x7FFFFFFFu : std::bit_cast<uint32_t>(x);
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(m));
}

// How many keys of the row are at least `from`, from + step, from + 2 step. Every thread of the block gets them.
struct KeyCounts {
  int64_t x[3];
};
template <class S>
__device__ __forceinline__ KeyCounts count_keys(const S* row, int64_t width, uint64_t from, uint64_t step) {
  constexpr int warps = top_k_threads / warp_size;
  SHARED(parts, Array<Array<int, 3>, warps>);
  int own[3] = {0, 0, 0};
  for (int64_t m = threadIdx.x; m < width; m += top_k_threads) {
    const uint64_t key = top_k_key(to_float(row[m]), m);
#pragma unroll
    for (int i = 0; i < 3; ++i) own[i] += key >= from + static_cast<uint64_t>(i) * step;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) own[i] = group_sum(own[i], warp_size);
  __syncthreads();  // the counts before these have been read
  if (threadIdx.x % warp_size == 0)
#pragma unroll
    for (int i = 0; i < 3; ++i) parts[threadIdx.x / warp_size][i] = own[i];
  __syncthreads();
  KeyCounts counts = {{0, 0, 0}};
  for (int warp = 0; warp < warps; ++warp)
#pragma unroll
    for (int i = 0; i < 3; ++i) counts.x[i] += parts[warp][i];
  return counts;
}

// The largest number that at least k keys reach, two bits at a time from the highest on, or 1 where fewer than k are
// positive. No two keys are equal, so exactly k reach it; as soon as k reach a candidate, its other bits do not matter.
template <class S>
__device__ __forceinline__ uint64_t min_key(const S* row, int64_t width, int64_t k) {
  if (count_keys(row, width, 1, 0).x[0] <= k) return 1;
  uint64_t least = 0;
  for (int shift = 62; shift >= 0; shift -= 2) {
    const uint64_t step = uint64_t{1} << shift;
    const KeyCounts counts = count_keys(row, width, least + step, step);
    const int digit = counts.x[2] >= k ? 3 : counts.x[1] >= k ? 2 : counts.x[0] >= k ? 1 : 0;
    least += static_cast<uint64_t>(digit) * step;
    const int64_t reached = digit == 3 ? counts.x[2] : digit == 2 ? counts.x[1] : digit == 1 ? counts.x[0] : 0;
    if (reached == k) break;
  }
  return least;
}

// A block takes a row, which it finds in the caches after its first pass.
template <class S>
__global__ void top_k_forward_kernel(S* out, const S* inp, int64_t width, int64_t k) {
  inp += blockIdx.x * width, out += blockIdx.x * width;
  const uint64_t least = min_key(inp, width, k);
  for (int64_t m = threadIdx.x; m < width; m += top_k_threads) {
    const float x = to_float(inp[m]);
    from_float(out[m], top_k_key(x, m) >= least ? x : 0.f);
  }
}

template <int width, class S>
__global__ void top_k_backward_kernel(S* dinp, const S* dout, const S* out, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> y = load<width>(out + i);
  const Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int e = 0; e < width; ++e) y[e] = y[e] > 0.f ? d[e] : y[e];
  store_or_accumulate<width>(dinp + i, y, accumulate);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void top_k_forward_cuda(const Tensor& out, const Tensor& inp, int64_t width, int64_t k) {
  const int64_t rows = inp.numel() / width;
  if (rows == 0) return;
  with_storage(inp.dtype, [&]<class S>(S) {
    launch({"top_k_forward", static_cast<uint32_t>(rows), top_k_threads}, top_k_forward_kernel<S>, out.as<S>(),
           inp.as<S>(), width, k);
  });
}

void top_k_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& out) {
  const int64_t n = dinp.numel();
  with_access(dinp.dtype, n, {dinp.data, dout.data, out.data}, [&]<class S>(S, auto width) {
    launch_elementwise("top_k_backward", n, width, top_k_backward_kernel<width, S>, dinp.as<S>(), dout.as<S>(),
                       out.as<S>(), dinp.accumulate);
  });
}

}  // namespace crossply
