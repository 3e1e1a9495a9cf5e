// Sums over elements, in double. The sum of squares, leaf by leaf, is the squared gradient norm, and is finite if the
// gradient is. The sum of the elements themselves is the loss.
//
//   leaf_squares: to[l] = sum of x[i]^2 for l leaf <= i < (l + 1) leaf        add_sum: to += sum_i x[i]
//   ordered_sum:  to = sum_k weights[k] * sums[order[k]]
//
// to: f64, where the stream's tensors are, so that none waits for the device; (ceil(n / leaf)), (1) and (1). x: any
// shape, only read. order: i32, the places of the leaves, or of any other sums. weights: f64, as many, or without data:
// all 1. Which thread adds what depends on its
// length alone: a caller that lists the leaves in one order gets the same bits however the ranks of a job share them.
// The square of an f32 neither overflows nor vanishes in double, so for f32 a sum of squares is NaN or infinite exactly
// when an element is.
#pragma once

#include "engine/buckets.h"
#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

inline int64_t leaves_of(int64_t n) { return (n + leaf - 1) / leaf; }

// Neither depends on the thread count.
void leaf_squares(const Tensor& to, const Tensor& x, Stream stream);
void add_sum(const Tensor& to, const Tensor& x, Stream stream);
void ordered_sum(const Tensor& to, const Tensor& sums, const Tensor& order, Stream stream, const Tensor& weights = {});

// kernels/optim/gradient_norm.cu
CUDA_TWIN void leaf_squares_cuda(double* to, const Tensor& x);
CUDA_TWIN void add_sum_cuda(double* to, const Tensor& x);
CUDA_TWIN void ordered_sum_cuda(double* to, const double* sums, const Tensor& order, const double* weights);

template <class T>
void leaf_squares_ref(double* to, const T* x, int64_t n) {
  for (int64_t l = 0; l < leaves_of(n); ++l) to[l] = 0;
  for (int64_t i = 0; i < n; ++i) to[i / leaf] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}

}  // namespace crossply
