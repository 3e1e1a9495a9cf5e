// One number for each head, the same for all tokens: a constant or a parameter that scales queries, keys, values or
// what attention returns.
//
//   out[n,k,:]  = factor[k] * inp[n,k,:]
//   dinp[n,k,:] = factor[k] * dout[n,k,:]             set, or added
//   dfactor[k] += sum_n <dout[n,k,:], inp[n,k,:]>     always added; not computed where it has no data
//
// inp, out and their gradients: (..., K, D) with n over all that stands in front, f32 or bf16; factor, dfactor: (K),
// f32. Nothing is saved. No output may alias anything.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void head_scale_forward(const Tensor& out, const Tensor& inp, const Tensor& factor, Stream stream);
// inp may be without data when dfactor has none. The sums do not depend on the thread count.
void head_scale_backward(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                         const Tensor& factor, Stream stream);

// kernels/depth/head_scale.cu
CUDA_TWIN void head_scale_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& factor, int64_t D);
CUDA_TWIN void head_scale_backward_cuda(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                                        const Tensor& factor, int64_t D);

// rows: n and k together.
template <class T>
void head_scale_forward_ref(T* out, const T* inp, const T* factor, int64_t rows, int64_t K, int64_t D) {
  for (int64_t i = 0; i < rows * D; ++i) out[i] = factor[i / D % K] * inp[i];
}

template <class T>
void head_scale_backward_ref(T* dinp, T* dfactor, const T* dout, const T* inp, const T* factor, int64_t rows, int64_t K,
                             int64_t D, bool accumulate) {
  for (int64_t i = 0; i < rows * D; ++i) {
    const int64_t k = i / D % K;
    if (dfactor != nullptr) dfactor[k] += dout[i] * inp[i];
    dinp[i] = (accumulate ? dinp[i] : T(0)) + factor[k] * dout[i];
  }
}

}  // namespace crossply
