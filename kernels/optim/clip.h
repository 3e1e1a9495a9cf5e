// The number by which AdamW multiplies all gradients, decided where they are: so no update waits for the host to look
// at the norm. Clipping by the global norm, after Pascanu et al., arXiv 1211.5063.
//
//   norm = scale sqrt(sums[0]);    factor = scale min(1, clip / (norm + 1e-6)),  or scale where clip is 0
//   factor = NaN, with which AdamW writes nothing, where a number of sums or of largest is not finite
//
// factor, scale: one f64 each; scale is from the gradients as they are to those of the loss. sums (n): f64, the first
// the sum of all gradients' squares, the others only looked at, as are the largest numbers of tensors, f32, or without
// data.
#pragma once

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void clip_factor(const Tensor& factor, const Tensor& scale, const Tensor& sums, const Tensor& largest, double clip,
                 Stream stream);

// kernels/optim/clip.cu
CUDA_TWIN void clip_factor_cuda(double* factor, const double* scale, const Tensor& sums, const Tensor& largest,
                                double clip);

}  // namespace crossply
