// Rotary position embedding: every head's vector is turned by angles that grow with the token's position.
//
//   w_j = theta^(-2j/D), j < D/2, or given ones;
//   table[t] = cos(t w_0), ..., cos(t w_{D/2-1}), sin(t w_0), ..., sin(t w_{D/2-1})
//
//   with h = D/2, and c, s the two halves of table[pos + t]:
//   out[j]    = inp[j] c[j] - inp[j+h] s[j]         the pairs are (j, j+h), not neighbours
//   out[j+h]  = inp[j+h] c[j] + inp[j] s[j]
//
//   dinp[j]   = dout[j] c[j] + dout[j+h] s[j]       the rotation back; overwritten or accumulated
//   dinp[j+h] = dout[j+h] c[j] - dout[j] s[j]
//
// inp, out, dout, dinp: (B, T, H, D), D even, f32 or bf16, all alike; table: (S, D), f32, pos + T <= S. Token t of the
// views is at position pos + t. Nothing is saved. out may alias inp; dinp may alias dout where it is set.
#pragma once

#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// (positions, D) of the frequencies w (D/2), all times factor, by which heads grow as they turn. In double: far
// positions times fast frequencies lose their fraction in float.
std::vector<double> rope_table(int64_t positions, const std::vector<double>& frequencies, double factor = 1);

void rope_forward(const Tensor& out, const Tensor& inp, const Tensor& table, int64_t pos, Stream stream);
void rope_backward(const Grad& dinp, const Tensor& dout, const Tensor& table, int64_t pos, Stream stream);

// Both are one rotation: sign = 1 turns forward, -1 turns back.
CUDA_TWIN void rope_cuda(const Grad& out, const Tensor& inp, const Tensor& table, int64_t pos,
                         float sign);  // kernels/block/rope.cu

template <class X>
void rope_forward_ref(X* out, const X* inp, const X* table, int64_t B, int64_t T, int64_t H, int64_t D, int64_t pos) {
  for (int64_t n = 0; n < B * T * H; ++n) {
    const X* row = table + (pos + n / H % T) * D;
    for (int64_t j = 0, h = D / 2; j < h; ++j) {
      const X x = inp[n * D + j], y = inp[n * D + j + h];
      out[n * D + j] = x * row[j] - y * row[j + h];
      out[n * D + j + h] = y * row[j] + x * row[j + h];
    }
  }
}

template <class X>
void rope_backward_ref(X* dinp, const X* dout, const X* table, int64_t B, int64_t T, int64_t H, int64_t D, int64_t pos,
                       bool accumulate) {
  for (int64_t n = 0; n < B * T * H; ++n) {
    const X* row = table + (pos + n / H % T) * D;
    for (int64_t j = 0, h = D / 2; j < h; ++j) {
      const X dx = dout[n * D + j] * row[j] + dout[n * D + j + h] * row[j + h];
      const X dy = dout[n * D + j + h] * row[j] - dout[n * D + j] * row[j + h];
      dinp[n * D + j] = accumulate ? dinp[n * D + j] + dx : dx;
      dinp[n * D + j + h] = accumulate ? dinp[n * D + j + h] + dy : dy;
    }
  }
}

}  // namespace crossply
