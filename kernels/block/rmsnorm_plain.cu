// RMSNorm in plain CUDA: the loops of rmsnorm.h, the outermost one spread over threads. Read it before rmsnorm.cu.
// Tests hold both to the same reference, and `bench gpu --only plain` times one against the other. Training never calls
// this file.
//
// Sums are in double. One thread adds up thousands of terms, and a float would lose digits that the fast kernels keep:
// there each of many threads has few terms.
// Not yet run on hardware: only in the emulator.
#include "kernels/block/rmsnorm.h"
#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256;  // of a block

// A thread has a row, and its neighbour reads C elements further on. A load of a warp touches 32 cache lines, and takes
// one element from each.
template <class S>
__global__ void rmsnorm_forward_kernel(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C,
                                       float eps) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  double sum = 0;
  for (int64_t c = 0; c < C; ++c) sum += to_float(inp[n * C + c]) * to_float(inp[n * C + c]);
  rstd[n] = 1 / sqrtf(static_cast<float>(sum) / static_cast<float>(C) + eps);
  for (int64_t c = 0; c < C; ++c) {
    const float w = weight == nullptr ? 1.f : weight[c];
    from_float(out[n * C + c], w * to_float(inp[n * C + c]) * rstd[n]);
  }
}

// A thread has a row. dinp may be dout: an element of it is read for the last time before it is written.
template <class S>
__global__ void rmsnorm_dinp_kernel(S* dinp, const S* dout, const S* inp, const float* weight, const float* rstd,
                                    int64_t rows, int64_t C, bool accumulate) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  double sum = 0;
  for (int64_t c = 0; c < C; ++c) {
    const float w = weight == nullptr ? 1.f : weight[c];
    sum += to_float(dout[n * C + c]) * w * to_float(inp[n * C + c]) * rstd[n];
  }
  const float mean = static_cast<float>(sum) / static_cast<float>(C);
  for (int64_t c = 0; c < C; ++c) {
    const float w = weight == nullptr ? 1.f : weight[c], xh = to_float(inp[n * C + c]) * rstd[n];
    const float d = rstd[n] * (to_float(dout[n * C + c]) * w - xh * mean);
    from_float(dinp[n * C + c], accumulate ? to_float(dinp[n * C + c]) + d : d);
  }
}

// A thread has a column and goes down all rows: C threads, few for a GPU.
template <class S>
__global__ void rmsnorm_dweight_kernel(float* dweight, const S* dout, const S* inp, const float* rstd, int64_t rows,
                                       int64_t C) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= C) return;
  double sum = 0;
  for (int64_t n = 0; n < rows; ++n) sum += to_float(dout[n * C + c]) * to_float(inp[n * C + c]) * rstd[n];
  dweight[c] += static_cast<float>(sum);
}

}  // namespace

void rmsnorm_forward_plain(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, int64_t C,
                           double eps) {
  const int64_t rows = rstd.numel();
  with_storage(out.dtype, [&]<class S>(S) {
    launch({"rmsnorm_forward_plain", blocks_of(rows, threads), threads}, rmsnorm_forward_kernel<S>, out.as<S>(),
           rstd.as<float>(), inp.as<S>(), data_or_null<float>(weight), rows, C, static_cast<float>(eps));
  });
}

void rmsnorm_backward_plain(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                            const Tensor& weight, const Tensor& rstd, int64_t C) {
  const int64_t rows = rstd.numel();
  with_storage(dinp.dtype, [&]<class S>(S) {
    if (weight.data != nullptr)  // first, while dout is there
      launch({"rmsnorm_dweight_plain", blocks_of(C, threads), threads}, rmsnorm_dweight_kernel<S>, dweight.as<float>(),
             dout.as<S>(), inp.as<S>(), rstd.as<float>(), rows, C);
    launch({"rmsnorm_dinp_plain", blocks_of(rows, threads), threads}, rmsnorm_dinp_kernel<S>, dinp.as<S>(),
           dout.as<S>(), inp.as<S>(), data_or_null<float>(weight), rstd.as<float>(), rows, C, dinp.accumulate);
  });
}

}  // namespace crossply
