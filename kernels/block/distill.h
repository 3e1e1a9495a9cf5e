// Distillation: the language-model head of a student fused with a loss that also compares its logits z with those of a
// teacher, u. Neither (rows, V) exists for all rows together.
//
//   z[n,v]  = sum_c inp[n,c] * weight[v,c]             u[n,v] = sum_c teacher.inp[n,c] * teacher.weight[v,c]
//   p = softmax(z)   s = softmax(z / tau)   t = softmax(u / tau)                  over v
//   ce[n]     = -log p[n,targets[n]]
//   kl[n]     = sum_v t[n,v] * (log t[n,v] - log s[n,v])
//   losses[n] = alpha * ce[n] + (1 - alpha) * tau^2 * kl[n] / R                   both 0 where targets[n] is -1
//   R = 1: the sum over the vocabulary; or V, its mean: then the second term is next to nothing beside the first
//
//   with L = scale * sum_n losses[n]:
//   dz[n,v] = scale * (alpha * (p[n,v] - [v == targets[n]]) + (1 - alpha) * tau / R * (s[n,v] - t[n,v]))
//   dinp[n,c]   = sum_v dz[n,v] * weight[v,c]                                     set; 0 where targets[n] is -1
//   dweight[v,c] = sum_n dz[n,v] * inp[n,c]                                       overwritten or accumulated
//   The teacher has no gradients.
//
// Types, shapes, targets and what is not scored are those of kernels/block/cross_entropy.h; the teacher's width may be
// another: teacher.inp (rows, C'), teacher.weight (V, C'), of the student's types. In bf16 both logits and dz are
// rounded to bf16. alpha = 1 gives the gradients of the cross entropy. A teacher with the student's logits has kl 0 and
// gets no gradient, exactly.
#pragma once

#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

struct Distillation {
  double alpha = 0.6, tau = 1;
  bool per_element = false;  // R = V
  // What the KL divergence is multiplied with, and tau (s - t) in its gradient.
  double kl_factor(int64_t V) const { return gradient_factor(V) * tau; }
  double gradient_factor(int64_t V) const { return (1 - alpha) * tau / (per_element ? static_cast<double>(V) : 1); }
};

struct TeacherHead {
  Tensor inp, weight;
};

// losses, ce: (rows). Nothing is saved: this is of training, and takes the gradients of L at once.
void distill_forward(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                     const Tensor& weight, const Tensor& targets, const TeacherHead& teacher, const Distillation& how,
                     double scale, Stream stream);

// Bytes of scratch that a CPU takes for it, if all rows are scored. width: C'.
int64_t distill_scratch(int64_t rows, int64_t V, int64_t C, int64_t width, Dtype dtype);

// kernels/block/distill.cu
CUDA_TWIN void distill_forward_cuda(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight,
                                    const Tensor& inp, const Tensor& weight, const Tensor& targets,
                                    const TeacherHead& teacher, const Distillation& how, double scale);

// l = log softmax(inp weight^T / tau) of one row.
template <class T>
void log_softmax_row_ref(T* l /*(V)*/, const T* inp /*(C)*/, const T* weight /*(V,C)*/, double tau, int64_t V,
                         int64_t C) {
  using std::exp, std::log, std::real;
  T largest = 0, sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    l[v] = 0;
    for (int64_t c = 0; c < C; ++c) l[v] += inp[c] * weight[v * C + c];
    l[v] /= T(tau);
    if (v == 0 || real(l[v]) > real(largest)) largest = l[v];
  }
  for (int64_t v = 0; v < V; ++v) sum += exp(l[v] - largest);
  for (int64_t v = 0; v < V; ++v) l[v] -= largest + log(sum);
}

// dz, of one scored row, with L = losses[n]; or none where dz is null. Returns losses[n].
template <class T>
T distill_row_ref(T* dz /*(V)*/, T* ce, const T* p, const T* s, const T* t /*logarithms, (V)*/, int32_t target,
                  const Distillation& how, int64_t V) {
  using std::exp;
  T kl = 0;
  for (int64_t v = 0; v < V; ++v) kl += exp(t[v]) * (t[v] - s[v]);
  for (int64_t v = 0; v < V && dz != nullptr; ++v)
    dz[v] = T(how.alpha) * (exp(p[v]) - T(v == target)) + T(how.gradient_factor(V)) * (exp(s[v]) - exp(t[v]));
  *ce = -p[target];
  return T(how.alpha) * *ce + T(how.kl_factor(V)) * kl;
}

// Without gradients where dinp is null. width: C'.
template <class T>
void distill_ref(T* losses, T* ce, T* dinp, T* dweight, const T* inp, const T* weight, const int32_t* targets,
                 const T* teacher_inp, const T* teacher_weight, const Distillation& how, double scale, int64_t rows,
                 int64_t V, int64_t C, int64_t width) {
  std::vector<T> p(static_cast<size_t>(V)), s(p), t(p), dz(p);
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    losses[n] = ce[n] = 0;
    for (int64_t c = 0; c < C && dinp != nullptr; ++c) dinp[n * C + c] = 0;
    if (targets[n] < 0) continue;
    log_softmax_row_ref(p.data(), x, weight, 1, V, C);
    log_softmax_row_ref(s.data(), x, weight, how.tau, V, C);
    log_softmax_row_ref(t.data(), teacher_inp + n * width, teacher_weight, how.tau, V, width);
    losses[n] = distill_row_ref(dinp != nullptr ? dz.data() : nullptr, &ce[n], p.data(), s.data(), t.data(), targets[n],
                                how, V);
    for (int64_t v = 0; v < V && dinp != nullptr; ++v)
      for (int64_t c = 0; c < C; ++c) {
        dinp[n * C + c] += T(scale) * dz[static_cast<size_t>(v)] * weight[v * C + c];
        dweight[v * C + c] += T(scale) * dz[static_cast<size_t>(v)] * x[c];
      }
  }
}

}  // namespace crossply
