// Vectors for the fast CPU kernels, by the compilers' vector extensions: on machines with narrower registers they
// become several instructions. What is alike in the kernels that sum over columns stands here once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "engine/dtype.h"
#include "kernels/cpu/cpu.h"

namespace crossply {

using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

// Sixteen lanes. Where registers have eight these are two of them: of a vector of sixteen g++ would make scalar
// comparisons, and detours through memory between other ops.
#ifdef __AVX512F__
using Vec16 = float __attribute__((vector_size(64)));
using Register = Vec16;  // as wide as the registers
#else
struct Vec16 {
  Vec8 low, high;
};
#ifdef __AVX__
using Register = Vec8;
#else  // NEON, SSE2
using Register = Vec4;
#endif

#define LANE_BY_LANE(op)                                                                                         \
  [[gnu::always_inline]] inline Vec16 operator op(const Vec16& a, const Vec16& b) {                              \
    return {a.low op b.low, a.high op b.high};                                                                   \
  }                                                                                                              \
  [[gnu::always_inline]] inline Vec16 operator op(const Vec16& a, float b) { return {a.low op b, a.high op b}; } \
  [[gnu::always_inline]] inline Vec16 operator op(float a, const Vec16& b) { return {a op b.low, a op b.high}; } \
  [[gnu::always_inline]] inline void operator op##=(Vec16& a, const Vec16& b) { a = a op b; }                    \
  [[gnu::always_inline]] inline void operator op##=(Vec16& a, float b) { a = a op b; }
LANE_BY_LANE(+)
LANE_BY_LANE(-)
LANE_BY_LANE(*)
LANE_BY_LANE(/)
#undef LANE_BY_LANE
[[gnu::always_inline]] inline Vec16 operator-(const Vec16& a) { return {-a.low, -a.high}; }
#endif

template <class Vec>
constexpr int64_t lanes_of = sizeof(Vec) / sizeof(float);

// The two halves, and back.
inline void split(Vec8& low, Vec8& high, const Vec16& v) {
#ifdef __AVX512F__
  low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  low = v.low, high = v.high;
#endif
}
inline void join(Vec16& v, const Vec8& low, const Vec8& high) {
#ifdef __AVX512F__
  v = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  v = {low, high};
#endif
}

template <class Vec>
inline void load(Vec& v, const float* p) {
  std::memcpy(&v, p, sizeof(Vec));
}
template <class Vec>
inline void store(float* p, const Vec& v) {
  std::memcpy(p, &v, sizeof(Vec));
}

// Hides where a vector came from. Else g++ lets each multiply-add that uses it load it again, and with AVX2 a core can
// load no more than two vectors while it does two multiply-adds.
template <class Vec>
inline void keep_in_register(Vec& v) {
  if constexpr (sizeof(Vec) <= sizeof(Register)) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
  }
}

// to = yes in the lanes where a < b.
inline void put_where_less(Vec16& to, const Vec16& a, const Vec16& b, const Vec16& yes) {
#ifdef __AVX512F__
  to = a < b ? yes : to;
#else
  to = {a.low < b.low ? yes.low : to.low, a.high < b.high ? yes.high : to.high};
#endif
}

// The same between bf16 in memory and float in registers; storing rounds as bf16's constructor does, except that the
// instruction for it, where there is one, makes 0 of what is below the normal numbers: below 1.2e-38.
template <class Vec>
struct BitsOf;  // the integers beside a vector of floats: as wide, and half as wide
#ifdef __AVX512F__
template <>
struct BitsOf<Vec16> {
  using Word = uint32_t __attribute__((vector_size(64)));
  using Int = int32_t __attribute__((vector_size(64)));
  using Half = uint16_t __attribute__((vector_size(32)));
};
#endif
template <>
struct BitsOf<Vec8> {
  using Word = uint32_t __attribute__((vector_size(32)));
  using Int = int32_t __attribute__((vector_size(32)));
  using Half = uint16_t __attribute__((vector_size(16)));
};
template <>
struct BitsOf<Vec4> {
  using Word = uint32_t __attribute__((vector_size(16)));
  using Int = int32_t __attribute__((vector_size(16)));
  using Half = uint16_t __attribute__((vector_size(8)));
};

