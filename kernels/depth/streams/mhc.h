// Manifold-constrained hyper-connections (mHC, arXiv 2512.24880): the residual streams of hyper.h, whose coefficients
// a token computes from all of its streams at once, so bounded that the streams neither grow nor vanish.
//
//   streams: (B,T,E,C), a token's streams in a row x (E*C); out: (B,T,C); pre: (B,T,E); coef: (B,T,E,E+2)
//   fn: (M,E*C), base: (M), scale: one number for each group of rows: pre (E rows), post (E), comb (the rest)
//
//   rho    = (mean(x^2) + norm_eps)^(-1/2)
//   z      = rho * fn x                        (M), the product first
//   l      = scale[group] * z + base
//   pre_i  = sigmoid(l_i) + eps
//   post_i = 2 sigmoid(l_{E+i})
//   comb   = by the mixing; comb[k,i] goes from stream k to stream i
//   out    = sum_i pre_i streams_i             if wanted: else the next sublayer reads by this pre (hyper.h, write)
//   coef   = row k: pre_k, comb[k,0..E-1], post_k          the layout of hyper.h, for hyper_write
//
// Mixings, with what there is of the rows:
//   merge         pre alone: the last read, which has no sublayer behind it; no coef
//   identity      pre and post; comb is the identity
//   permutations  E! more rows: comb = sum_p softmax(l)_p P_p, P_p[k,p(k)] = 1, p in lexicographic order
//   sinkhorn      E*E more rows, row k for the targets of stream k: a softmax over each row, plus eps; then the columns
//                 and, iterations - 1 times, the rows and the columns are divided by their sums plus eps. Columns come
//                 last and sum to 1; rows do so only where that has converged, which peaked logits prevent.
//
// squares (B,T) is sum x^2, which the write that made the streams has taken; without data it is computed here. The
// forward saves pre, z (B,T,M) and rho (B,T). Streams, out and their gradients are all f32 or all bf16, the rest is f32
// (fn, too, is multiplied as it is, or as the sum of two bf16 parts). No output may alias an input, nor another output.
//
// Elements to and from memory per token and sublayer at E = 4. Forward: a write 9 C, the product with fn 4 C, a read
// 5 C; where a write reads for the next sublayer 10 C and 4 C. (With that product taken on the way it would be 10 C in
// all.) Backward: a write 14 C; a read 5 C for dpre, 4 C for fn and 13 C for the streams, where it adds to the write's;
// or 19, 4 and 12 C.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"
#include "kernels/depth/streams/hyper.h"

namespace crossply {

constexpr int64_t max_mhc_rows = mhc_rows(Mixing::sinkhorn, max_streams);

// Target of stream k in the permutation number p, of E! in lexicographic order: of the numbers that no earlier stream
// has, so many smaller ones are passed over as p says, digit by digit.
constexpr int64_t permuted(int64_t p, int64_t E, int64_t k) {
  unsigned taken = 0;
  for (int64_t place = 0;; ++place) {
    const int64_t rest = permutations_of(E - 1 - place);
    int64_t skip = p / rest, target = 0;
    for (p %= rest; (taken >> target & 1u) != 0 || skip-- > 0; ++target) continue;
    if (place == k) return target;
    taken |= 1u << target;
  }
}

// From streams (B,T,E,C): writes out, if that has data, and what is saved. coef is missing if the mixing has none.
void mhc_read_forward(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form, Stream stream);

// With dout for an out and dcoef for a coef:
//   dpre_i      = dcoef[i,0] + <streams_i, dout>
//   dl          = through the sigmoids and the mixing
//   dbase += sum_n dl;  dscale += sum_n sum_group dl z;  dz = scale[group] dl
//   dfn += sum_n rho dz x^T
//   dstreams    = pre_i dout + rho fn^T dz - x rho^2 <dz, z> / (E*C)       set, or added
// Members of d are always added to, those without data skipped. The sums over tokens go through a fixed number of
// partial sums, so they do not depend on the thread count.
struct MhcGradients {
  Grad dstreams;
  Tensor dout, dcoef;
};
void mhc_read_backward(const MhcGradients& g, const MhcWeights<Tensor>& d, const MhcRead<Tensor>& t,
                       const MhcWeights<Tensor>& w, const MhcForm& form, Stream stream);

// On a GPU: a token's numbers in a part of the products with fn, and scratch memory in bytes by slot: the divisors, a
// factor in two parts of bf16, the products, those for dfn, and of blocks of tokens the sums for base and scale.
constexpr int64_t mhc_stride(int64_t M) { return (M + 7) / 8 * 8; }
inline ScratchBytes mhc_scratch(const MhcForm& form, int64_t rows, int64_t E, int64_t C, Dtype dtype) {
  const int64_t M = mhc_rows(form.mixing, E), P = mhc_stride(M), split = dtype == Dtype::bf16, EC = E * C;
  const auto bytes = [](int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); };
  return {bytes(rows * (2 * form.iterations - 1) * E), bytes(split * P * std::max(rows, EC)),
          bytes(rows * (split ? 2 * P : M)), bytes(split * 2 * P * EC), bytes(((rows + 15) / 16 + 1) * 2 * M + rows)};
}

