// The language-model head fused with its loss. The logits z of all rows together, (rows, V), never exist.
//
//   z[n,v]     = sum_c inp[n,c] * weight[v,c]                    or c tanh of 1/c of that: softcap c, 0 for none
//   lse[n]     = log(sum_v exp(z[n,v]))
//   losses[n]  = lse[n] - z[n,targets[n]]                                         0 where targets[n] is -1
//   squares[n] = lse[n]^2                                                         if asked for; likewise
//
//   with L = scale * sum_n row_weights[n] * (losses[n] + z_loss * squares[n])     row_weights: 1, unless given
//   dz[n,v] = scale * row_weights[n] * (softmax_v(z[n,:]) * (1 + 2 z_loss lse[n]) - [v == targets[n]])
//             * (1 - (z[n,v] / c)^2) if capped                                    0 where targets[n] is -1
//   dinp[n,c]   = sum_v dz[n,v] * weight[v,c]                                     set
//   dweight[v,c] = sum_n dz[n,v] * inp[n,c]                                       overwritten or accumulated
//
// bf16 is for inp, dinp and weight (together); logits before the cap and dz are then rounded to bf16, too.
// losses, row_weights, squares: (rows), f32; inp, dinp: (rows, C) after flattening; weight, dweight: (V, C); targets:
// (rows), i32, each in [-1, V).
// A target of -1 marks a row that is not scored (prompt, padding); on the CPU the matmuls never see it, so it costs
// nothing. On a GPU, where the host does not see the targets, one outside of [-1, V) makes its loss NaN.
// Nothing is saved: training takes the gradients at once. No output may alias an input.
#pragma once

#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"
#include "kernels/block/softcap.h"

namespace crossply {

// What only some losses have. z_loss is of the gradients alone: the losses have none of it in them.
struct CrossEntropyOptions {
  Tensor row_weights = {}, squares = {};
  double softcap = 0, z_loss = 0;
};

// The losses, and in the same pass the gradients of L, unless dinp and dweight have no data. The losses are the
// same, bit for bit, and have no weights in them.
void cross_entropy_forward(const Tensor& losses, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                           const Tensor& weight, const Tensor& targets, double scale, Stream stream,
                           const CrossEntropyOptions& options = {});

// Bytes of scratch that a CPU takes for it, if all rows are scored.
int64_t cross_entropy_scratch(int64_t rows, int64_t V, int64_t C, Dtype dtype);

// On a GPU: the rows whose logits exist at the same time, and the elements from one of these to the next.
struct LogitChunk {
  int64_t rows, stride;
};
LogitChunk logit_chunk(int64_t rows, int64_t V, Dtype dtype);

// kernels/block/cross_entropy.cu
CUDA_TWIN void cross_entropy_forward_cuda(const Tensor& losses, const Tensor& dinp, const Grad& dweight,
                                          const Tensor& inp, const Tensor& weight, const Tensor& targets, double scale,
                                          const CrossEntropyOptions& options);
// kernels/block/cross_entropy_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(cross_entropy_forward_cuda) cross_entropy_forward_plain;

// The logits of one row, capped.
template <class T>
void logits_row_ref(T* z /*(V)*/, const T* inp /*(C)*/, const T* weight /*(V,C)*/, double softcap, int64_t V,
                    int64_t C) {
  for (int64_t v = 0; v < V; ++v) {
    T sum = 0;
    for (int64_t c = 0; c < C; ++c) sum += inp[c] * weight[v * C + c];
    z[v] = softcap_ref(sum, softcap);
  }
}

// The sum of exponentials of one row of logits; p receives their softmax.
template <class T>
struct ExpSum {
  T largest, log;  // lse is their sum
};
template <class T>
ExpSum<T> softmax_logits_ref(T* p /*(V)*/, const T* z /*(V)*/, int64_t V) {
  using std::exp, std::log, std::real;
  T largest = z[0], sum = 0;
  for (int64_t v = 1; v < V; ++v)
    if (real(z[v]) > real(largest)) largest = z[v];
  for (int64_t v = 0; v < V; ++v) sum += p[v] = exp(z[v] - largest);
  for (int64_t v = 0; v < V; ++v) p[v] /= sum;
  return {largest, log(sum)};
}

// The options, of plain numbers; null for none.
template <class T>
struct CrossEntropyOptionsRef {
  const T* row_weights = nullptr;
  T* squares = nullptr;
  double softcap = 0, z_loss = 0;
};

// Without gradients where dinp is null; dweight is added to.
template <class T>
void cross_entropy_ref(T* losses, T* dinp, T* dweight, const T* inp, const T* weight, const int32_t* targets,
                       double scale, int64_t rows, int64_t V, int64_t C, const CrossEntropyOptionsRef<T>& options) {
  std::vector<T> z(static_cast<size_t>(V)), p(z);
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    losses[n] = 0;
    if (options.squares != nullptr) options.squares[n] = 0;
    for (int64_t c = 0; c < C && dinp != nullptr; ++c) dinp[n * C + c] = 0;
    if (targets[n] < 0) continue;
    logits_row_ref(z.data(), x, weight, options.softcap, V, C);
    const ExpSum<T> sum = softmax_logits_ref(p.data(), z.data(), V);
    const T lse = sum.largest + sum.log;
    losses[n] = sum.log - (z[static_cast<size_t>(targets[n])] - sum.largest);
    if (options.squares != nullptr) options.squares[n] = lse * lse;
    const T own = T(scale) * (options.row_weights != nullptr ? options.row_weights[n] : T(1));
    for (int64_t v = 0; v < V && dinp != nullptr; ++v) {
      const size_t i = static_cast<size_t>(v);
      const T dz = own * (p[i] * (T(1) + T(2 * options.z_loss) * lse) - T(v == targets[n])) *
                   softcap_slope_ref(z[i], options.softcap);
      for (int64_t c = 0; c < C; ++c) {
        dinp[n * C + c] += dz * weight[v * C + c];
        dweight[v * C + c] += dz * x[c];
      }
    }
  }
}

}  // namespace crossply
