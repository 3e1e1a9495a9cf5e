// Hyper-connections: E residual streams of width C in place of one. Around each sublayer a read mixes the streams into
// what the sublayer sees, and a write mixes them among themselves and adds the sublayer's y to each.
// kernels/depth/streams/hyper_read.md derives the backward of the read.
//
//   streams, next: (B,T,E,C); x, y, out: (B,T,C); coef: (B,T,E,E+2), row i holds A[i,0..E], then b[i]
//
//   expand:  streams_i = x                                          the start of the model
//   read:    A[i,j] = static_alpha[i,j] + alpha_scale * tanh(Nh_i . alpha_proj[:,j])      Nh_i = norm(streams_i)
//            b[i]   = static_beta[i] + beta_scale * tanh(Nh_i . beta_proj)
//            out    = sum_i A[i,0] streams_i
//   write:   next_i = b[i] y + sum_k A[k,i+1] streams_k
//            x = sum_i A[i,0] next_i              if wanted: what the next sublayer reads, where reads go by the A of
//                                                 the sublayer before (mhc.h)
//            squares = sum_i <next_i, next_i>     if wanted: (B,T), for a norm of all streams together
//   reread:  x = sum_i A[i,0] streams_i          where those that a write has read for the next sublayer were replaced
//   sum:     out = sum_i streams_i                                  its end
//
// Static connections have no tanh terms. Norms: LayerNorm over C without or with gain and bias, or RMSNorm with a gain.
// The read saves stats: (B,T,E,E+4), row i holds the mean (0 for RMSNorm), rstd, then the E+2 values of the tanhs of
// row i of coef; without data for static connections.
//
// With A[:,0] one-hot at s, A[:,1..E] the identity, b = 1 and zero projections or scales, out is exactly streams_s and
// next_i exactly streams_i + y (but -0 may become 0), as long as all streams are finite.
//
// Backward, in this order: reread, write, sublayer, read. hyper_write_backward sets dcoef, or adds to it, with 0 in the
// column of A[:,0] if it has not made x; hyper_read_backward adds that column's part to what it reads from dcoef.
// Outputs may not alias inputs, nor each other. Outside of the reference the streams, x, y, out and their gradients are
// all f32 or all bf16, the rest is f32. x and squares are those of next as it is stored.
#pragma once

#include <algorithm>
#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/members.h"

