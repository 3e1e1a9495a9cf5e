// The bf16 copy of f32 numbers, each rounded to nearest, ties to even:
//
//   out = bf16(inp)                                     NaN stays NaN; on some CPUs what is below 1.2e-38 becomes 0
//
// out: bf16, inp: f32, with the same number of elements, not aliasing.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void convert(const Tensor& out, const Tensor& inp, Stream stream);

CUDA_TWIN void convert_cuda(const Tensor& out, const Tensor& inp);  // kernels/optim/convert.cu

inline void convert_ref(bf16* out, const float* inp, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = inp[i];
}

}  // namespace crossply
