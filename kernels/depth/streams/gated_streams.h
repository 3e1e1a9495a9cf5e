// Gated residual streams (Qwen3.8-Flash-Next): the residual streams of hyper.h, each normalised for itself. A sublayer
// reads their mean, gated channel by channel by a small network that sees all of them; its output is added to each
// stream by a factor of its own. N tokens, E streams of C columns:
//
//   norm:    rstd_i   = (mean(streams_i^2) + eps)^(-1/2)
//            normed_i = streams_i rstd_i (1 + gain_i)
//   silu:    out      = z sigmoid(z),  z = factor * inp            between the network's two products (block/matmul.h)
//   mean:    out      = (1/E) sum_i sigmoid(logits_i) normed_i     by the network's output
//   inject:  next_i   = streams_i + w_i y,  w_i = 2 sigmoid(logit_i / E)
//
// streams, next, normed, logits of the mean: (N, E, C); gain: (E, C); rstd: (N, E); out, y: (N, C); logit of the
// inject: (N, E); silu: any shape. Any more dimensions in front. gain and rstd are f32, all else is f32 or bf16, all
// alike. Nothing aliases but where it says so.
#pragma once

#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/depth/streams/hyper.h"

namespace crossply {

void gated_norm_forward(const Tensor& normed, const Tensor& rstd, const Tensor& streams, const Tensor& gain, double eps,
                        Stream stream);
// With g = dnormed (1 + gain) and xh = streams rstd:
//   dstreams_i = rstd_i (g_i - xh_i mean(g_i xh_i))     set, or added
//   dgain     += sum over tokens of dnormed xh          through a fixed number of partial sums
void gated_norm_backward(const Grad& dstreams, const Tensor& dgain, const Tensor& dnormed, const Tensor& streams,
                         const Tensor& gain, const Tensor& rstd, Stream stream);

void gated_silu_forward(const Tensor& out, const Tensor& inp, double factor, Stream stream);
// dinp = factor dout s (1 + z (1 - s)), s = sigmoid(z), set; dinp may be dout.
void gated_silu_backward(const Tensor& dinp, const Tensor& dout, const Tensor& inp, double factor, Stream stream);

void gated_mean_forward(const Tensor& out, const Tensor& normed, const Tensor& logits, Stream stream);
// With s = sigmoid(logits), both set: dnormed_i = s_i dout / E; dlogits_i = normed_i s_i (1 - s_i) dout / E, which may
// be logits.
void gated_mean_backward(const Tensor& dnormed, const Tensor& dlogits, const Tensor& dout, const Tensor& normed,
                         const Tensor& logits, Stream stream);

void gated_inject_forward(const Tensor& next, const Tensor& streams, const Tensor& logits, const Tensor& y,
                          Stream stream);
// dstreams = dnext, dy = sum_i w_i dnext_i: set, or added; dlogit_i = <dnext_i, y> w_i (2 - w_i) / (2 E), set. A
// dstreams that is dnext stays as it is.
void gated_inject_backward(const Grad& dstreams, const Tensor& dlogits, const Grad& dy, const Tensor& dnext,
                           const Tensor& logits, const Tensor& y, Stream stream);

// kernels/depth/streams/gated_streams.cu
CUDA_TWIN void gated_norm_forward_cuda(const Tensor& normed, const Tensor& rstd, const Tensor& streams,
                                       const Tensor& gain, double eps, const StreamsSize& z);
CUDA_TWIN void gated_norm_backward_cuda(const Grad& dstreams, const Tensor& dgain, const Tensor& dnormed,
                                        const Tensor& streams, const Tensor& gain, const Tensor& rstd,
                                        const StreamsSize& z);
CUDA_TWIN void gated_silu_forward_cuda(const Tensor& out, const Tensor& inp, double factor);
CUDA_TWIN void gated_silu_backward_cuda(const Tensor& dinp, const Tensor& dout, const Tensor& inp, double factor);
CUDA_TWIN void gated_mean_forward_cuda(const Tensor& out, const Tensor& normed, const Tensor& logits,
                                       const StreamsSize& z);
CUDA_TWIN void gated_mean_backward_cuda(const Tensor& dnormed, const Tensor& dlogits, const Tensor& dout,
                                        const Tensor& normed, const Tensor& logits, const StreamsSize& z);
CUDA_TWIN void gated_inject_forward_cuda(const Tensor& next, const Tensor& streams, const Tensor& logits,
                                         const Tensor& y, const StreamsSize& z);
CUDA_TWIN void gated_inject_backward_cuda(const Grad& dstreams, const Tensor& dlogits, const Grad& dy,
                                          const Tensor& dnext, const Tensor& logits, const Tensor& y,
                                          const StreamsSize& z);

// -----------------------------------------------------------------------------------------------------------------
// Reference.

template <class T>
T sigmoid_ref(T x) {
  using std::exp;
  return T(1) / (T(1) + exp(-x));
}

template <class T>
void gated_norm_forward_ref(T* normed, T* rstd, const T* streams, const T* gain, double eps, const StreamsSize& z) {
  using std::sqrt;
  for (int64_t r = 0; r < z.rows * z.E; ++r) {
    const T *x = streams + r * z.C, *w = gain + r % z.E * z.C;
    T squares = 0;
    for (int64_t c = 0; c < z.C; ++c) squares += x[c] * x[c];
    rstd[r] = T(1) / sqrt(squares / T(z.C) + T(eps));
    for (int64_t c = 0; c < z.C; ++c) normed[r * z.C + c] = x[c] * rstd[r] * (T(1) + w[c]);
  }
}

template <class T>
void gated_norm_backward_ref(T* dstreams, T* dgain, const T* dnormed, const T* streams, const T* gain, const T* rstd,
                             const StreamsSize& z, bool accumulate) {
  for (int64_t r = 0; r < z.rows * z.E; ++r) {
    const T *x = streams + r * z.C, *dy = dnormed + r * z.C, *w = gain + r % z.E * z.C;
    T mean = 0;
    for (int64_t c = 0; c < z.C; ++c) {
      mean += dy[c] * (T(1) + w[c]) * x[c] * rstd[r] / T(z.C);
      dgain[r % z.E * z.C + c] += dy[c] * x[c] * rstd[r];
    }
    for (int64_t c = 0; c < z.C; ++c) {
      const T d = rstd[r] * (dy[c] * (T(1) + w[c]) - x[c] * rstd[r] * mean);
      dstreams[r * z.C + c] = accumulate ? dstreams[r * z.C + c] + d : d;
    }
  }
}

template <class T>
void gated_silu_forward_ref(T* out, const T* inp, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = T(factor) * inp[i] * sigmoid_ref(T(factor) * inp[i]);
}

template <class T>
void gated_silu_backward_ref(T* dinp, const T* dout, const T* inp, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const T z = T(factor) * inp[i], s = sigmoid_ref(z);
    dinp[i] = T(factor) * dout[i] * s * (T(1) + z * (T(1) - s));
  }
}

