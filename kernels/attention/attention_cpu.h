// What the fast CPU attentions share: their arguments, and how the work is divided. attention.cpp computes in
// float vectors, attention_narrow.cpp does so for small heads, attention_bf16.cpp in tiles of bf16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/dtype.h"
#include "kernels/attention/attention.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/cpu.h"

namespace crossply {

// Below this much work the threads stay asleep.
inline int64_t grain_of(const AttentionSizes& z, int64_t items) {
  return z.B * z.H * z.T * (z.pos + z.T) * z.D <= 65536 ? items : 1;
}

template <class S>
struct AttentionGradients {
  S *dq, *dk, *dv;
  const S *dout, *out, *q, *k, *v;
  const float* lse;
  float scale;
  bool accumulate_q, accumulate_k, accumulate_v;
};

// Later blocks of queries see more keys. In the order 0, n-1, 1, n-2, ... contiguous shares are about the same work.
inline int64_t folded(int64_t i, int64_t n) { return i % 2 == 0 ? i / 2 : n - 1 - i / 2; }

// One thread sums up one part of what goes to one of `pairs` (b, kv head), out of `work` blocks of queries. Only where
// the pairs are few are they cut, by the shape.
inline int64_t backward_parts(int64_t pairs, int64_t work) { return std::min(work, ceil_div(8, pairs)); }

// sums (size) += the sums of the other parts, `apart` from one to the next.
inline void add_parts(float* sums, int64_t size, int64_t apart, int64_t parts) {
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[part * apart + i];
}

// For D of up to 16 in the forward, up to 8 in the backward. pos may be anything, lse null. They need the 32 registers
// of AVX-512, and pad heads to 8 columns, or to 16.
#ifdef __AVX512DQ__
constexpr bool narrow_paths = true;
#else
constexpr bool narrow_paths = false;
#endif
template <class S>
void attention_forward_narrow(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z,
                              float scale);
template <class S>
void attention_backward_narrow(const AttentionGradients<S>& g, const AttentionSizes& z);
// Is the kernel for narrow heads the fastest, as measured, with or without tiles?
inline bool narrow_forward_serves(const AttentionSizes& z, bool tiles) {
  return z.D <= 8 || (z.D > 12 && z.D <= 16 && !tiles);
}
inline bool narrow_backward_serves(const AttentionSizes& z, bool tiles) {
  return z.D <= 8 && (z.T <= 320 || !tiles || matrix_unit() != MatrixUnit::amx);
}

#if CROSSPLY_MATRIX_UNITS
// Need a matrix unit, pos == 0 and a scale that is not negative.
void attention_forward_bf16(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionSizes& z,
                            float scale);
void attention_backward_bf16(const AttentionGradients<bf16>& g, const AttentionSizes& z);
#endif

}  // namespace crossply
