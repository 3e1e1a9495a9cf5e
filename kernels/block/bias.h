// A bias: the same row added to every row of a product.
//
//   out[n,o] += bias[o]
//
//   dbias[o] += sum_n dout[n,o]                         always added
//
// out, dout: (rows, O) after flattening, f32 or bf16; bias, dbias: (O), f32. The gradient of what was added to is dout
// as it is. Nothing is saved, nothing may alias. What is in bf16 is rounded here once more than in the product that
// computed it. On a GPU linear layers add it within the product; on a CPU that would save a hundredth of its time.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// Not on a GPU.
void bias_forward(const Tensor& out, const Tensor& bias, Stream stream);
// The sum over rows goes through a fixed number of partial sums, so it does not depend on the thread count.
void bias_backward(const Tensor& dbias, const Tensor& dout, Stream stream);

// kernels/block/bias.cu
CUDA_TWIN void bias_backward_cuda(const Tensor& dbias, const Tensor& dout, int64_t O);

template <class T>
void bias_forward_ref(T* out, const T* bias, int64_t rows, int64_t O) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t o = 0; o < O; ++o) out[n * O + o] += bias[o];
}

template <class T>
void bias_backward_ref(T* dbias, const T* dout, int64_t rows, int64_t O) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t o = 0; o < O; ++o) dbias[o] += dout[n * O + o];
}

}  // namespace crossply