template <class T>
void gated_mean_forward_ref(T* out, const T* normed, const T* logits, const StreamsSize& z) {
  for (int64_t n = 0; n < z.rows; ++n)
    for (int64_t c = 0; c < z.C; ++c) {
      T sum = 0;
      for (int64_t at = n * z.E * z.C + c; at < (n + 1) * z.E * z.C; at += z.C)
        sum += sigmoid_ref(logits[at]) * normed[at];
      out[n * z.C + c] = sum / T(z.E);
    }
}

template <class T>
void gated_mean_backward_ref(T* dnormed, T* dlogits, const T* dout, const T* normed, const T* logits,
                             const StreamsSize& z) {
  for (int64_t at = 0; at < z.rows * z.E * z.C; ++at) {
    const T s = sigmoid_ref(logits[at]), g = dout[at / (z.E * z.C) * z.C + at % z.C] / T(z.E);
    dnormed[at] = s * g;
    dlogits[at] = normed[at] * s * (T(1) - s) * g;
  }
}

template <class T>
void gated_inject_forward_ref(T* next, const T* streams, const T* logits, const T* y, const StreamsSize& z) {
  for (int64_t r = 0; r < z.rows * z.E; ++r) {
    const T w = T(2) * sigmoid_ref(logits[r] / T(z.E));
    for (int64_t c = 0; c < z.C; ++c) next[r * z.C + c] = streams[r * z.C + c] + w * y[r / z.E * z.C + c];
  }
}

template <class T>
void gated_inject_backward_ref(T* dstreams, T* dlogits, T* dy, const T* dnext, const T* logits, const T* y,
                               const StreamsSize& z, bool accumulate_streams, bool accumulate_y) {
  for (int64_t r = 0; r < z.rows * z.E; ++r) {
    const T w = T(2) * sigmoid_ref(logits[r] / T(z.E)), *g = dnext + r * z.C, *in = y + r / z.E * z.C;
    T *to = dy + r / z.E * z.C, dot = 0;
    for (int64_t c = 0; c < z.C; ++c) {
      dot += g[c] * in[c];
      dstreams[r * z.C + c] = accumulate_streams ? dstreams[r * z.C + c] + g[c] : g[c];
      to[c] = accumulate_y || r % z.E > 0 ? to[c] + w * g[c] : w * g[c];
    }
    dlogits[r] = dot * w * (T(2) - w) / T(2 * z.E);
  }
}

}  // namespace crossply
