// Several weighted sums ("ways") over the same sources, with weights of each token's own plus static ones: the depth
// aggregation of MUDDFormer. W ways, S sources. kernels/depth/multiway_mix.md derives the backward.
//
//   c[n,w,s] = weight[n, w*S + s] + base[w,s]
//   a_w[n,:] = sum_s c[n,w,s] * gain_s * source_s[n,:]                            gain_s elementwise, absent if plain
//   plain:    out_w = a_w
//   prepost:  rstd[n,w]  = (mean_c a_w[n,c]^2 + eps)^(-1/2)                       saved for the backward
//             out_w[n,:] = post_w * a_w[n,:] * rstd[n,w] + skip[n,:]
//
//   plain:    da_w = dout_w
//   prepost:  u = dout_w * post_w, ah = a_w * rstd:   da_w[n,:] = rstd[n,w] * (u[n,:] - ah[n,:] * mean_c(u * ah))
//             dpost_w    += sum_n dout_w[n,:] * ah[n,:]                           always added
//             dskip[n,:]  = sum_w dout_w[n,:]                                     set, or added
//             dgain_s    += sum_n v_s[n,:] * source_s[n,:]                        always added; v_s as below
//   dweight[n, w*S + s]   = <da_w[n,:], gain_s * source_s[n,:]>                   set
//   dbase[w,s]           += sum_n dweight[n, w*S + s]                             always added
//   v_s[n,:]              = sum_w c[n,w,s] * da_w[n,:]
//   dsource_s[n,:]        = gain_s * v_s[n,:]                                     set, or added
//
// source, out, skip and their gradients: (B,T,C); weight: (B,T,W*S); base: (W,S); gain, post: (C); rstd: (B,T,W). At
// most 4 ways. a_w is not saved: the backward computes it again from the sources, which it reads anyway. No output may
// alias anything. If c is 1 for one source and 0 for the others, a plain out_w is that source exactly; if all c are 0,
// the prepost out_w is skip exactly and rstd is eps^(-1/2), as long as the sources are finite. Outside of the reference
// source, weight, out, skip and their gradients are all f32 or all bf16, the rest is f32.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"

