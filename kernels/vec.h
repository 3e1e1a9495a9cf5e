// Vectors for the fast CPU kernels, by the compilers' vector extensions: on machines with narrower registers they
// become several instructions. What is alike in the kernels that sum over columns stands here once.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "engine/dtype.h"

namespace crossply {

using Vec16 = float __attribute__((vector_size(64)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

template <class Vec>
constexpr int64_t lanes_of = sizeof(Vec) / sizeof(float);

template <class Vec>
inline void load(Vec& v, const float* p) {
  std::memcpy(&v, p, sizeof(Vec));
}
template <class Vec>
inline void store(float* p, const Vec& v) {
  std::memcpy(p, &v, sizeof(Vec));
}

// The same between bf16 in memory and float in registers; storing rounds as bf16's constructor does.
template <class Vec> struct BitsOf;  // the integers beside a vector of floats: as wide, and half as wide
template <> struct BitsOf<Vec16> {
  using Word = uint32_t __attribute__((vector_size(64)));
  using Half = uint16_t __attribute__((vector_size(32)));
};
template <> struct BitsOf<Vec8> {
  using Word = uint32_t __attribute__((vector_size(32)));
  using Half = uint16_t __attribute__((vector_size(16)));
};
template <> struct BitsOf<Vec4> {
  using Word = uint32_t __attribute__((vector_size(16)));
  using Half = uint16_t __attribute__((vector_size(8)));
};

template <class Vec>
inline void load(Vec& v, const bf16* p) {
  typename BitsOf<Vec>::Half half;
  std::memcpy(&half, p, sizeof half);
#ifdef __AVX512F__
  if constexpr (lanes_of<Vec> == 16) {
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(half));
    v = reinterpret_cast<Vec>(reinterpret_cast<typename BitsOf<Vec>::Word>(wide) << 16);
    return;
  }
#endif
  v = reinterpret_cast<Vec>(__builtin_convertvector(half, typename BitsOf<Vec>::Word) << 16);
}
template <class Vec>
inline void store(bf16* p, const Vec& v) {
  using Word = typename BitsOf<Vec>::Word;
  const Word word = reinterpret_cast<Word>(v), rounded = word + 0x7FFF + ((word >> 16) & 1);
  const Word bits = (v != v ? word | 0x400000 : rounded) >> 16;
#ifdef __AVX512F__  // g++ makes two of every conversion of 16 lanes
  if constexpr (lanes_of<Vec> == 16) {
    const __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(bits));
    return static_cast<void>(std::memcpy(static_cast<void*>(p), &narrow, sizeof narrow));
  }
#endif
  const typename BitsOf<Vec>::Half half = __builtin_convertvector(bits, typename BitsOf<Vec>::Half);
  std::memcpy(static_cast<void*>(p), &half, sizeof half);
}

// One element, for the end of a loop over vectors.
inline void load(float& v, const bf16* p) { v = *p; }
inline void store(bf16* p, const float& v) { *p = v; }

// Halving by shuffles: from a loop over the lanes g++ makes a detour through memory.
inline float sum_of_lanes(float sum) { return sum; }
inline float sum_of_lanes(const Vec8& sum) {
  const Vec4 half = __builtin_shufflevector(sum, sum, 0, 1, 2, 3) + __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
  return (half[0] + half[2]) + (half[1] + half[3]);
}
inline float sum_of_lanes(const Vec16& sum) {
  const Vec8 half = __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
  return sum_of_lanes(half);
}

}  // namespace crossply
