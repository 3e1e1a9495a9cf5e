#include "kernels/optim/gradient_norm.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: x once. The number of blocks depends on n alone, and so does the order of the sum.
constexpr int threads = 256, warps = threads / warp_size, most_blocks = 1056, at_once = 4;

// Of squares, or of x itself.
template <int width, bool square>
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
      for (int j = 0; j < width; ++j) {
        const double value = static_cast<double>(v[k][j]);
        sum[j] += square ? value * value : value;
      }
  }
  double total = 0;
#pragma unroll
  for (int j = 0; j < width; ++j) total += sum[j];
  total = block_sum<warps>(total);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void add_partial_kernel(double* to, const double* partial, int count, bool add) {
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) sum += partial[i];
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) *to = add ? *to + sum : sum;
}

template <bool square>
void sum_up(double* to, const Tensor& x, bool add) {
  const int64_t n = x.numel();
  const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(n / (threads * 16), 1, most_blocks));
  double* partial = scratch<double>(blocks);
  with_width<float>(n, {x.data}, [&](auto width) {
    launch({"sums", blocks, threads}, sums_kernel<width, square>, partial, x.as<float>(), n);
  });
  launch({"add_partial", 1, threads}, add_partial_kernel, to, partial, static_cast<int>(blocks), add);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void sum_of_squares_cuda(double* to, const Tensor& x) { sum_up<true>(to, x, false); }
void add_sum_cuda(double* to, const Tensor& x) { sum_up<false>(to, x, true); }

}  // namespace crossply
