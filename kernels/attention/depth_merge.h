// MoDA's joint softmax (arXiv 2603.15619): attention over a sequence, which attention.h has computed, takes in slots of
// each token's own: keys and values that lower layers kept for it. Position and mask mean nothing to a slot. Query head
// h reads key/value head h / (H/K) of the S slots, as it does of the sequence.
//
//   s[h,j]    = scale * <q[h,:], key_j[h/(H/K),:]>                           of token (b,t), whose indices are left out
//   joint[h]  = log(exp(lse[h]) + sum_j exp(s[h,j]))
//   out[h,:] := exp(lse[h] - joint[h]) * out[h,:] + sum_j exp(s[h,j] - joint[h]) * value_j[h/(H/K),:]
//   lse[h]   := joint[h]
//
// Backward, of the joint out and lse. attention_backward with the same two is exact for the sequence's part, and comes
// before, so that here dq is always added to:
//   p[h,j]    = exp(s[h,j] - lse[h]),  delta[h] = <dout[h,:], out[h,:]>
//   ds[h,j]   = scale * p[h,j] * (<dout[h,:], value_j> - delta[h])
//   dq[h,:]  += sum_j ds[h,j] * key_j
//   dkey_j    = sum_{h of a group} ds[h,j] * q[h,:]                          set, or added
//   dvalue_j  = sum_{h of a group} p[h,j] * dout[h,:]                        set, or added
//
// q, out, dq, dout: (B,T,H,D); keys, values and their gradients: (B,T,K,D), on the CPU f32 or bf16; lse: (B,H,T), f32.
// But for out and lse, nothing that is written aliases anything else. Nothing more than attention does is saved: the
// weights are computed again, since S of them for each head would be more than a head has numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void depth_merge_forward(const Tensor& out, const Tensor& lse, const Tensor& q, const std::vector<Tensor>& keys,
                         const std::vector<Tensor>& values, double scale, Stream stream);
void depth_merge_backward(const Tensor& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                          const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q,
                          const std::vector<Tensor>& keys, const std::vector<Tensor>& values, double scale,
                          Stream stream);

// A row is a key/value head of a token, with the queries of its group: n = (b T + t) K + k.
struct DepthMergeSizes {
  int64_t B, T, H, K, D, S;
  int64_t group = H / K, rows = B * T * K;
  // Where the lse of row n's query g lies.
  constexpr int64_t lse_of(int64_t n, int64_t g) const { return (n / K / T * H + n % K * group + g) * T + n / K % T; }
};

// kernels/attention/depth_merge.cu
CUDA_TWIN void depth_merge_forward_cuda(const Tensor& out, const Tensor& lse, const Tensor& q,
                                        const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                                        const DepthMergeSizes& z, float scale);
CUDA_TWIN void depth_merge_backward_cuda(const Tensor& dq, const std::vector<Grad>& dkeys,
                                         const std::vector<Grad>& dvalues, const Tensor& dout, const Tensor& out,
                                         const Tensor& lse, const Tensor& q, const std::vector<Tensor>& keys,
                                         const std::vector<Tensor>& values, const DepthMergeSizes& z, float scale);

template <class Real>
Real dot_ref(const Real* x, const Real* y, int64_t D) {
  Real sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += x[d] * y[d];
  return sum;
}

template <class Real>
void depth_merge_forward_ref(Real* out, Real* lse, const Real* q, const std::vector<const Real*>& keys,
                             const std::vector<const Real*>& values, const DepthMergeSizes& z, double scale) {
  using std::exp, std::log, std::real;
  std::vector<Real> s(keys.size());
  for (int64_t n = 0; n < z.rows; ++n)
    for (int64_t g = 0; g < z.group; ++g) {
      const int64_t query = (n * z.group + g) * z.D, slot = n * z.D;
      Real& l = lse[z.lse_of(n, g)];
      auto max = real(l);  // by the real part, as in attend_ref
      for (size_t j = 0; j < keys.size(); ++j) {
        s[j] = Real(scale) * dot_ref(q + query, keys[j] + slot, z.D);
        max = std::max(max, real(s[j]));
      }
      Real sum = exp(l - max);
      for (const Real& x : s) sum += exp(x - max);
      const Real joint = max + log(sum);
      for (int64_t d = 0; d < z.D; ++d) {
        out[query + d] *= exp(l - joint);
        for (size_t j = 0; j < keys.size(); ++j) out[query + d] += exp(s[j] - joint) * values[j][slot + d];
      }
      l = joint;
    }
}

template <class Real>
void depth_merge_backward_ref(Real* dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                              const Real* dout, const Real* out, const Real* lse, const Real* q,
                              const std::vector<const Real*>& keys, const std::vector<const Real*>& values,
                              const DepthMergeSizes& z, double scale) {
  using std::exp;
  for (int64_t n = 0; n < z.rows; ++n)
    for (size_t j = 0; j < keys.size(); ++j)
      for (int64_t g = 0; g < z.group; ++g) {
        const int64_t query = (n * z.group + g) * z.D, slot = n * z.D;
        const Real *dy = dout + query, *key = keys[j] + slot, *value = values[j] + slot;
        const Real p = exp(Real(scale) * dot_ref(q + query, key, z.D) - lse[z.lse_of(n, g)]);
        const Real ds = Real(scale) * p * (dot_ref(dy, value, z.D) - dot_ref(dy, out + query, z.D));
        Real *dkey = dkeys[j].as<Real>() + slot, *dvalue = dvalues[j].as<Real>() + slot;
        for (int64_t d = 0; d < z.D; ++d) {
          if (g == 0 && !dkeys[j].accumulate) dkey[d] = 0;
          if (g == 0 && !dvalues[j].accumulate) dvalue[d] = 0;
          dq[query + d] += ds * key[d];
          dkey[d] += ds * q[query + d];
          dvalue[d] += p * dy[d];
        }
      }
}

}  // namespace crossply
