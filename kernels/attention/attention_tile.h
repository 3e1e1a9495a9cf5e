// What the fast CPU attention does to one tile in scratch memory: vector functions, products, transposes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply::attention_tile {

// Everything inside a tile is vectorised along the queries: scores are held as (key, query), and q, dout, out and dq as
// (d, query). So no reduction crosses the lanes, and heads narrower than a vector waste none of it. Only dk and dv,
// which sum over queries, are vectorised along d.
#ifdef __AVX512F__
constexpr int64_t lanes = 16, tile_vectors = 4;
#else
constexpr int64_t lanes = 8, tile_vectors = 2;
#endif
constexpr int64_t tile = tile_vectors * lanes;  // queries, and keys, of one tile

using Vec = float __attribute__((vector_size(lanes * sizeof(float))));
using IntVec = int32_t __attribute__((vector_size(lanes * sizeof(float))));

inline int64_t round_up(int64_t n) { return crossply::round_up(n, lanes); }

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

// a where it is larger, otherwise b: so b where either is a NaN. The compilers take two instructions for one.
inline void take_larger(Vec& b, const Vec& a) {
#ifdef __AVX512F__
  b = reinterpret_cast<Vec>(_mm512_maskz_max_ps(0xFFFF, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  b = a > b ? a : b;
#endif
}

// x = 2^x to about 1 ulp for x <= 127; below -126.5 it is 0. NaN stays NaN.
inline void exp2_in_place(Vec& x) {
  // 2^23 * 1.5 + 127: adding it rounds to an integer n and leaves n + 127, the exponent of 2^n, in the low bits.
  const Vec shifter = Vec{} + 12583039.f, lowest = Vec{} - 127.f;
  take_larger(x, lowest);  // 2^-127 has the exponent bits of 0
  const Vec biased = x + shifter;
  const Vec r = x - (biased - shifter);
  const IntVec power = reinterpret_cast<IntVec>(biased) << 23;
  Vec p = r * 1.32764725e-3f + 9.67554096e-3f;  // 2^r on [-1/2, 1/2] with relative error below 8e-8
  p = p * r + 5.55071309e-2f;
  p = p * r + 2.40221202e-1f;
  p = p * r + 6.93146944e-1f;
  p = p * r + 1.00000012f;
  x = p * reinterpret_cast<Vec>(power);
}

// x = log(x) to about 2 ulp for positive normal x. NaN stays NaN.
template <class V>
inline void log_in_place(V& x) {
  using Int = decltype(x < x);  // as wide a vector of int32_t
  const Int bits = reinterpret_cast<Int>(x);
  const Int exponent = (bits - 0x3F3504F3) >> 23;  // so that the mantissa m is in [1/sqrt 2, sqrt 2)
  const V m = reinterpret_cast<V>(bits - (exponent << 23));
  const V s = (m - 1.f) / (m + 1.f), s2 = s * s;  // log m = 2 artanh s
  V p = s2 * (2.f / 9.f) + 2.f / 7.f;
  p = p * s2 + 2.f / 5.f;
  p = p * s2 + 2.f / 3.f;
  p = p * s2 + 2.f;
  x = __builtin_convertvector(exponent, V) * ln_2 + (p * s + (x - x));  // x - x: the bits of a NaN were lost above
}

// In the vector of queries first .. first+lanes-1, those before `key` do not see it: they get `hidden`.
inline void mask(Vec& x, int64_t key, int64_t first, float hidden) {
  IntVec lane;
  for (int64_t l = 0; l < lanes; ++l) lane[l] = static_cast<int32_t>(l);
  const IntVec bound = IntVec{} + static_cast<int32_t>(key - first);
  x = lane < bound ? Vec{} + hidden : x;
}
// So do those whose first key, of `lower` (lanes), comes after it.
inline void mask_below(Vec& x, int64_t key, const int32_t* lower, float hidden) {
  IntVec first;
  std::memcpy(&first, lower, sizeof first);
  x = first > IntVec{} + static_cast<int32_t>(key) ? Vec{} + hidden : x;
}

// -----------------------------------------------------------------------------------------------------------------
// Products of tiles: c (M, N vectors) = [c +] a (M, k) b (k, N vectors), where a is row-major, or stored transposed as
// (k, M). Every element of a is broadcast against the vectors of b; c stays in registers.

template <int M, int N, bool transposed>
void multiply_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                    bool accumulate) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      if (accumulate) load(sum[i][j], c + i * ldc + j * lanes);
      else sum[i][j] = Vec{};
    }
  for (int64_t p = 0; p < k; ++p) {
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      load(row[j], b + p * ldb + j * lanes);
      keep_in_register(row[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const float x = transposed ? a[p * lda + i] : a[i * lda + p];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * lanes, sum[i][j]);
}

template <int M, int N, bool transposed>
void multiply_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows,
                   int64_t k, bool accumulate) {
  int64_t m = 0;
  for (; m + M <= rows; m += M)
    multiply_block<M, N, transposed>(c + m * ldc, ldc, a + (transposed ? m : m * lda), lda, b, ldb, k, accumulate);
  if constexpr (M > 1) {
    if (m < rows)
      multiply_rows<M / 2, N, transposed>(c + m * ldc, ldc, a + (transposed ? m : m * lda), lda, b, ldb, rows - m, k,
                                          accumulate);
  }
}

