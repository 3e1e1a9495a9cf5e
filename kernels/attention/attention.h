// Causal attention with grouped key/value heads: query head h reads key/value head h / (H/K).
// kernels/attention/attention.md derives the backward.
//
//   s[b,h,t,j] = scale * sum_d q[b,t,h,d] * k[b,j,h/(H/K),d]            for j <= t
//   lse[b,h,t] = log sum_{j<=t} exp(s[b,h,t,j])                          saved for the backward
//   p          = exp(s - lse)                                            never stored beyond a tile
//   out[b,t,h] = sum_{j<=t} p[b,h,t,j] * v[b,j,h/(H/K)]
//
//   with delta[b,h,t] = sum_d dout[b,t,h,d] * out[b,t,h,d],
//   ds         = scale * p * (sum_d dout[b,t,h,d] * v[b,j,h/(H/K),d] - delta)
//   dq[b,t,h]  = sum_{j<=t} ds[b,h,t,j] * k[b,j,h/(H/K)]                 each of dq, dk, dv set, or added
//   dk[b,j,i]  = sum_{h of group i} sum_{t>=j} ds[b,h,t,j] * q[b,t,h]
//   dv[b,j,i]  = sum_{h of group i} sum_{t>=j} p[b,h,t,j] * dout[b,t,h]
//
// q, out, dq, dout: (B,T,H,D); k, v, dk, dv: (B,T,K,D); lse: (B,H,T), with K a divisor of H. All but lse, which is
// f32, may be stored as bf16; on a matrix unit p and ds are then rounded to bf16 too, sums and statistics are not. What
// is written may not alias what is read. A NaN in q or k reaches exactly the rows of out that see it. Where a NaN meets
// a masked weight it stays NaN, so one in v can also reach out, and any one the gradients, of earlier rows in its tile
// of 16 positions, or 32 on a matrix unit, or 128 in bf16 on a GPU. In narrow heads, and on a GPU, what is below the
// normal numbers may count as 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void attention_forward(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, Stream stream);
// The sums over queries are taken in an order that depends on the shapes alone, not on the thread count.
void attention_backward(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout, const Tensor& out,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, double scale,
                        Stream stream);
// For generation: writes k and v (B,T,K,D) into the caches (B,S,K,D) at positions pos .. pos+T-1; then query t attends
// to the cached positions 0 .. pos+t. What the caches hold beyond that is neither read nor changed. k and v without
// data: the caches have these positions already, from another call. lse without data: nobody asks for it.
void attention_cached(const Tensor& out, const Tensor& lse, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& q, const Tensor& k, const Tensor& v, int64_t pos, double scale, Stream stream);

struct AttentionSizes {
  int64_t B, T, H, K, D;
  int64_t S, pos;                                    // rows of k and v; query t sits at position pos + t
  int64_t query_stride = H * D, key_stride = K * D;  // from row to row of a head
  int64_t group = H / K;                             // heads of q to each of k and v
  // Where head h of batch b begins in q, and head kv in k and v.
  constexpr int64_t query_head(int64_t b, int64_t h) const { return (b * T * H + h) * D; }
  constexpr int64_t key_head(int64_t b, int64_t kv) const { return (b * S * K + kv) * D; }
};

// kernels/attention/attention.cu
CUDA_TWIN void attention_forward_cuda(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const AttentionSizes& z, float scale);
CUDA_TWIN void attention_backward_cuda(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout,
                                       const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Tensor& lse, const AttentionSizes& z, float scale);
CUDA_TWIN void attention_cached_cuda(const Tensor& out, const Tensor& lse, const Tensor& k_cache, const Tensor& v_cache,
                                     const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSizes& z,
                                     float scale);
// kernels/attention/attention_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(attention_forward_cuda) attention_forward_plain;
CUDA_TWIN decltype(attention_backward_cuda) attention_backward_plain;

