// Not yet run on hardware: only in the emulator.
#include "kernels/depth/head_scale.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256;

// A thread's `width` neighbours lie in one row of D.
template <int width, class S>
__global__ void head_scale_forward_kernel(S* out, const S* inp, const float* factor, int64_t K, int64_t D, int64_t n) {
  const int64_t at = first_of_thread<width>();
  if (at >= n) return;
  const auto row = static_cast<uint32_t>(at / width) / static_cast<uint32_t>(D / width);
  const float f = factor[row % static_cast<uint32_t>(K)];
  Floats<width> y = load<width>(inp + at);
#pragma unroll
  for (int i = 0; i < width; ++i) y[i] *= f;
  store<width>(out + at, y);
}

// `lanes` threads, a power of two, take a row of D; dots (rows): <dout, inp> of each, or null.
template <int width, class S>
__global__ void head_scale_backward_kernel(S* dinp, float* dots, const S* dout, const S* inp, const float* factor,
                                           int64_t rows, int64_t K, int64_t D, int lanes, bool accumulate) {
  const int64_t row = row_of_lanes<threads>(lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float dot = 0;
  if (row < rows) {
    const float f = factor[static_cast<uint32_t>(row) % static_cast<uint32_t>(K)];
    for (int64_t at = row * D + lane * width; at < (row + 1) * D; at += lanes * width) {
      Floats<width> dy = load<width>(dout + at);
      const Floats<width> x = load_if<width>(dots != nullptr, inp, at);
#pragma unroll
      for (int i = 0; i < width; ++i) dot += dy[i] * x[i], dy[i] *= f;
      store_or_accumulate<width>(dinp + at, dy, accumulate);
    }
  }
  dot = group_sum(dot, lanes);
  if (dots != nullptr && lane == 0 && row < rows) dots[row] = dot;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void head_scale_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& factor, int64_t D) {
  with_access(inp.dtype, D, {out.data, inp.data}, [&]<class S>(S, auto width) {
    CHECK_THAT(inp.numel() / width < int64_t{1} << 32, "head_scale_forward: ", inp.str(), " is too large for a GPU");
    launch_elementwise("head_scale_forward", inp.numel(), width, head_scale_forward_kernel<width, S>, out.as<S>(),
                       inp.as<S>(), factor.as<float>(), factor.numel(), D);
  });
}

void head_scale_backward_cuda(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                              const Tensor& factor, int64_t D) {
  const int64_t rows = dinp.numel() / D, K = factor.numel();
  CHECK_THAT(rows < int64_t{1} << 32, "head_scale_backward: ", inp.str(), " is too large for a GPU");
  float* dots = dfactor.data == nullptr ? nullptr : scratch<float>(rows);
  with_access(dinp.dtype, D, {dinp.data, dout.data, inp.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of_row(D / width);
    launch({"head_scale_backward", blocks_of(rows * lanes, threads), threads}, head_scale_backward_kernel<width, S>,
           dinp.as<S>(), dots, dout.as<S>(), data_or_null<S>(inp), factor.as<float>(), rows, K, D, lanes,
           dinp.accumulate);
  });
  if (dots != nullptr) add_rows(dfactor.as<float>(), dots, rows / K, K);
}

}  // namespace crossply
