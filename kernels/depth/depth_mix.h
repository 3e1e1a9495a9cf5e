// Mixtures over the residual streams of all layers so far. A source is one layer's output, N = B*T rows of width C; a
// mix reads several of them. DenseFormer weighs a whole source with one trained scalar; vertical attention weighs every
// token's row by a softmax over depth of a trained score minus the logarithm of the row's norm.
//
//   depth_mix   out[n,:]     = sum_s weights[s] * sources[s][n,:]
//   vertical    squares[n]   = sum_c inp[n,c]^2                                    of one source, when it is produced
//               z[n,s]       = scores[s] - 1/2 ln(squares[s][n] + eps)
//               weights[n,:] = softmax(z[n,:])                                     saved for the backward
//               out[n,:]     = sum_s weights[n,s] * sources[s][n,:]
//
// Backward in gather form: when the gradients of all mixes that read a source are there (its readers), the source's own
// gradient is written once. Reader r read it with the weight w = r.weights[r.column], or r.weights[n, r.column].
//
//   depth_mix   dinp[n,:] = sum_r w * r.dout[n,:]                                  set, or added
//               r.dtrained[r.column] += sum_n <r.dout[n,:], inp[n,:]>              always added
//   vertical    r.pbar[n] = <r.dout[n,:], r.out[n,:]>                              once per mix, before any gather
//               q_r[n]    = w * (<r.dout[n,:], inp[n,:]> - r.pbar[n])
//               dinp[n,:] = sum_r w * r.dout[n,:] - (sum_r q_r[n]) * inp[n,:] / (squares[n] + eps)   set, or added
//               r.dtrained[r.column] += sum_n q_r[n]                                always added
//
// The last term of dinp is the gradient through the norm. Without readers dinp is 0, or unchanged if added to.
// sources, inp, out, dout, dinp: any shape of N*C elements, on the CPU f32 or bf16; squares, pbar: (N); they and all
// weights, scores and their gradients are f32. Nothing that is written may alias
// anything else. Sums over tokens go through a fixed number of partial sums: the thread count does not change them.
//
// A vertical mix of one source copies it bit for bit with the weight 1, and its gather is exactly dout, with dtrained
// exactly 0. depth_mix with weights (0,...,0,1) gives the last source exactly, as long as the others are finite (but -0
// may become 0). Squares are summed in f32: a row near 1e19 overflows, its weight is 0; if all of them do, it is NaN.
// A row of zeros with eps 0 gives NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// weights: as many elements as there are sources.
void depth_mix_forward(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights, Stream stream);

// A mix that read this source as number `column` of its S sources.
struct DepthReader {
  Tensor dout;      // the gradient of its out
  Tensor weights;   // (S); vertical: (N,S), saved by its forward
  Tensor dtrained;  // (S), the gradient of the weights, always added; vertical: of the scores, or without data
  int64_t column;
  Tensor pbar;  // (N), only vertical
};
void depth_mix_backward(const Grad& dinp, const Tensor& inp, const std::vector<DepthReader>& readers, Stream stream);

// weights: (N,S). scores: (S), or without data: all zero, which is a fixed map over the given sources.
void vertical_forward(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                      const std::vector<Tensor>& squares, const Tensor& scores, double eps, Stream stream);
// dots[n] = <a[n,:], b[n,:]>: a source's squares, and pbar from dout and out.
void vertical_dot(const Tensor& dots, const Tensor& a, const Tensor& b, Stream stream);
void vertical_backward(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                       const std::vector<DepthReader>& readers, double eps, Stream stream);

// kernels/depth/depth_mix.cu
CUDA_TWIN void depth_mix_forward_cuda(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights);
CUDA_TWIN void depth_mix_backward_cuda(const Grad& dinp, const Tensor& inp, const std::vector<DepthReader>& readers);
CUDA_TWIN void vertical_dot_cuda(const Tensor& dots, const Tensor& a, const Tensor& b, int64_t N, int64_t C);
CUDA_TWIN void vertical_forward_cuda(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                                     const std::vector<Tensor>& squares, const Tensor& scores, int64_t N, int64_t C,
                                     double eps);