// kernels/depth/streams/mhc.cu
CUDA_TWIN void mhc_read_forward_cuda(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form,
                                     int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void mhc_read_backward_cuda(const MhcGradients& g, const MhcWeights<Tensor>& d, const MhcRead<Tensor>& t,
                                      const MhcWeights<Tensor>& w, const MhcForm& form, int64_t rows, int64_t E,
                                      int64_t C);

// -----------------------------------------------------------------------------------------------------------------
// Reference.

// To 1, by rows (of E numbers, `apart` 1 between members) or by columns.
template <class T>
void normalise_ref(T* m, T* divisors, int64_t E, bool columns, double eps) {
  const int64_t line = columns ? 1 : E, member = columns ? E : 1;
  for (int64_t j = 0; j < E; ++j) {
    T sum = T(eps);
    for (int64_t i = 0; i < E; ++i) sum += m[j * line + i * member];
    for (int64_t i = 0; i < E; ++i) m[j * line + i * member] /= sum;
    divisors[j] = sum;
  }
}
// z (count) becomes its softmax.
template <class T>
void softmax_in_place_ref(T* z, int64_t count) {
  using std::exp, std::real;
  auto max = real(z[0]);  // by the real part: a constant leaves the softmax and its derivative unchanged
  for (int64_t i = 1; i < count; ++i) max = std::max(max, real(z[i]));
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += z[i] = exp(z[i] - max);
  for (int64_t i = 0; i < count; ++i) z[i] /= sum;
}
// From the gradient of a softmax p to that of its logits.
template <class T>
void softmax_backward_ref(T* dlogits, const T* p, const T* dp, int64_t count) {
  T along = 0;
  for (int64_t i = 0; i < count; ++i) along += dp[i] * p[i];
  for (int64_t i = 0; i < count; ++i) dlogits[i] = p[i] * (dp[i] - along);
}

// Steps of Sinkhorn's normalisation, even ones over columns.
constexpr int64_t sinkhorn_steps(int64_t iterations) { return 2 * iterations - 1; }

// m (E,E) from logits to what the mixing says, with the divisors (steps,E) of all steps.
template <class T>
void sinkhorn_ref(T* m, T* divisors, int64_t E, const MhcForm& form) {
  for (int64_t k = 0; k < E; ++k) {
    softmax_in_place_ref(m + k * E, E);
    for (int64_t i = 0; i < E; ++i) m[k * E + i] += T(form.eps);
  }
  for (int64_t step = 0; step < sinkhorn_steps(form.iterations); ++step)
    normalise_ref(m, divisors + step * E, E, step % 2 == 0, form.eps);
}
// From the gradient g (E,E) of m to that of the logits; m is undone, step by step.
template <class T>
void sinkhorn_backward_ref(T* g, T* m, const T* divisors, int64_t E, const MhcForm& form) {
  for (int64_t step = sinkhorn_steps(form.iterations) - 1; step >= 0; --step) {
    const int64_t line = step % 2 == 0 ? 1 : E, member = step % 2 == 0 ? E : 1;
    for (int64_t j = 0; j < E; ++j) {
      const T d = divisors[step * E + j];
      T along = 0;
      for (int64_t i = 0; i < E; ++i) along += g[j * line + i * member] * m[j * line + i * member];
      for (int64_t i = 0; i < E; ++i) {
        T &of_g = g[j * line + i * member], &of_m = m[j * line + i * member];
        of_g = (of_g - along) / d, of_m *= d;
      }
    }
  }
  for (int64_t e = 0; e < E * E; ++e) m[e] -= T(form.eps);
  for (int64_t k = 0; k < E; ++k) softmax_backward_ref(g + k * E, m + k * E, g + k * E, E);
}

// One token's logits l (M) turn into pre (E), comb (E,E) and post (E); room for divisors (sinkhorn_steps,E).
template <class T>
void mhc_coefficients_ref(T* pre, T* comb, T* post, T* divisors, const T* l, int64_t E, const MhcForm& form) {
  using std::exp;
  for (int64_t i = 0; i < E; ++i) pre[i] = T(1) / (T(1) + exp(-l[i])) + T(form.eps);
  if (form.mixing == Mixing::merge) return;
  for (int64_t i = 0; i < E; ++i) post[i] = T(2) / (T(1) + exp(-l[E + i]));
  for (int64_t e = 0; e < E * E; ++e) comb[e] = form.mixing == Mixing::sinkhorn ? l[2 * E + e] : T(e % (E + 1) == 0);
  if (form.mixing == Mixing::sinkhorn) sinkhorn_ref(comb, divisors, E, form);
  if (form.mixing != Mixing::permutations) return;
  const int64_t count = permutations_of(E);
  std::copy_n(l + 2 * E, count, divisors);
  softmax_in_place_ref(divisors, count);
  std::fill_n(comb, E * E, T(0));
  for (int64_t p = 0; p < count; ++p)
    for (int64_t k = 0; k < E; ++k) comb[k * E + permuted(p, E, k)] += divisors[p];
}
// What mhc_coefficients_ref has left, and the gradients of pre and post and, in dl from 2 E on, of comb: dl becomes the
// gradient of l.
template <class T>
void mhc_coefficients_backward_ref(T* dl, const T* pre, T* comb, const T* post, const T* divisors, const T* dcomb,
                                   int64_t E, const MhcForm& form) {
  for (int64_t i = 0; i < E; ++i) dl[i] *= (pre[i] - T(form.eps)) * (T(1) + T(form.eps) - pre[i]);
  if (form.mixing == Mixing::merge) return;
  for (int64_t i = 0; i < E; ++i) dl[E + i] *= post[i] * (T(2) - post[i]) / T(2);
  if (form.mixing == Mixing::sinkhorn) {
    std::copy_n(dcomb, E * E, dl + 2 * E);
    sinkhorn_backward_ref(dl + 2 * E, comb, divisors, E, form);
  }
  if (form.mixing != Mixing::permutations) return;
  const int64_t count = permutations_of(E);
  for (int64_t p = 0; p < count; ++p) {
    dl[2 * E + p] = 0;
    for (int64_t k = 0; k < E; ++k) dl[2 * E + p] += dcomb[k * E + permuted(p, E, k)];
  }
  softmax_backward_ref(dl + 2 * E, divisors, dl + 2 * E, count);
}

// The group of row m.
constexpr int64_t mhc_group(int64_t m, int64_t E) { return m < E ? 0 : m < 2 * E ? 1 : 2; }

template <class T>
void mhc_read_forward_ref(const MhcRead<T*>& t, const MhcWeights<const T*>& w, const MhcForm& form, int64_t rows,
                          int64_t E, int64_t C) {
  using std::sqrt;
  const int64_t M = mhc_rows(form.mixing, E), EC = E * C;
  std::vector<T> divisors(static_cast<size_t>(std::max(sinkhorn_steps(form.iterations) * E, M)));
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = t.streams + n * EC;
    T l[max_mhc_rows], comb[max_streams * max_streams], post[max_streams], squares = 0;
    for (int64_t e = 0; e < EC; ++e) squares += x[e] * x[e];
    t.rho[n] = T(1) / sqrt((t.squares != nullptr ? t.squares[n] : squares) / T(EC) + T(form.norm_eps));
    for (int64_t m = 0; m < M; ++m) {
      T product = 0;
      for (int64_t e = 0; e < EC; ++e) product += w.fn[m * EC + e] * x[e];
      t.z[n * M + m] = t.rho[n] * product;
      l[m] = w.scale[mhc_group(m, E)] * t.z[n * M + m] + w.base[m];
    }
    mhc_coefficients_ref(t.pre + n * E, comb, post, divisors.data(), l, E, form);
    for (int64_t k = 0; k < E && t.coef != nullptr; ++k) {
      T* row = t.coef + (n * E + k) * (E + 2);
      row[0] = t.pre[n * E + k], row[E + 1] = post[k];
      std::copy_n(comb + k * E, E, row + 1);
    }
    for (int64_t c = 0; c < C && t.out != nullptr; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < E; ++i) sum += t.pre[n * E + i] * x[i * C + c];
      t.out[n * C + c] = sum;
    }
  }
}

