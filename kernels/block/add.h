// Elementwise addition, and the step that passes a gradient on unchanged.
//
//   out = a + b                                         out may alias a
//   out = a + factor b                                  add_scaled; out may alias a
//   dinp = dout                                         accumulate, set: a copy
//   dinp += dout                                        accumulate, added
//   dinp = factor dout, or += it                        accumulate_scaled
//
// The backward of add is accumulate, called once for each input; that of add_scaled is accumulate for a and
// accumulate_scaled for b. All tensors have the same number of elements and the
// same type, f32 or bf16. Nothing is saved. Apart from out and a, nothing may alias.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void add_forward(const Tensor& out, const Tensor& a, const Tensor& b, Stream stream);
void accumulate(const Grad& dinp, const Tensor& dout, Stream stream);
void add_scaled_forward(const Tensor& out, const Tensor& a, const Tensor& b, double factor, Stream stream);
void accumulate_scaled(const Grad& dinp, const Tensor& dout, double factor, Stream stream);

// kernels/block/add.cu
CUDA_TWIN void add_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b);
CUDA_TWIN void accumulate_cuda(const Grad& dinp, const Tensor& dout);
CUDA_TWIN void add_scaled_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b, double factor);
CUDA_TWIN void accumulate_scaled_cuda(const Grad& dinp, const Tensor& dout, double factor);

template <class T>
void add_forward_ref(T* out, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

template <class T>
void accumulate_ref(T* dinp, const T* dout, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) dinp[i] = accumulate ? dinp[i] + dout[i] : dout[i];
}

template <class T>
void add_scaled_forward_ref(T* out, const T* a, const T* b, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + T(factor) * b[i];
}

template <class T>
void accumulate_scaled_ref(T* dinp, const T* dout, double factor, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) dinp[i] = T(factor) * dout[i] + (accumulate ? dinp[i] : T(0));
}

}  // namespace crossply