// One query: out (D) and, returned, lse, over the first n rows of one head of k and v, whose rows are `stride` apart.
template <class Real>
Real attend_ref(Real* out, const Real* q, const Real* k, const Real* v, int64_t stride, int64_t n, int64_t D,
                double scale) {
  using std::exp, std::log, std::real;
  std::vector<Real> p(static_cast<size_t>(n));
  for (int64_t j = 0; j < n; ++j) {
    Real s = 0;
    for (int64_t d = 0; d < D; ++d) s += q[d] * k[j * stride + d];
    p[j] = Real(scale) * s;
  }
  // By the real part: subtracting any constant leaves the softmax, and its derivative, unchanged.
  auto max = real(p[0]);
  for (int64_t j = 1; j < n; ++j) max = std::max(max, real(p[j]));
  Real sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += p[j] = exp(p[j] - max);
  for (int64_t d = 0; d < D; ++d) out[d] = 0;
  for (int64_t j = 0; j < n; ++j)
    for (int64_t d = 0; d < D; ++d) out[d] += p[j] / sum * v[j * stride + d];
  return max + log(sum);
}

template <class Real>
void attention_forward_ref(Real* out, Real* lse, const Real* q, const Real* k, const Real* v, int64_t B, int64_t T,
                           int64_t H, int64_t K, int64_t D, double scale) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = ((b * T + t) * H + h) * D, head = (b * T * K + h / (H / K)) * D;
        lse[(b * H + h) * T + t] = attend_ref(out + row, q + row, k + head, v + head, K * D, t + 1, D, scale);
      }
}

template <class Real>
void attention_backward_ref(Real* dq, Real* dk, Real* dv, const Real* dout, const Real* out, const Real* q,
                            const Real* k, const Real* v, const Real* lse, int64_t B, int64_t T, int64_t H, int64_t K,
                            int64_t D, double scale, bool accumulate_q, bool accumulate_k, bool accumulate_v) {
  using std::exp;
  if (!accumulate_q) std::fill(dq, dq + B * T * H * D, Real(0));
  if (!accumulate_k) std::fill(dk, dk + B * T * K * D, Real(0));
  if (!accumulate_v) std::fill(dv, dv + B * T * K * D, Real(0));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = ((b * T + t) * H + h) * D;
        Real delta = 0;
        for (int64_t d = 0; d < D; ++d) delta += dout[row + d] * out[row + d];
        for (int64_t j = 0; j <= t; ++j) {
          const int64_t key = ((b * T + j) * K + h / (H / K)) * D;
          Real s = 0, dp = 0;
          for (int64_t d = 0; d < D; ++d) s += q[row + d] * k[key + d], dp += dout[row + d] * v[key + d];
          const Real p = exp(Real(scale) * s - lse[(b * H + h) * T + t]), ds = Real(scale) * p * (dp - delta);
          for (int64_t d = 0; d < D; ++d) {
            dq[row + d] += ds * k[key + d];
            dk[key + d] += ds * q[row + d];
            dv[key + d] += p * dout[row + d];
          }
        }
      }
}

template <class Real>
void attention_cached_ref(Real* out, Real* lse, Real* k_cache, Real* v_cache, const Real* q, const Real* k,
                          const Real* v, int64_t B, int64_t T, int64_t S, int64_t H, int64_t K, int64_t D, int64_t pos,
                          double scale) {
  for (int64_t b = 0; b < B; ++b) {
    if (k != nullptr) std::copy_n(k + b * T * K * D, T * K * D, k_cache + (b * S + pos) * K * D);
    if (v != nullptr) std::copy_n(v + b * T * K * D, T * K * D, v_cache + (b * S + pos) * K * D);
    for (int64_t t = 0; t < T; ++t)
      for (int64_t h = 0; h < H; ++h) {
        const int64_t row = ((b * T + t) * H + h) * D, head = (b * S * K + h / (H / K)) * D;
        const Real of_row =
            attend_ref(out + row, q + row, k_cache + head, v_cache + head, K * D, pos + t + 1, D, scale);
        if (lse != nullptr) lse[(b * H + h) * T + t] = of_row;
      }
  }
}

}  // namespace crossply
