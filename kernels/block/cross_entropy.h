// The language-model head fused with its loss. The logits z of all rows together, (rows, V), never exist.
//
//   z[n,v]    = sum_c inp[n,c] * weight[v,c]
//   losses[n] = log(sum_v exp(z[n,v])) - z[n,targets[n]]                          0 where targets[n] is -1
//
//   with L = scale * sum_n row_weights[n] * losses[n]                             row_weights: 1, unless given
//   dz[n,v]     = scale * row_weights[n] * (softmax_v(z[n,:]) - [v == targets[n]])  0 where targets[n] is -1
//   dinp[n,c]   = sum_v dz[n,v] * weight[v,c]                                     set
//   dweight[v,c] = sum_n dz[n,v] * inp[n,c]                                       overwritten or accumulated
//
// bf16 is for inp, dinp and weight (together); logits and dz are then rounded to bf16, too.
// losses, row_weights: (rows), f32; inp, dinp: (rows, C) after flattening; weight, dweight: (V, C); targets: (rows),
// i32, each in [-1, V).
// A target of -1 marks a row that is not scored (prompt, padding); on the CPU the matmuls never see it, so it costs
// nothing. On a GPU, where the host does not see the targets, one outside of [-1, V) makes its loss NaN.
// Nothing is saved: training takes the gradients at once. No output may alias an input.
#pragma once

#include <cmath>
#include <complex>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// The losses, and in the same pass the gradients of L, unless dinp and dweight have no data. The losses are the
// same, bit for bit, and have no weights in them.
void cross_entropy_forward(const Tensor& losses, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                           const Tensor& weight, const Tensor& targets, double scale, Stream stream,
                           const Tensor& row_weights = {});

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
                                          const Tensor& row_weights);
// kernels/block/cross_entropy_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(cross_entropy_forward_cuda) cross_entropy_forward_plain;

// The loss of one scored row; z receives softmax(inp weight^T).
template <class T>
T cross_entropy_row_ref(T* z /*(V)*/, const T* inp /*(C)*/, const T* weight /*(V,C)*/, int32_t target, int64_t V,
                        int64_t C) {
  using std::exp, std::log, std::real;
  T largest = 0, sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    z[v] = 0;
    for (int64_t c = 0; c < C; ++c) z[v] += inp[c] * weight[v * C + c];
    if (v == 0 || real(z[v]) > real(largest)) largest = z[v];
  }
  const T shifted = z[target] - largest;
  for (int64_t v = 0; v < V; ++v) {
    z[v] = exp(z[v] - largest);
    sum += z[v];
  }
  for (int64_t v = 0; v < V; ++v) z[v] /= sum;
  return log(sum) - shifted;
}

template <class T>
void cross_entropy_forward_ref(T* losses, const T* inp, const T* weight, const int32_t* targets, int64_t rows,
                               int64_t V, int64_t C) {
  std::vector<T> z(static_cast<size_t>(V));
  for (int64_t n = 0; n < rows; ++n)
    losses[n] = targets[n] < 0 ? T(0) : cross_entropy_row_ref(z.data(), inp + n * C, weight, targets[n], V, C);
}

// dweight is added to.
template <class T>
void cross_entropy_forward_backward_ref(T* losses, T* dinp, T* dweight, const T* inp, const T* weight,
                                        const int32_t* targets, double scale, int64_t rows, int64_t V, int64_t C,
                                        const T* row_weights = nullptr) {
  std::vector<T> z(static_cast<size_t>(V));
  for (int64_t n = 0; n < rows; ++n) {
    const T* x = inp + n * C;
    T* dx = dinp + n * C;
    losses[n] = 0;
    for (int64_t c = 0; c < C; ++c) dx[c] = 0;
    if (targets[n] < 0) continue;
    losses[n] = cross_entropy_row_ref(z.data(), x, weight, targets[n], V, C);
    for (int64_t v = 0; v < V; ++v) {
      const T dz = T(scale) * (row_weights != nullptr ? row_weights[n] : T(1)) * (z[v] - T(v == targets[n]));
      for (int64_t c = 0; c < C; ++c) {
        dx[c] += dz * weight[v * C + c];
        dweight[v * C + c] += dz * x[c];
      }
    }
  }
}

}  // namespace crossply
