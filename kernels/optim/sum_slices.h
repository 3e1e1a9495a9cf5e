// The sum of what several ranks have of the same gradients, in an order that is a tree over the ranks:
//
//   to[i] = tree(0, S)            tree(a, 1) = from[a][i]
//                                 tree(a, n) = tree(a, p) + tree(a + p, n - p), p the largest power of two below n
//
// So where the ranks' numbers are themselves such sums, over equally many micro-steps and a power of two of them, the
// result has the bits of one rank's tree over all micro-steps.
//
// to: (n), from: (S, n), both f32 (the reference: or f64); only read. to may be a row of from; otherwise nothing may
// alias.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void sum_slices(const Tensor& to, const Tensor& from, Stream stream);

// One slice: a copy.
inline void copy(const Tensor& to, const Tensor& from, Stream stream) {
  sum_slices(to, Tensor{from.data, from.dtype, Shape{1, from.numel()}}, stream);
}

CUDA_TWIN void sum_slices_cuda(const Tensor& to, const Tensor& from);  // kernels/optim/sum_slices.cu

constexpr int max_levels = 12;  // of the tree: fewer than 4,096 slices

template <class T>
T tree_sum_ref(const T* from, int64_t stride, int64_t begin, int64_t n) {
  if (n == 1) return from[begin * stride];
  int64_t left = 1;
  while (left * 2 < n) left *= 2;
  return tree_sum_ref(from, stride, begin, left) + tree_sum_ref(from, stride, begin + left, n - left);
}

template <class T>
void sum_slices_ref(T* to, const T* from, int64_t S, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = tree_sum_ref(from + i, n, 0, S);
}

}  // namespace crossply
