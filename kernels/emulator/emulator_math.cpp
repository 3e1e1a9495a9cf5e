// The arithmetic of a GPU where it is not IEEE's: see emulator.h.
#include <algorithm>

#include "kernels/emulator/emulator.h"

namespace crossply::emulator {
namespace {

uint64_t errors = 1;

constexpr int at_once = 8, columns = 8, guard_bits = 1;

int exponent_of(float x) { return static_cast<int>(std::bit_cast<uint32_t>(x) >> 23 & 0xFF) - 127; }
float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// x in units, cut off. Not finite, or too large for a tensor core's sum: any number.
int32_t units(float x) { return static_cast<int32_t>(std::max(-0x1p27f, std::min(x, 0x1p27f))); }

// d += a b for one row and at_once terms. The unit is one of the last place of 2^top, and guard_bits below. top is at
// least so large that units are normal numbers: sums that are themselves next to these lose more than on a GPU.
void add_products(float* d, const float* a, const float (*b)[columns]) {
  int top[columns];
  int32_t sum[columns];
  float plain[columns];
  for (int n = 0; n < columns; ++n) top[n] = std::max(exponent_of(d[n]), -126 + 23 + guard_bits), plain[n] = d[n];
  for (int k = 0; k < at_once; ++k)
    for (int n = 0; n < columns; ++n) {
      top[n] = std::max(top[n], exponent_of(a[k]) + exponent_of(b[k][n]));
      plain[n] += a[k] * b[k][n];
    }
  float scale[columns];
  for (int n = 0; n < columns; ++n) {
    top[n] = std::min(top[n], 127);
    scale[n] = power_of_two(23 + guard_bits - top[n]);
    sum[n] = units(d[n] * scale[n]);
  }
  for (int k = 0; k < at_once; ++k)
    for (int n = 0; n < columns; ++n) sum[n] += units(a[k] * b[k][n] * scale[n]);
  for (int n = 0; n < columns; ++n) {
    const auto exact = std::bit_cast<uint64_t>(static_cast<double>(sum[n]));
    const auto cut = static_cast<float>(std::bit_cast<double>(exact >> 29 << 29));
    d[n] = std::isfinite(plain[n]) ? cut * power_of_two(top[n] - 23 - guard_bits) : plain[n];
  }
}

}  // namespace

void multiply_tiles(float (&d)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; k += at_once) add_products(d[m], a[m] + k, b + k);
}

void seed_errors(uint64_t value) { errors = value; }

float inexact(double exact, uint64_t arguments, int most) {
  const auto rounded = static_cast<float>(exact);
  uint64_t hash = (arguments + 1) * 0x9E3779B97F4A7C15ull ^ errors * 0xC2B2AE3D27D4EB4Full;
  hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93ull;
  const int by = static_cast<int>(hash >> 33) % (2 * most + 1) - most;
  const auto bits = static_cast<int32_t>(std::bit_cast<uint32_t>(rounded));
  const int32_t size = bits & 0x7FFFFFFF;
  if (size <= most || size + most >= 0x7F800000) return rounded;
  return std::bit_cast<float>(static_cast<uint32_t>(bits + by));
}

}  // namespace crossply::emulator
