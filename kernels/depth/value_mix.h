// Value residuals: the values of a layer mixed with those of the first layer, v1.
//
// value_mix (ResFormer), with two trained numbers for all tokens and heads:
//   out      = own * v + first * v1
//   dv       = own * dout                    set, or added
//   dv1      = first * dout                  set, or added
//   d_own   += <dout, v>                     always added, where they have data
//   d_first += <dout, v1>
//
// gated_mix (SATFormer), with a gate for every token n and head j:
//   out[n,j,:]   = v[n,j,:] + alpha[n,j] * v1[n,j,:]
//   dv           = dout                      not written here
//   dv1[n,j,:]   = alpha[n,j] * dout[n,j,:]  set, or added
//   dalpha[n,j]  = <dout[n,j,:], v1[n,j,:]>  set, or added
//
// scale, for ResFormer's vector of `first`, a trained number times a softmax over the layers:
//   out[i]   = factor[0] * inp[i]
//   dinp[i]  = factor[0] * dout[i]           set, or added
//   dfactor += <dout, inp>                   always added, where it has data
//
// v, v1, out and their gradients: (B,T,K,D); alpha, dalpha: (B,T,K); a MixWeight is one element of a tensor of any
// shape; factor: one element. On the CPU value_mix and gated_mix store v, v1, out and their gradients as f32 or bf16;
// all else is f32, and so is everything of scale. out may alias v, and dv may alias dout where it is set; nothing else
// aliases.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"

namespace crossply {

using MixWeight = Element<Tensor>;

// The address of the weight; null if it has no data.
template <class T>
T* number_of(const MixWeight& weight) {
  if (weight.values.data == nullptr) return nullptr;
  CHECK_THAT(weight.index >= 0 && weight.index < weight.values.numel(), weight.index, " of ", weight.values.str());
  return weight.values.as<T>() + weight.index;
}

void value_mix_forward(const Tensor& out, const Tensor& v, const Tensor& v1, const MixWeight& own,
                       const MixWeight& first, Stream stream);
// v may be without data when d_own has none. The sums over the elements go through a fixed number of partial sums, so
// they do not depend on the thread count.
void value_mix_backward(const Grad& dv, const Grad& dv1, const MixWeight& d_own, const MixWeight& d_first,
                        const Tensor& dout, const Tensor& v, const Tensor& v1, const MixWeight& own,
                        const MixWeight& first, Stream stream);

void gated_mix_forward(const Tensor& out, const Tensor& v, const Tensor& v1, const Tensor& alpha, Stream stream);
void gated_mix_backward(const Grad& dv1, const Grad& dalpha, const Tensor& dout, const Tensor& v1, const Tensor& alpha,
                        Stream stream);

void scale_forward(const Tensor& out, const Tensor& inp, const Tensor& factor, Stream stream);
void scale_backward(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                    const Tensor& factor, Stream stream);

// kernels/depth/value_mix.cu; D: the width of a row with one gate.
CUDA_TWIN void value_mix_forward_cuda(const Tensor& out, const Tensor& v, const Tensor& v1, const MixWeight& own,
                                      const MixWeight& first);
CUDA_TWIN void value_mix_backward_cuda(const Grad& dv, const Grad& dv1, const MixWeight& d_own,
                                       const MixWeight& d_first, const Tensor& dout, const Tensor& v, const Tensor& v1,
                                       const MixWeight& own, const MixWeight& first);
CUDA_TWIN void gated_mix_forward_cuda(const Tensor& out, const Tensor& v, const Tensor& v1, const Tensor& alpha,
                                      int64_t D);
CUDA_TWIN void gated_mix_backward_cuda(const Grad& dv1, const Grad& dalpha, const Tensor& dout, const Tensor& v1,
                                       const Tensor& alpha, int64_t D);
CUDA_TWIN void scale_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& factor);
CUDA_TWIN void scale_backward_cuda(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                                   const Tensor& factor);

template <class T>
void value_mix_forward_ref(T* out, const T* v, const T* v1, T own, T first, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = own * v[i] + first * v1[i];
}

// d_own and d_first point to one element each, or are null.
template <class T>
void value_mix_backward_ref(T* dv, T* dv1, T* d_own, T* d_first, const T* dout, const T* v, const T* v1, T own, T first,
                            int64_t n, bool accumulate_v, bool accumulate_v1) {
  for (int64_t i = 0; i < n; ++i) {
    const T dy = dout[i];  // read once, because dv may be dout
    if (d_own != nullptr) *d_own += dy * v[i];
    if (d_first != nullptr) *d_first += dy * v1[i];
    dv[i] = accumulate_v ? dv[i] + own * dy : own * dy;
    dv1[i] = accumulate_v1 ? dv1[i] + first * dy : first * dy;
  }
}

template <class T>
void gated_mix_forward_ref(T* out, const T* v, const T* v1, const T* alpha, int64_t rows, int64_t D) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t d = 0; d < D; ++d) out[n * D + d] = v[n * D + d] + alpha[n] * v1[n * D + d];
}

template <class T>
void gated_mix_backward_ref(T* dv1, T* dalpha, const T* dout, const T* v1, const T* alpha, int64_t rows, int64_t D,
                            bool accumulate_v1, bool accumulate_alpha) {
  for (int64_t n = 0; n < rows; ++n) {
    T sum = 0;
    for (int64_t i = n * D; i < (n + 1) * D; ++i) {
      sum += dout[i] * v1[i];
      dv1[i] = accumulate_v1 ? dv1[i] + alpha[n] * dout[i] : alpha[n] * dout[i];
    }
    dalpha[n] = accumulate_alpha ? dalpha[n] + sum : sum;
  }
}

template <class T>
void scale_forward_ref(T* out, const T* inp, T factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = factor * inp[i];
}

template <class T>
void scale_backward_ref(T* dinp, T* dfactor, const T* dout, const T* inp, T factor, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) {
    if (dfactor != nullptr) *dfactor += dout[i] * inp[i];
    dinp[i] = accumulate ? dinp[i] + factor * dout[i] : factor * dout[i];
  }
}

}  // namespace crossply