CUDA_TWIN void vertical_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                                      const std::vector<DepthReader>& readers, int64_t N, int64_t C, double eps);
// kernels/depth/depth_mix_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(depth_mix_forward_cuda) depth_mix_forward_plain;
CUDA_TWIN decltype(depth_mix_backward_cuda) depth_mix_backward_plain;
CUDA_TWIN decltype(vertical_dot_cuda) vertical_dot_plain;
CUDA_TWIN decltype(vertical_forward_cuda) vertical_forward_plain;
CUDA_TWIN decltype(vertical_backward_cuda) vertical_backward_plain;

template <class T>
void depth_mix_forward_ref(T* out, const std::vector<const T*>& sources, const T* weights, int64_t size /*N*C*/) {
  for (int64_t i = 0; i < size; ++i) {
    out[i] = weights[0] * sources[0][i];
    for (size_t s = 1; s < sources.size(); ++s) out[i] += weights[s] * sources[s][i];
  }
}

template <class T>
void depth_mix_backward_ref(T* dinp, const T* inp, const std::vector<DepthReader>& readers, int64_t size /*N*C*/,
                            bool accumulate) {
  if (!accumulate) std::fill(dinp, dinp + size, T(0));
  for (const DepthReader& reader : readers) {
    const T* dout = reader.dout.as<T>();
    const T w = reader.weights.as<T>()[reader.column];
    for (int64_t i = 0; i < size; ++i) {
      dinp[i] += w * dout[i];
      reader.dtrained.as<T>()[reader.column] += dout[i] * inp[i];
    }
  }
}

template <class T>
void vertical_dot_ref(T* dots, const T* a, const T* b, int64_t N, int64_t C) {
  for (int64_t n = 0; n < N; ++n) {
    dots[n] = T(0);
    for (int64_t c = 0; c < C; ++c) dots[n] += a[n * C + c] * b[n * C + c];
  }
}

template <class T>
void vertical_forward_ref(T* out, T* weights, const std::vector<const T*>& sources,
                          const std::vector<const T*>& squares, const T* scores, int64_t N, int64_t C, double eps) {
  using std::exp, std::log, std::real;
  const int64_t S = static_cast<int64_t>(sources.size());
  for (int64_t n = 0; n < N; ++n) {
    T* w = weights + n * S;
    for (int64_t s = 0; s < S; ++s)
      w[s] = (scores == nullptr ? T(0) : scores[s]) - T(0.5) * log(squares[static_cast<size_t>(s)][n] + T(eps));
    // By the real part: subtracting any constant leaves the softmax, and its derivative, unchanged.
    auto max = real(w[0]);
    for (int64_t s = 1; s < S; ++s) max = std::max(max, real(w[s]));
    T sum = 0;
    for (int64_t s = 0; s < S; ++s) sum += w[s] = exp(w[s] - max);
    for (int64_t s = 0; s < S; ++s) w[s] /= sum;
    for (int64_t c = 0; c < C; ++c) {
      T& y = out[n * C + c];
      y = w[0] * sources[0][n * C + c];
      for (int64_t s = 1; s < S; ++s) y += w[s] * sources[static_cast<size_t>(s)][n * C + c];
    }
  }
}

template <class T>
void vertical_backward_ref(T* dinp, const T* inp, const T* squares, const std::vector<DepthReader>& readers, int64_t N,
                           int64_t C, double eps, bool accumulate) {
  if (!accumulate) std::fill(dinp, dinp + N * C, T(0));
  for (const DepthReader& reader : readers) {
    const int64_t S = reader.weights.numel() / N;
    for (int64_t n = 0; n < N; ++n) {
      const T* dout = reader.dout.as<T>() + n * C;
      const T* x = inp + n * C;
      const T w = reader.weights.as<T>()[n * S + reader.column];
      T p = 0;
      for (int64_t c = 0; c < C; ++c) p += dout[c] * x[c];
      const T q = w * (p - reader.pbar.as<T>()[n]);
      if (reader.dtrained.data != nullptr) reader.dtrained.as<T>()[reader.column] += q;
      for (int64_t c = 0; c < C; ++c) dinp[n * C + c] += w * dout[c] - q * x[c] / (squares[n] + T(eps));
    }
  }
}

}  // namespace crossply
