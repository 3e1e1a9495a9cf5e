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
// backward makes them again. Nothing is saved. dwk, dwv and dgain are always added to, dweight is set, du_s is set or
// added to. No output may alias an input. u_s, k, v, their gradients, wk and wv are all f32 or all bf16, the rest is
// f32; on a GPU mixtures, their gradients, and weights times the gain, are of the former too. (Gerasimov et al., arXiv
// 2502.09245v1; the gain folded into the weights.)
#pragma once

#include <algorithm>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"

namespace crossply {

void head_mix_forward(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m, Stream stream);
// d: the gradients, by the names of what they belong to.
void head_mix_backward(const HeadMix<Grad, Tensor>& d, const Tensor& dk, const Tensor& dv, const HeadMix<Tensor>& m,
                       Stream stream);

struct HeadMixSize {
  int64_t N, S, K, D, C;
  bool shared;  // one weight for all tokens
};

// On a GPU: so many tokens' mixtures at a time. Enough for the products to fill it, and few enough for much of the
// mixtures to be still in the L2 cache when they are read.
inline int64_t tokens_of_chunk(const HeadMixSize& z) {
  return std::min(z.N, std::clamp<int64_t>((int64_t{1} << 24) / (z.K * z.C), 64, 4096));
}
// What it takes there: mixtures, their gradients, the weights times the gain, what their gradients are made from, and
// keys beside values.
inline ScratchBytes head_mix_scratch(const HeadMixSize& z, Dtype dtype) {
  const auto mixtures = static_cast<size_t>(tokens_of_chunk(z) * z.K * z.C);
  const auto weights = static_cast<size_t>(2 * z.K * z.D * z.C);
  const auto stack = static_cast<size_t>(tokens_of_chunk(z) * 2 * z.K * z.D);
  return {mixtures * size_of(dtype), mixtures * size_of(dtype), weights * size_of(dtype), weights * sizeof(float),
          stack * size_of(dtype)};
}

// kernels/depth/head_mix.cu
CUDA_TWIN void head_mix_forward_cuda(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m, const HeadMixSize& z);
CUDA_TWIN void head_mix_backward_cuda(const HeadMix<Grad, Tensor>& d, const Tensor& dk, const Tensor& dv,
                                      const HeadMix<Tensor>& m, const HeadMixSize& z);

// One head's mixture at token n, without the gain.
template <class T>
void mixture_ref(T* mixture, const HeadMix<const T*>& m, const HeadMixSize& z, int64_t n, int64_t h) {
  std::fill(mixture, mixture + z.C, T(0));
  for (int64_t s = 0; s < z.S; ++s) {
    const T w = m.weight[((z.shared ? 0 : n) * z.K + h) * z.S + s];
    for (int64_t c = 0; c < z.C; ++c) mixture[c] += w * m.sources[static_cast<size_t>(s)][n * z.C + c];
  }
}

template <class T>
void head_mix_forward_ref(T* k, T* v, const HeadMix<const T*>& of, const HeadMixSize& z) {
  std::vector<T> m(static_cast<size_t>(z.C));
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t h = 0; h < z.K; ++h) {
      mixture_ref(m.data(), of, z, n, h);
      for (int64_t d = 0; d < z.D; ++d) {
        const int64_t row = (h * z.D + d) * z.C, to = (n * z.K + h) * z.D + d;
        k[to] = v[to] = T(0);
        for (int64_t c = 0; c < z.C; ++c) {
          const T gained = of.gain[c] * m[static_cast<size_t>(c)];
          k[to] += gained * of.wk[row + c], v[to] += gained * of.wv[row + c];
        }
      }
    }
}

// d: where sources and weight are set, they hold zeros before.
template <class T>
void head_mix_backward_ref(const HeadMix<T*>& d, const T* dk, const T* dv, const HeadMix<const T*>& of,
                           const HeadMixSize& z) {
  std::vector<T> mixture(static_cast<size_t>(z.C)), dmixture(mixture);
  T *m = mixture.data(), *dm = dmixture.data();
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t h = 0; h < z.K; ++h) {
      mixture_ref(m, of, z, n, h);
      std::fill(dm, dm + z.C, T(0));
      for (int64_t j = 0; j < z.D; ++j) {
        const int64_t row = (h * z.D + j) * z.C;
        const T a = dk[(n * z.K + h) * z.D + j], b = dv[(n * z.K + h) * z.D + j];
        for (int64_t c = 0; c < z.C; ++c) {
          dm[c] += of.gain[c] * (a * of.wk[row + c] + b * of.wv[row + c]);
          d.gain[c] += m[c] * (a * of.wk[row + c] + b * of.wv[row + c]);
          d.wk[row + c] += a * of.gain[c] * m[c];
          d.wv[row + c] += b * of.gain[c] * m[c];
        }
      }
      for (int64_t s = 0; s < z.S; ++s) {
        const int64_t i = ((z.shared ? 0 : n) * z.K + h) * z.S + s;
        const T* u = of.sources[static_cast<size_t>(s)] + n * z.C;
        T* du = d.sources[static_cast<size_t>(s)] + n * z.C;
        for (int64_t c = 0; c < z.C; ++c) d.weight[i] += dm[c] * u[c], du[c] += of.weight[i] * dm[c];
      }
    }
}

}  // namespace crossply
