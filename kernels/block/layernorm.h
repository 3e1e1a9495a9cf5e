// LayerNorm over the last dimension (rows of width C), with gain and bias, with a gain only, or without both.
//
//   mean[n]   = mean_c inp[n,c]                                                   saved for the backward
//   rstd[n]   = (mean_c (inp[n,c] - mean[n])^2 + eps)^(-1/2)                      saved for the backward
//   out[n,c]  = weight[c] * (inp[n,c] - mean[n]) * rstd[n] + bias[c]
//
//   with u = dout * weight and xh = (inp - mean) * rstd:
//   dinp[n,c] = rstd[n] * (u[n,c] - mean_j u[n,j] - xh[n,c] * mean_j(u[n,j] * xh[n,j]))      overwritten or accumulated
//   dweight[c] += sum_n dout[n,c] * xh[n,c]                                       always added
//   dbias[c]   += sum_n dout[n,c]                                                 always added
//
// inp, out, dout, dinp: any shape that ends in C, with the same rows, f32 or bf16, all four alike; mean, rstd: (rows),
// weight, bias, dweight, dbias: (C), f32. Without data in weight the gain is 1, and there is no bias either; what has
// no data has no gradient. The mean comes first and the squares are of deviations from it, so a large common offset
// costs no more digits than it already cost inp. The sum of squares is in f32: it overflows for deviations near 1e19.
// out may alias inp, which the backward needs, however; dinp may alias dout where it is set.
#pragma once

#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                       const Tensor& weight, const Tensor& bias, double eps, Stream stream);
// The sums over rows go through a fixed number of partial sums, so they do not depend on the thread count.
void layernorm_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                        const Tensor& inp, const Tensor& weight, const Tensor& mean, const Tensor& rstd, Stream stream);

// kernels/block/layernorm.cu
CUDA_TWIN void layernorm_forward_cuda(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                                      const Tensor& weight, const Tensor& bias, int64_t C, double eps);
CUDA_TWIN void layernorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                                       const Tensor& inp, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                                       int64_t C);

// weight, bias, dweight and dbias may be null in both.
template <class T>
void layernorm_forward_ref(T* out, T* mean, T* rstd, const T* inp, const T* weight, const T* bias, int64_t rows,
                           int64_t C, double eps) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    T sum = 0, square = 0;
    for (int64_t c = 0; c < C; ++c) sum += x[c];
    mean[n] = sum / T(C);
    for (int64_t c = 0; c < C; ++c) square += (x[c] - mean[n]) * (x[c] - mean[n]);
    rstd[n] = T(1) / sqrt(square / T(C) + T(eps));
    for (int64_t c = 0; c < C; ++c) {
      const T xh = (x[c] - mean[n]) * rstd[n];
      out[n * C + c] = (weight == nullptr ? xh : weight[c] * xh) + (bias == nullptr ? T(0) : bias[c]);
    }
  }
}

template <class T>
void layernorm_backward_ref(T* dinp, T* dweight, T* dbias, const T* dout, const T* inp, const T* weight, const T* mean,
                            const T* rstd, int64_t rows, int64_t C, bool accumulate) {
  const auto gain = [=](int64_t c) { return weight == nullptr ? T(1) : weight[c]; };
  for (int64_t n = 0; n < rows; ++n) {
    const T *x = inp + n * C, *dy = dout + n * C;
    T along_one = 0, along_out = 0;
    for (int64_t c = 0; c < C; ++c) {
      const T xh = (x[c] - mean[n]) * rstd[n];
      along_one += dy[c] * gain(c);
      along_out += dy[c] * gain(c) * xh;
      if (dweight != nullptr) dweight[c] += dy[c] * xh;
      if (dbias != nullptr) dbias[c] += dy[c];
    }
    along_one /= T(C);
    along_out /= T(C);
    for (int64_t c = 0; c < C; ++c) {
      const T d = rstd[n] * (dy[c] * gain(c) - along_one - (x[c] - mean[n]) * rstd[n] * along_out);
      dinp[n * C + c] = accumulate ? dinp[n * C + c] + d : d;
    }
  }
}

}  // namespace crossply
