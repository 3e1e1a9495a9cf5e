// Learned positions: each token's row of a table is added to it.
//
//   out[b,t] = inp[b,t] + weight[pos + t]
//
//   dinp = dout: one tensor, the op works in place
//   dweight[t] += sum_b dout[b,t]                       always added, in the order of b; pos is 0 in training
//
// inp, out, dout: (B, T, C), f32 or bf16; weight, dweight: (P, C), f32, pos + T <= P. out may alias inp. Nothing is
// saved.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void positions_forward(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t pos, Stream stream);
void positions_backward(const Tensor& dweight, const Tensor& dout, Stream stream);

// kernels/block/positions.cu
CUDA_TWIN void positions_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t pos);
CUDA_TWIN void positions_backward_cuda(const Tensor& dweight, const Tensor& dout);

template <class T>
void positions_forward_ref(T* out, const T* inp, const T* weight, int64_t B, int64_t Ts, int64_t C, int64_t pos) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < Ts * C; ++i) out[b * Ts * C + i] = inp[b * Ts * C + i] + weight[pos * C + i];
}

template <class T>
void positions_backward_ref(T* dweight, const T* dout, int64_t B, int64_t Ts, int64_t C) {
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < Ts * C; ++i) dweight[i] += dout[b * Ts * C + i];
}

}  // namespace crossply
