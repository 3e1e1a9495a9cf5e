// Elementwise multiplication.
//
//   out = a b
//   da = dout b,  db = dout a                           each overwritten or accumulated
//
// All tensors have the same number of elements and the same type, f32 or bf16. Nothing is saved. da may be a, and db b,
// where they are set; nothing else may alias.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void multiply_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream);
void multiply_backward(const Grad& da, const Grad& db, const Tensor& dout, const Tensor& a, const Tensor& b,
                       Stream stream);

// kernels/block/multiply.cu
CUDA_TWIN void multiply_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b);
CUDA_TWIN void multiply_backward_cuda(const Grad& da, const Grad& db, const Tensor& dout, const Tensor& a,
                                      const Tensor& b);

template <class T>
void multiply_forward_ref(T* out, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

template <class T>
void multiply_backward_ref(T* da, T* db, const T* dout, const T* a, const T* b, int64_t n, bool accumulate_a,
                           bool accumulate_b) {
  for (int64_t i = 0; i < n; ++i) {
    const T x = a[i], y = b[i];
    da[i] = (accumulate_a ? da[i] : T(0)) + dout[i] * y;
    db[i] = (accumulate_b ? db[i] : T(0)) + dout[i] * x;
  }
}

}  // namespace crossply
