// The inside of gemm_bf16.cpp: packing operands into panels for the matrix units, and the product of two panels.
//
// A panel is 32 lines (rows of a, columns of b) of K, in steps of 32 k: for each step, and for each part (one for bf16,
// high and low for float), two tiles of 16 lines x 32 k, 1 KiB each. A tile of a holds [line][k], one of b
// [k / 2][line][k % 2]: transposed, but in pairs along k, which the units multiply and add at once.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "engine/dtype.h"
#include "kernels/amx.h"

#if CROSSPLY_MATRIX_UNITS

namespace crossply {

constexpr int64_t tile_lines = 16, step_k = 32, panel_lines = 2 * tile_lines;
constexpr int64_t tile_size = tile_lines * step_k;  // in bf16
// A sum of a panel by a panel, in floats.
constexpr int64_t sums_size = panel_lines * panel_lines;

template <class T>
constexpr int64_t parts = sizeof(T) == sizeof(bf16) ? 1 : 2;

// One operand, as lines: element (line, k) is data[line * across + k * along].
template <class T>
struct Lines {
  const T* data;
  int64_t across, along;
  bool k_inner() const { return along == 1; }
  const T* at(int64_t line, int64_t k) const { return data + line * across + k * along; }
};

// A mask of the first n lanes, of all if n is larger.
inline uint32_t first_lanes(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// -----------------------------------------------------------------------------------------------------------------
// Packing.

// The intrinsics with maskz, and shuffles by the compilers' own vectors: the plain ones make g++ 12 warn of data that
// is not initialized.
using Words = uint32_t __attribute__((vector_size(64)));

template <size_t... I>
MATRIX_TARGET inline void zip(Words& low, Words& high, const Words& a, const Words& b, std::index_sequence<I...>) {
  low = __builtin_shufflevector(a, b, static_cast<int>(I / 2 + I % 2 * 16)...);
  high = __builtin_shufflevector(a, b, static_cast<int>((I + 16) / 2 + I % 2 * 16)...);
}
// 16 x 16 words. One round rotates the bits of a word's position (row, lane) by one place; four swap the two halves.
MATRIX_TARGET inline void transpose_tile(Words (&v)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Words w[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) zip(w[2 * i], w[2 * i + 1], v[i], v[i + 8], std::make_index_sequence<16>());
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = w[i];
  }
}

// 16 numbers x and 16 numbers y of 16 bits: x first, then y; and in pairs.
MATRIX_TARGET inline __m512i join(__m256i x, __m256i y) {
  return _mm512_maskz_inserti64x4(0xFF, _mm512_castsi256_si512(x), y, 1);
}
MATRIX_TARGET inline __m512i pair_up(__m256i x, __m256i y) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(order), join(x, y));
}

// 16 floats, rounded; x becomes what that left over.
MATRIX_TARGET inline __m256i split(__m512& x) {
  const __m256i high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  x -= reinterpret_cast<__m512>(reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xFFFF, high)) << 16);
  return high;
}

// Vector i of a tile is line i's 32 k if k is contiguous, and two k's 16 lines in pairs if not. Only the first n lines
// and K k are read, the rest are zeros.
template <bool k_inner>
MATRIX_TARGET inline void read_vector(Words (&v)[1][16], int i, const Lines<bf16>& from, int64_t n, int64_t K) {
  if (k_inner) {
    const bf16* line = from.data + (i < n ? i * from.across : 0);
    v[0][i] = reinterpret_cast<Words>(_mm512_maskz_loadu_epi16(first_lanes(i < n ? K : 0), line));
  } else {
    const bf16* x = from.data + (2 * i < K ? 2 * i * from.along : 0);
    const bf16* y = from.data + (2 * i + 1 < K ? (2 * i + 1) * from.along : 0);
    const __mmask16 x_mask = static_cast<__mmask16>(first_lanes(2 * i < K ? n : 0));
    const __mmask16 y_mask = static_cast<__mmask16>(first_lanes(2 * i + 1 < K ? n : 0));
    const __m256i x16 = _mm256_maskz_loadu_epi16(x_mask, x), y16 = _mm256_maskz_loadu_epi16(y_mask, y);
    v[0][i] = reinterpret_cast<Words>(pair_up(x16, y16));
  }
}
template <bool k_inner>
MATRIX_TARGET inline void read_vector(Words (&v)[2][16], int i, const Lines<float>& from, int64_t n, int64_t K) {
  const int64_t x_k = k_inner ? 0 : 2 * i, y_k = k_inner ? tile_lines : 2 * i + 1, line = k_inner && i < n ? i : 0;
  const uint32_t lanes = first_lanes(k_inner ? (i < n ? K : 0) : n);
  const uint32_t x_mask = x_k < K ? lanes : 0, y_mask = y_k < K ? (k_inner ? lanes >> 16 : lanes) : 0;
  __m512 x = _mm512_maskz_loadu_ps(static_cast<__mmask16>(x_mask), from.at(line, x_k < K ? x_k : 0));
  __m512 y = _mm512_maskz_loadu_ps(static_cast<__mmask16>(y_mask), from.at(line, y_k < K ? y_k : 0));
  const __m256i high_x = split(x), high_y = split(y);
  const __m256i low_x = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
  const __m256i low_y = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y));
  v[0][i] = reinterpret_cast<Words>(k_inner ? join(high_x, high_y) : pair_up(high_x, high_y));
  v[1][i] = reinterpret_cast<Words>(k_inner ? join(low_x, low_y) : pair_up(low_x, low_y));
}

