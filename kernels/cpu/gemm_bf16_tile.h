// The inside of gemm_bf16.cpp: packing operands into panels for the matrix units, and the product of two panels.
//
// A panel is 32 lines (rows of a, columns of b) of K, in steps of 32 k: for each step, and for each part (one for bf16,
// high and low for float), two tiles of 16 lines x 32 k, 1 KiB each. A tile of a holds [line][k], one of b
// [k / 2][line][k % 2]: transposed, but in pairs along k, which the units multiply and add at once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "engine/dtype.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/cpu.h"

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

// -----------------------------------------------------------------------------------------------------------------
// Packing. The intrinsics with maskz: the plain ones make g++ 12 warn of data that is not initialized.

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

// The 32 k from k on of one panel: n lines, from the first of `from`. The panel is of b if pairs, else of a.
template <class T, bool pairs, bool k_inner>
MATRIX_TARGET inline void pack_step(bf16* to, const Lines<T>& from, int64_t k, int64_t n, int64_t K) {
  constexpr bool transposed = pairs == k_inner;
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half, to += tile_size) {
    const int64_t line = half * tile_lines, left = std::max<int64_t>(0, n - line);
    const Lines<T> part{from.at(left > 0 ? line : 0, k), from.across, from.along};
    if (left >= tile_lines && K - k >= step_k)  // with constants, without masks
      pack_tile<T, k_inner, transposed>(to, part, tile_lines, step_k);
    else pack_tile<T, k_inner, transposed>(to, part, left, K - k);
  }
}