namespace crossply {

// rstd: without data if plain.
void multiway_mix_forward(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix<Tensor>& m, double eps,
                          Stream stream);

// d: the gradient of each member of m, with the same members empty. The sums over n go through a fixed number of
// partial sums, so they do not depend on the thread count.
void multiway_mix_backward(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts, const Tensor& rstd,
                           const MultiwayMix<Tensor>& m, Stream stream);

// On a GPU the backward's blocks have up to so many warps, and so many of these are at once on a multiprocessor. If
// plain, several: while one waits at a barrier, or for memory, others go on. Else one as wide as it may be, which keeps
// a_w of all columns in registers.
template <bool prepost>
constexpr int64_t way_warps = prepost ? 16 : 8;
template <bool prepost>
constexpr int64_t way_blocks = prepost ? 1 : 3;
// A thread takes so many ways, enough for W. wide: 16 bytes at a time fit every row of columns.
constexpr int ways_of_thread(int64_t W, bool wide) { return wide && W == 1 ? 1 : 4; }
// It takes so many columns in the backward, of elements of so many bytes: fewer than 16 bytes leave registers for what
// is on its way, and more threads for what waits.
constexpr int columns_of_thread(int ways, bool wide, size_t bytes) {
  return !wide ? 1 : ways > 1 ? 4 : static_cast<int>(16 / bytes);
}
// A block has so many warps as have columns to do, at most `most`, if there is shared memory for the `floats` of each.
inline int64_t way_warps_for(int64_t C, int columns, int64_t floats, int64_t most) {
  constexpr int64_t room = 160 * 1024 / sizeof(float);
  return std::clamp<int64_t>(std::min((C + columns * 32 - 1) / (columns * 32), room / floats), 1, most);
}
// How many blocks, each with a row of sums over its tokens. A row costs as much as some tokens: a block takes several,
// and there are no more blocks than an H200's 132 multiprocessors run at once, each of them at_once.
struct BlockSums {
  int64_t warps, at_once, blocks, row;
};
template <bool prepost>
BlockSums way_sums(int64_t N, int64_t C, int64_t W, int64_t S, int ways, int columns) {
  const int64_t warps = way_warps_for(C, columns, (S + 1) * ways, way_warps<prepost>);
  const int64_t at_once = way_blocks<prepost> * way_warps<prepost> / warps;
  return {warps, at_once, std::clamp<int64_t>(N / 8, 1, 132 * at_once),
          (W * S + 7) / 8 * 8 + (prepost ? (W + S) * C : 0)};
}

// kernels/depth/multiway_mix.cu, for (N,C) tensors and at most 256 sources.
CUDA_TWIN void multiway_mix_forward_cuda(const std::vector<Tensor>& outs, const Tensor& rstd,
                                         const MultiwayMix<Tensor>& m, double eps, int64_t N, int64_t C);
CUDA_TWIN void multiway_mix_backward_cuda(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts,
                                          const Tensor& rstd, const MultiwayMix<Tensor>& m, int64_t N, int64_t C);

// a(C), one way of one token; coef(S) is c[n,w,:].
template <class T>
void way_sum_ref(T* a, const T* coef, const MultiwayMix<T*>& m, int64_t n, int64_t C) {
  for (int64_t c = 0; c < C; ++c) {
    a[c] = 0;
    for (size_t s = 0; s < m.sources.size(); ++s)
      a[c] += coef[s] * (m.gains.empty() ? m.sources[s][n * C + c] : m.gains[s][c] * m.sources[s][n * C + c]);
  }
}

template <class T>
std::vector<T> way_coefficients_ref(const MultiwayMix<T*>& m, int64_t n, size_t w, size_t W) {
  const size_t S = m.sources.size();
  std::vector<T> coef(S);
  for (size_t s = 0; s < S; ++s) coef[s] = m.weight[(static_cast<size_t>(n) * W + w) * S + s] + m.base[w * S + s];
  return coef;
}

template <class T>
void multiway_mix_forward_ref(const std::vector<T*>& outs, T* rstd, const MultiwayMix<T*>& m, int64_t N, int64_t C,
                              double eps) {
  using std::sqrt;
  const size_t W = outs.size();
  for (int64_t n = 0; n < N; ++n) {
    for (size_t w = 0; w < W; ++w) {
      T* y = outs[w] + n * C;
      way_sum_ref(y, way_coefficients_ref(m, n, w, W).data(), m, n, C);
      if (m.post.empty()) continue;
      T square = 0;
      for (int64_t c = 0; c < C; ++c) square += y[c] * y[c];
      const T r = rstd[n * static_cast<int64_t>(W) + static_cast<int64_t>(w)] = T(1) / sqrt(square / T(C) + T(eps));
      for (int64_t c = 0; c < C; ++c) y[c] = m.post[w][c] * y[c] * r + m.skip[n * C + c];
    }
  }
}

// da(C) from dy = dout_w[n,:] and a = a_w[n,:].
template <class T>
void way_norm_backward_ref(T* da, T* dpost, const T* dy, const T* a, const T* post, T r, int64_t C) {
  T mean = 0;
  for (int64_t c = 0; c < C; ++c) {
    mean += dy[c] * post[c] * a[c] * r;
    dpost[c] += dy[c] * a[c] * r;
  }
  mean /= T(C);
  for (int64_t c = 0; c < C; ++c) da[c] = r * (dy[c] * post[c] - a[c] * r * mean);
}

// d: where sources and skip are set, they hold zeros before.
template <class T>
void multiway_mix_backward_ref(const MultiwayMix<T*>& d, const std::vector<T*>& douts, const T* rstd,
                               const MultiwayMix<T*>& m, int64_t N, int64_t C) {
  const size_t W = douts.size(), S = m.sources.size();
  std::vector<T> a(static_cast<size_t>(C)), da(static_cast<size_t>(C));
  for (int64_t n = 0; n < N; ++n) {
    for (size_t w = 0; w < W; ++w) {
      const size_t row = static_cast<size_t>(n) * W + w;
      const T* dy = douts[w] + n * C;
      const std::vector<T> coef = way_coefficients_ref(m, n, w, W);
      da.assign(dy, dy + C);
      if (!m.post.empty()) {
        way_sum_ref(a.data(), coef.data(), m, n, C);
        way_norm_backward_ref(da.data(), d.post[w], dy, a.data(), m.post[w], rstd[row], C);
        for (int64_t c = 0; c < C; ++c) d.skip[n * C + c] += dy[c];
      }
      for (size_t s = 0; s < S; ++s) {
        const T* x = m.sources[s] + n * C;
        T* dx = d.sources[s] + n * C;
        T product = 0;
        for (int64_t c = 0; c < C; ++c) {
          const T v = coef[s] * da[static_cast<size_t>(c)], gain = m.gains.empty() ? T(1) : m.gains[s][c];
          product += da[static_cast<size_t>(c)] * gain * x[c];
          if (!m.gains.empty()) d.gains[s][c] += v * x[c];
          dx[c] += gain * v;
        }
        d.weight[row * S + s] = product;
        d.base[w * S + s] += product;
      }
    }
  }
}

}  // namespace crossply