template <class Vec>
inline void load(Vec& v, const bf16* p) {
  typename BitsOf<Vec>::Half half;
  std::memcpy(&half, p, sizeof half);
#ifdef __AVX512F__
  if constexpr (lanes_of<Vec> == 16) {
    const __m512i words = _mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(half));
    v = reinterpret_cast<Vec>(reinterpret_cast<typename BitsOf<Vec>::Word>(words) << 16);
    return;
  }
#endif
  v = reinterpret_cast<Vec>(__builtin_convertvector(half, typename BitsOf<Vec>::Word) << 16);
}
template <class Vec>
inline void store(bf16* p, const Vec& v) {
#ifdef __AVX512BF16__  // a third of the instructions, which is what an elementwise kernel in the caches waits for
  if constexpr (lanes_of<Vec> == 16) {
    const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
    return static_cast<void>(std::memcpy(static_cast<void*>(p), &half, sizeof half));
  }
#endif
  using Word = typename BitsOf<Vec>::Word;
  const Word word = reinterpret_cast<Word>(v), rounded = word + 0x7FFF + ((word >> 16) & 1);
  const Word bits = (v != v ? word | 0x400000 : rounded) >> 16;
#ifdef __AVX512F__  // g++ makes two of every conversion of 16 lanes
  if constexpr (lanes_of<Vec> == 16) {
    const __m256i half = _mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(bits));
    return static_cast<void>(std::memcpy(static_cast<void*>(p), &half, sizeof half));
  }
#endif
  const typename BitsOf<Vec>::Half half = __builtin_convertvector(bits, typename BitsOf<Vec>::Half);
  std::memcpy(static_cast<void*>(p), &half, sizeof half);
}

#ifndef __AVX512F__
inline void load(Vec16& v, const float* p) { load(v.low, p), load(v.high, p + 8); }
inline void store(float* p, const Vec16& v) { store(p, v.low), store(p + 8, v.high); }
inline void load(Vec16& v, const bf16* p) { load(v.low, p), load(v.high, p + 8); }
inline void store(bf16* p, const Vec16& v) { store(p, v.low), store(p + 8, v.high); }
#endif

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
  Vec8 low, high;
  split(low, high, sum);
  return sum_of_lanes(low + high);
}
// to = the sums of adjacent lanes, those of a first.
inline void add_adjacent(Vec16& to, const Vec16& a, const Vec16& b) {
#ifdef __AVX512F__
  to = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
       __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  const auto half = [](Vec8& sums, const Vec16& v) {
    sums = __builtin_shufflevector(v.low, v.high, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(v.low, v.high, 1, 3, 5, 7, 9, 11, 13, 15);
  };
  Vec16 sums;
  half(sums.low, a), half(sums.high, b);
  to = sums;
#endif
}

// Sums of n terms, x[i] or a[i] * b[i], by the same additions whatever a compiler makes of loops.
inline float sum_of(const float* x, int64_t n) {
  Vec16 sum{}, v;
  float rest = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) load(v, x + i), sum += v;
  for (; i < n; ++i) rest += x[i];
  return sum_of_lanes(sum) + rest;
}
template <class S>
float dot_of(const S* a, const S* b, int64_t n) {
  Vec16 sum{}, x, y;
  float rest = 0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) load(x, a + i), load(y, b + i), sum += x * y;
  for (; i < n; ++i) rest += a[i] * b[i];
  return sum_of_lanes(sum) + rest;
}

// Sixteen elements, or the `count` that are left at an end; what is beyond is 0 after loading.
struct Whole {};
template <class S>
inline void load(Vec16& v, const S* p, Whole) {
  load(v, p);
}
template <class S>
inline void store(S* p, const Vec16& v, Whole) {
  store(p, v);
}
template <class S>
inline void load(Vec16& v, const S* p, int64_t count) {
  S part[16] = {};
  std::memcpy(static_cast<void*>(part), p, static_cast<size_t>(count) * sizeof(S));
  load(v, part);
}
template <class S>
inline void store(S* p, const Vec16& v, int64_t count) {
  S part[16];
  store(part, v);
  std::memcpy(static_cast<void*>(p), part, static_cast<size_t>(count) * sizeof(S));
}