// The members of MhcGradients, as pointers to their numbers.
template <class T>
struct MhcGradientNumbers {
  T* dstreams;
  bool add_streams;
  const T *dout, *dcoef;
};

template <class T>
void mhc_read_backward_ref(const MhcGradientNumbers<T>& g, const MhcWeights<T*>& d, const MhcRead<T*>& t,
                           const MhcWeights<const T*>& w, const MhcForm& form, int64_t rows, int64_t E, int64_t C) {
  const int64_t M = mhc_rows(form.mixing, E), EC = E * C;
  std::vector<T> divisors(static_cast<size_t>(std::max(sinkhorn_steps(form.iterations) * E, M)));
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = t.streams + n * EC;
    T* dx = g.dstreams + n * EC;
    T dl[max_mhc_rows] = {}, l[max_mhc_rows], along = 0;
    if (!g.add_streams) std::fill_n(dx, EC, T(0));
    for (int64_t i = 0; i < E && g.dout != nullptr; ++i)
      for (int64_t c = 0; c < C; ++c) {
        dl[i] += x[i * C + c] * g.dout[n * C + c];
        dx[i * C + c] += t.pre[n * E + i] * g.dout[n * C + c];
      }
    T pre[max_streams], comb[max_streams * max_streams], post[max_streams], dcomb[max_streams * max_streams];
    for (int64_t m = 0; m < M; ++m) l[m] = w.scale[mhc_group(m, E)] * t.z[n * M + m] + w.base[m];
    mhc_coefficients_ref(pre, comb, post, divisors.data(), l, E, form);
    for (int64_t k = 0; k < E && g.dcoef != nullptr; ++k) {
      const T* row = g.dcoef + (n * E + k) * (E + 2);
      std::copy_n(row + 1, E, dcomb + k * E);
      dl[k] += row[0], dl[E + k] = row[E + 1];
    }
    mhc_coefficients_backward_ref(dl, pre, comb, post, divisors.data(), dcomb, E, form);
    for (int64_t m = 0; m < M; ++m) {
      const T z = t.z[n * M + m], dz = dl[m] * w.scale[mhc_group(m, E)];
      if (d.base != nullptr) d.base[m] += dl[m];
      if (d.scale != nullptr) d.scale[mhc_group(m, E)] += dl[m] * z;
      along += dz * z;
      for (int64_t e = 0; e < EC; ++e) {
        dx[e] += t.rho[n] * dz * w.fn[m * EC + e];
        if (d.fn != nullptr) d.fn[m * EC + e] += t.rho[n] * dz * x[e];
      }
    }
    for (int64_t e = 0; e < EC; ++e) dx[e] -= x[e] * t.rho[n] * t.rho[n] * along / T(EC);
  }
}

}  // namespace crossply
