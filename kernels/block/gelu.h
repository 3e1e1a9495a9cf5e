// GELU, elementwise: with the exact normal distribution function, or with GPT-2's approximation by tanh.
//
//   erf:   Phi(x) = (1 + erf(x / sqrt 2)) / 2,   phi(x) = Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi)
//   tanh:  Phi(x) = (1 + tanh(u)) / 2,           phi(x) = Phi'(x) = (1 - tanh(u)^2) / 2 * sqrt(2 / pi) (1 + 3 a x^2)
//          with u = sqrt(2 / pi) (x + a x^3), a = 0.044715
//
//   out  = inp * Phi(inp)
//   dinp = dout * (Phi(inp) + inp * phi(inp))           overwritten or accumulated
//
// All tensors have the same number of elements and the same type, f32 or bf16. Nothing is saved. dinp may be dout
// where it is set; no other output may alias anything. The fast paths treat |inp| > 12 as 12 in Phi and phi, by tanh
// |inp| > 9.9 as 9.9: there they are 0 or 1 to within 1e-30. In f32 they are good to 1e-7 max(1, |inp|), slopes to
// 2e-7; on a GPU to 2.5e-7 and 7e-7. What is small keeps its digits: 6e-8 (9 + inp^2 / 2) of it, by tanh
// 6e-8 (8 + 10 |u|); on a GPU by 11 of these units less.
#pragma once

#include <cmath>
#include <complex>
#include <numbers>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

enum class GeluKind { erf, tanh };

void gelu_forward(const Tensor& out, const Tensor& inp, GeluKind kind, Stream stream);
void gelu_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, GeluKind kind, Stream stream);

// kernels/block/gelu.cu
CUDA_TWIN void gelu_forward_cuda(const Tensor& out, const Tensor& inp, GeluKind kind);
CUDA_TWIN void gelu_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, GeluKind kind);

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

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// What both fast paths compute of z in [0, 12]: the tail itself, because 1 - Phi(z) has no digits left,
//
//   area = Phi(-z) = bell t q(t - 1/2),   bell = exp(-z^2 / 2),   t = 1 / (1 + 0.34 z)
//
// where q is the minimax polynomial of degree 8, good to 2.3e-8 of the value. With exp's error and the roundings, of
// which that of z^2 / 2 grows: 6e-8 (8 + z^2 / 2) of it. T: float, or a vector of them.
template <class T>
HOST_DEVICE inline void tail_polynomial(T& q, const T& u) {
  q = u * -2.66262207e-2f + 3.53720052e-2f;
  q = q * u + 3.23217943e-2f;
  q = q * u - 6.77487525e-2f;
  q = q * u - 6.74762785e-2f;
  q = q * u + 1.07994571e-1f;
  q = q * u + 2.97943905e-1f;
  q = q * u + 3.41064884e-1f;
  q = q * u + 2.47139325e-1f;
}

// And by tanh, of z in [0, 9.9], with e = exp(-2 u) and r = 1 / (1 + e): area = Phi(-z) = e r, phi(z) = e r^2 2 u'(z).
// The parts are -2 u, which has an error of 5 roundings, and 2 u'.
template <class T>
HOST_DEVICE inline void tanh_parts(T& minus_2u, T& slope_of_2u, const T& z) {
  minus_2u = z * (z * z * -0.0713548163f - 1.59576912f);
  slope_of_2u = z * z * 0.214064449f + 1.59576912f;
}
#undef HOST_DEVICE

// u and Phi of the approximation.
template <class T>
T tanh_argument(T x) {
  return T(std::numbers::sqrt2 * std::numbers::inv_sqrtpi) * (x + T(0.044715) * x * x * x);
}
template <class T>
T tanh_distribution(T x) {
  using std::exp;
  return T(1) / (T(1) + exp(T(-2) * tanh_argument(x)));  // (1 + tanh(u)) / 2, with all its digits where it is small
}

template <class T>
void gelu_forward_ref(T* out, const T* inp, int64_t n, GeluKind kind) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = inp[i] * (kind == GeluKind::erf ? normal_distribution(inp[i]) : tanh_distribution(inp[i]));
}

template <class T>
void gelu_backward_ref(T* dinp, const T* dout, const T* inp, int64_t n, GeluKind kind, bool accumulate) {
  for (int64_t i = 0; i < n; ++i) {
    const T x = inp[i];
    T slope;
    if (kind == GeluKind::erf) {
      slope = normal_distribution(x) + x * normal_density(x);
    } else {
      const T p = tanh_distribution(x),
              du = T(std::numbers::sqrt2 * std::numbers::inv_sqrtpi) * (T(1) + T(3 * 0.044715) * x * x);
      slope = p + x * T(2) * p * (T(1) - p) * du;
    }
    dinp[i] = accumulate ? dinp[i] + dout[i] * slope : dout[i] * slope;
  }
}

}  // namespace crossply
