// What the files of hyper.h share: vectors over the columns of a token, loops over its E streams unrolled at
// compile time, checks.
//
// A function `..._columns<Vec>(..., c, C)` works on columns [c, C) of a token, and calls its own <float> version for
// those at the end that do not fill a Vec. What it sums over columns it adds to its result.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/streams/hyper.h"
#include "kernels/dispatch.h"

namespace crossply::hyper {

// For a place one token ahead, which the hardware does not foresee: a token's streams are several sequences at once,
// and the passes after the first hit the cache. An address behind the end does no harm.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 2); }

// out[i] += the sum of v[i]'s lanes. Sixteen vectors at a time, in a tree: the sums of adjacent lanes of two
// vectors make one vector.
template <int N>
inline void add_sums_of_lanes(float* out, const Vec16 (&v)[N]) {
  for (int first = 0; first < N; first += 16) {
    Vec16 tree[16] = {};
    for (int i = 0; i < 16 && first + i < N; ++i) tree[i] = v[first + i];
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) add_adjacent(tree[i], tree[2 * i], tree[2 * i + 1]);
    float sums[16];
    store(sums, tree[0]);
    for (int i = 0; i < 16 && first + i < N; ++i) out[first + i] += sums[i];
  }
}
template <int N>
inline void add_sums_of_lanes(float* out, const float (&v)[N]) {
  for (int i = 0; i < N; ++i) out[i] += v[i];
}

// Calls body(integral_constant<int, i>) for i in [0, N). With constant indices small arrays of vectors live in
// registers; where the compiler leaves a loop a loop, they live in memory and every use waits for a store.
template <int N, class F>
inline void unrolled(F&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (body(std::integral_constant<int, i>{}), ...); }
  (std::make_integer_sequence<int, N>{});
}

// Calls body(integral_constant<int, E>).
template <int First = 1, class F>
void with_streams(int64_t E, F&& body) {
  if constexpr (First < max_streams)
    if (E != First) return with_streams<First + 1>(E, body);
  body(std::integral_constant<int, First>{});
}

// out = sum_i weight[i * apart] x_i; the first pass over a token fetches the next one's x.
template <class Vec, int E, bool first_pass, class S>
void read_columns(S* out, const S* x, const float* weight, int64_t apart, int64_t c, int64_t C) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec sum = {}, s;
    for (int i = 0; i < E; ++i) {
      if constexpr (first_pass) prefetch(x + (E + i) * C + c);
      load(s, x + i * C + c);
      sum += weight[i * apart] * s;
    }
    store(out + c, sum);
  }
  if (c < C) read_columns<float, E, first_pass>(out, x, weight, apart, c, C);
}

// For parallel_for over tokens.
inline int64_t grain(int64_t E, int64_t C) { return 32768 / (E * C); }

// The sizes of streams (B,T,E,C) and of x, which has one stream for each token.
inline StreamsSize check_streams(const Tensor& streams, const Tensor& x) {
  const auto [rows, C] = rows_of(x);
  const int64_t E = streams.dim(2);
  CHECK_SHAPES(
      streams.shape.rank == 4 && E >= 1 && E <= max_streams && streams.dim(3) == C && streams.numel() == rows * E * C,
      streams, x);
  return {rows, E, C};
}

inline void check_coef(const Tensor& coef, const Tensor& streams) {
  const int64_t E = streams.dim(2);
  CHECK_SHAPES(coef.shape == Shape({streams.dim(0), streams.dim(1), E, E + 2}), coef, streams);
}

}  // namespace crossply::hyper
