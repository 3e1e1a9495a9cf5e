// Softmax over the last dimension (rows of width S, such as the streams of a depth), with top-p pruning.
//
//   alpha[n,m] = exp(inp[n,m] - max_j inp[n,j]) / sum_j exp(inp[n,j] - max_j inp[n,j])
//   out[n,m]   = mask[n,m] * alpha[n,m] / s[n]                   s[n] = sum_j mask[n,j] * alpha[n,j] if renormalize,
//                                                                else 1
// mask is 1 for the entries of alpha that come first in descending order, until their sum exceeds top_p: an entry stays
// if the sum of those strictly before it is <= top_p. Among equal entries the one with the larger index comes first. So
// top_p = 0 keeps one entry, top_p >= 1 all. The sum may exceed top_p by 1e-6: where equal weights meet top_p exactly,
// as they do when training starts, the rounding of alpha must not decide.
//
// The backward holds the mask constant.
//
//   dinp[n,m] = alpha[n,m] * (da[n,m] - sum_j alpha[n,j] * da[n,j])        overwritten or accumulated
//
// Not renormalised, da = mask * dout: pruned entries learn too. Renormalised, da[n,m] = mask[n,m] / s[n] * (dout[n,m] -
// sum_j out[n,j] * dout[n,j]), whose product with alpha sums to 0, so that
//
//   dinp[n,m] = out[n,m] * (dout[n,m] - sum_j out[n,j] * dout[n,j])
//
// which is the softmax of the kept entries alone: a pruned one has the gradient 0, and comes back when those above it
// fall. Nothing is saved: the backward computes alpha and mask again. All tensors: (rows, S) after flattening; inp and
// dinp are f32 or bf16, out and dout f32. No output may alias anything. A NaN makes its whole row NaN, and so does
// +infinity in inp.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <numeric>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

struct Pruning {
  double top_p = 1;
  bool renormalize = true;
};

void softmax_forward(const Tensor& out, const Tensor& inp, const Pruning& pruning, Stream stream);
void softmax_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, const Pruning& pruning, Stream stream);

// kernels/block/softmax.cu
CUDA_TWIN void softmax_forward_cuda(const Tensor& out, const Tensor& inp, int64_t S, const Pruning& pruning);
CUDA_TWIN void softmax_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, int64_t S,
                                     const Pruning& pruning);

// How far the kept sum may exceed top_p.
constexpr double top_p_slack = 1e-6;

// The fast CPU softmax of a few rows on the calling thread, without pruning: for kernels that need alpha on the way. It
// is quickest for about a thousand elements at a time. out may be inp.
void softmax_rows_cpu(float* out, const float* inp, int64_t rows, int64_t S);

template <class T>
void softmax_row_ref(T* alpha, const T* inp, int64_t S) {
  using std::exp, std::real;
  auto max = real(inp[0]);
  for (int64_t m = 1; m < S; ++m) max = std::max(max, real(inp[m]));
  T sum = 0;
  for (int64_t m = 0; m < S; ++m) sum += alpha[m] = exp(inp[m] - max);
  for (int64_t m = 0; m < S; ++m) alpha[m] /= sum;
}

// Multiplies values by the mask that top_p and alpha make; they may be alpha itself.
template <class T>
void prune_row_ref(T* values, const T* alpha, int64_t S, double top_p) {
  using std::real;
  if (top_p >= 1) return;
  std::vector<double> weight(static_cast<size_t>(S));
  for (int64_t m = 0; m < S; ++m) weight[static_cast<size_t>(m)] = static_cast<double>(real(alpha[m]));
  std::vector<size_t> order(weight.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});  // the largest index first, and stays so among equals
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight[a] > weight[b]; });
  double before = 0;
  for (size_t m : order) {
    if (before > top_p + top_p_slack) values[m] *= T(0);  // a product, because NaN must stay
    before += weight[m];
  }
}

// The weights of one row, pruned.
template <class T>
void pruned_row_ref(T* out, const T* inp, int64_t S, const Pruning& pruning) {
  softmax_row_ref(out, inp, S);
  prune_row_ref(out, out, S, pruning.top_p);
  if (pruning.top_p >= 1 || !pruning.renormalize) return;
  T sum = 0;
  for (int64_t m = 0; m < S; ++m) sum += out[m];
  for (int64_t m = 0; m < S; ++m) out[m] /= sum;
}

template <class T>
void softmax_forward_ref(T* out, const T* inp, int64_t rows, int64_t S, const Pruning& pruning) {
  for (int64_t n = 0; n < rows; ++n) pruned_row_ref(out + n * S, inp + n * S, S, pruning);
}

template <class T>
void softmax_backward_ref(T* dinp, const T* dout, const T* inp, int64_t rows, int64_t S, const Pruning& pruning,
                          bool accumulate) {
  std::vector<T> alpha(static_cast<size_t>(S)), da(alpha);
  for (int64_t n = 0; n < rows; ++n) {
    std::copy(dout + n * S, dout + (n + 1) * S, da.begin());
    if (pruning.renormalize) {
      pruned_row_ref(alpha.data(), inp + n * S, S, pruning);  // the result takes alpha's place
    } else {
      softmax_row_ref(alpha.data(), inp + n * S, S);
      prune_row_ref(da.data(), alpha.data(), S, pruning.top_p);
    }
    T mean = 0;
    for (size_t m = 0; m < alpha.size(); ++m) mean += alpha[m] * da[m];
    for (size_t m = 0; m < alpha.size(); ++m) {
      T& d = dinp[n * S + static_cast<int64_t>(m)];
      d = (accumulate ? d : T(0)) + alpha[m] * (da[m] - mean);
    }
  }
}

}  // namespace crossply
