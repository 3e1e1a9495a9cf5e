// What losses on logits share on a GPU, where a block of threads has a row of them.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace crossply {

constexpr int row_threads = 512;

// Exponentials are 2 to the z / ln 2, an addition and a multiplication in one and then one instruction of its own: of
// what is read and written so often that e to the z, some eight instructions, would be what a row waits for.
constexpr float per_ln_2 = 1.44269504088896341f, ln_2 = 0.69314718055994531f;

// The largest exponent of 2 so far, and the sum of 2^(exponent - largest).
struct Softmax {
  float largest, sum;
  __device__ void add(const Softmax& other) {
    if (other.sum == 0) return;
    if (sum == 0) return static_cast<void>(*this = other);
    const float both = other.largest > largest ? other.largest : largest;
    sum = sum * exp2_fast(largest - both) + other.sum * exp2_fast(other.largest - both);
    largest = both;
  }
};

// Logits v and on; beyond the last they are minus infinity, whatever is there.
template <int width, class S>
__device__ __forceinline__ Floats<width> load_logits(const S* z, int64_t v, int64_t V) {
  Floats<width> x = load<width>(z + v);
#pragma unroll
  for (int i = 1; i < width; ++i)
    if (v + i >= V) x[i] = -INFINITY;
  return x;
}

using SoftmaxParts = Array<Softmax, row_threads / warp_size>;

// The softmax whose exponents of 2 are factor * z, (V), by all threads of a block. parts: shared memory, for this call
// alone.
template <int width, class S>
__device__ __forceinline__ Softmax softmax_of_row(const S* z, int64_t V, float factor, SoftmaxParts& parts) {
  Softmax mine{0, 0};
  for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) {
    const Floats<width> x = load_logits<width>(z, v, V);
    float largest = factor * x[0];
#pragma unroll
    for (int i = 1; i < width; ++i) largest = factor * x[i] > largest ? factor * x[i] : largest;
    Softmax next{largest, 0};
#pragma unroll
    for (int i = 0; i < width; ++i) next.sum += exp2_fast(fmaf(factor, x[i], -largest));
    mine.add(next);
  }
#pragma unroll
  for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) {
    const Softmax other{__shfl_xor_sync(~0u, mine.largest, lanes), __shfl_xor_sync(~0u, mine.sum, lanes)};
    mine.add(other);
  }
  if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = mine;
  __syncthreads();
  Softmax all = parts[0];
  for (int w = 1; w < row_threads / warp_size; ++w) all.add(parts[w]);
  return all;
}

}  // namespace crossply
