// Token embedding: a row of the table for every token.
//
//   out[n] = weight[tokens[n]]
//
//   dweight[tokens[n]] += dout[n]                       always added, in the order of n
//
// out, dout: (B, T, C), f32 or bf16; weight, dweight: (V, C), f32; tokens: (B, T), i32, each in [0, V), which is
// checked, except on a GPU: there another token makes its row of out NaN, and its row of dout is left out. Nothing is
// saved, nothing may alias.
#pragma once

#include <algorithm>
#include <bit>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void embedding_forward(const Tensor& out, const Tensor& weight, const Tensor& tokens, Stream stream);
// Every element of dweight has one writer that takes the tokens in order: the sum does not depend on the thread count.
// The GPU's writer adds a frequent token's rows in parts, whose bounds only the tokens decide.
void embedding_backward(const Tensor& dweight, const Tensor& dout, const Tensor& tokens, Stream stream);

// On a GPU: the positions as keys that it sorts, in tiles, and a row of sums for each window of the sorted list.
constexpr int sort_tile = 2048, sort_window = 32;
inline ScratchBytes embedding_scratch(int64_t rows, int64_t C) {
  const size_t keys = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(rows, sort_tile)));
  return {keys * sizeof(uint64_t), static_cast<size_t>((rows + sort_window - 1) / sort_window * C) * sizeof(float)};
}

// kernels/block/embedding.cu
CUDA_TWIN void embedding_forward_cuda(const Tensor& out, const Tensor& weight, const Tensor& tokens);
CUDA_TWIN void embedding_backward_cuda(const Tensor& dweight, const Tensor& dout, const Tensor& tokens);

template <class X>
void embedding_forward_ref(X* out, const X* weight, const int32_t* tokens, int64_t rows, int64_t C) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < C; ++c) out[n * C + c] = weight[tokens[n] * C + c];
}

template <class X>
void embedding_backward_ref(X* dweight, const X* dout, const int32_t* tokens, int64_t rows, int64_t C) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < C; ++c) dweight[tokens[n] * C + c] += dout[n * C + c];
}

}  // namespace crossply
