// The sum of squares of all elements, in double: the gradient norm before the root, and the test for a finite gradient.
//
//   result = sum_i x[i]^2
//
// x: any shape, only read. The square of an f32 neither overflows nor vanishes in double, so for f32 the result
// is NaN or infinite exactly when an element is.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// The sum goes through partial sums that depend on the size alone, not on the thread count.
double sum_of_squares(const Tensor& x, Stream stream);

// kernels/gradnorm.cu; `to` is in device memory. The second waits for the GPU.
void sum_of_squares_cuda(double* to, const Tensor& x);
double sum_of_squares_cuda(const Tensor& x);

template <class T>
double sum_of_squares_ref(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace crossply
