// Matrix products on the CPU's bf16 matrix units (amx.h), with sums in float:
//
//   c[i,j] = sum_k a[i,k] * b[k,j]                                        overwritten, or accumulated if `accumulate`
//
// a: (M, K), b: (K, N), each in either order, given by its strides; c: (M, N), dense, row-major, not aliasing a or b.
// gemm_rows_bf16: a and b are bf16; c is float, or bf16, rounded once, after the sum is complete and c's old value
// added. gemm_rows_bf16x3: a and b are float, each split into two bf16, x = high + low: high * high + low * high +
// high * low, which keeps about 16 of the 24 bits of every product.
// Without such units, and for the few rows of generation, gemm_rows_bf16 converts to float; without AMX,
// gemm_rows_bf16x3 is gemm_rows. The units take numbers below 1.2e-38 for zero, and gemm_rows_bf16x3 makes NaN of
// infinity and of numbers above 3.39e38.
// Every sum runs in an order that depends on the shapes and strides alone, never on the thread count. Inside a parallel
// region it runs on the calling thread. Uses the scratch slots 4 to 6 and 8.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/dtype.h"
#include "kernels/cpu/gemm.h"

namespace crossply {

// As gemm_rows of gemm.h; C is float or bf16. Products that follow each other with the same c, the later ones adding,
// are one sum: c in bf16 is rounded only once.
template <class C>
void gemm_rows_bf16(const std::vector<GemmProduct<C, bf16>>& products, int64_t M);
void gemm_rows_bf16x3(const std::vector<GemmProduct<float, float>>& products, int64_t M);

}  // namespace crossply
