// LIMe v1: every key/value head is projected from its own mixture of the residual streams of all layers so far, each
// brought to unit norm (u_s) and then multiplied by one gain that the layer has for all of them.
//
//   m[n,h,:] = sum_s weight[n,h,s] * u_s[n,:]                                     never stored beyond a block of tokens
//   k[n,h,:] = (gain * m[n,h,:]) Wk_h^T,   v likewise with Wv_h                   Wk_h: rows h*D .. h*D+D of wk
//
//   with G_h = dk[:,h,:]^T m[:,h,:] (D, C), and likewise for v:
//   dwk_h  += G_h * gain  (each row);      dgain += sum over h and rows of G_h * Wk_h  (elementwise), and v's
//   dm[n,h,:] = dk[n,h,:] (Wk_h * gain) + dv[n,h,:] (Wv_h * gain)
//   dweight[n,h,s] = <dm[n,h,:], u_s[n,:]>                                        summed over n where weight is shared
//   du_s[n,:] = sum_h weight[n,h,s] * dm[n,h,:]
//
// u_s: (B,T,C), S of them; gain: (C); weight: (K,S), shared by all tokens, or (B,T,K,S); wk, wv: (K*D,C); k, v:
// (B,T,K,D). Mixing before projecting costs K*S*C multiply-adds a token, the other order (S-1)*2*C*K*D more. The
// mixtures are K times as large as a stream, so they live in scratch memory for some hundred tokens at a time; the
// backward makes them again. Nothing is saved. dwk, dwv and dgain are added to, dweight is set, du_s is set or added
// to. No output may alias an input. u_s, k, v, their gradients, wk and wv are all f32 or all bf16, the rest is f32; on
// a GPU mixtures, and weights times the gain, are of the former too. (Gerasimov et al., arXiv 2502.09245v1; the gain
// folded into the weights.)
#pragma once

#include <algorithm>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

struct HeadMix {
  std::vector<Tensor> sources;
  Tensor weight, gain, wk, wv;
};

void head_mix_forward(const Tensor& k, const Tensor& v, const HeadMix& m, Stream stream);
// d: the gradients, by the names of what they belong to. acc: per source.
void head_mix_backward(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m,
                       const std::vector<bool>& acc, Stream stream);

struct HeadMixSize {
  int64_t N, S, K, D, C;
  bool shared;  // one weight for all tokens
};

// kernels/depth/head_mix.cu
CUDA_TWIN void head_mix_forward_cuda(const Tensor& k, const Tensor& v, const HeadMix& m, const HeadMixSize& z);
CUDA_TWIN void head_mix_backward_cuda(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m,
                                      const std::vector<bool>& acc, const HeadMixSize& z);

// One head's mixture at token n, without the gain.
template <class T>
void mixture_ref(T* m, const std::vector<const T*>& u, const T* weight, const HeadMixSize& z, int64_t n, int64_t h) {
  std::fill(m, m + z.C, T(0));
  for (int64_t s = 0; s < z.S; ++s) {
    const T w = weight[((z.shared ? 0 : n) * z.K + h) * z.S + s];
    for (int64_t c = 0; c < z.C; ++c) m[c] += w * u[static_cast<size_t>(s)][n * z.C + c];
  }
}

template <class T>
void head_mix_forward_ref(T* k, T* v, const std::vector<const T*>& u, const T* weight, const T* gain, const T* wk,
                          const T* wv, const HeadMixSize& z) {
  std::vector<T> m(static_cast<size_t>(z.C));
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t h = 0; h < z.K; ++h) {
      mixture_ref(m.data(), u, weight, z, n, h);
      for (int64_t d = 0; d < z.D; ++d) {
        const int64_t row = (h * z.D + d) * z.C, to = (n * z.K + h) * z.D + d;
        k[to] = v[to] = T(0);
        for (int64_t c = 0; c < z.C; ++c) k[to] += gain[c] * m[c] * wk[row + c], v[to] += gain[c] * m[c] * wv[row + c];
      }
    }
}

template <class T>
void head_mix_backward_ref(const std::vector<T*>& du, T* dweight, T* dgain, T* dwk, T* dwv, const T* dk, const T* dv,
                           const std::vector<const T*>& u, const T* weight, const T* gain, const T* wk, const T* wv,
                           const HeadMixSize& z, const std::vector<bool>& acc) {
  std::vector<T> m(static_cast<size_t>(z.C)), dm(static_cast<size_t>(z.C));
  std::fill(dweight, dweight + (z.shared ? 1 : z.N) * z.K * z.S, T(0));
  for (size_t s = 0; s < du.size(); ++s)
    if (!acc[s]) std::fill(du[s], du[s] + z.N * z.C, T(0));
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t h = 0; h < z.K; ++h) {
      mixture_ref(m.data(), u, weight, z, n, h);
      std::fill(dm.begin(), dm.end(), T(0));
      for (int64_t d = 0; d < z.D; ++d) {
        const int64_t row = (h * z.D + d) * z.C;
        const T a = dk[(n * z.K + h) * z.D + d], b = dv[(n * z.K + h) * z.D + d];
        for (int64_t c = 0; c < z.C; ++c) {
          dm[static_cast<size_t>(c)] += gain[c] * (a * wk[row + c] + b * wv[row + c]);
          dgain[c] += m[static_cast<size_t>(c)] * (a * wk[row + c] + b * wv[row + c]);
          dwk[row + c] += a * gain[c] * m[static_cast<size_t>(c)];
          dwv[row + c] += b * gain[c] * m[static_cast<size_t>(c)];
        }
      }
      for (int64_t s = 0; s < z.S; ++s) {
        const int64_t i = ((z.shared ? 0 : n) * z.K + h) * z.S + s;
        for (int64_t c = 0; c < z.C; ++c) {
          dweight[i] += dm[static_cast<size_t>(c)] * u[static_cast<size_t>(s)][n * z.C + c];
          du[static_cast<size_t>(s)][n * z.C + c] += weight[i] * dm[static_cast<size_t>(c)];
        }
      }
    }
}

}  // namespace crossply
