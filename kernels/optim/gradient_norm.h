// Sums over all elements, in double. Of squares: the gradient norm before the root, and the test for a finite gradient;
// plain: the loss.
//
//   sum_of_squares: to = sum_i x[i]^2        add_sum: to += sum_i x[i]
//
// to: (1) of f64, where the stream's tensors are, so that neither waits for the device. x: any shape, only read. The
// square of an f32 neither overflows nor vanishes in double, so for f32 the sum of squares is NaN or infinite exactly
// when an element is.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// The sum goes through partial sums that depend on the size alone, not on the thread count.
void sum_of_squares(const Tensor& to, const Tensor& x, Stream stream);
void add_sum(const Tensor& to, const Tensor& x, Stream stream);

// kernels/optim/gradient_norm.cu
CUDA_TWIN void sum_of_squares_cuda(double* to, const Tensor& x);
CUDA_TWIN void add_sum_cuda(double* to, const Tensor& x);

template <class T>
double sum_of_squares_ref(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace crossply
