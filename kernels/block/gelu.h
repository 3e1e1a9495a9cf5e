// GELU with the exact normal distribution function, elementwise.
//
//   Phi(x) = (1 + erf(x / sqrt 2)) / 2,   phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
//   out  = inp * Phi(inp)
//   dinp = dout * (Phi(inp) + inp * phi(inp))           set, or added if acc
//
// All tensors have the same number of elements and the same type, f32 or bf16. Nothing is saved. No output may alias
// anything. The fast path treats |inp| > 12 as 12 in Phi and phi, where they are 0 or 1 to within 1e-30.
#pragma once

#include <cmath>
#include <complex>
#include <numbers>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void gelu_forward(const Tensor& out, const Tensor& inp, Stream stream);
void gelu_backward(const Tensor& dinp, const Tensor& dout, const Tensor& inp, bool acc, Stream stream);

// kernels/block/gelu.cu
CUDA_TWIN void gelu_forward_cuda(const Tensor& out, const Tensor& inp);
CUDA_TWIN void gelu_backward_cuda(const Tensor& dinp, const Tensor& dout, const Tensor& inp, bool acc);

template <class T>
T normal_density(T x) {
  using std::exp;
  return exp(T(-0.5) * x * x) * T(0.5 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
}

template <class T>
T normal_distribution(T x) {
  return T(0.5) * std::erfc(x * T(-0.5 * std::numbers::sqrt2));
}
// For the complex step, because the library has no complex erfc:
// Phi(x) = 1/2 + phi(x) sum_k x^(2k+1) / (1 * 3 * ... * (2k+1)).
inline std::complex<double> normal_distribution(std::complex<double> x) {
  std::complex<double> term = x, sum = x;
  for (double odd = 3; std::abs(term) > 1e-18 * std::abs(sum); odd += 2) sum += term *= x * x / odd;
  return 0.5 + normal_density(x) * sum;
}

template <class T>
void gelu_forward_ref(T* out, const T* inp, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = inp[i] * normal_distribution(inp[i]);
}

template <class T>
void gelu_backward_ref(T* dinp, const T* dout, const T* inp, int64_t n, bool acc) {
  for (int64_t i = 0; i < n; ++i) {
    const T d = dout[i] * (normal_distribution(inp[i]) + inp[i] * normal_density(inp[i]));
    dinp[i] = acc ? dinp[i] + d : d;
  }
}

}  // namespace crossply
