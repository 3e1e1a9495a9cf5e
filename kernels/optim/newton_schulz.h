// Newton-Schulz iteration: from a matrix X = U S V^T to p(S) between U and V^T, near the orthogonal matrix U V^T, by
// matrix products alone. It makes the direction of Muon's step (Keller Jordan, 2024; kernels/optim/muon.h).
//
//   X = X / max(safety |X|_F, 1e-7)
//   for (a, b, c) in steps:
//     A = X X^T
//     X = a X + (b A + c A A) X            where m > n on the transpose: A = X^T X, X = a X + X (b A + c A A)
//
// matrices: each (m, n), row-major, replaced by the result; not overlapping. f32 (f64 on the reference), with products
// as stream.products says, or all bf16: then X, A and b A + c A A are stored in bf16, and sums are f32. |X|_F: squares
// in double, leaf by leaf, then in order. A zero matrix stays zero. No result depends on the thread count, nor on which
// matrices are beside each other in the list. On a GPU those of one shape are multiplied at once.
//
// FLOPs of one step: 4 s^2 l + 2 s^3 with s the smaller side and l the larger; 31 % less on the CPU, which computes the
// symmetric products once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// The coefficients of the steps. `safety` bounds the first polynomial's argument where its slope is steep.
struct NewtonSchulz {
  std::vector<std::array<double, 3>> steps;
  double safety = 1;
};
// jordan: Keller Jordan's five equal steps, torch.optim.Muon's. polar_express: five different ones, each the best odd
// quintic for what the one before leaves (Amsel et al., arXiv 2505.16932).
inline const std::vector<std::string> muon_polynomials = {"jordan", "polar_express"};
// name: one of them. count: the first so many steps, the last one repeated; 0: all.
NewtonSchulz newton_schulz_of(const std::string& name, int64_t count);

// FLOPs of `steps` steps on an (m, n) matrix, as counted above.
inline double newton_schulz_flops(int64_t m, int64_t n, size_t steps) {
  const auto small = static_cast<double>(std::min(m, n)), large = static_cast<double>(std::max(m, n));
  return static_cast<double>(steps) * (4 * small * small * large + 2 * small * small * small);
}

// Bytes that the CPU takes beside these matrices, with `threads` threads.
int64_t newton_schulz_scratch(const std::vector<Shape>& matrices, Dtype dtype, int64_t threads);
void newton_schulz(const std::vector<Tensor>& matrices, const NewtonSchulz& iteration, Stream stream);

// kernels/optim/newton_schulz.cu
CUDA_TWIN void newton_schulz_cuda(const std::vector<Tensor>& matrices, const NewtonSchulz& iteration);
CUDA_TWIN ScratchBytes newton_schulz_scratch_cuda(const std::vector<Shape>& matrices, Dtype dtype);

template <class T>
void newton_schulz_ref(T* x, int64_t m, int64_t n, const NewtonSchulz& iteration) {
  using std::sqrt;
  const int64_t small = std::min(m, n), large = std::max(m, n);
  T squares = 0;
  for (int64_t i = 0; i < m * n; ++i) squares += x[i] * x[i];
  const T norm = T(iteration.safety) * sqrt(squares), divisor = norm > T(1e-7) ? norm : T(1e-7);
  // rows[i * large + k]: X, or its transpose where that has fewer rows.
  std::vector<T> rows(static_cast<size_t>(m * n)), a(static_cast<size_t>(small * small)), map(a), next(rows);
  const auto place = [=](int64_t i, int64_t k) { return m <= n ? i * n + k : k * n + i; };
  for (int64_t i = 0; i < small; ++i)
    for (int64_t k = 0; k < large; ++k) rows[i * large + k] = x[place(i, k)] / divisor;
  for (const auto& [c1, c3, c5] : iteration.steps) {
    for (int64_t i = 0; i < small; ++i)
      for (int64_t j = 0; j < small; ++j) {
        T sum = 0;
        for (int64_t k = 0; k < large; ++k) sum += rows[i * large + k] * rows[j * large + k];
        a[i * small + j] = sum;
      }
    for (int64_t i = 0; i < small; ++i)
      for (int64_t j = 0; j < small; ++j) {
        T sum = 0;
        for (int64_t k = 0; k < small; ++k) sum += a[i * small + k] * a[k * small + j];
        map[i * small + j] = T(c3) * a[i * small + j] + T(c5) * sum;
      }
    for (int64_t i = 0; i < small; ++i)
      for (int64_t k = 0; k < large; ++k) {
        T sum = 0;
        for (int64_t j = 0; j < small; ++j) sum += map[i * small + j] * rows[j * large + k];
        next[i * large + k] = T(c1) * rows[i * large + k] + sum;
      }
    rows.swap(next);
  }
  for (int64_t i = 0; i < small; ++i)
    for (int64_t k = 0; k < large; ++k) x[place(i, k)] = rows[i * large + k];
}

}  // namespace crossply
