// Attention residuals: a mixture of what earlier layers have put out, every token's weights a softmax over depth of a
// trained query's dot with the sources' rows, each row divided by its root mean square (arXiv 2603.15031). Sources are
// as in depth_mix.h: N = B*T rows of width C each.
//
//   squares_s[n] = sum_c x_s[n,c]^2                         vertical_dot, of one source, when it is produced
//   r_s[n]       = (squares_s[n] / C + eps)^(-1/2)
//   query        = proj * gain                              elementwise; saved for the backward
//   logits[n,s]  = r_s[n] <query, x_s[n,:]>                 saved
//   weights[n,:] = softmax(logits[n,:])                     saved
//   out[n,:]     = sum_s weights[n,s] * x_s[n,:]            of the rows as they are
//
// Backward in gather form, when the gradients of all mixtures that read a source x are there (its readers), with the
// weight w = r.weights[n,r.column] and the logit z of this source:
//
//   r.pbar[n]  = <r.dout[n,:], r.out[n,:]>                  vertical_dot, once per mixture, before any gather
//   q_r[n]     = w * (<r.dout[n,:], x[n,:]> - r.pbar[n])    the logit's gradient
//   dx[n,:]    = sum_r (w * r.dout[n,:] + q_r[n] r[n] * r.query) - (sum_r q_r[n] z) r[n]^2 / C * x[n,:]   set, or added
//   dquery_r   = sum_n q_r[n] r[n] * x[n,:]
//   r.dproj += dquery_r * r.gain      r.dgain += dquery_r * r.proj                                        always added
//
// What may be stored how, and how sums are taken, is as in depth_mix.h. A mixture of one source copies it bit for bit
// with the weight 1, and its gather is exactly dout, with q exactly 0. A row of zeros has the logit 0, also with eps 0
// as long as other rows' logits are finite: 0 * infinity is NaN, so give an eps.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// What a mixture has of its own: trained proj and gain (C), and what its forward saves: query (C), logits and weights
// (N,S).
struct QueryMix {
  Tensor proj, gain, query, logits, weights;
};
void query_mix_forward(const Tensor& out, const QueryMix& mix, const std::vector<Tensor>& sources,
                       const std::vector<Tensor>& squares, double eps, Stream stream);

// A mixture that read this source as number `column` of its S sources.
struct QueryReader {
  Tensor dout;  // the gradient of its out
  QueryMix mix;
  Tensor dproj, dgain;  // (C)
  Tensor pbar;          // (N)
  int64_t column;
};
// On a GPU: into how many parts the rows are cut for the gradients of the queries, and the scratch memory, in bytes by
// slot, of the backward with R readers: what each row pulls at each query, and the parts' sums.
inline int64_t query_mix_parts(int64_t N) { return std::clamp<int64_t>(N / 64, 1, 64); }
inline ScratchBytes query_mix_scratch(int64_t N, int64_t C, int64_t R) {
  return {static_cast<size_t>(N * R) * sizeof(float), static_cast<size_t>(query_mix_parts(N) * R * C) * sizeof(float)};
}
void query_mix_backward(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                        const std::vector<QueryReader>& readers, double eps, Stream stream);

// kernels/depth/query_mix.cu
CUDA_TWIN void query_mix_forward_cuda(const Tensor& out, const QueryMix& mix, const std::vector<Tensor>& sources,
                                      const std::vector<Tensor>& squares, int64_t N, int64_t C, double eps);
CUDA_TWIN void query_mix_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                                       const std::vector<QueryReader>& readers, int64_t N, int64_t C, double eps);

// The members of QueryMix, as pointers to their numbers.
template <class T>
struct QueryMixNumbers {
  const T *proj, *gain;
  T *query, *logits, *weights;
};

template <class T>
void query_mix_forward_ref(T* out, const QueryMixNumbers<T>& mix, const std::vector<const T*>& sources,
                           const std::vector<const T*>& squares, int64_t N, int64_t C, double eps) {
  using std::exp, std::sqrt, std::real;
  const size_t S = sources.size();
  for (int64_t c = 0; c < C; ++c) mix.query[c] = mix.proj[c] * mix.gain[c];
  for (int64_t n = 0; n < N; ++n) {
    T* z = mix.logits + n * static_cast<int64_t>(S);
    T* w = mix.weights + n * static_cast<int64_t>(S);
    for (size_t s = 0; s < S; ++s) {
      T product = 0;
      for (int64_t c = 0; c < C; ++c) product += mix.query[c] * sources[s][n * C + c];
      z[s] = product / sqrt(squares[s][n] / T(C) + T(eps));
    }
    auto max = real(z[0]);  // by the real part: a constant leaves the softmax and its derivative unchanged
    for (size_t s = 1; s < S; ++s) max = std::max(max, real(z[s]));
    T sum = 0;
    for (size_t s = 0; s < S; ++s) sum += w[s] = exp(z[s] - max);
    for (size_t s = 0; s < S; ++s) w[s] /= sum;
    for (int64_t c = 0; c < C; ++c) {
      T& y = out[n * C + c];
      y = w[0] * sources[0][n * C + c];
      for (size_t s = 1; s < S; ++s) y += w[s] * sources[s][n * C + c];
    }
  }
}

template <class T>
void query_mix_backward_ref(T* dinp, const T* inp, const T* squares, const std::vector<QueryReader>& readers, int64_t N,
                            int64_t C, double eps, bool accumulate) {
  if (!accumulate) std::fill(dinp, dinp + N * C, T(0));
  for (const QueryReader& r : readers) {
    const int64_t S = r.mix.weights.numel() / N;
    const T *query = r.mix.query.as<T>(), *proj = r.mix.proj.as<T>(), *gain = r.mix.gain.as<T>();
    for (int64_t n = 0; n < N; ++n) {
      const T* dout = r.dout.as<T>() + n * C;
      const T *x = inp + n * C, w = r.mix.weights.as<T>()[n * S + r.column], z = r.mix.logits.as<T>()[n * S + r.column];
      const T scale = T(1) / std::sqrt(squares[n] / T(C) + T(eps));
      T p = 0;
      for (int64_t c = 0; c < C; ++c) p += dout[c] * x[c];
      const T q = w * (p - r.pbar.as<T>()[n]);
      for (int64_t c = 0; c < C; ++c) {
        dinp[n * C + c] += w * dout[c] + q * scale * query[c] - q * z * scale * scale / T(C) * x[c];
        r.dproj.as<T>()[c] += q * scale * x[c] * gain[c];
        r.dgain.as<T>()[c] += q * scale * x[c] * proj[c];
      }
    }
  }
}

}  // namespace crossply
