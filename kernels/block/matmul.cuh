// Products of matrices in device memory (products.cu): cuBLASLt's on a GPU, plain loops in the emulator.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace crossply {

// Element (r, c) of matrix i is data[i * apart + r * stride + c], or data[i * apart + c * stride + r] if transposed.
struct Matrix {
  void* data;
  Dtype dtype;  // f32 or bf16; of factors also e4m3 or e5m2
  int64_t stride;
  bool transposed = false;
  int64_t apart = 0;
  const float* inverse = nullptr;  // of eight bits: on the device, what each element is multiplied with
};
inline Matrix transposed(Matrix m) {
  m.transposed = !m.transposed;
  return m;
}
struct ProductSize {
  int64_t M, N, K, batch = 1;
  bool fast = false;  // of eight bits, on sm_90: sums of fewer bits
  // Each matrix has the bits that it has alone: the algorithm is chosen for one, and splits no sum. Matrices are apart
  // by multiples of 256 bytes.
  bool as_alone = false;
};
// What the product and `plus` are multiplied with.
struct Factors {
  float product = 1, plus = 1;
};

// A row (N) that is added to each row of matrix i: data + i * apart, of the type of c, at multiples of 16 bytes; null:
// none.
struct Bias {
  const void* data = nullptr;
  int64_t apart = 0;
};

// What is done with the sums before they become c, by tanh (kernels/block/gelu.h): inp = sum and c = gelu(sum), or
// backward c = sum * gelu'(inp). inp: of the type and the layout of c; null: nothing is done.
struct Gelu {
  void* inp = nullptr;
  bool backward = false;
};

// c[i] (M, N) = a[i] (M, K) * b[i] (K, N), plus what is at `plus`, unless that is null: matrices of the type and the
// layout of c, or c itself; plus a bias. a and b have one type, or either one of eight bits: a then not transposed, b
// transposed, a bias bf16. c is not transposed; sums are f32. a and b may be the same matrix for all i, apart by 0.
// Throws Exit::device. Returns false, having done nothing, where the library has no algorithm with this gelu. by: both
// are 1 beside a bias or gelu.
//
//   for i, m, n: c[i][m, n] = by.plus * plus[i][m, n] + bias[i][n] + by.product * sum_k a[i][m, k] * b[i][k, n]
//                and then gelu's
bool multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus,
              const Bias& bias = {}, const Gelu& gelu = {}, const Factors& by = {});

}  // namespace crossply
