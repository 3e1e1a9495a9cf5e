// What the attention in bf16 tiles does with one block: packs, products, reductions. A product's tiles are 16 rows of
// 64 bytes: c (16, 16 floats) += a (16, 32) b (32, 16), where b holds two of its rows in one, by turns.
#pragma once

#include "kernels/attention/attention_cpu.h"
#include "kernels/cpu/vec.h"

#if CROSSPLY_MATRIX_UNITS

namespace crossply::attention_bf16 {

constexpr int64_t side = 16;         // rows of a tile, and floats of a row
constexpr int64_t depth = 2 * side;  // bf16 of a row: what one product sums over
constexpr int64_t tile_size = side * depth;

using Floats = float __attribute__((vector_size(64)));  // vec.h's vectors are what -march has registers for
using Pairs = uint16_t __attribute__((vector_size(64)));

template <class V>
MATRIX_TARGET inline void get(V& x, const void* from) {
  std::memcpy(&x, from, sizeof x);
}
template <class V>
MATRIX_TARGET inline void put(void* to, const V& x) {
  std::memcpy(to, &x, sizeof x);
}

using crossply::zip;  // of words; of 16 bits:
MATRIX_TARGET inline void zip(Pairs& low, Pairs& high, const Pairs& a, const Pairs& b) {
  low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11,
                                43, 12, 44, 13, 45, 14, 46, 15, 47);
  high = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
                                 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

// The same within every 16 bytes, which costs less: of 32 columns, low gets those with bit 2 clear, high the others.
MATRIX_TARGET inline void zip_quarters(Pairs& low, Pairs& high, const Pairs& a, const Pairs& b) {
  low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50,
                                19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
  high = __builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22,
                                 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}
// Which of 32 columns zip_quarters leaves in word i of its half.
inline int64_t quarter_column(int64_t half, int64_t i) { return i / 4 * 8 + half * 4 + i % 4; }

// dst = src transposed, 16 x 16 words; rows of src are `stride` bytes apart, those of dst 64.
MATRIX_TARGET inline void transpose_words(void* dst, const void* src, int64_t stride) {
  Words v[side];
#pragma GCC unroll 16
  for (int64_t i = 0; i < side; ++i) get(v[i], static_cast<const char*>(src) + i * stride);
  transpose_tile(v);
#pragma GCC unroll 16
  for (int64_t i = 0; i < side; ++i) put(static_cast<char*>(dst) + i * 64, v[i]);
}

// Element l of the result: v[l]'s lanes combined.
template <class Combine>
MATRIX_TARGET inline void reduce_rows(Floats& result, Floats* v, Combine&& combine) {
#pragma GCC unroll 4
  for (int64_t half = side / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) {
      Words low, high;
      zip(low, high, reinterpret_cast<Words>(v[i]), reinterpret_cast<Words>(v[i + half]));
      v[i] = combine(reinterpret_cast<Floats>(low), reinterpret_cast<Floats>(high));
    }
  result = v[0];
}
struct Larger {  // b where either is a NaN
  MATRIX_TARGET inline Floats operator()(const Floats& a, const Floats& b) const {
    const auto max = _mm512_maskz_max_ps(0xFFFF, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b));
    return reinterpret_cast<Floats>(max);
  }
};
struct Plus {
  MATRIX_TARGET inline Floats operator()(const Floats& a, const Floats& b) const { return a + b; }
};

// Two vectors of floats as one of bf16.
MATRIX_TARGET inline void to_bf16(Pairs& x, const Floats& low, const Floats& high) {
  const auto both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
  std::memcpy(&x, &both, sizeof x);
}

// x = 2^x to 3e-6 for x <= 127; below -126.5 it is 0. NaN stays NaN. As attention_tile.h's, but for a shorter series.
MATRIX_TARGET inline void exp2_in_place(Floats& x) {
  const Floats shifter = Floats{} + 12583039.f, lowest = Floats{} - 127.f;
  x = Larger()(lowest, x);
  const Floats biased = x + shifter, r = x - (biased - shifter);
  Floats p = r * 9.57010201e-3f + 5.59178603e-2f;
  p = p * r + 2.40247448e-1f;
  p = p * r + 6.93121815e-1f;
  p = p * r + 9.99999261e-1f;
  x = p * reinterpret_cast<Floats>(reinterpret_cast<Words>(biased) << 23);
}

// -----------------------------------------------------------------------------------------------------------------
// Between the rows of one head and tiles. A row in scratch is `width` bf16, a multiple of 32.