// Makes the lanes 0 again that are beyond the end.
inline void clear_beyond(Vec16&, Whole) {}
inline void clear_beyond(Vec16& v, int64_t count) {
  float lanes[16];
  store(lanes, v);
  std::fill(lanes + count, lanes + 16, 0.f);
  load(v, lanes);
}

// Calls body(i, part) for every sixteenth i of [begin, end), where part is what load and store want to know. The ends
// go through the same instructions as the rest, so that where a range ends, as between two threads, changes no bit.
template <class F>
inline void for_vectors(int64_t begin, int64_t end, F&& body) {
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) body(i, Whole{});
  if (i < end) body(i, end - i);
}

// The same over [0, n) on all threads: for kernels that work element by element.
template <class F>
inline void for_elements(int64_t n, int64_t grain, const F& body) {
  parallel_for(n, grain, [&body](int64_t begin, int64_t end) {
    const F own = body;  // a copy on the stack, which no store of the loop can change
    for_vectors(begin, end, own);
  });
}

// p[i] = x[i], or p[i] += x[i] if accumulate: how a gradient is written.
template <bool accumulate, class S, class Part>
inline void store_or_accumulate(S* p, const Vec16& x, Part part) {
  if constexpr (!accumulate) return store(p, x, part);
  Vec16 before;
  load(before, p, part);
  store(p, x + before, part);
}

// The elements of a small tile as floats in memory, for kernels that go over them several times: f32 where it stands,
// bf16 in `scratch`. A tile that is written begins with its old values, if accumulate, and ends with write_floats.
inline const float* read_floats(float*, const float* tile, int64_t) { return tile; }
inline const float* read_floats(float* scratch, const bf16* tile, int64_t count) {
  for_vectors(0, count, [=](int64_t i, auto part) {
    Vec16 x;
    load(x, tile + i, part);
    store(scratch + i, x, part);
  });
  return scratch;
}
inline float* begin_floats(float*, float* tile, int64_t, bool) { return tile; }
inline float* begin_floats(float* scratch, bf16* tile, int64_t count, bool accumulate) {
  if (accumulate) read_floats(scratch, tile, count);
  return scratch;
}
inline void write_floats(float*, const float*, int64_t) {}
inline void write_floats(bf16* tile, const float* scratch, int64_t count) {
  for_vectors(0, count, [=](int64_t i, auto part) {
    Vec16 x;
    load(x, scratch + i, part);
    store(tile + i, x, part);
  });
}

