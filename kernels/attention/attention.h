// Causal attention with grouped key/value heads: query head h reads key/value head h / (H/K).
// kernels/attention/attention.md derives the backward.
//
//   lower(t)   = max(start[b,t], t - window + 1)                         query t sees the keys lower(t) .. t
//   s[b,h,t,j] = scale * sum_d q[b,t,h,d] * k[b,j,h/(H/K),d]            for the keys j that t sees
//   lse[b,h,t] = log sum_j exp(s[b,h,t,j])                               saved for the backward
//   p          = exp(s - lse)                                            never stored beyond a tile
//   out[b,t,h] = sum_j p[b,h,t,j] * v[b,j,h/(H/K)]
//
//   with delta[b,h,t] = sum_d dout[b,t,h,d] * out[b,t,h,d],
//   ds         = scale * p * (sum_d dout[b,t,h,d] * v[b,j,h/(H/K),d] - delta)
//   dq[b,t,h]  = sum_j ds[b,h,t,j] * k[b,j,h/(H/K)]                      each of dq, dk, dv set, or added
//   dk[b,j,i]  = sum_{h of group i} sum_t ds[b,h,t,j] * q[b,t,h]         over the queries t that see j
//   dv[b,j,i]  = sum_{h of group i} sum_t p[b,h,t,j] * dout[b,t,h]
//
// q, out, dq, dout: (B,T,H,D); k, v, dk, dv: (B,T,K,D); lse: (B,H,T), with K a divisor of H. All but lse, which is
// f32, may be stored as bf16; on a matrix unit p and ds are then rounded to bf16 too, sums and statistics are not. What
// is written may not alias what is read. A NaN in q or k reaches exactly the rows of out that see it. Where a NaN meets
// a masked weight it stays NaN, so one in v can also reach out, and any one the gradients, of other rows in its tile
// of 16 positions, or 32 on a matrix unit, or 128 in bf16 on a GPU. With a window or documents it can reach all rows of
// a block that sees a part of its tile: 64 positions on a CPU, up to 192 on a GPU. In narrow heads, and on a GPU, what
// is below the normal numbers may count as 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// What is hidden from a query beside the keys behind it. Without either, it sees all keys up to itself.
struct AttentionMask {
  int64_t window = 0;  // it sees so many keys, itself among them (Hugging Face's sliding_window); 0: no limit
  // (B,T,2), i32: the position in its row at which a token's document begins, and that at which the next one does, T
  // where none does. Both never fall along a row. Without data: a row is one document.
  Tensor documents = {};
};

void attention_forward(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, const AttentionMask& mask, Stream stream);
// The sums over queries are taken in an order that depends on the shapes alone, not on the thread count.
void attention_backward(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout, const Tensor& out,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, double scale,
                        const AttentionMask& mask, Stream stream);
// For generation: writes k and v (B,T,K,D) into the caches (B,S,K,D) at positions pos .. pos+T-1; then query t attends
// to the cached positions up to pos+t, the last `window` of them (0: all). What the caches hold beyond that is neither
// read nor changed. k and v without data: the caches have these positions already, from another call. lse without
// data: nobody asks for it.
void attention_cached(const Tensor& out, const Tensor& lse, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& q, const Tensor& k, const Tensor& v, int64_t pos, double scale, int64_t window,
                      Stream stream);

struct AttentionSizes {
  int64_t B, T, H, K, D;
  int64_t S, pos;                                    // rows of k and v; query t sits at position pos + t
  int64_t window = S;                                // keys that a query sees, at most
  const int32_t* documents = nullptr;                // AttentionMask's; only where pos is 0
  int64_t query_stride = H * D, key_stride = K * D;  // from row to row of a head
  int64_t group = H / K;                             // heads of q to each of k and v

