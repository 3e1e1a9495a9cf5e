// The softmax of short rows on a GPU: `lanes` neighbours of a block take a row.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace crossply {

// The tensors are small, a row for every head of a layer: the launches are most of the time.
constexpr int softmax_threads = 256;

inline Launch launch_of_rows(const char* name, int64_t rows, int lanes) {
  return {name, blocks_of(rows * lanes, softmax_threads), softmax_threads};
}

// A thread's place, without a softmax yet. 0 wide beyond the last row: the lanes of a warp stay together.
struct SoftmaxRow {
  int64_t n, width;
  int lane;
  float largest = 0, scale = 0;
};
__device__ __forceinline__ SoftmaxRow row_of_lanes(int64_t rows, int64_t S, int lanes) {
  const int64_t n = row_of_lanes<softmax_threads>(lanes);
  return {n, n < rows ? S : 0, static_cast<int>(threadIdx.x) % lanes};
}

// exp(inp - largest) * scale is the row's softmax.
template <class X>
__device__ __forceinline__ SoftmaxRow softmax_of_row(const X* inp, int64_t rows, int64_t S, int lanes) {
  SoftmaxRow r = row_of_lanes(rows, S, lanes);
  inp += r.n * S;
  float largest = -INFINITY, sum = 0;
  for (int64_t m = r.lane; m < r.width; m += lanes) largest = larger_or_nan(largest, to_float(inp[m]));
  r.largest = group_max(largest, lanes);
  for (int64_t m = r.lane; m < r.width; m += lanes) sum += expf(to_float(inp[m]) - r.largest);
  r.scale = 1.f / group_sum(sum, lanes);
  return r;
}

}  // namespace crossply