namespace crossply {

enum class HyperNorm { layernorm_no_affine, layernorm, rmsnorm };

constexpr int64_t max_streams = 8;  // E

struct StreamsSize {
  int64_t rows, E, C;
};

// streams_i = x, overwritten or accumulated: the forward of expand, the backward of sum.
void streams_expand(const Grad& streams, const Tensor& x, Stream stream);
// out = sum_i streams_i, overwritten or accumulated: the forward of sum, the backward of expand.
void streams_sum(const Grad& out, const Tensor& streams, Stream stream);

// Whether w.alpha_proj has data decides whether the connections are static.
void hyper_read_forward(const Tensor& out, const Tensor& coef, const Tensor& stats, const Tensor& streams,
                        const HyperWeights<Tensor>& w, HyperNorm norm, double eps, Stream stream);
// dA[i,j] = dcoef[i,j] + [j = 0] <streams_i, dout>, db = dcoef's last column; then, with TA and Tb the tanhs and sums
// over all tokens (and i):
//   dstatic_alpha += sum dA;  dalpha_scale += sum dA * TA;  qA = alpha_scale * dA * (1 - TA^2);  so too for beta
//   dalpha_proj[:,j] += sum Nh_i qA[i,j];  dbeta_proj += sum Nh_i qb[i];  dNh_i = alpha_proj qA[i,:] + beta_proj qb[i]
//   dnorm_weight += sum dNh_i * xh_i;  dnorm_bias += sum dNh_i            xh_i = (streams_i - mean_i) rstd_i
//   dstreams_i = A[i,0] dout + the norm's backward of dNh_i               set, or added
// d's members are always added to, those without data skipped. The sums over tokens go through a fixed number
// of partial sums, so they do not depend on the thread count.
void hyper_read_backward(const Grad& dstreams, const HyperWeights<Tensor>& d, const Tensor& dout, const Tensor& dcoef,
                         const Tensor& streams, const Tensor& coef, const Tensor& stats, const HyperWeights<Tensor>& w,
                         HyperNorm norm, Stream stream);

// On a GPU hyper_read_backward takes a row of sums over tokens a block: of dA, dA tanh and q, (E,E+2) each, then, if
// dynamic, of those for the projections, (E+2,C). A row costs as much as a token or two: no more blocks than an H200
// runs at once, each of eight tokens at a time, or on tensor cores of eight streams.
constexpr int64_t head_size(int64_t E) { return (3 * E * (E + 2) + 3) / 4 * 4; }
struct ReadSums {
  int64_t blocks, row;
};
inline ReadSums read_sums(int64_t rows, int64_t E, int64_t C, bool dynamic) {
  const int64_t at_once = E == 2 || E == 4 ? 264 : 132;
  return {std::clamp<int64_t>(rows / 16, 1, at_once), head_size(E) + (dynamic ? (E + 2) * C : 0)};
}

// What a write leaves; x and squares may be without data.
struct WriteOutputs {
  Tensor next, x, squares;
};
void hyper_write_forward(const WriteOutputs& out, const Tensor& streams, const Tensor& coef, const Tensor& y,
                         Stream stream);
// The output of a write: next itself, and the gradients of next and x. One gradient may be without data, which stands
// for 0. Without dx next is not read.
struct Written {
  Tensor next, dnext, dx;
};
// With g_i = dnext_i + A[i,0] dx:
//   dstreams_k = sum_i A[k,i+1] g_i       set, or added
//   dy = sum_i b[i] g_i                   set, or added
//   dA[k,i+1] = <streams_k, g_i>,  dA[k,0] = <next_k, dx>,  db[i] = <g_i, y>         set, or added
void hyper_write_backward(const Grad& dstreams, const Grad& dcoef, const Grad& dy, const Written& written,
                          const Tensor& streams, const Tensor& coef, const Tensor& y, Stream stream);

void hyper_reread_forward(const Tensor& x, const Tensor& streams, const Tensor& coef, Stream stream);
//   dstreams_i = A[i,0] dx                set, or added
//   dA[i,0] = <streams_i, dx>, and 0 for the rest of coef; set, or added; none where dcoef is without data
void hyper_reread_backward(const Grad& dstreams, const Grad& dcoef, const Tensor& dx, const Tensor& streams,
                           const Tensor& coef, Stream stream);

// kernels/depth/streams/hyper.cu and hyper_read.cu
CUDA_TWIN void streams_expand_cuda(const Grad& streams, const Tensor& x, int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void streams_sum_cuda(const Grad& out, const Tensor& streams, int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void hyper_write_forward_cuda(const WriteOutputs& out, const Tensor& streams, const Tensor& coef,
                                        const Tensor& y, int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void hyper_write_backward_cuda(const Grad& dstreams, const Grad& dcoef, const Grad& dy,
                                         const Written& written, const Tensor& streams, const Tensor& coef,
                                         const Tensor& y, int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void hyper_reread_forward_cuda(const Tensor& x, const Tensor& streams, const Tensor& coef, int64_t rows,
                                         int64_t E, int64_t C);
CUDA_TWIN void hyper_reread_backward_cuda(const Grad& dstreams, const Grad& dcoef, const Tensor& dx,
                                          const Tensor& streams, const Tensor& coef, int64_t rows, int64_t E,
                                          int64_t C);
CUDA_TWIN void hyper_read_forward_cuda(const Tensor& out, const Tensor& coef, const Tensor& stats,
                                       const Tensor& streams, const HyperWeights<Tensor>& w, HyperNorm norm, double eps,
                                       int64_t rows, int64_t E, int64_t C);
CUDA_TWIN void hyper_read_backward_cuda(const Grad& dstreams, const HyperWeights<Tensor>& d, const Tensor& dout,
                                        const Tensor& dcoef, const Tensor& streams, const Tensor& coef,
                                        const Tensor& stats, const HyperWeights<Tensor>& w, HyperNorm norm,
                                        int64_t rows, int64_t E, int64_t C);

// -----------------------------------------------------------------------------------------------------------------
// Reference.

// Every stream of every row n = (b,t) becomes, or grows by, its x.
template <class T>
void streams_expand_ref(T* streams, const T* x, int64_t rows, int64_t E, int64_t C, bool accumulate) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t i = 0; i < E; ++i)
      for (int64_t c = 0; c < C; ++c) {
        T& s = streams[(n * E + i) * C + c];
        s = accumulate ? s + x[n * C + c] : x[n * C + c];
      }
}

template <class T>
void streams_sum_ref(T* out, const T* streams, int64_t rows, int64_t E, int64_t C, bool accumulate) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < C; ++c) {
      T sum = accumulate ? out[n * C + c] : T(0);
      for (int64_t i = 0; i < E; ++i) sum += streams[(n * E + i) * C + c];
      out[n * C + c] = sum;
    }
}

// mean and rstd of one stream x (C).
template <class T>
void hyper_norm_ref(T& mean, T& rstd, const T* x, HyperNorm norm, int64_t C, double eps) {
  using std::sqrt;
  T sum = 0, square = 0;
  for (int64_t c = 0; c < C; ++c) sum += x[c];
  mean = norm == HyperNorm::rmsnorm ? T(0) : sum / T(C);
  for (int64_t c = 0; c < C; ++c) square += (x[c] - mean) * (x[c] - mean);
  rstd = T(1) / sqrt(square / T(C) + T(eps));
}

// Nh at column c, from xh there.
template <class T>
T hyper_gained(const HyperWeights<T*>& w, T xh, int64_t c) {
  const T gained = w.norm_weight != nullptr ? w.norm_weight[c] * xh : xh;
  return w.norm_bias != nullptr ? gained + w.norm_bias[c] : gained;
}

// Column j of (alpha_proj | beta_proj) at c.
template <class T>
T& hyper_projection(const HyperWeights<T*>& w, int64_t c, int64_t j, int64_t E) {
  return j <= E ? w.alpha_proj[c * (E + 1) + j] : w.beta_proj[c];
}

template <class T>
void hyper_read_forward_ref(T* out, T* coef, T* stats, const T* streams, const HyperWeights<T*>& w, HyperNorm norm,
                            int64_t rows, int64_t E, int64_t C, double eps) {
  using std::tanh;
  std::fill(out, out + rows * C, T(0));
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t i = 0; i < E; ++i) {
      const T* x = streams + (n * E + i) * C;
      T* a = coef + (n * E + i) * (E + 2);
      for (int64_t j = 0; j <= E; ++j) a[j] = w.static_alpha[i * (E + 1) + j];
      a[E + 1] = w.static_beta[i];
      if (w.alpha_proj != nullptr) {
        T* s = stats + (n * E + i) * (E + 4);
        hyper_norm_ref(s[0], s[1], x, norm, C, eps);
        for (int64_t j = 0; j < E + 2; ++j) {
          T z = 0;
          for (int64_t c = 0; c < C; ++c) z += hyper_gained(w, (x[c] - s[0]) * s[1], c) * hyper_projection(w, c, j, E);
          s[2 + j] = tanh(z);
          a[j] += (j <= E ? *w.alpha_scale : *w.beta_scale) * s[2 + j];
        }
      }
      for (int64_t c = 0; c < C; ++c) out[n * C + c] += a[0] * x[c];
    }
  }
}

