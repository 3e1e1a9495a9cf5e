// RMSNorm, with a gain or without, over the last dimension (rows of width C). kernels/block/rmsnorm.md derives the
// backward.
//
//   rstd[n]   = (mean_c inp[n,c]^2 + eps)^(-1/2)                                  saved for the backward
//   out[n,c]  = weight[c] * inp[n,c] * rstd[n]
//
//   with u = dout * weight and xh = inp * rstd:
//   dinp[n,c] = rstd[n] * (u[n,c] - xh[n,c] * mean_j(u[n,j] * xh[n,j]))           overwritten or accumulated
//   dweight[c] += sum_n dout[n,c] * xh[n,c]                                       always added
//
// inp, out, dout, dinp: any shape that ends in C, the model width or, for q/k norms, the head width; weight, dweight:
// (C); rstd: (rows). Without data in weight the gain is 1, and dweight has no data either. inp, out, dout and dinp are
// f32 or bf16, all four alike, the others f32. The sum of squares is in f32: it overflows for |inp| near 1e19. out may
// not alias inp; dinp may alias dout where it is set.
#pragma once

#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, double eps,
                     Stream stream);
// The sum over rows goes through a fixed number of partial sums, so it does not depend on the thread count.
void rmsnorm_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                      const Tensor& weight, const Tensor& rstd, Stream stream);

// kernels/block/rmsnorm.cu; C is the rows' width.
CUDA_TWIN void rmsnorm_forward_cuda(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight,
                                    int64_t C, double eps);
CUDA_TWIN void rmsnorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                                     const Tensor& weight, const Tensor& rstd, int64_t C);
// kernels/block/rmsnorm_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(rmsnorm_forward_cuda) rmsnorm_forward_plain;
CUDA_TWIN decltype(rmsnorm_backward_cuda) rmsnorm_backward_plain;

// weight and dweight may be null in both.
template <class T>
void rmsnorm_forward_ref(T* out, T* rstd, const T* inp, const T* weight, int64_t rows, int64_t C, double eps) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    T sum = 0;
    for (int64_t c = 0; c < C; ++c) sum += inp[n * C + c] * inp[n * C + c];
    rstd[n] = T(1) / sqrt(sum / T(C) + T(eps));
    for (int64_t c = 0; c < C; ++c) out[n * C + c] = (weight == nullptr ? T(1) : weight[c]) * inp[n * C + c] * rstd[n];
  }
}

template <class T>
void rmsnorm_backward_ref(T* dinp, T* dweight, const T* dout, const T* inp, const T* weight, const T* rstd,
                          int64_t rows, int64_t C, bool accumulate) {
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    const T* dy = dout + n * C;
    T mean = 0;
    for (int64_t c = 0; c < C; ++c) {
      mean += dy[c] * (weight == nullptr ? T(1) : weight[c]) * x[c] * rstd[n];
      if (dweight != nullptr) dweight[c] += dy[c] * x[c] * rstd[n];
    }
    mean /= T(C);
    for (int64_t c = 0; c < C; ++c) {
      const T u = dy[c] * (weight == nullptr ? T(1) : weight[c]);
      const T d = rstd[n] * (u - x[c] * rstd[n] * mean);
      dinp[n * C + c] = accumulate ? dinp[n * C + c] + d : d;
    }
  }
}

}  // namespace crossply
