// Several exits of a model, of which each token takes one: a gate says at each how likely that is (Ouro, arXiv
// 2510.25741). R exits; z_t[n] is the logit of the gate at exit t of token n. The last exit has no gate, and takes the
// rest.
//
//   lam_t = sigmoid(z_t)   S_0 = 1   p_t = lam_t S_t   S_{t+1} = S_t (1 - lam_t)     for t < R-1
//   p_{R-1} = S_{R-1}, so that the p_t add up to 1
//   a_t       = ce_t + beta ln p_t              ce_t: the cross entropy of exit t
//   losses[n] = sum_t p_t a_t                   the mean cross entropy, less beta times the entropy of p
//
//   with L = scale * sum_n losses[n]:
//   dz_t      = scale * (p_t (1 - lam_t) a_t - lam_t sum_{s>t} p_s a_s)              set
//   and what the gradients of ce_t are multiplied by is p_t.
//
// Rows that are not scored, of which the target is -1, have losses and gradients of 0. z, dz: R - 1 of N numbers, f32
// or bf16; p, ce: R of N, f32, as losses are. Nothing aliases. All sums are over one token, in f64 on a CPU.
#pragma once

#include <array>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

constexpr int64_t max_exits = 16;

void exit_weights(const std::vector<Tensor>& p, const std::vector<Tensor>& z, Stream stream);
// Without gradients where dz is empty.
void exit_loss(const Tensor& losses, const std::vector<Tensor>& dz, const std::vector<Tensor>& ce,
               const std::vector<Tensor>& z, const Tensor& targets, double beta, double scale, Stream stream);

// kernels/block/exit_gate.cu
CUDA_TWIN void exit_weights_cuda(const std::vector<Tensor>& p, const std::vector<Tensor>& z);
CUDA_TWIN void exit_loss_cuda(const Tensor& losses, const std::vector<Tensor>& dz, const std::vector<Tensor>& ce,
                              const std::vector<Tensor>& z, const Tensor& targets, double beta, double scale);

// Of each exit a row of N numbers.
template <class S>
struct ExitRows {
  S* row[max_exits];
};
template <class S>
ExitRows<S> rows_of_exits(const std::vector<Tensor>& list) {
  ExitRows<S> rows{};
  for (size_t t = 0; t < list.size(); ++t) rows.row[t] = list[t].as<S>();
  return rows;
}

// ln(1 + exp(x)), which is -ln(1 - sigmoid(x)).
template <class T>
T softplus_ref(T x) {
  using std::exp, std::log, std::real;
  return real(x) > 0 ? x + log(T(1) + exp(-x)) : log(T(1) + exp(x));
}

// ln p of one token, from the R - 1 logits.
template <class T>
void exit_log_weights_ref(T* log_p /*(R)*/, const T* z /**/, int64_t R) {
  T left = 0;  // ln S
  for (int64_t t = 0; t + 1 < R; ++t) log_p[t] = left - softplus_ref(-z[t]), left -= softplus_ref(z[t]);
  log_p[R - 1] = left;
}

// The loss of one token; dz with L = losses[n], unless null.
template <class T>
T exit_loss_row_ref(T* dz /**/, const T* ce /*(R)*/, const T* z /**/, double beta, int64_t R) {
  using std::exp;
  std::array<T, max_exits> log_p;
  exit_log_weights_ref(log_p.data(), z, R);
  T after = 0;  // the sum of p a over later exits
  for (int64_t t = R; t-- > 0;) {
    const T own = exp(log_p[static_cast<size_t>(t)]) * (ce[t] + T(beta) * log_p[static_cast<size_t>(t)]);
    if (dz != nullptr && t + 1 < R) {
      const T lam = exp(-softplus_ref(-z[t])), stay = exp(-softplus_ref(z[t]));
      dz[t] = stay * own - lam * after;
    }
    after += own;
  }
  return after;
}

}  // namespace crossply