// What the dynamic branch of one stream adds: to d from dA and db (da, E+2 values), and to dx (C) through the norm.
template <class T>
void hyper_dynamic_backward_ref(T* dx, const HyperWeights<T*>& d, const T* da, const T* x, const T* s,
                                const HyperWeights<T*>& w, HyperNorm norm, int64_t E, int64_t C) {
  T q[max_streams + 2], along_one = 0, along_xh = 0;
  for (int64_t j = 0; j < E + 2; ++j) {
    T* dscale = j <= E ? d.alpha_scale : d.beta_scale;
    if (dscale != nullptr) *dscale += da[j] * s[2 + j];
    q[j] = (j <= E ? *w.alpha_scale : *w.beta_scale) * da[j] * (T(1) - s[2 + j] * s[2 + j]);
  }
  auto at = [&](int64_t c, T& xh, T& dnormed) {  // dnormed: the gradient of Nh
    xh = (x[c] - s[0]) * s[1];
    dnormed = 0;
    for (int64_t j = 0; j < E + 2; ++j) dnormed += q[j] * hyper_projection(w, c, j, E);
  };
  T xh, dnormed;
  for (int64_t c = 0; c < C; ++c) {
    at(c, xh, dnormed);
    for (int64_t j = 0; j < E + 2; ++j)
      if ((j <= E ? d.alpha_proj : d.beta_proj) != nullptr)
        hyper_projection(d, c, j, E) += hyper_gained(w, xh, c) * q[j];
    if (d.norm_weight != nullptr) d.norm_weight[c] += dnormed * xh;
    if (d.norm_bias != nullptr) d.norm_bias[c] += dnormed;
    const T dxh = w.norm_weight != nullptr ? w.norm_weight[c] * dnormed : dnormed;
    if (norm != HyperNorm::rmsnorm) along_one += dxh / T(C);
    along_xh += dxh * xh / T(C);
  }
  for (int64_t c = 0; c < C; ++c) {
    at(c, xh, dnormed);
    const T dxh = w.norm_weight != nullptr ? w.norm_weight[c] * dnormed : dnormed;
    dx[c] += s[1] * (dxh - along_one - xh * along_xh);
  }
}

