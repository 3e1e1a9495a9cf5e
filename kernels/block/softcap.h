// The soft cap of logits, as in Gemma 2: none gets beyond cap, and small ones hardly change.
//
//   out = cap tanh(inp / cap)                                  elementwise
//
// The losses on logits have it in themselves, with its slope 1 - (out / cap)^2 (kernels/block/cross_entropy.h,
// distill.h). This op is for logits that are read: it has no backward. All tensors are f32 or bf16; out may be inp.
// A cap of 0 stands for none: there is nothing to call then.
#pragma once

#include <cmath>
#include <complex>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void softcap_forward(const Tensor& out, const Tensor& inp, double cap, Stream stream);

// kernels/block/softcap.cu
CUDA_TWIN void softcap_forward_cuda(const Tensor& out, const Tensor& inp, double cap);

// A cap of 0 leaves z as it is.
template <class T>
T softcap_ref(T z, double cap) {
  using std::tanh;
  return cap == 0 ? z : T(cap) * tanh(z / T(cap));
}
// Of a logit that is capped.
template <class T>
T softcap_slope_ref(T capped, double cap) {
  if (cap == 0) return T(1);
  const T t = capped / T(cap);
  return (T(1) - t) * (T(1) + t);
}

}  // namespace crossply