// dst (32, width) = src (n, D), and zeros.
MATRIX_TARGET inline void take_rows(bf16* dst, int64_t width, const bf16* src, int64_t stride, int64_t n, int64_t D) {
  for (int64_t d = 0; d < width; d += depth) {
    const uint32_t lanes = first_lanes(D - d);
    for (int64_t i = 0; i < n; ++i) put(dst + i * width + d, _mm512_maskz_loadu_epi16(lanes, src + i * stride + d));
    for (int64_t i = n; i < depth; ++i) put(dst + i * width + d, Pairs{});
  }
}

// Brings rows that are needed later near: they lie too far apart for the hardware to foresee.
inline void prefetch_row(const bf16* row, int64_t D) {
  constexpr int64_t line = 32;  // bf16 of a cache line
  for (int64_t d = 0; d < D; d += line) __builtin_prefetch(row + d, 0, 2);
}

// The right factor rows (32, width), summed over the rows: one tile for every 16 of D columns.
MATRIX_TARGET inline void pack_pairs(bf16* dst, const bf16* rows, int64_t width, int64_t D) {
  for (int64_t d = 0; d < D; d += depth, dst += 2 * tile_size)
    for (int64_t i = 0; i < side; ++i) {
      Pairs a, b, low, high;
      get(a, rows + 2 * i * width + d);
      get(b, rows + (2 * i + 1) * width + d);
      zip(low, high, a, b);
      put(dst + i * depth, low);
      if (d + side < D) put(dst + tile_size + i * depth, high);
    }
}

// The right factor rows (32, width) transposed, summed over the columns: for either 16 rows, a tile for every 32.
MATRIX_TARGET inline void pack_columns(bf16* dst, const bf16* rows, int64_t width) {
  for (int64_t i = 0; i < depth; i += side)
    for (int64_t d = 0; d < width; d += depth, dst += tile_size) transpose_words(dst, rows + i * width + d, width * 2);
}

// The left factor rows (32, width) transposed, summed over the rows: a tile for every 16 of D columns.
MATRIX_TARGET inline void pack_transposed(bf16* dst, const bf16* rows, int64_t width, int64_t D) {
  pack_pairs(dst, rows, width, D);
  for (int64_t d = 0; d < D; d += side, dst += tile_size) transpose_words(dst, dst, 64);
}

