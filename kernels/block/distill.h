// Distillation: the language-model head of a student fused with a loss that also compares its logits z with those of a
// teacher, u. Neither (rows, V) exists for all rows together.
//
//   z[n,v]  = sum_c inp[n,c] * weight[v,c]             u[n,v] = sum_c teacher.inp[n,c] * teacher.weight[v,c]
//   each with the cap of its own model's logits, where it has one (kernels/block/softcap.h)
//   p = softmax(z)   s = softmax(z / tau)   t = softmax(u / tau)                  over v
//   ce[n]     = -log p[n,targets[n]]
//   kl[n]     = sum_v t[n,v] * (log t[n,v] - log s[n,v])
//   losses[n] = alpha * ce[n] + (1 - alpha) * tau^2 * kl[n] / R                   both 0 where targets[n] is -1
//   R = 1: the sum over the vocabulary; or V, its mean: then the second term is next to nothing beside the first
//
//   with L = scale * sum_n losses[n]:
//   dz[n,v] = scale * (alpha * (p[n,v] - [v == targets[n]]) + (1 - alpha) * tau / R * (s[n,v] - t[n,v]))
//             times the slope of the student's cap
//   dinp[n,c]   = sum_v dz[n,v] * weight[v,c]                                     set; 0 where targets[n] is -1
//   dweight[v,c] = sum_n dz[n,v] * inp[n,c]                                       overwritten or accumulated
//   The teacher has no gradients.
//
// Types, shapes, targets and what is not scored are those of kernels/block/cross_entropy.h; the teacher's width may be
// another: teacher.inp (rows, C'), teacher.weight (V, C'), of the student's types. In bf16 both logits, before the cap,
// and dz are rounded to bf16. alpha = 1 gives the gradients of the cross entropy. A teacher with the student's logits
// has kl 0 and gets no gradient, exactly.
#pragma once

#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/block/cross_entropy.h"

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
  double softcap = 0;
};

// losses, ce: (rows). Nothing is saved: this is of training, and takes the gradients of L at once. softcap: the
// student's.
void distill_forward(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                     const Tensor& weight, double softcap, const Tensor& targets, const TeacherHead& teacher,
                     const Distillation& how, double scale, Stream stream);

// Bytes of scratch that a CPU takes for it, if all rows are scored. width: C'.
int64_t distill_scratch(int64_t rows, int64_t V, int64_t C, int64_t width, Dtype dtype);

// kernels/block/distill.cu
CUDA_TWIN void distill_forward_cuda(const Tensor& losses, const Tensor& ce, const Tensor& dinp, const Grad& dweight,
                                    const Tensor& inp, const Tensor& weight, double softcap, const Tensor& targets,
                                    const TeacherHead& teacher, const Distillation& how, double scale);

// l = log softmax(z / tau) of one row of logits.
template <class T>
void log_softmax_row_ref(T* l /*(V)*/, const T* z /*(V)*/, double tau, int64_t V) {
  using std::exp, std::log, std::real;
  T largest = 0, sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    l[v] = z[v] / T(tau);
    if (v == 0 || real(l[v]) > real(largest)) largest = l[v];
  }
  for (int64_t v = 0; v < V; ++v) sum += exp(l[v] - largest);
  for (int64_t v = 0; v < V; ++v) l[v] -= largest + log(sum);
}

// dz, of one scored row, with L = losses[n], before the slope of a cap; or none where dz is null. Returns losses[n].
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
void distill_ref(T* losses, T* ce, T* dinp, T* dweight, const T* inp, const T* weight, double softcap,
                 const int32_t* targets, const T* teacher_inp, const T* teacher_weight, double teacher_softcap,
                 const Distillation& how, double scale, int64_t rows, int64_t V, int64_t C, int64_t width) {
  std::vector<T> z(static_cast<size_t>(V)), u(z), p(z), s(z), t(z), dz(z);
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    losses[n] = ce[n] = 0;
    for (int64_t c = 0; c < C && dinp != nullptr; ++c) dinp[n * C + c] = 0;
    if (targets[n] < 0) continue;
    logits_row_ref(z.data(), x, weight, softcap, V, C);
    logits_row_ref(u.data(), teacher_inp + n * width, teacher_weight, teacher_softcap, V, width);
    log_softmax_row_ref(p.data(), z.data(), 1, V);
    log_softmax_row_ref(s.data(), z.data(), how.tau, V);
    log_softmax_row_ref(t.data(), u.data(), how.tau, V);
    losses[n] = distill_row_ref(dinp != nullptr ? dz.data() : nullptr, &ce[n], p.data(), s.data(), t.data(), targets[n],
                                how, V);
    for (int64_t v = 0; v < V && dinp != nullptr; ++v) {
      const size_t i = static_cast<size_t>(v);
      const T d = T(scale) * dz[i] * softcap_slope_ref(z[i], softcap);
      for (int64_t c = 0; c < C; ++c) {
        dinp[n * C + c] += d * weight[v * C + c];
        dweight[v * C + c] += d * x[c];
      }
    }
  }
}

}  // namespace crossply