template <class T, bool k_inner, bool transposed>
MATRIX_TARGET inline void pack_tile(bf16* to, const Lines<T>& from, int64_t n, int64_t K) {
  Words v[parts<T>][16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) read_vector<k_inner>(v, i, from, n, K);
#pragma GCC unroll 2
  for (int part = 0; part < parts<T>; ++part) {
    if (transposed) transpose_tile(v[part]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      _mm512_store_si512(to + part * 2 * tile_size + i * step_k, reinterpret_cast<__m512i>(v[part][i]));
  }
}

// The 32 k from k on of one panel: n lines, from the first of `from`. Of b if pairs, else of a.
template <class T, bool pairs, bool k_inner>
MATRIX_TARGET inline void pack_step(bf16* to, const Lines<T>& from, int64_t k, int64_t n, int64_t K) {
  constexpr bool transposed = pairs == k_inner;
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half, to += tile_size) {
    const int64_t line = half * tile_lines, left = std::max<int64_t>(0, n - line);
    const Lines<T> part{from.at(left > 0 ? line : 0, k), from.across, from.along};
    if (left >= tile_lines && K - k >= step_k)  // with constants, without masks
      pack_tile<T, k_inner, transposed>(to, part, tile_lines, step_k);
    else
      pack_tile<T, k_inner, transposed>(to, part, left, K - k);
  }
}

// The first n lines and K k of `from` into panels, panel_size apart, each in the order in which its memory lies.
template <class T, bool pairs>
MATRIX_TARGET void pack_panels(bf16* to, int64_t panel_size, const Lines<T>& from, int64_t n, int64_t K) {
  constexpr int64_t step_size = 2 * parts<T> * tile_size;
  if (from.k_inner()) {
    for (int64_t line = 0; line < n; line += panel_lines, to += panel_size) {
      const Lines<T> panel{from.at(line, 0), from.across, from.along};
      for (int64_t k = 0; k < K; k += step_k)
        pack_step<T, pairs, true>(to + k / step_k * step_size, panel, k, n - line, K);
    }
  } else {
    for (int64_t k = 0; k < K; k += step_k, to += step_size) {
      for (int64_t line = 0; line < n; line += panel_lines)
        pack_step<T, pairs, false>(to + line / panel_lines * panel_size, {from.at(line, 0), from.across, from.along}, k,
                                   n - line, K);
    }
  }
}

// One panel of a matrix of bf16 whose k is contiguous: a copy, row by row.
MATRIX_TARGET inline void copy_rows(bf16* to, const Lines<bf16>& from, int64_t n, int64_t K) {
  for (int64_t line = 0; line < panel_lines; ++line) {
    const bf16* row = from.at(line < n ? line : 0, 0);
    const int64_t there = line < n ? K : 0;
    for (int64_t k = 0; k < K; k += step_k) {
      const __mmask32 mask = first_lanes(there - k);
      _mm512_store_si512(to + (k / step_k * panel_lines + line) * step_k,
                         _mm512_maskz_loadu_epi16(mask, row + (mask ? k : 0)));
    }
  }
}

template <class T>
MATRIX_TARGET inline void pack_rows(bf16* to, const Lines<T>& from, int64_t n, int64_t K) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (from.k_inner()) return copy_rows(to, from, n, K);
  }
  pack_panels<T, false>(to, 0, from, n, K);
}

