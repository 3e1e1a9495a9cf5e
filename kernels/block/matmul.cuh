// Products of matrices in device memory: cuBLASLt's on a GPU, plain loops in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace crossply {

// Element (r, c) of matrix i is data[i * apart + r * stride + c], or data[i * apart + c * stride + r] if transposed.
struct Matrix {
  void* data;
  Dtype dtype;  // f32 or bf16
  int64_t stride;
  bool transposed = false;
  int64_t apart = 0;
};
inline Matrix transposed(Matrix m) {
  m.transposed = !m.transposed;
  return m;
}
struct ProductSize {
  int64_t M, N, K, batch = 1;
};

// c[i] (M, N) = a[i] (M, K) * b[i] (K, N), plus what is at `plus`, unless that is null: matrices of the type and the
// layout of c, or c itself; plus a row (N) of that type to each row, unless `bias` is null. a and b have one type, c is
// not transposed; sums are f32. Throws Exit::device.
//
//   for i, m, n: c[i][m, n] = plus[i][m, n] + bias[n] + sum_k a[i][m, k] * b[i][k, n]
void multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus,
              const void* bias = nullptr);

}  // namespace crossply