// to[i] = from[i], converted.
template <class To, class From>
inline void copy_row(To* to, const From* from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// Kernels with a pass over each row that sums, and a second one that writes, take up to sixteen rows at a time, because
// sixteen sums over lanes cost hardly more than one; fewer of the long rows, so that they are still in the cache for
// the second pass.
constexpr int64_t max_rows = 16;
inline int64_t rows_at_once(int64_t C) { return C <= 256 ? max_rows : 4; }

// Calls body(n, count) for one such group of the rows [begin, end) after the other.
template <class F>
inline void for_row_groups(int64_t begin, int64_t end, int64_t C, F&& body) {
  for (int64_t n = begin, count; n < end; n += count) {
    count = std::min(rows_at_once(C), end - n);
    body(n, count);
  }
}

// Calls body(n, how many) for four rows together, then for each that is left: one row alone would wait for its
// additions, and sixteen of some widths would push each other out of the cache. The count is a compile-time constant.
template <class F>
inline void by_fours(int64_t rows, F&& body) {
  int64_t n = 0;
  for (; n + 4 <= rows; n += 4) body(n, std::integral_constant<int64_t, 4>{});
  for (; n < rows; ++n) body(n, std::integral_constant<int64_t, 1>{});
}

// The first pass calls this where the second one will write: else the memory would rest from writing meanwhile.
// Inlined, because g++ sees no effect in it and drops the call.
template <int64_t rows, class S>
[[gnu::always_inline]] inline void fetch_to_write(S* out, int64_t C, int64_t c) {
  constexpr int64_t line = 64 / sizeof(S);
  if (c % line == 0)
    for (int64_t n = 0; n < rows; ++n) __builtin_prefetch(out + n * C + c, 1);
}

// The largest of n > 0. In lanes by hand: no compiler vectorises a maximum of floats that may be NaN. A NaN may be lost
// here, but not in the exponentials of differences from it. Several chains, because one would wait for itself.
template <class S>
float largest_of(const S* x, int64_t n) {
  constexpr int64_t lanes = lanes_of<Register>, chains = 64 / lanes;
  float largest = x[0];
  int64_t i = 0;
  if (n >= 64) {
    Register chain[chains];
    for (int64_t c = 0; c < chains; ++c) load(chain[c], x + lanes * c);
    for (i = 64; i + 64 <= n; i += 64)
      for (int64_t c = 0; c < chains; ++c) {
        Register next;
        load(next, x + i + lanes * c);
        chain[c] = next > chain[c] ? next : chain[c];
      }
    for (const Register& each : chain)
      for (int l = 0; l < lanes; ++l) largest = std::max(largest, each[l]);
  }
  for (; i < n; ++i) largest = std::max<float>(largest, x[i]);
  return largest;
}

// exp_f32 of kernels/cpu/cpu.h, to the bit, in the lanes of a register.
template <class Vec>
inline void exp_of_register(Vec& x) {
  const Vec shifter = Vec{} + 12582912.f, lowest = Vec{} - 87.3f, highest = Vec{} + 88.7f;
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  const Vec biased = x * 1.44269504f + shifter, n = biased - shifter;
  const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec p = r * 1.9875691e-4f + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.f;
#ifdef __AVX512F__
  x = reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(0xFFFF, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  using Int = typename BitsOf<Vec>::Int;
  const Int k = reinterpret_cast<Int>(biased) - reinterpret_cast<Int>(shifter), half = k >> 1;
  x = p * reinterpret_cast<Vec>((half + 127) << 23) * reinterpret_cast<Vec>((k - half + 127) << 23);
#endif
}
inline void exp_in_place(Vec16& x) {
#ifdef __AVX512F__
  exp_of_register(x);
#else
  exp_of_register(x.low), exp_of_register(x.high);
#endif
}

// sums[i] = the sum of v[i]'s lanes, the first first, as a loop would add them. v is overwritten: rows become columns,
// by exchanging blocks of 8, of 4, of 2 and of 1.
#ifdef __AVX512F__
inline void sums_of_lanes(Vec16& sums, Vec16 (&v)[16]) {
  for (int i = 0; i < 8; ++i) {
    const Vec16 a = v[i], b = v[i + 8];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    v[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int k = 0; k < 8; ++k) {
    const int i = k / 4 * 8 + k % 4;
    const Vec16 a = v[i], b = v[i + 4];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int k = 0; k < 8; ++k) {
    const int i = k / 2 * 4 + k % 2;
    const Vec16 a = v[i], b = v[i + 2];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  sums = Vec16{};
  for (int i = 0; i < 16; i += 2) {
    const Vec16 a = v[i], b = v[i + 1];
    sums += __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    sums += __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}
#else
// Adds the lanes of v[i] to sums[i].
inline void add_lanes(Vec8& sums, Vec8 (&v)[8]) {
  for (int i = 0; i < 4; ++i) {
    const Vec8 a = v[i], b = v[i + 4];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int k = 0; k < 4; ++k) {
    const int i = k / 2 * 4 + k % 2;
    const Vec8 a = v[i], b = v[i + 2];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 8; i += 2) {
    const Vec8 a = v[i], b = v[i + 1];
    sums += __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
    sums += __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
}
inline void sums_of_lanes(Vec16& sums, Vec16 (&v)[16]) {
  Vec8 rows[8];
  const auto add = [&](Vec8& to, int first) {
    to = Vec8{};
    for (int i = 0; i < 8; ++i) rows[i] = v[first + i].low;
    add_lanes(to, rows);
    for (int i = 0; i < 8; ++i) rows[i] = v[first + i].high;
    add_lanes(to, rows);
  };
  add(sums.low, 0), add(sums.high, 8);
}
#endif

}  // namespace crossply
