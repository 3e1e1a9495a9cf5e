// The types of a tensor's elements.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace crossply {

// The upper half of a float: 8 bits of exponent, 7 of mantissa. A storage type: kernels compute in float.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  bf16(float x) : bits(rounded(x)) {}
  bf16& operator=(float x) {  // without a temporary, which keeps g++ from making vectors of a loop
    bits = rounded(x);
    return *this;
  }
  bf16& operator+=(float x) { return *this = static_cast<float>(*this) + x; }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  // To nearest, ties to even. A NaN stays one: rounding its bits could carry out of them.
  static uint16_t rounded(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), nearest = u + 0x7FFF + ((u >> 16) & 1);
    const uint32_t nan = -static_cast<uint32_t>((u & 0x7FFFFFFF) > 0x7F800000);  // a mask instead of a branch
    return static_cast<uint16_t>(((nearest & ~nan) | ((u | 0x400000) & nan)) >> 16);
  }
};

// A number in a byte, as products on tensor cores may read it: a sign, 7 - M bits of exponent, M of mantissa. The codes
// above the one of `most`, the largest number, are NaN; where M is 2 the first of them is an infinity.
template <int M, int most>
struct Fp8 {
  static constexpr float largest = most;
  static constexpr int bias = (1 << (6 - M)) - 1;

  uint8_t bits;

  Fp8() = default;
  Fp8(float x) : bits(rounded(x)) {}
  operator float() const {
    const int exponent = (bits & 0x7F) >> M, fraction = bits & ((1 << M) - 1);
    const float value = static_cast<float>(exponent > 0 ? fraction + (1 << M) : fraction) * unit_of(exponent);
    const bool infinite = M == 2 && fraction == 0;
    const float size = value <= largest ? value
                       : infinite       ? std::numeric_limits<float>::infinity()
                                        : std::numeric_limits<float>::quiet_NaN();
    return bits < 0x80 ? size : -size;
  }

  // To nearest, ties to even, as CUDA does with __NV_SATFINITE: what is larger than the largest number, infinities too,
  // becomes that. A NaN stays one.
  static uint8_t rounded(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = u >> 24 & 0x80;
    if ((u & 0x7FFFFFFF) > 0x7F800000) return 0x7F;
    const uint32_t size = std::min(u & 0x7FFFFFFF, std::bit_cast<uint32_t>(largest));
    const int exponent = std::max(static_cast<int>(size >> 23) - 127 + bias, 1);
    // Added to 2^23 units it is rounded to whole ones, and these are the last bits of the sum.
    const float shift = 0x1p23f * unit_of(exponent);
    const auto sum = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + shift);
    const uint32_t units = sum - std::bit_cast<uint32_t>(shift);
    return static_cast<uint8_t>(sign + (static_cast<uint32_t>(exponent - 1) << M) + units);
  }

 private:
  // What the last bit of the mantissa counts for; with exponent 0 as with 1.
  static float unit_of(int exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(std::max(exponent, 1) + 127 - bias - M) << 23);
  }
};
struct e4m3 : Fp8<3, 448> {
  using Fp8::Fp8;
};
struct e5m2 : Fp8<2, 57344> {
  using Fp8::Fp8;
};

// f32 and bf16 are what activations are stored in; f64 is for the reference backend, which checks gradients; i32 holds
// tokens; e4m3 and e5m2 are what products may read instead of bf16 on a GPU.
enum class Dtype : uint8_t { f32, f64, i32, bf16, e4m3, e5m2 };

inline size_t size_of(Dtype dtype) { return std::array<size_t, 6>{4, 8, 4, 2, 1, 1}[static_cast<size_t>(dtype)]; }
inline const char* name_of(Dtype dtype) {
  return std::array{"f32", "f64", "i32", "bf16", "e4m3", "e5m2"}[static_cast<size_t>(dtype)];
}

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::f32;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::f64;
};
template <>
struct DtypeOf<int32_t> {
  static constexpr Dtype value = Dtype::i32;
};
template <>
struct DtypeOf<bf16> {
  static constexpr Dtype value = Dtype::bf16;
};
template <>
struct DtypeOf<e4m3> {
  static constexpr Dtype value = Dtype::e4m3;
};
template <>
struct DtypeOf<e5m2> {
  static constexpr Dtype value = Dtype::e5m2;
};

}  // namespace crossply