// What the 32 lines and 32 k from `from` on lie in, into the L2 cache.
template <class T>
inline void fetch_step(const Lines<T>& from) {
  const int64_t apart = from.k_inner() ? from.across : from.along;
  for (int64_t r = 0; r < step_k; ++r) {
    for (int64_t x = 0; x < step_k; x += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(from.data + r * apart + x, 0, 2);
  }
}

// The packing of n lines and K k into panels, panel_size apart, of a or, in pairs, of b: in steps, in the order in
// which memory lies.
template <class T, bool pairs>
struct Packing {
  bf16* to;
  int64_t panel_size;
  Lines<T> from;
  int64_t n, K, line = 0, k = 0;
  bool left() const { return line < n && k < K; }
  int64_t steps() const { return n > 0 ? ceil_div(n, panel_lines) * ceil_div(K, step_k) : 0; }
  // `fetch`: what a later step will read.
  MATRIX_TARGET inline void step(bool fetch) {
    constexpr int64_t step_size = 2 * parts<T> * tile_size;
    const bool k_inner = from.k_inner();
    const Lines<T> panel{from.at(line, 0), from.across, from.along};
    const T* later = k_inner ? panel.at(panel_lines, k) : panel.at(0, k + step_k);
    if (fetch) fetch_step(Lines<T>{later, from.across, from.along});
    bf16* tiles = to + line / panel_lines * panel_size + k / step_k * step_size;
    if (k_inner) {
      pack_step<T, pairs, true>(tiles, panel, k, n - line, K);
      if ((k += step_k) >= K) k = 0, line += panel_lines;
    } else {
      pack_step<T, pairs, false>(tiles, panel, k, n - line, K);
      if ((line += panel_lines) >= n) line = 0, k += step_k;
    }
  }
  // Among the products, whose loop shall stay short.
  MATRIX_TARGET __attribute__((noinline)) void step_aside() { step(false); }
  // Compiled once, though called from many places: it is long.
  MATRIX_TARGET __attribute__((noinline)) void finish(bool fetch) {
    while (left()) step(fetch);
  }
};

// Lines of memory to bring into the L2 cache one by one, long before they are used: `rows` of `width` bytes, `apart`.
// Not into the L1 cache, which waits for 16 lines at most: tiles that come from the L2 cache would stand behind them.
struct Fetch {
  const char* row;
  int64_t rows, apart, width, x = 0;
  void one() {
    if (rows <= 0) return;
    __builtin_prefetch(row + x, 0, 2);
    x += 64;
    if (x >= width) x = 0, row += apart, --rows;
  }
  int64_t lines() const { return std::max<int64_t>(0, rows) * ceil_div(width, 64); }
};
// What packing the first n lines and K k of `from` will read.
template <class T>
inline Fetch fetch_of(const Lines<T>& from, int64_t n, int64_t K) {
  constexpr int64_t size = sizeof(T);
  const char* data = reinterpret_cast<const char*>(from.data);
  if (from.k_inner()) return {data, n, from.across * size, K * size};
  return {data, n > 0 ? K : 0, from.along * size, n * size};
}

// -----------------------------------------------------------------------------------------------------------------
// What the vector units do during the products.

MATRIX_TARGET inline __m512 load_masked(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
MATRIX_TARGET inline __m512 load_masked(const bf16* from, __mmask16 mask) {
  return reinterpret_cast<__m512>(
      reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, from))) << 16);
}
MATRIX_TARGET inline void store_pair(float* to, uint32_t mask, __m512 x, __m512 y) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), x);
  if (mask >> 16) _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(mask >> 16), y);
}
MATRIX_TARGET inline void store_pair(bf16* to, uint32_t mask, __m512 x, __m512 y) {
  _mm512_mask_storeu_epi16(to, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
}

// One row of 32 sums into c; the mask says where c has columns.
template <bool accumulate, class C>
MATRIX_TARGET inline void finish_row(C* c, const float* sums, uint32_t mask) {
  __m512 x = _mm512_loadu_ps(sums), y = _mm512_loadu_ps(sums + 16);
  if (accumulate) {
    x = _mm512_add_ps(x, load_masked(c, static_cast<__mmask16>(mask)));
    y = _mm512_add_ps(y, load_masked(c + (mask >> 16 ? 16 : 0), static_cast<__mmask16>(mask >> 16)));
  }
  store_pair(c, mask, x, y);
}

// Complete sums of 32 x 32 to put into m rows and n columns of c, overwritten or accumulated: some rows at a time.
template <class C>
struct Finish {
  C* c;
  const float* sums;
  int64_t ldc, m, n;
  bool accumulate;
  MATRIX_TARGET void rows(int64_t count) {
    const int64_t end = std::min(count, m);
    const uint32_t mask = first_lanes(n);
    for (int64_t r = 0; r < end; ++r, c += ldc, sums += panel_lines) {
      if (mask == ~0u) accumulate ? finish_row<true>(c, sums, ~0u) : finish_row<false>(c, sums, ~0u);  // without masks
      else accumulate ? finish_row<true>(c, sums, mask) : finish_row<false>(c, sums, mask);
    }
    m -= end;
  }
};

// Work that is spread over the steps of products: so much of it at every step.
template <class C, class T>
struct Aside {
  Finish<C> finish{};  // of the product before
  Fetch c{};           // of a product after
  Fetch a{};           // of rows of a, and the packing of those before them: many products share both
  Packing<T, false> packing{};
  int64_t rows_a_step = 0, c_a_step = 0, a_lines = 0, a_packs = 0, a_steps = 1, a_due = 0, packs_due = 0;
  void share_c(const Fetch& later, int64_t steps) {
    c = later, c_a_step = ceil_div(c.lines(), steps), rows_a_step = ceil_div(panel_lines, steps);
  }
  void share_a(const Fetch& later, const Packing<T, false>& next, int64_t steps) {
    a = later, a_lines = later.lines(), a_due = 0;
    packing = next, a_packs = next.steps(), packs_due = 0;
    a_steps = steps;
  }
  MATRIX_TARGET void step() {
    if (finish.m > 0) finish.rows(rows_a_step);
    for (int64_t n = 0; n < c_a_step; ++n) c.one();
    for (a_due += a_lines; a_due >= a_steps; a_due -= a_steps) a.one();
    for (packs_due += a_packs; packs_due >= a_steps; packs_due -= a_steps) packing.step_aside();
  }
};

// -----------------------------------------------------------------------------------------------------------------
// Products of panels.

// c (32, 32), overwritten or accumulated, from `steps` x 32 k of a and b. a: packed, or 32 rows of a matrix of bf16. b
// is loaded so that it passes through the L1 cache and leaves a there: a step, at best 64 cycles, takes 72 instead of
// 88. At each step the vector units do a part of what else there is to do.
template <int part_count, class Work>
MATRIX_TARGET inline void multiply_amx(float* c, int64_t ldc, const PairRows& a, const bf16* b, int64_t steps,
                                       bool accumulate, Work& aside) {
  const int64_t c_bytes = ldc * 4, a_bytes = a.row * 2;
  const bf16 *top = a.at, *bottom = a.at + tile_lines * a.row;
  float* c_bottom = c + tile_lines * ldc;
  finish_stores();
  if (accumulate) {
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
    aside.step();
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + tile_lines, c_bytes);
  _tile_stored(2, c_bottom, c_bytes);
  _tile_stored(3, c_bottom + tile_lines, c_bytes);
}

}  // namespace crossply

#endif