template <class T>
void hyper_read_backward_ref(T* dstreams, const HyperWeights<T*>& d, const T* dout, const T* dcoef, const T* streams,
                             const T* coef, const T* stats, const HyperWeights<T*>& w, HyperNorm norm, int64_t rows,
                             int64_t E, int64_t C, bool accumulate) {
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t i = 0; i < E; ++i) {
      const T* x = streams + (n * E + i) * C;
      T* dx = dstreams + (n * E + i) * C;
      T da[max_streams + 2];
      std::copy_n(dcoef + (n * E + i) * (E + 2), E + 2, da);
      for (int64_t c = 0; c < C; ++c) {
        da[0] += x[c] * dout[n * C + c];
        dx[c] = (accumulate ? dx[c] : T(0)) + coef[(n * E + i) * (E + 2)] * dout[n * C + c];
      }
      for (int64_t j = 0; j <= E && d.static_alpha != nullptr; ++j) d.static_alpha[i * (E + 1) + j] += da[j];
      if (d.static_beta != nullptr) d.static_beta[i] += da[E + 1];
      if (w.alpha_proj != nullptr)
        hyper_dynamic_backward_ref(dx, d, da, x, stats + (n * E + i) * (E + 4), w, norm, E, C);
    }
  }
}

// The members of WriteOutputs and of Written, as pointers to their numbers.
template <class S, class P>
struct WriteOutputNumbers {
  S *next, *x;
  P* squares;
};
template <class S>
struct WrittenNumbers {
  const S *next, *dnext, *dx;
};

