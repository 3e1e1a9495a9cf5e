// Vectors for the fast CPU kernels, by the compilers' vector extensions: on machines with narrower registers they
// become several instructions. What is alike in the kernels that sum over columns stands here once.
#pragma once

#include <cstdint>
#include <cstring>

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
