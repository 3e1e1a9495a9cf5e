// The matrix units of x86 CPUs that multiply bf16 and sum in float: which one this machine has, AMX's tiles, and
// AVX-512's products of pairs.
//
// The compiler's -march says nothing here (g++ 12 knows CPUs with AMX by the name of older ones): code for a unit
// carries MATRIX_TARGET, and runs only where matrix_unit() says so. A lambda, and a function that is called without
// being inlined, do not inherit the attribute.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/dtype.h"

#if defined(__x86_64__) && defined(__linux__)
#define CROSSPLY_MATRIX_UNITS 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MATRIX_TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#else
#define CROSSPLY_MATRIX_UNITS 0
#endif

namespace crossply {

// Each has what those before it have; none is also every CPU that this header does not know.
enum class MatrixUnit { none, avx512_bf16, amx };

// The unit that CPU and kernel both offer. Linux gives tiles to a process that asks, once and for all its threads.
inline MatrixUnit detect_matrix_unit() {
#if CROSSPLY_MATRIX_UNITS
  uint32_t a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return MatrixUnit::none;  // no xgetbv
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t vector_state = 0xE6, tile_state = 3u << 17, vector_features = 0xC0030000;  // of leaf 7's ebx
  if ((low & vector_state) != vector_state) return MatrixUnit::none;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & vector_features) != vector_features) return MatrixUnit::none;
  const bool tiles = (d >> 24 & 1) && (d >> 22 & 1) && (low & tile_state) == tile_state;  // amx-tile, amx-bf16
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return MatrixUnit::none;
  constexpr long request_permission = 0x1023, tile_data = 18;
  const bool may = tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return may ? MatrixUnit::amx : MatrixUnit::avx512_bf16;
#else
  return MatrixUnit::none;
#endif
}

inline const MatrixUnit best_matrix_unit = detect_matrix_unit();
inline MatrixUnit matrix_unit_in_use = best_matrix_unit;

inline MatrixUnit matrix_unit() { return matrix_unit_in_use; }
// For tests: this unit, or the best there is where that is less. Not while other threads compute.
inline void use_matrix_unit(MatrixUnit unit) { matrix_unit_in_use = unit < best_matrix_unit ? unit : best_matrix_unit; }

#if CROSSPLY_MATRIX_UNITS

// All eight tiles as large as they can be: 16 rows of 64 bytes. A constant, because g++ 12 thinks that loading it reads
// 8 bytes, and would drop the stores of the others.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
inline constexpr TileConfig tile_config;

// A thread's use of tiles: begin, then products, then end, after which a context switch costs no more than before.
// Nothing where products are by vectors.
MATRIX_TARGET inline void begin_tiles() {
  if (matrix_unit() == MatrixUnit::amx) _tile_loadconfig(&tile_config);
}
MATRIX_TARGET inline void end_tiles() {
  if (matrix_unit() == MatrixUnit::amx) _tile_release();
}

// g++ does not know that a tile's load reads memory: to stand between the stores and the loads.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// A mask of the first n lanes, of all if n is larger.
inline uint32_t first_lanes(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// Shuffled by the compilers' own vectors: g++ 12 warns that the intrinsics read data that is not initialized.
using Words = uint32_t __attribute__((vector_size(64)));

// (a0, b0, a1, b1, ...) in two vectors.
MATRIX_TARGET inline void zip(Words& low, Words& high, const Words& a, const Words& b) {
  low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
// 16 x 16 words. A zip of both halves moves the bits of a word's position (row, lane) by one place; four swap them.
MATRIX_TARGET inline void transpose_tile(Words (&v)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Words w[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) zip(w[2 * i], w[2 * i + 1], v[i], v[i + 8]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = w[i];
  }
}

// Factors and sums of multiply_pairs; strides in elements. A tile of b holds 32 k of 16 columns, each vector two k of
// all of them in pairs, as AMX has it.
struct PairRows {
  const bf16* at;
  int64_t row, step;  // from row to row, and from 32 k to the next
};
struct PairTiles {
  const bf16* at;
  int64_t column, step;  // from 16 columns to the next, and from 32 k to the next
};
struct PairSums {
  float* at;
  int64_t row, column;  // from row to row, and from 16 columns to the next
};

// c = [c +] a b by vectors of 16 pairs, `rows` (a multiple of 8) x 16 `columns` of c, from `steps` x 32 k: 8 rows at a
// time, which leaves registers for the factors.
template <int columns>
MATRIX_TARGET inline void multiply_pairs(const PairSums& c, const PairRows& a, const PairTiles& b, int64_t rows,
                                         int64_t steps, bool accumulate) {
  constexpr int block = 8, pairs = 16, pair_columns = 32;
  for (int64_t i = 0; i < rows; i += block) {
    float* const to = c.at + i * c.row;
    __m512 sum[block][columns];
#pragma GCC unroll 8
    for (int r = 0; r < block; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < columns; ++h)
        sum[r][h] = accumulate ? _mm512_loadu_ps(to + r * c.row + h * c.column) : _mm512_setzero_ps();
    for (int64_t s = 0; s < steps; ++s) {
      const bf16* x = a.at + i * a.row + s * a.step;
      const bf16* y = b.at + s * b.step;
      for (int64_t pair = 0; pair < pairs; ++pair, x += 2, y += pair_columns) {
        __m512bh right[columns];
#pragma GCC unroll 2
        for (int h = 0; h < columns; ++h) right[h] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(y + h * b.column));
#pragma GCC unroll 8
        for (int r = 0; r < block; ++r) {
          int32_t two;
          std::memcpy(&two, x + r * a.row, sizeof two);
          const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
#pragma GCC unroll 2
          for (int h = 0; h < columns; ++h) sum[r][h] = _mm512_dpbf16_ps(sum[r][h], left, right[h]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < block; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < columns; ++h) _mm512_storeu_ps(to + r * c.row + h * c.column, sum[r][h]);
  }
}

#endif

}  // namespace crossply