// `vectors` counts the vectors of a row of b and c.
template <bool transposed>
void multiply(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows,
              int64_t vectors, int64_t k, bool accumulate) {
  constexpr int tall = lanes == 16 ? 8 : 4, wide = lanes == 16 ? 4 : 2;
  for (; vectors > 0; vectors -= 4, c += 4 * lanes, b += 4 * lanes) {
    if (vectors >= 4) multiply_rows<wide, 4, transposed>(c, ldc, a, lda, b, ldb, rows, k, accumulate);
    else if (vectors == 3) multiply_rows<wide, 3, transposed>(c, ldc, a, lda, b, ldb, rows, k, accumulate);
    else if (vectors == 2) multiply_rows<tall, 2, transposed>(c, ldc, a, lda, b, ldb, rows, k, accumulate);
    else multiply_rows<tall, 1, transposed>(c, ldc, a, lda, b, ldb, rows, k, accumulate);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Between the strided rows of one head and contiguous scratch, eight floats at a time: heads may be that narrow.

constexpr int64_t eight = 8;
using Half = Vec8;                              // half of a Vec of 16, or all of one of 8
using TransposeBlock = std::array<Vec, eight>;  // eight values of d of `lanes` queries, by row or by column

// Takes 8 x 8 blocks from rows to columns, or back: v[i] holds row i in its first half and row i + 8 in its second.
// A step moves the bits of an element's position one place on; three steps exchange row and column.
template <size_t... I>
inline void transpose(TransposeBlock& v, std::index_sequence<I...>) {
#pragma GCC unroll 3
  for (int step = 0; step < 3; ++step) {
    TransposeBlock w;
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      w[2 * i] = __builtin_shufflevector(v[i], v[i + 4], (I / 8 * 8 + I % 8 / 2 + I % 2 * lanes)...);
      w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 4], (I / 8 * 8 + I % 8 / 2 + 4 + I % 2 * lanes)...);
    }
    v = w;
  }
}

template <size_t... I>
inline void join(Vec& v, const Half& low, const Half& high, std::index_sequence<I...>) {
  v = __builtin_shufflevector(low, high, I...);
}

template <int64_t first, size_t... I>
inline void half_of(Half& half, const Vec& v, std::index_sequence<I...>) {
  half = __builtin_shufflevector(v, v, (I + first)...);
}

// dst = [dst +] factor * x.
template <class S>
inline void write_half(S* dst, const Half& x, float factor, bool accumulate) {
  Half y{};
  if (accumulate) load(y, dst);
  y += x * factor;
  store(dst, y);
}

