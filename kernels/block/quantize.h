// What a product of a linear layer reads in one byte a number: a tensor times a power of two, rounded to e4m3 or e5m2.
// The power follows from the largest numbers of earlier steps (train/step/delayed_scales.h), so that x is read once.
//
//   to[n,c] = to_transposed[c,n] = round(scale x[n,c])
//   amax = max(amax, max |x|)                           not finite from the first NaN or infinity on
//
// x: bf16, only read. amax and scale: f32, where the stream's tensors are, so that nobody waits for the device. Nothing
// may alias. What is too large becomes the largest number of its type (engine/dtype.h). A maximum has no order, so all
// backends write the same bits. Products in these types are a GPU's: on a CPU these are plain loops.
#pragma once

#include <algorithm>
#include <bit>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// to (rows, C) and to_transposed (C, rows), in one type; without data they are not written, and without both x is only
// measured. amax (1); x (rows, C) after flattening; scale (1). Throws Exit::internal for other shapes or types.
void quantize(const Tensor& to, const Tensor& to_transposed, const Tensor& amax, const Tensor& x, const Tensor& scale,
              Stream stream);

// kernels/block/quantize.cu
CUDA_TWIN void quantize_cuda(const Tensor& to, const Tensor& to_transposed, const Tensor& amax, const Tensor& x,
                             const Tensor& scale);

// Calls body(e4m3{}) or body(e5m2{}), whichever the tensors are; for none of them either will do.
template <class F>
void with_fp8(const Tensor& to, const Tensor& to_transposed, F&& body) {
  const Tensor& one = to.data != nullptr ? to : to_transposed;
  const Dtype dtype = one.data != nullptr ? one.dtype : Dtype::e4m3;
  CHECK_THAT(dtype == Dtype::e4m3 || dtype == Dtype::e5m2, "expected an e4m3 or e5m2 tensor, got ", name_of(dtype));
  if (dtype == Dtype::e4m3) body(e4m3{});
  else body(e5m2{});
}

template <class S>
void quantize_ref(S* to, S* to_transposed, float* amax, const bf16* x, float scale, int64_t rows, int64_t C) {
  auto most = std::bit_cast<uint32_t>(*amax);  // sizes are ordered as their bits: numbers, infinity, NaN
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < C; ++c) {
      const auto value = static_cast<float>(x[n * C + c]);
      most = std::max(most, std::bit_cast<uint32_t>(value) & 0x7FFFFFFF);
      const S rounded(scale * value);
      if (to != nullptr) to[n * C + c] = rounded;
      if (to_transposed != nullptr) to_transposed[c * rows + n] = rounded;
    }
  *amax = std::bit_cast<float>(most);
}

}  // namespace crossply
