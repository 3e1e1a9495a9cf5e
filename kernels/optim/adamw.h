// AdamW: Adam with decoupled weight decay, over the flat arena of all parameters in one pass.
//
//   g = factor * grads                                  the clipping (kernels/optim/clip.h)
//   m = beta1 m + (1 - beta1) g;       v = beta2 v + (1 - beta2) g^2
//   mhat = unbias_m m;                 vhat = unbias_v^2 v        unbias_m = 1 / (1 - beta1^step)
//   a = lr lr_mul                                                 unbias_v = 1 / sqrt(1 - beta2^step)
//   step = a mhat / (sqrt(vhat) + eps eps_mul)
//   params -= a decay weight_decay params + step                  cautious: the decay only where step params >= 0
//
//   bf16_copy = params                                            rounded to bf16, if it has data
//
// params, m, v, grads, bf16_copy: flat, the same size; params, m and v are read and written, grads is read. Nothing may
// alias. bf16_copy is bf16 and not for the reference. The caller first writes all of it, because what lies between the
// rows stays as it is there too. numbers: an AdamwNumbers, (5) of f64 where the others are, so that an update may
// be recorded and replayed for other steps. Where the factor is not finite, nothing is written. A NaN gradient makes
// the parameter NaN.
#pragma once

#include <cmath>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// A range of the arena with its own learning rate, weight decay and epsilon.
struct AdamwRow {
  int64_t begin, end;
  double lr_mul, weight_decay, eps_mul = 1;
};

struct AdamwConstants {
  double beta1, beta2, eps;
  bool cautious = false;
};

// What changes from step to step.
struct AdamwNumbers {
  double factor, lr, unbias_m, unbias_v;
  double decay;  // a factor of all weight decay
};
// step: 1 for the first update. In double: near step 1, 1 - beta2^step cancels in float.
inline AdamwNumbers adamw_numbers(const AdamwConstants& of, int64_t step, double lr, double factor, double decay = 1) {
  const double n = static_cast<double>(step);
  return {factor, lr, 1 / (1 - std::pow(of.beta1, n)), 1 / std::sqrt(1 - std::pow(of.beta2, n)), decay};
}

// The same for all elements of all steps, in float.
struct AdamwFactors {
  float beta1, in1, beta2, in2, eps;
  bool cautious;
};
inline AdamwFactors factors_of(const AdamwConstants& s) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(s.beta1), f(1 - s.beta1), f(s.beta2), f(1 - s.beta2), f(s.eps), s.cautious};
}

// rows: ascending, without overlap. What lies between them stays as it is, moments included.
void adamw_update(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& bf16_copy, const Tensor& grads,
                  const Tensor& numbers, const std::vector<AdamwRow>& rows, const AdamwConstants& constants,
                  Stream stream);

// kernels/optim/adamw.cu
CUDA_TWIN void adamw_update_cuda(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& bf16_copy,
                                 const Tensor& grads, const AdamwNumbers* numbers, const std::vector<AdamwRow>& rows,
                                 const AdamwConstants& constants);

template <class T>
void adamw_row_ref(T* params, T* m, T* v, const T* grads, const AdamwNumbers& numbers, const AdamwRow& row,
                   const AdamwConstants& constants) {
  using std::sqrt;
  const double lr = numbers.lr * row.lr_mul;
  const T unbias_m = T(numbers.unbias_m), unbias_v = T(numbers.unbias_v);
  for (int64_t i = row.begin; i < row.end; ++i) {
    const T g = T(numbers.factor) * grads[i];
    m[i] = T(constants.beta1) * m[i] + T(1 - constants.beta1) * g;
    v[i] = T(constants.beta2) * v[i] + T(1 - constants.beta2) * g * g;
    const T step = T(lr) * (m[i] * unbias_m) / (sqrt(v[i]) * unbias_v + T(constants.eps * row.eps_mul));
    const bool decays = !constants.cautious || step * params[i] >= T(0);
    params[i] -= decays ? T(lr * numbers.decay * row.weight_decay) * params[i] + step : step;
  }
}

}  // namespace crossply
