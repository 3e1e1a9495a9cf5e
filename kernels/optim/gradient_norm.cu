// Not yet run on hardware: only in the emulator.
#include "kernels/optim/gradient_norm.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: x once. Who adds what depends on n and on the alignment of x, which is the same from run to run.
constexpr int threads = 256, warps = threads / warp_size, max_blocks = 1056, at_once = 4;

// A block takes a leaf; a thread begins `at_once` loads before it needs the first.
template <int width>
__global__ void leaf_squares_kernel(double* to, const float* x, int64_t n) {
  static_assert(leaf % (threads * width * at_once) == 0);
  double sum = 0;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * leaf;
  for (int64_t first = threadIdx.x * width; first < leaf; first += threads * width * at_once) {
    Floats<width> v[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t i = begin + first + k * threads * width;
      v[k] = load_if<width>(i < n, x, i);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k)
#pragma unroll
      for (int j = 0; j < width; ++j) sum += static_cast<double>(v[k][j]) * static_cast<double>(v[k][j]);
  }
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) to[blockIdx.x] = sum;
}

template <int width>
__global__ void sums_kernel(double* partial, const float* x, int64_t n) {
  Array<double, width> sum{};
  const int64_t step = static_cast<int64_t>(gridDim.x) * threads * width;
  for (int64_t first = first_of_thread<width>(); first < n; first += step * at_once) {
    Floats<width> v[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t i = first + k * step;
      v[k] = load_if<width>(i < n, x, i);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k)
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += static_cast<double>(v[k][j]);
  }
  double total = 0;
#pragma unroll
  for (int j = 0; j < width; ++j) total += sum[j];
  total = block_sum<warps>(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void add_partial_kernel(double* to, const double* partial, int count) {
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) sum += partial[i];
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) *to += sum;
}

// A block's share of the order: few enough that one block has all of a model of 4 million parameters.
constexpr int64_t share = 1024;

__global__ void ordered_sum_kernel(double* to, const double* sums, const int32_t* order, const double* weights,
                                   int64_t n) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * share, end = begin + share < n ? begin + share : n;
  double sum = 0;
  for (int64_t k = begin + threadIdx.x; k < end; k += threads)
    sum += (weights != nullptr ? weights[k] : 1) * sums[order[k]];
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) to[blockIdx.x] = sum;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void leaf_squares_cuda(double* to, const Tensor& x) {
  const int64_t n = x.numel();
  if (n == 0) return;
  with_width<float>(n, {x.data}, [&](auto width) {
    launch({"leaf_squares", blocks_of(n, leaf), threads}, leaf_squares_kernel<width>, to, x.as<float>(), n);
  });
}

void add_sum_cuda(double* to, const Tensor& x) {
  const int64_t n = x.numel();
  const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(n / (threads * 16), 1, max_blocks));
  double* partial = scratch<double>(blocks);
  with_width<float>(n, {x.data}, [&](auto width) {
    launch({"sums", blocks, threads}, sums_kernel<width>, partial, x.as<float>(), n);
  });
  launch({"add_partial", 1, threads}, add_partial_kernel, to, partial, static_cast<int>(blocks));
}

void ordered_sum_cuda(double* to, const double* sums, const Tensor& order, const double* weights) {
  const int64_t n = order.numel();
  const uint32_t blocks = std::max(blocks_of(n, share), 1u);
  double* partial = blocks > 1 ? scratch<double>(blocks) : to;
  launch({"ordered_sum", blocks, threads}, ordered_sum_kernel, partial, sums, order.as<int32_t>(), weights, n);
  if (blocks == 1) return;
  fill_device_memory(to, 0, sizeof(double));
  launch({"add_partial", 1, threads}, add_partial_kernel, to, partial, static_cast<int>(blocks));
}

}  // namespace crossply
