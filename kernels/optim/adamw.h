// AdamW: Adam with decoupled weight decay, over the flat arena of all parameters in one pass.
//
//   g = grad_scale * grads
//   m = beta1 m + (1 - beta1) g;       v = beta2 v + (1 - beta2) g^2
//   mhat = m / (1 - beta1^step);       vhat = v / (1 - beta2^step)
//   params -= lr weight_decay params + lr mhat / (sqrt(vhat) + eps)
//
//   narrow = params                                     rounded to bf16, if it has data
//
// params, m, v, grads, narrow: flat, the same size; params, m and v are read and written, grads is read. Nothing may
// alias. narrow is bf16 and not for the reference; whoever has one writes all of it first, because what lies between
// the rows stays as it is there too.
// A NaN gradient makes the parameter NaN: whoever wants to skip such a step looks at the gradient norm first.
#pragma once

#include <cmath>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// A range of the arena with its own rate (the schedule already multiplied in) and decay.
struct AdamwRow {
  int64_t begin, end;
  double lr, weight_decay;
};

struct AdamwScalars {
  double beta1, beta2, eps;
  int64_t step;       // 1 for the first update
  double grad_scale;  // from clipping
};

// What is the same for all elements. In double first: near step 1, 1 - beta2^step cancels in float.
struct AdamwFactors {
  float beta1, in1, beta2, in2, unbias_v, scale, eps;
  double bias_m;  // a row's rate is lr / bias_m
};
inline AdamwFactors factors_of(const AdamwScalars& s) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const double step = static_cast<double>(s.step), bias_m = 1 - std::pow(s.beta1, step);
  const double unbias_v = 1 / std::sqrt(1 - std::pow(s.beta2, step));
  return {f(s.beta1), f(1 - s.beta1), f(s.beta2), f(1 - s.beta2), f(unbias_v), f(s.grad_scale), f(s.eps), bias_m};
}

// rows: ascending, without overlap. What lies between them stays as it is, moments included.
void adamw_update(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& narrow, const Tensor& grads,
                  const std::vector<AdamwRow>& rows, const AdamwScalars& scalars, Stream stream);

// kernels/optim/adamw.cu
CUDA_TWIN void adamw_update_cuda(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& narrow,
                                 const Tensor& grads, const std::vector<AdamwRow>& rows, const AdamwScalars& scalars);

template <class T>
void adamw_row_ref(T* params, T* m, T* v, const T* grads, const AdamwRow& row, const AdamwScalars& scalars) {
  using std::sqrt;
  const double step = static_cast<double>(scalars.step);
  const T unbias_m = T(1 / (1 - std::pow(scalars.beta1, step))), unbias_v = T(1 / (1 - std::pow(scalars.beta2, step)));
  for (int64_t i = row.begin; i < row.end; ++i) {
    const T g = T(scalars.grad_scale) * grads[i];
    m[i] = T(scalars.beta1) * m[i] + T(1 - scalars.beta1) * g;
    v[i] = T(scalars.beta2) * v[i] + T(1 - scalars.beta2) * g * g;
    params[i] -= T(row.lr * row.weight_decay) * params[i] +
                 T(row.lr) * (m[i] * unbias_m) / (sqrt(v[i] * unbias_v) + T(scalars.eps));
  }
}

}  // namespace crossply
