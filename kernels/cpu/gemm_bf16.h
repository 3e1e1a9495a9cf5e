// Matrix products on the CPU's bf16 matrix units (amx.h), with sums in float:
//
//   c[i,j] = sum_k a[i,k] * b[k,j]                                                set, or added if add
//
// a: (M, K), b: (K, N), each in either order, given by its strides; c: (M, N), dense, row-major, not aliasing a or b.
// gemm_bf16: a and b are bf16; c is float, or bf16, rounded once, after the sum is complete and c's old value added.
// gemm_bf16x3: a and b are float, each split into two bf16, x = high + low: high * high + low * high + high * low,
// which keeps about 16 of the 24 bits of every product.
// Without such units gemm_bf16 converts to float; without AMX, gemm_bf16x3 is gemm. The units take numbers below
// 1.2e-38 for zero, and gemm_bf16x3 makes NaN of infinity and of numbers above 3.39e38.
// Every sum runs in an order that depends on the shapes and strides alone, never on the thread count. Inside a parallel
// region it runs on the calling thread. Uses the scratch slots 4 to 6 and 8.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/dtype.h"
#include "kernels/cpu/gemm.h"

namespace crossply {

// As Strided and Product of gemm.h.
struct Strided16 {
  const bf16* data;
  int64_t row, col;
};
template <class C>
struct Product16 {
  C* c;
  Strided16 a, b;
  int64_t N, K;
  bool add;
};

// C is float or bf16.
template <class C>
void gemm_bf16(C* c, const Strided16& a, const Strided16& b, int64_t M, int64_t N, int64_t K, bool add);
void gemm_bf16x3(float* c, const Strided& a, const Strided& b, int64_t M, int64_t N, int64_t K, bool add);

// As gemm_rows of gemm.h. Products that follow each other with the same c, the later ones adding, are one sum: c in
// bf16 is rounded only once.
template <class C>
void gemm_rows_bf16(const std::vector<Product16<C>>& products, int64_t M);
void gemm_rows_bf16x3(const std::vector<Product>& products, int64_t M);

}  // namespace crossply
