// Attention over the depth of a token (Depth-Attention, arXiv 2606.05014): a layer's values mixed with those of lower
// layers for the same token, by what its queries find in the keys. A row is a key/value head of a token, and has the G
// queries of its group: N = B*T*K rows. S slots: the sources, then the layer's own key and value.
//
//   mean[n,:]    = 1/G sum_g q[n,g,:]
//   z[n,s]       = <mean[n,:], k_s[n,:]> / sqrt(D)
//   weights[n,:] = softmax(z[n,:])                                            saved for the backward
//   out[n,:]     = sum_s weights[n,s] * v_s[n,:]
//
// Backward:
//   p[n,s]    = <dout[n,:], v_s[n,:]>
//   dz[n,s]   = weights[n,s] * (p[n,s] - sum_r weights[n,r] p[n,r]) / sqrt(D)
//   dv_s[n,:] = weights[n,s] * dout[n,:]                                      set, or added
//   dk_s[n,:] = dz[n,s] * mean[n,:]                                           set, or added
//   dq[n,g,:] = 1/G sum_s dz[n,s] * k_s[n,:]                                  set, or added
//
// q, dq: (B,T,H,D), head k*G + g the g-th of key/value head k; keys, values, out and their gradients: (B,T,K,D), on the
// CPU f32 or bf16; weights: (B,T,K,S), f32. Nothing that is written aliases anything else. The weights are saved, not
// computed again: S numbers beside the D of a value that the backward keeps anyway, for a softmax less.
//
// With one slot out is its value bit for bit, its weight is 1, and dv is exactly dout, with dk and dq exactly 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void depth_attention_forward(const Tensor& out, const Tensor& weights, const Tensor& q, const std::vector<Tensor>& keys,
                             const std::vector<Tensor>& values, Stream stream);
void depth_attention_backward(const Grad& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                              const Tensor& dout, const Tensor& weights, const Tensor& q,
                              const std::vector<Tensor>& keys, const std::vector<Tensor>& values, Stream stream);

struct DepthAttentionSize {
  int64_t N, G, D, S;
};

// kernels/depth/depth_attention.cu
CUDA_TWIN void depth_attention_forward_cuda(const Tensor& out, const Tensor& weights, const Tensor& q,
                                            const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                                            const DepthAttentionSize& z);
CUDA_TWIN void depth_attention_backward_cuda(const Grad& dq, const std::vector<Grad>& dkeys,
                                             const std::vector<Grad>& dvalues, const Tensor& dout,
                                             const Tensor& weights, const Tensor& q, const std::vector<Tensor>& keys,
                                             const std::vector<Tensor>& values, const DepthAttentionSize& z);

// The mean of row n's queries.
template <class T>
std::vector<T> mean_query_ref(const T* q, int64_t n, const DepthAttentionSize& z) {
  std::vector<T> mean(static_cast<size_t>(z.D), T(0));
  for (int64_t g = 0; g < z.G; ++g)
    for (int64_t d = 0; d < z.D; ++d) mean[static_cast<size_t>(d)] += q[(n * z.G + g) * z.D + d] / T(z.G);
  return mean;
}

template <class T>
void depth_attention_forward_ref(T* out, T* weights, const T* q, const std::vector<const T*>& keys,
                                 const std::vector<const T*>& values, const DepthAttentionSize& z) {
  using std::exp, std::real;
  const size_t S = keys.size();
  for (int64_t n = 0; n < z.N; ++n) {
    const std::vector<T> mean = mean_query_ref(q, n, z);
    T* w = weights + n * z.S;
    for (size_t s = 0; s < S; ++s) {
      w[s] = T(0);
      for (int64_t d = 0; d < z.D; ++d) w[s] += mean[static_cast<size_t>(d)] * keys[s][n * z.D + d];
      w[s] /= T(std::sqrt(static_cast<double>(z.D)));
    }
    auto max = real(w[0]);  // by the real part: a constant leaves the softmax and its derivative unchanged
    for (size_t s = 1; s < S; ++s) max = std::max(max, real(w[s]));
    T sum = 0;
    for (size_t s = 0; s < S; ++s) sum += w[s] = exp(w[s] - max);
    for (size_t s = 0; s < S; ++s) w[s] /= sum;
    for (int64_t i = n * z.D; i < (n + 1) * z.D; ++i) {
      out[i] = w[0] * values[0][i];
      for (size_t s = 1; s < S; ++s) out[i] += w[s] * values[s][i];
    }
  }
}

template <class T>
void depth_attention_backward_ref(const Grad& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                                  const T* dout, const T* weights, const T* q, const std::vector<const T*>& keys,
                                  const std::vector<const T*>& values, const DepthAttentionSize& z) {
  const auto write = [](const Grad& to, int64_t i, T x) {
    T& y = to.as<T>()[i];
    y = to.accumulate ? y + x : x;
  };
  for (int64_t n = 0; n < z.N; ++n) {
    const std::vector<T> mean = mean_query_ref(q, n, z);
    const T* w = weights + n * z.S;
    std::vector<T> dz(keys.size(), T(0)), dmean(mean.size(), T(0));
    T total = 0;
    for (size_t s = 0; s < keys.size(); ++s) {
      for (int64_t i = n * z.D; i < (n + 1) * z.D; ++i) dz[s] += dout[i] * values[s][i];
      total += w[s] * dz[s];
    }
    for (size_t s = 0; s < keys.size(); ++s) {
      dz[s] = w[s] * (dz[s] - total) / T(std::sqrt(static_cast<double>(z.D)));
      for (size_t d = 0; d < mean.size(); ++d) {
        const int64_t i = n * z.D + static_cast<int64_t>(d);
        write(dvalues[s], i, w[s] * dout[i]);
        write(dkeys[s], i, dz[s] * mean[d]);
        dmean[d] += dz[s] * keys[s][i];
      }
    }
    for (int64_t i = 0; i < z.G * z.D; ++i) write(dq, n * z.G * z.D + i, dmean[static_cast<size_t>(i % z.D)] / T(z.G));
  }
}

}  // namespace crossply
