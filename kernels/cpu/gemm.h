// The one single-precision matrix product of the fast CPU path:
//
//   c[i,j] = sum_k a[i,k] * b[k,j]                                        overwritten, or accumulated if `accumulate`
//
// a: (M, K), b: (K, N), each in either order, given by its strides; c: (M, N), dense, row-major, not aliasing a or b.
// Every sum runs in an order that depends on the shapes and strides alone, never on the thread count. Inside a parallel
// region it runs on the calling thread. Uses the scratch slots 4 to 6.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/dtype.h"

namespace crossply {

// Element (i, j) is data[i * row + j * col]; one of the two strides is 1.
template <class T>
struct Strided {
  const T* data;
  int64_t row, col;
};

// For generation: M of at most a few rows in bf16, a.col and b.row 1, sums in float; c is set.
template <class C>  // float or bf16
void gemm_few_rows(C* c, const Strided<bf16>& a, const Strided<bf16>& b, int64_t M, int64_t N, int64_t K);

void gemm(float* c, const Strided<float>& a, const Strided<float>& b, int64_t M, int64_t N, int64_t K, bool accumulate);

// Several products with the same number of rows M, one after the other. Where there are enough rows, each thread takes
// its rows through all of them, so that what they share (a, or c) stays in its cache.
template <class C, class T>
struct GemmProduct {
  C* c;
  Strided<T> a, b;
  int64_t N, K;
  bool accumulate;
};
void gemm_rows(const std::vector<GemmProduct<float, float>>& products, int64_t M);

}  // namespace crossply
