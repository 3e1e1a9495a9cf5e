// The gates of SATFormer (arXiv 2605.03953): how much of the first layer's value each key/value head takes. Rows
// of width K, one number per head.
//
//   with p = softmax_j(inp), s = 1 / (1 + exp(-inp)):
//   gate             out                  dinp                                     set, or added
//   relu             max(inp, 0)          dout where inp > 0, else 0
//   sigmoid          s                    dout * s * (1 - s)
//   softmax          K * p                out * (dout - sum_j dout * out / K)
//   softmax_sigmoid  K * p * s            out * dout * (2 - s) - p * sum_j dout * out
//   tanh             tanh(inp)            dout * (1 - out^2)
//   identity         inp                  dout
//
// All tensors: (rows, K) after flattening; K is inp's last dimension. inp and dinp are f32 or bf16, out and dout f32.
// Nothing is saved. No output may alias anything. A NaN stays, in its whole row where the gate has a softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

enum class Gate { relu, sigmoid, softmax, softmax_sigmoid, tanh, identity };

void gate_forward(const Tensor& out, const Tensor& inp, Gate gate, Stream stream);
void gate_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, Gate gate, Stream stream);

// kernels/depth/gate.cu
CUDA_TWIN void gate_forward_cuda(const Tensor& out, const Tensor& inp, int64_t K, Gate gate);
CUDA_TWIN void gate_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, int64_t K, Gate gate);

// 1 for z > 0, else 0, and NaN for NaN.
template <class T>
T step_ref(const T& z) {
  using std::real;
  return real(z) > 0 ? T(1) : real(z) <= 0 ? T(0) : z;
}

// One row: out (K), and p (K) where the gate has a softmax.
template <class T>
void gate_row_ref(T* out, T* p, const T* inp, int64_t K, Gate gate) {
  using std::exp, std::real, std::tanh;
  auto max = real(inp[0]);
  for (int64_t j = 1; j < K; ++j) max = std::max(max, real(inp[j]));
  T sum = 0;
  for (int64_t j = 0; j < K; ++j) sum += exp(inp[j] - max);
  for (int64_t j = 0; j < K; ++j) {
    const T z = inp[j], s = T(1) / (T(1) + exp(-z));
    p[j] = exp(z - max) / sum;
    switch (gate) {
      case Gate::relu: out[j] = step_ref(z) * z; break;
      case Gate::sigmoid: out[j] = s; break;
      case Gate::softmax: out[j] = T(static_cast<double>(K)) * p[j]; break;
      case Gate::softmax_sigmoid: out[j] = T(static_cast<double>(K)) * p[j] * s; break;
      case Gate::tanh: out[j] = tanh(z); break;
      case Gate::identity: out[j] = z; break;
    }
  }
}

template <class T>
void gate_forward_ref(T* out, const T* inp, int64_t rows, int64_t K, Gate gate) {
  std::vector<T> p(static_cast<size_t>(K));
  for (int64_t n = 0; n < rows; ++n) gate_row_ref(out + n * K, p.data(), inp + n * K, K, gate);
}

template <class T>
void gate_backward_ref(T* dinp, const T* dout, const T* inp, int64_t rows, int64_t K, Gate gate, bool accumulate) {
  using std::exp;
  std::vector<T> out(static_cast<size_t>(K)), p(out);
  for (int64_t n = 0; n < rows; ++n) {
    const T* dy = dout + n * K;
    gate_row_ref(out.data(), p.data(), inp + n * K, K, gate);
    T sum = 0;
    for (int64_t j = 0; j < K; ++j) sum += dy[j] * out[static_cast<size_t>(j)];
    for (int64_t j = 0; j < K; ++j) {
      const T z = inp[n * K + j], y = out[static_cast<size_t>(j)], s = T(1) / (T(1) + exp(-z));
      T d = 0;
      switch (gate) {
        case Gate::relu: d = dy[j] * step_ref(z); break;
        case Gate::sigmoid: d = dy[j] * s * (T(1) - s); break;
        case Gate::softmax: d = y * (dy[j] - sum / T(static_cast<double>(K))); break;
        case Gate::softmax_sigmoid: d = y * dy[j] * (T(2) - s) - p[static_cast<size_t>(j)] * sum; break;
        case Gate::tanh: d = dy[j] * (T(1) - y * y); break;
        case Gate::identity: d = dy[j]; break;
      }
      dinp[n * K + j] = accumulate ? dinp[n * K + j] + d : d;
    }
  }
}

}  // namespace crossply
