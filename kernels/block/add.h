// Elementwise addition, and the step that passes a gradient on unchanged.
//
//   out = a + b                                         out may alias a
//   dinp = dout                                         accumulate, set: a copy
//   dinp += dout                                        accumulate, added
//
// The backward of add is accumulate, called once for each input. All tensors have the same number of elements and the
// same type, f32 or bf16. Nothing is saved. Apart from out and a, nothing may alias.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void add_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream);
void accumulate(const Grad& dinp, const Tensor& dout, Stream stream);

// kernels/block/add.cu
CUDA_TWIN void add_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b);
CUDA_TWIN void accumulate_cuda(const Grad& dinp, const Tensor& dout);

template <class T>
void add_forward_ref(T* out, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

template <class T>
void accumulate_ref(T* dinp, const T* dout, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) dinp[i] = accumulate ? dinp[i] + dout[i] : dout[i];
}

}  // namespace crossply