// dst (n, D) = [dst +] src (n, width) * factor[row]; width is D rounded up to tiles.
MATRIX_TARGET inline void give_rows(bf16* dst, int64_t stride, const float* src, int64_t width, int64_t n, int64_t D,
                                    const float* factor, bool accumulate) {
  for (int64_t d = 0; d < D; d += side) {
    const auto lanes = static_cast<__mmask16>(first_lanes(D - d));
    for (int64_t i = 0; i < n; ++i) {
      bf16* const to = dst + i * stride + d;
      Floats x;
      get(x, src + i * width + d);
      x *= factor[i];
      if (accumulate) {
        const __m512i old = _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_maskz_loadu_epi16(lanes, to));
        x += reinterpret_cast<Floats>(reinterpret_cast<Words>(old) << 16);
      }
      const auto rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
      __m256i bits;
      std::memcpy(&bits, &rounded, sizeof bits);
      _mm256_mask_storeu_epi16(to, lanes, bits);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Products, by the tiles of AMX or by AVX-512's products of pairs, whichever matrix_unit() is.

// AMX sleeps after some 300 ns without work, and takes as long to wake up. So between the products a loop over 16 rows
// of vectors holds one product that nobody reads.
MATRIX_TARGET inline void keep_awake() {
  if (matrix_unit() == MatrixUnit::amx) _tile_dpbf16ps(3, 5, 7);
}

// The operands of a product: where each begins, and the distance to its next tile.

struct Left {
  const bf16* at;
  int64_t row, step, stride;  // stride: bytes between the rows of one tile
};
struct Right {
  const bf16* at;
  int64_t column, step;
};
struct OutputTile {
  float* at;
  int64_t row, column, stride;
};

template <int rows, int columns>
MATRIX_TARGET inline void multiply_block(const OutputTile& c, const Left& a, const Right& b, int64_t steps,
                                         bool accumulate) {
  float* const c01 = c.at + c.column;
  float* const c10 = c.at + c.row;
  if (accumulate) {
    _tile_loadd(0, c.at, c.stride);
    if (columns > 1) _tile_loadd(1, c01, c.stride);
    if (rows > 1) _tile_loadd(2, c10, c.stride);
    if (rows > 1 && columns > 1) _tile_loadd(3, c10 + c.column, c.stride);
  } else {
    _tile_zero(0);
    if (columns > 1) _tile_zero(1);
    if (rows > 1) _tile_zero(2);
    if (rows > 1 && columns > 1) _tile_zero(3);
  }
  for (int64_t p = 0; p < steps; ++p) {
    _tile_loadd(4, a.at + p * a.step, a.stride);
    _tile_loadd(6, b.at + p * b.step, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (columns > 1) {
      _tile_loadd(7, b.at + b.column + p * b.step, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (rows > 1) {
      _tile_loadd(5, a.at + a.row + p * a.step, a.stride);
      _tile_dpbf16ps(2, 5, 6);
      if (columns > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c.at, c.stride);
  if (columns > 1) _tile_stored(1, c01, c.stride);
  if (rows > 1) _tile_stored(2, c10, c.stride);
  if (rows > 1 && columns > 1) _tile_stored(3, c10 + c.column, c.stride);
}

// c = a b, of an even number of rows and columns of tiles, each one product. What such short sums wait for is the way
// of a tile from loads to stores, so two pairs of tiles take turns: one multiplies while the other is stored.
MATRIX_TARGET inline void multiply_once(const OutputTile& c, const Left& a, const Right& b, int64_t rows,
                                        int64_t columns) {
  float* previous = nullptr;
  finish_stores();
  for (int64_t i = 0; i < rows; i += 2) {
    _tile_loadd(4, a.at + i * a.row, a.stride);
    _tile_loadd(5, a.at + (i + 1) * a.row, a.stride);
    for (int64_t j = 0; j < columns; j += 2) {
      float* const c00 = c.at + i * c.row + j * c.column;
      float* const c01 = c00 + c.column;
      _tile_loadd(6, b.at + j * b.column, 64);
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (i + j > 0) {
        _tile_stored(2, previous, c.stride);
        _tile_stored(3, previous + c.row, c.stride);
      }
      _tile_loadd(7, b.at + (j + 1) * b.column, 64);
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      _tile_stored(0, c00, c.stride);
      _tile_stored(1, c00 + c.row, c.stride);
      previous = c01;
    }
  }
  _tile_stored(2, previous, c.stride);
  _tile_stored(3, previous + c.row, c.stride);
  finish_stores();
}

// The same by AVX-512's products of pairs.
MATRIX_TARGET inline void multiply_by_vectors(const OutputTile& c, const Left& a, const Right& b, int64_t rows,
                                              int64_t columns, int64_t steps, bool accumulate) {
  for (int64_t j = 0; j < columns; j += 2)
    for (int64_t i = 0; i < rows; ++i) {
      const PairSums to{c.at + i * c.row + j * c.column, c.stride / 4, c.column};
      const PairRows left{a.at + i * a.row, a.stride / 2, a.step};
      const PairTiles right{b.at + j * b.column, b.column, b.step};
      if (j + 1 < columns) multiply_pairs<2>(to, left, right, side, steps, accumulate);
      else multiply_pairs<1>(to, left, right, side, steps, accumulate);
    }
}

// c = [c +] a b, of rows x columns tiles, each the sum of `steps` products.
MATRIX_TARGET inline void multiply(const OutputTile& c, const Left& a, const Right& b, int64_t rows, int64_t columns,
                                   int64_t steps, bool accumulate) {
  if (matrix_unit() != MatrixUnit::amx) return multiply_by_vectors(c, a, b, rows, columns, steps, accumulate);
  if (steps == 1 && !accumulate && rows % 2 == 0 && columns % 2 == 0) return multiply_once(c, a, b, rows, columns);
  finish_stores();
  for (int64_t j = 0; j < columns; j += 2)
    for (int64_t i = 0; i < rows; i += 2) {
      const OutputTile to{c.at + i * c.row + j * c.column, c.row, c.column, c.stride};
      const Left left{a.at + i * a.row, a.row, a.step, a.stride};
      const Right right{b.at + j * b.column, b.column, b.step};
      if (i + 1 < rows && j + 1 < columns) multiply_block<2, 2>(to, left, right, steps, accumulate);
      else if (i + 1 < rows) multiply_block<2, 1>(to, left, right, steps, accumulate);
      else if (j + 1 < columns) multiply_block<1, 2>(to, left, right, steps, accumulate);
      else multiply_block<1, 1>(to, left, right, steps, accumulate);
    }
  finish_stores();
}

}  // namespace crossply::attention_bf16

#endif