template <class T>
void hyper_write_forward_ref(const WriteOutputNumbers<T, T>& out, const T* streams, const T* coef, const T* y,
                             int64_t rows, int64_t E, int64_t C) {
  for (int64_t n = 0; n < rows; ++n) {
    const T* a = coef + n * E * (E + 2);
    T* next = out.next + n * E * C;
    for (int64_t i = 0; i < E; ++i)
      for (int64_t c = 0; c < C; ++c) {
        T sum = a[i * (E + 2) + E + 1] * y[n * C + c];
        for (int64_t k = 0; k < E; ++k) sum += a[k * (E + 2) + i + 1] * streams[(n * E + k) * C + c];
        next[i * C + c] = sum;
      }
    for (int64_t c = 0; c < C && out.x != nullptr; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < E; ++i) sum += a[i * (E + 2)] * next[i * C + c];
      out.x[n * C + c] = sum;
    }
    if (out.squares == nullptr) continue;
    out.squares[n] = 0;
    for (int64_t e = 0; e < E * C; ++e) out.squares[n] += next[e] * next[e];
  }
}

template <class T>
void hyper_write_backward_ref(T* dstreams, T* dcoef, T* dy, const WrittenNumbers<T>& written, const T* streams,
                              const T* coef, const T* y, int64_t rows, int64_t E, int64_t C, bool accumulate_streams,
                              bool accumulate_coef, bool accumulate_y) {
  if (!accumulate_streams) std::fill(dstreams, dstreams + rows * E * C, T(0));
  if (!accumulate_y) std::fill(dy, dy + rows * C, T(0));
  if (!accumulate_coef) std::fill(dcoef, dcoef + rows * E * (E + 2), T(0));
  for (int64_t n = 0; n < rows; ++n) {
    const T* a = coef + n * E * (E + 2);
    T* da = dcoef + n * E * (E + 2);
    for (int64_t i = 0; i < E; ++i)
      for (int64_t c = 0; c < C; ++c) {
        T g = written.dnext != nullptr ? written.dnext[(n * E + i) * C + c] : T(0);
        if (written.dx != nullptr) {
          g += a[i * (E + 2)] * written.dx[n * C + c];
          da[i * (E + 2)] += written.next[(n * E + i) * C + c] * written.dx[n * C + c];
        }
        dy[n * C + c] += a[i * (E + 2) + E + 1] * g;
        da[i * (E + 2) + E + 1] += g * y[n * C + c];
        for (int64_t k = 0; k < E; ++k) {
          dstreams[(n * E + k) * C + c] += a[k * (E + 2) + i + 1] * g;
          da[k * (E + 2) + i + 1] += g * streams[(n * E + k) * C + c];
        }
      }
  }
}

template <class T>
void hyper_reread_forward_ref(T* x, const T* streams, const T* coef, int64_t rows, int64_t E, int64_t C) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < C; ++c) {
      T sum = 0;
      for (int64_t i = 0; i < E; ++i) sum += coef[(n * E + i) * (E + 2)] * streams[(n * E + i) * C + c];
      x[n * C + c] = sum;
    }
}

template <class T>
void hyper_reread_backward_ref(T* dstreams, T* dcoef, const T* dx, const T* streams, const T* coef, int64_t rows,
                               int64_t E, int64_t C, bool accumulate_streams, bool accumulate_coef) {
  if (!accumulate_streams) std::fill(dstreams, dstreams + rows * E * C, T(0));
  if (dcoef != nullptr && !accumulate_coef) std::fill(dcoef, dcoef + rows * E * (E + 2), T(0));
  for (int64_t n = 0; n < rows * E; ++n)
    for (int64_t c = 0; c < C; ++c) {
      dstreams[n * C + c] += coef[n * (E + 2)] * dx[n / E * C + c];
      if (dcoef != nullptr) dcoef[n * (E + 2)] += streams[n * C + c] * dx[n / E * C + c];
    }
}

}  // namespace crossply
