// The squared distance of each row from a target that is given: the loss of an autoencoder.
//
//   losses[n] = sum_c (inp[n,c] - target[n,c])^2
//
//   with L = scale * sum_n losses[n]:
//   dinp[n,c] = 2 scale (inp[n,c] - target[n,c])                        overwritten or accumulated; the target has none
//
// inp, dinp, target: (rows, C) after flattening, of the same type, f32 or bf16; losses: (rows), f32. Nothing is saved.
// No output may alias anything. A NaN shows in its row's loss and in its own gradient.
#pragma once

#include <cstdint>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void squared_error_forward(const Tensor& losses, const Tensor& inp, const Tensor& target, Stream stream);
void squared_error_backward(const Grad& dinp, const Tensor& inp, const Tensor& target, double scale, Stream stream);

// kernels/block/squared_error.cu
CUDA_TWIN void squared_error_forward_cuda(const Tensor& losses, const Tensor& inp, const Tensor& target);
CUDA_TWIN void squared_error_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& target, double scale);

template <class T>
void squared_error_forward_ref(T* losses, const T* inp, const T* target, int64_t rows, int64_t C) {
  for (int64_t n = 0; n < rows; ++n) {
    T sum = 0;
    for (int64_t i = n * C; i < (n + 1) * C; ++i) sum += (inp[i] - target[i]) * (inp[i] - target[i]);
    losses[n] = sum;
  }
}

template <class T>
void squared_error_backward_ref(T* dinp, const T* inp, const T* target, double scale, int64_t n, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) dinp[i] = (accumulate ? dinp[i] : T(0)) + T(2 * scale) * (inp[i] - target[i]);
}

}  // namespace crossply