// dst (rows, D) = [dst +] factor * src (rows, D), with rows dst_stride and src_stride apart.
template <class To, class From>
void write_rows(To* dst, int64_t dst_stride, const From* src, int64_t src_stride, int64_t rows, int64_t D, float factor,
                bool accumulate) {
  for (int64_t i = 0; i < rows; ++i, dst += dst_stride, src += src_stride) {
    int64_t d = 0;
    for (; d + eight <= D; d += eight) {
      Half x;
      load(x, src + d);
      write_half(dst + d, x, factor, accumulate);
    }
    for (; d < D; ++d) dst[d] = src[d] * factor + (accumulate ? static_cast<float>(dst[d]) : 0.f);
  }
}

// v = n rows of src, zeros below; n may be a compile-time constant.
template <class S, class N>
inline void load_rows(TransposeBlock& v, const S* src, int64_t stride, N n) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < eight; ++r) {
    Half low{}, high{};
    if (r < n) load(low, src + r * stride);
    if (r + eight < n) load(high, src + (r + eight) * stride);
    join(v[r], low, high, std::make_index_sequence<lanes>());
  }
}

// n rows of dst = [dst +] factor * v.
template <class S, class N>
inline void write_block(S* dst, int64_t stride, const TransposeBlock& v, N n, float factor, bool accumulate) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < eight; ++r) {
    Half half;
    half_of<0>(half, v[r], std::make_index_sequence<eight>());
    if (r < n) write_half(dst + r * stride, half, factor, accumulate);
    half_of<lanes - eight>(half, v[r], std::make_index_sequence<eight>());
    if (r + eight < n) write_half(dst + (r + eight) * stride, half, factor, accumulate);
  }
}

// dst (D, tile) = factor * src (rows, D) transposed; up to the end of the last vector, columns past `rows` become 0.
template <class S>
void pack_transposed(float* dst, const S* src, int64_t stride, int64_t rows, int64_t D, float factor) {
  for (int64_t i = 0; i < rows; i += lanes, dst += lanes, src += lanes * stride) {
    const int64_t n = std::min(lanes, rows - i);
    int64_t d = 0;
    for (; d + eight <= D; d += eight) {
      TransposeBlock v;
      if (n == lanes) load_rows(v, src + d, stride, std::integral_constant<int64_t, lanes>());
      else load_rows(v, src + d, stride, n);
      transpose(v, std::make_index_sequence<lanes>());
#pragma GCC unroll 8
      for (int64_t r = 0; r < eight; ++r) store(dst + (d + r) * tile, v[r] * factor);
    }
    for (; d < D; ++d)
      for (int64_t l = 0; l < lanes; ++l) dst[d * tile + l] = l < n ? factor * src[l * stride + d] : 0.f;
  }
}

// dst (rows, D) = [dst +] factor * src (D, tile) transposed.
template <class S>
void unpack_transposed(S* dst, int64_t stride, const float* src, int64_t rows, int64_t D, float factor,
                       bool accumulate) {
  for (int64_t i = 0; i < rows; i += lanes, src += lanes, dst += lanes * stride) {
    const int64_t n = std::min(lanes, rows - i);
    int64_t d = 0;
    for (; d + eight <= D; d += eight) {
      TransposeBlock v;
#pragma GCC unroll 8
      for (int64_t r = 0; r < eight; ++r) load(v[r], src + (d + r) * tile);
      transpose(v, std::make_index_sequence<lanes>());
      const std::integral_constant<int64_t, lanes> whole;
      if (n < lanes) write_block(dst + d, stride, v, n, factor, accumulate);
      else if (accumulate) write_block(dst + d, stride, v, whole, factor, true);
      else write_block(dst + d, stride, v, whole, factor, false);
    }
    for (; d < D; ++d)
      for (int64_t l = 0; l < n; ++l)
        dst[l * stride + d] = factor * src[d * tile + l] + (accumulate ? static_cast<float>(dst[l * stride + d]) : 0.f);
  }
}

}  // namespace crossply::attention_tile
