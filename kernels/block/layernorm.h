// LayerNorm without gain and bias, over the last dimension (rows of width C).
//
//   mean[n]   = mean_c inp[n,c]                                                   saved for the backward
//   rstd[n]   = (mean_c (inp[n,c] - mean[n])^2 + eps)^(-1/2)                      saved for the backward
//   out[n,c]  = (inp[n,c] - mean[n]) * rstd[n]
//
//   with xh = out:
//   dinp[n,c] = rstd[n] * (dout[n,c] - mean_j dout[n,j] - xh[n,c] * mean_j(dout[n,j] * xh[n,j]))   set or added
//
// inp, out, dout, dinp: any shape that ends in C, with the same rows, f32 or bf16, all four alike; mean, rstd: (rows),
// f32. The mean comes first and the squares are of deviations from it, so a large common offset costs no more digits
// than it already cost inp. The sum of squares is in f32: it overflows for deviations near 1e19. out may alias inp,
// which the backward needs, however; dinp may alias dout where it is set.
#pragma once

#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp, double eps,
                       Stream stream);
void layernorm_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, const Tensor& mean, const Tensor& rstd,
                        Stream stream);

// kernels/block/layernorm.cu
CUDA_TWIN void layernorm_forward_cuda(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                                      int64_t C, double eps);
CUDA_TWIN void layernorm_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, const Tensor& mean,
                                       const Tensor& rstd, int64_t C);

template <class T>
void layernorm_forward_ref(T* out, T* mean, T* rstd, const T* inp, int64_t rows, int64_t C, double eps) {
  using std::sqrt;
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    T sum = 0, square = 0;
    for (int64_t c = 0; c < C; ++c) sum += x[c];
    mean[n] = sum / T(C);
    for (int64_t c = 0; c < C; ++c) square += (x[c] - mean[n]) * (x[c] - mean[n]);
    rstd[n] = T(1) / sqrt(square / T(C) + T(eps));
    for (int64_t c = 0; c < C; ++c) out[n * C + c] = (x[c] - mean[n]) * rstd[n];
  }
}

template <class T>
void layernorm_backward_ref(T* dinp, const T* dout, const T* inp, const T* mean, const T* rstd, int64_t rows, int64_t C,
                            bool acc) {
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    const T* dy = dout + n * C;
    T along_one = 0, along_out = 0;
    for (int64_t c = 0; c < C; ++c) {
      along_one += dy[c];
      along_out += dy[c] * (x[c] - mean[n]) * rstd[n];
    }
    along_one /= T(C);
    along_out /= T(C);
    for (int64_t c = 0; c < C; ++c) {
      const T d = rstd[n] * (dy[c] - along_one - (x[c] - mean[n]) * rstd[n] * along_out);
      dinp[n * C + c] = acc ? dinp[n * C + c] + d : d;
    }
  }
}

}  // namespace crossply
