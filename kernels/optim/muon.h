// Muon (Keller Jordan, 2024): momentum whose direction is made orthogonal, for hidden weight matrices.
//
//   g = factor * grads                                       the clipping, as in AdamW's row
//   m = momentum m + (1 - momentum) g
//   u = (1 - momentum) g + momentum m      (nesterov)   or   u = m                       muon_momentum
//   o = u near an orthogonal matrix                                                      newton_schulz.h
//   NorMuon (Li et al., arXiv 2510.05491): v_i = beta2 v_i + (1 - beta2) mean_j o_ij^2   of each row i
//     o_ij = o_ij / (sqrt(v_i) + 1e-10), then o times |o before|_F / (|o after|_F + 1e-10)   normalize_rows
//   params -= rate decay weight_decay params + rate scale o    with rate = lr lr_mul     muon_update
//   cautious: the decay only where o params >= 0
//
// u may be grads, or is an array of bf16 of its size. Elementwise passes are over flat memory that holds any number of
// matrices; u, m, grads, params, bf16_copy: the same size. bf16_copy = params rounded, if it has data. factor, numbers:
// f64 where the others are, (1) and a MuonNumbers. Where the factor is not finite, nothing is written.
#pragma once

#include <cmath>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// What changes from step to step: the base rate, the momentum, and a factor of all weight decay.
struct MuonNumbers {
  double lr, momentum, decay;
};

// A matrix in the flat arrays.
struct MuonRow {
  int64_t begin, end;
  double lr_mul, weight_decay;
  double scale;  // of the orthogonal matrix: its size for a matrix of this shape
};
// rms: 0.2 sqrt(max(m, n)), an update of the size that AdamW's has (Liu et al., arXiv 2502.16982). original:
// sqrt(max(1, m / n)). spectral: sqrt(m / n). name: one of muon_scales.
inline const std::vector<std::string> muon_scales = {"rms", "original", "spectral"};
double muon_scale_of(const std::string& name, int64_t m, int64_t n);

void muon_momentum(const Tensor& u, const Tensor& m, const Tensor& grads, const Tensor& factor, const Tensor& numbers,
                   bool nesterov, Stream stream);
// o: (m, n); v: (m), in double sums over a row.
void normalize_rows(const Tensor& o, const Tensor& v, double beta2, const Tensor& factor, Stream stream);
void muon_update(const Tensor& params, const Tensor& bf16_copy, const Tensor& o, const Tensor& factor,
                 const Tensor& numbers, const std::vector<MuonRow>& rows, bool cautious, Stream stream);

// kernels/optim/muon.cu
CUDA_TWIN void muon_momentum_cuda(const Tensor& u, const Tensor& m, const Tensor& grads, const double* factor,
                                  const MuonNumbers* numbers, bool nesterov);
CUDA_TWIN void normalize_rows_cuda(const Tensor& o, const Tensor& v, double beta2, const double* factor);
CUDA_TWIN void muon_update_cuda(const Tensor& params, const Tensor& bf16_copy, const Tensor& o, const double* factor,
                                const MuonNumbers* numbers, const std::vector<MuonRow>& rows, bool cautious);

template <class T>
void muon_momentum_ref(T* u, T* m, const T* grads, int64_t n, double factor, double momentum, bool nesterov) {
  for (int64_t i = 0; i < n; ++i) {
    const T g = T(1 - momentum) * T(factor) * grads[i];
    m[i] = T(momentum) * m[i] + g;
    u[i] = nesterov ? g + T(momentum) * m[i] : m[i];
  }
}

template <class T>
void normalize_rows_ref(T* o, T* v, int64_t m, int64_t n, double beta2) {
  using std::sqrt;
  T before = 0, after = 0;
  for (int64_t i = 0; i < m; ++i) {
    T squares = 0;
    for (int64_t j = 0; j < n; ++j) squares += o[i * n + j] * o[i * n + j];
    before += squares;
    v[i] = T(beta2) * v[i] + T(1 - beta2) * squares / T(n);
    const T divisor = sqrt(v[i]) + T(1e-10);
    for (int64_t j = 0; j < n; ++j) o[i * n + j] /= divisor;
    after += squares / (divisor * divisor);
  }
  const T by = sqrt(before) / (sqrt(after) + T(1e-10));
  for (int64_t i = 0; i < m * n; ++i) o[i] *= by;
}

template <class T>
void muon_update_ref(T* params, const T* o, const MuonNumbers& numbers, const MuonRow& row, bool cautious) {
  const double rate = numbers.lr * row.lr_mul;
  for (int64_t i = row.begin; i < row.end; ++i) {
    const bool decays = !cautious || o[i] * params[i] >= T(0);
    const T decay = decays ? T(rate * numbers.decay * row.weight_decay) * params[i] : T(0);
    params[i] -= decay + T(rate * row.scale) * o[i];
  }
}

}  // namespace crossply
