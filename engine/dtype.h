// The types of a tensor's elements.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

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

// f32 and bf16 are what activations are stored in; f64 is for the reference backend, which checks gradients; i32 holds
// tokens.
enum class Dtype : uint8_t { f32, f64, i32, bf16 };

inline size_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::bf16 ? 2 : 4; }
inline const char* name_of(Dtype dtype) {
  return dtype == Dtype::f32 ? "f32" : dtype == Dtype::f64 ? "f64" : dtype == Dtype::i32 ? "i32" : "bf16";
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

}  // namespace crossply
