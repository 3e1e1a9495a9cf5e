// What losses on logits share on a GPU, where a block of threads has a row of them.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/block/softcap.cuh"
#include "kernels/cuda/mma.cuh"

namespace crossply {

constexpr int row_threads = 512;

// Exponentials are 2 to the z / ln 2, an addition and a multiplication in one and then one instruction of its own: of
// what is read and written so often that e to the z, some eight instructions, would be what a row waits for.
constexpr float per_ln_2 = 1.44269504088896341f, ln_2 = 0.69314718055994531f;

// The largest exponent of 2 so far, and the sum of 2^(exponent - largest).
struct OnlineSoftmax {
  float largest, sum;
  __device__ void add(const OnlineSoftmax& other) {
    if (other.sum == 0) return;
    if (sum == 0) return static_cast<void>(*this = other);
    const float both = other.largest > largest ? other.largest : largest;
    sum = sum * exp2_fast(largest - both) + other.sum * exp2_fast(other.largest - both);
    largest = both;
  }
};

// Logits v and on; beyond the last they are minus infinity, whatever is there.
template <int width, class S>
__device__ __forceinline__ Floats<width> logits_of(const Packed<width, S>& raw, int64_t v, int64_t V) {
  Floats<width> x = floats(raw);
  if (v + width > V) {
    const int left = static_cast<int>(V - v);
#pragma unroll
    for (int i = 1; i < width; ++i)
      if (i >= left) x[i] = -INFINITY;
  }
  return x;
}
template <int width, class S>
__device__ __forceinline__ Floats<width> load_logits(const S* z, int64_t v, int64_t V) {
  return logits_of<width, S>(load_packed<width>(z + v), v, V);
}

using SoftmaxParts = Array<OnlineSoftmax, row_threads / warp_size>;

// factor: above 0. A NaN is not the largest, but makes the sum one.
template <int width>
__device__ __forceinline__ OnlineSoftmax softmax_of(const Floats<width>& x, float factor) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < width; ++i) largest = fmaxf(largest, x[i]);
  OnlineSoftmax all{factor * largest, 0};
#pragma unroll
  for (int i = 0; i < width; ++i) all.sum += exp2_fast(fmaf(factor, x[i], -all.largest));
  return all;
}

struct KeepNothing {
  template <class X>
  __device__ void operator()(int64_t, const X&) const {}
};

// The softmax whose exponents of 2 are factor * cap(z), (V), by all threads of a block. parts: shared memory, for this
// call alone. keep(v, x): called with all that was read, x being logits v and on, not capped.
template <int width, class S, class Cap, class Keep = KeepNothing>
__device__ __forceinline__ OnlineSoftmax softmax_of_row(const S* z, int64_t V, float factor, const Cap& cap,
                                                        SoftmaxParts& parts, const Keep& keep = {}) {
  constexpr int at_once = 4, step = row_threads * width;  // accesses on their way, so that memory is always asked
  OnlineSoftmax mine{0, 0};
  for (int64_t first = threadIdx.x * width; first < V; first += at_once * step) {
    Packed<width, S> raw[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) raw[i] = load_packed_if<width>(first + i * step < V, z, first + i * step);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int64_t v = first + i * step;
      if (v >= V) continue;
      const Floats<width> x = logits_of<width, S>(raw[i], v, V);
      mine.add(softmax_of<width>(capped<width>(x, v, V, cap), factor));
      keep(v, x);
    }
  }
#pragma unroll
  for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
    const OnlineSoftmax other{__shfl_xor_sync(~0u, mine.largest, lanes), __shfl_xor_sync(~0u, mine.sum, lanes)};
    mine.add(other);
  }
  if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = mine;
  __syncthreads();
  OnlineSoftmax all = parts[0];
  for (int w = 1; w < row_threads / warp_size; ++w) all.add(parts[w]);
  return all;
}

}  // namespace crossply
