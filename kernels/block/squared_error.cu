// Not yet run on hardware: only in the emulator.
#include "kernels/block/squared_error.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int squared_error_threads = 256;

// A warp takes a row.
template <int width, class S>
__global__ void squared_error_forward_kernel(float* losses, const S* inp, const S* target, int64_t rows, int64_t C) {
  const int64_t n = row_of_lanes<squared_error_threads>(warp_size);
  const int64_t end = n < rows ? C : 0;
  float sum = 0;
  for (int64_t c = threadIdx.x % warp_size * width; c < end; c += warp_size * width) {
    const Floats<width> x = load<width>(inp + n * C + c), y = load<width>(target + n * C + c);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  }
  sum = warp_sum(sum);
  if (n < rows && threadIdx.x % warp_size == 0) losses[n] = sum;
}

template <int width, class S>
__global__ void squared_error_backward_kernel(S* dinp, const S* inp, const S* target, float twice, bool accumulate,
                                              int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(inp + i);
  const Floats<width> y = load<width>(target + i);
#pragma unroll
  for (int e = 0; e < width; ++e) x[e] = twice * (x[e] - y[e]);
  store_or_accumulate<width>(dinp + i, x, accumulate);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void squared_error_forward_cuda(const Tensor& losses, const Tensor& inp, const Tensor& target) {
  const int64_t rows = losses.numel(), C = inp.numel() / rows;
  with_access(inp.dtype, C, {inp.data, target.data}, [&]<class S>(S, auto width) {
    launch({"squared_error_forward", blocks_of(rows * warp_size, squared_error_threads), squared_error_threads},
           squared_error_forward_kernel<width, S>, losses.as<float>(), inp.as<S>(), target.as<S>(), rows, C);
  });
}

void squared_error_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& target, double scale) {
  const int64_t n = dinp.numel();
  with_access(dinp.dtype, n, {dinp.data, inp.data, target.data}, [&]<class S>(S, auto width) {
    launch_elementwise("squared_error_backward", n, width, squared_error_backward_kernel<width, S>, dinp.as<S>(),
                       inp.as<S>(), target.as<S>(), static_cast<float>(2 * scale), dinp.accumulate);
  });
}

}  // namespace crossply