// Into the L2 cache: part t of `count` of what packing the first n lines and K k of `from` will read.
template <class T>
MATRIX_TARGET inline void prefetch_lines(const Lines<T>& from, int64_t n, int64_t K, int64_t t, int64_t count) {
  const bool k_inner = from.k_inner();
  const int64_t rows = k_inner ? n : K, width = (k_inner ? K : n) * static_cast<int64_t>(sizeof(T));
  for (int64_t r = rows * t / count; r < rows * (t + 1) / count; ++r) {
    const char* row = reinterpret_cast<const char*>(from.data + r * (k_inner ? from.across : from.along));
    for (int64_t x = 0; x < width; x += 64) __builtin_prefetch(row + x, 0, 2);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Products of panels.

// A panel of a for the product: packed, or 32 rows of a matrix of bf16. Strides in bf16.
struct RowPanel {
  const bf16* data;
  int64_t row, step;  // from row to row, and from 32 k to the next
  const bf16* half(int64_t h) const { return data + h * tile_lines * row; }
};

// c (32, 32), set or added to, from `steps` x 32 k of a and b.
// b is loaded so that it passes through the L1 cache and leaves a there: a step, at best 64 cycles, takes 72, even for
// 640 k, instead of 88 for 384. Meanwhile 32 rows of 128 bytes from `ahead` on are fetched: what the next call
// will write.
template <int part_count>
MATRIX_TARGET inline void multiply_amx(float* c, int64_t ldc, const RowPanel& a, const bf16* b, int64_t steps,
                                       bool add, const char* ahead, int64_t ahead_row) {
  const int64_t ahead_rows = (panel_lines + steps - 1) / steps;
  const int64_t c_bytes = ldc * 4, a_bytes = a.row * 2;
  const bf16 *top = a.half(0), *bottom = a.half(1);
  float* c_bottom = c + tile_lines * ldc;
  finish_stores();
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + tile_lines, c_bytes);
    _tile_loadd(2, c_bottom, c_bytes);
    _tile_loadd(3, c_bottom + tile_lines, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, top += a.step, bottom += a.step, b += 2 * part_count * tile_size) {
    if (part_count == 2) {  // the low part of a
      _tile_stream_loadd(6, b, 64);
      _tile_loadd(4, top + 2 * tile_size, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, b + tile_size, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, bottom + 2 * tile_size, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(4, top, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, bottom, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_stream_loadd(6, b + 2 * tile_size, 64);  // the low part of b
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_stream_loadd(7, b + 3 * tile_size, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_stream_loadd(6, b, 64);
      _tile_loadd(4, top, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, b + tile_size, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, bottom, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t r = 0; r < ahead_rows; ++r, ahead += ahead_row) {
      __builtin_prefetch(ahead, 1);
      __builtin_prefetch(ahead + 64, 1);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + tile_lines, c_bytes);
  _tile_stored(2, c_bottom, c_bytes);
  _tile_stored(3, c_bottom + tile_lines, c_bytes);
}

// The same with vectors of 16 pairs: 8 rows x 2 vectors of sums at a time, which leaves registers for b and a.
MATRIX_TARGET inline void multiply_avx512(float* c, int64_t ldc, const RowPanel& a, const bf16* b, int64_t steps,
                                          bool add) {
  constexpr int rows = 8;
  for (int64_t i = 0; i < panel_lines; i += rows) {
    __m512 sum[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        sum[r][h] = add ? _mm512_loadu_ps(c + (i + r) * ldc + h * tile_lines) : _mm512_setzero_ps();
    }
    for (int64_t s = 0; s < steps; ++s) {
      const bf16* x = a.data + i * a.row + s * a.step;
      const bf16* y = b + s * 2 * tile_size;
      for (int64_t pair = 0; pair < step_k / 2; ++pair, x += 2, y += 2 * tile_lines) {
        const __m512bh y0 = reinterpret_cast<__m512bh>(_mm512_load_si512(y));
        const __m512bh y1 = reinterpret_cast<__m512bh>(_mm512_load_si512(y + tile_size));
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          int32_t two;
          __builtin_memcpy(&two, x + r * a.row, sizeof two);
          const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, y0);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, y1);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) _mm512_storeu_ps(c + (i + r) * ldc + h * tile_lines, sum[r][h]);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// The first m rows and n columns of complete sums into c, set or added.

MATRIX_TARGET inline __m512 load_masked(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
MATRIX_TARGET inline __m512 load_masked(const bf16* from, __mmask16 mask) {
  return reinterpret_cast<__m512>(
      reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, from))) << 16);
}
MATRIX_TARGET inline void store_masked(float* to, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(to, mask, x); }
MATRIX_TARGET inline void store_masked(bf16* to, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

template <class C>
MATRIX_TARGET inline void finish_sums(C* c, int64_t ldc, const float* sums, int64_t m, int64_t n, bool add) {
  const uint32_t columns = first_lanes(n);
  for (int64_t i = 0; i < std::min(m, panel_lines); ++i) {
#pragma GCC unroll 2
    for (int64_t h = 0; h < 2; ++h) {
      const __mmask16 mask = static_cast<__mmask16>(columns >> h * tile_lines);
      if (mask == 0) continue;
      C* to = c + i * ldc + h * tile_lines;
      __m512 x = _mm512_loadu_ps(sums + i * panel_lines + h * tile_lines);
      if (add) x = _mm512_add_ps(x, load_masked(to, mask));
      store_masked(to, mask, x);
    }
  }
}

}  // namespace crossply

#endif