  // The first key that the query at this position sees, and the last position whose query sees this key. Neither ever
  // falls along a row.
  constexpr int64_t lower(int64_t b, int64_t position) const {
    const int64_t start = documents != nullptr ? documents[2 * (b * T + position)] : 0;
    return position - window + 1 > start ? position - window + 1 : start;
  }
  constexpr int64_t upper(int64_t b, int64_t key) const {
    const int64_t end = documents != nullptr ? documents[2 * (b * T + key) + 1] : pos + T;
    return key + window < end ? key + window - 1 : end - 1;
  }
  constexpr bool causal_only() const { return documents == nullptr && window >= pos + T; }
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

// One query: out (D) and, returned, lse, over n rows of one head of k and v, which are `stride` apart.
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
void attention_forward_ref(Real* out, Real* lse, const Real* q, const Real* k, const Real* v, const AttentionSizes& z,
                           double scale) {
  for (int64_t b = 0; b < z.B; ++b)
    for (int64_t h = 0; h < z.H; ++h)
      for (int64_t t = 0; t < z.T; ++t) {
        const int64_t row = z.query_head(b, h) + t * z.query_stride, lower = z.lower(b, t);
        const int64_t keys = z.key_head(b, h / z.group) + lower * z.key_stride;
        lse[(b * z.H + h) * z.T + t] =
            attend_ref(out + row, q + row, k + keys, v + keys, z.key_stride, t + 1 - lower, z.D, scale);
      }
}

template <class Real>
void attention_backward_ref(Real* dq, Real* dk, Real* dv, const Real* dout, const Real* out, const Real* q,
                            const Real* k, const Real* v, const Real* lse, const AttentionSizes& z, double scale,
                            bool accumulate_q, bool accumulate_k, bool accumulate_v) {
  using std::exp;
  if (!accumulate_q) std::fill(dq, dq + z.B * z.T * z.H * z.D, Real(0));
  if (!accumulate_k) std::fill(dk, dk + z.B * z.T * z.K * z.D, Real(0));
  if (!accumulate_v) std::fill(dv, dv + z.B * z.T * z.K * z.D, Real(0));
  for (int64_t b = 0; b < z.B; ++b)
    for (int64_t h = 0; h < z.H; ++h)
      for (int64_t t = 0; t < z.T; ++t) {
        const int64_t row = z.query_head(b, h) + t * z.query_stride;
        Real delta = 0;
        for (int64_t d = 0; d < z.D; ++d) delta += dout[row + d] * out[row + d];
        for (int64_t j = z.lower(b, t); j <= t; ++j) {
          const int64_t key = z.key_head(b, h / z.group) + j * z.key_stride;
          Real s = 0, dp = 0;
          for (int64_t d = 0; d < z.D; ++d) s += q[row + d] * k[key + d], dp += dout[row + d] * v[key + d];
          const Real p = exp(Real(scale) * s - lse[(b * z.H + h) * z.T + t]), ds = Real(scale) * p * (dp - delta);
          for (int64_t d = 0; d < z.D; ++d) {
            dq[row + d] += ds * k[key + d];
            dk[key + d] += ds * q[row + d];
            dv[key + d] += p * dout[row + d];
          }
        }
      }
}

template <class Real>
void attention_cached_ref(Real* out, Real* lse, Real* k_cache, Real* v_cache, const Real* q, const Real* k,
                          const Real* v, const AttentionSizes& z, double scale) {
  const int64_t rows = z.T * z.key_stride;
  for (int64_t b = 0; b < z.B; ++b) {
    if (k != nullptr) std::copy_n(k + b * rows, rows, k_cache + z.key_head(b, 0) + z.pos * z.key_stride);
    if (v != nullptr) std::copy_n(v + b * rows, rows, v_cache + z.key_head(b, 0) + z.pos * z.key_stride);
    for (int64_t t = 0; t < z.T; ++t)
      for (int64_t h = 0; h < z.H; ++h) {
        const int64_t row = z.query_head(b, h) + t * z.query_stride, lower = z.lower(b, z.pos + t);
        const int64_t keys = z.key_head(b, h / z.group) + lower * z.key_stride;
        const Real of_row = attend_ref(out + row, q + row, k_cache + keys, v_cache + keys, z.key_stride,
                                       z.pos + t + 1 - lower, z.D, scale);
        if (lse != nullptr) lse[(b * z.H + h) * z.T + t] = of_row;
      }
  }
}

}  // namespace crossply
