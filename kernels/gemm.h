// The one single-precision matrix product of the fast CPU path:
//
//   c[i,j] = sum_k a[i,k] * b[k,j]                                                set, or added if add
//
// a: (M, K), b: (K, N), each in either order, given by its strides; c: (M, N), dense, row-major, not aliasing a or b.
// Every sum runs in an order that depends on the shapes and strides alone, never on the thread count. Inside a parallel
// region it runs on the calling thread. Uses the scratch slots 4 to 6.
#pragma once

#include <cstdint>

namespace crossply {

// Element (i, j) is data[i * row + j * col]; one of the two strides is 1.
struct Strided {
  const float* data;
  int64_t row, col;
};

void gemm(float* c, const Strided& a, const Strided& b, int64_t M, int64_t N, int64_t K, bool add);

}  // namespace crossply
