// The k largest entries of each row, if they are positive; what a sparse autoencoder's code is.
//
//   out[n,m]  = max(inp[n,m], 0) if inp[n,m] is one of the k largest of row n, else 0
//   dinp[n,m] = dout[n,m] where out[n,m] > 0, else 0                               overwritten or accumulated
//
// Among equal entries the one with the lower index is the larger. 1 <= k <= the rows' width, which is below 2^32. All
// tensors: (rows, width) after flattening, of the same type, f32 or bf16. Nothing is saved: the backward reads out. No
// output may alias anything. A NaN counts as larger than any number, and stays, in out and in dinp.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <numeric>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void top_k_forward(const Tensor& out, const Tensor& inp, int64_t k, Stream stream);
void top_k_backward(const Grad& dinp, const Tensor& dout, const Tensor& out, Stream stream);

// kernels/block/top_k.cu
CUDA_TWIN void top_k_forward_cuda(const Tensor& out, const Tensor& inp, int64_t width, int64_t k);
CUDA_TWIN void top_k_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& out);

template <class T>
void top_k_forward_ref(T* out, const T* inp, int64_t rows, int64_t width, int64_t k) {
  using std::isnan, std::real;
  std::vector<int64_t> order(static_cast<size_t>(width));
  for (int64_t n = 0; n < rows; ++n, out += width, inp += width) {
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      const auto x = real(inp[a]), y = real(inp[b]);
      return isnan(x) ? !isnan(y) : x > y;
    });
    std::fill(out, out + width, T(0));
    for (int64_t i = 0; i < k; ++i) {
      const int64_t m = order[static_cast<size_t>(i)];
      if (!(real(inp[m]) <= 0)) out[m] = inp[m];
    }
  }
}

template <class T>
void top_k_backward_ref(T* dinp, const T* dout, const T* out, int64_t n, bool accumulate) {
  using std::real;
  for (int64_t i = 0; i < n; ++i) dinp[i] = (accumulate ? dinp[i] : T(0)) + (real(out[i]) > 0 ? dout[i] : out[i]);
}

}  // namespace crossply
