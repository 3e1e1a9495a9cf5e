// SwiGLU, elementwise: the gate goes through silu and scales the up branch.
//
//   s = 1 / (1 + exp(-gate));   out = gate * s * up
//
//   dgate = dout * up * s * (1 + gate * (1 - s))        overwritten or accumulated
//   dup   = dout * gate * s                             overwritten or accumulated
//
// All tensors have the same number of elements and the same type, f32 or bf16. Nothing is saved: s is cheaper to
// compute again than to read. dgate may be gate, and dup up, where they are set; nothing else may alias.
#pragma once

#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void swiglu_forward(const Tensor& out, const Tensor& gate, const Tensor& up, Stream stream);
void swiglu_backward(const Grad& dgate, const Grad& dup, const Tensor& dout, const Tensor& gate, const Tensor& up,
                     Stream stream);

// kernels/block/swiglu.cu
CUDA_TWIN void swiglu_forward_cuda(const Tensor& out, const Tensor& gate, const Tensor& up);
CUDA_TWIN void swiglu_backward_cuda(const Grad& dgate, const Grad& dup, const Tensor& dout, const Tensor& gate,
                                    const Tensor& up);

template <class T>
void swiglu_forward_ref(T* out, const T* gate, const T* up, int64_t n) {
  using std::exp;
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (T(1) + exp(-gate[i])) * up[i];
}

template <class T>
void swiglu_backward_ref(T* dgate, T* dup, const T* dout, const T* gate, const T* up, int64_t n, bool accumulate_gate,
                         bool accumulate_up) {
  using std::exp;
  for (int64_t i = 0; i < n; ++i) {
    const T s = T(1) / (T(1) + exp(-gate[i]));
    const T dg = dout[i] * up[i] * s * (T(1) + gate[i] * (T(1) - s));
    const T du = dout[i] * gate[i] * s;
    dgate[i] = accumulate_gate ? dgate[i] + dg : dg;
    dup[i] = accumulate_up ? dup[i] + du : du;
  }
}

}  // namespace crossply
