// Deterministic random numbers without state: every number is a hash of (seed, stream, index), so it does not matter
// who draws first, on how many threads, or whether a run was resumed. `stream` says what the numbers are for.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace crossply {

// The finalizer of SplitMix64: every input bit changes every output bit with probability one half.
inline uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// 64 random bits for (seed, stream, index).
inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  uint64_t x = mix_bits(seed + golden);
  x = mix_bits(x ^ (stream + 2 * golden));
  return mix_bits(x + (index + 1) * golden);
}

// Uniform in [0, 1), a multiple of 2^-53.
inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Standard normal, of two uniform numbers in [0, 1) (Box and Muller's transform).
inline double normal_of(double first, double second) {
  const double u = 1.0 - first;  // in (0, 1]: its logarithm is finite
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * second);
}
// Each index uses two hashes of its own.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  return normal_of(random_uniform(seed, stream, 2 * index), random_uniform(seed, stream, 2 * index + 1));
}

// 64 bits from the operating system, others at every call: to tell runs and jobs apart, never for a run's numbers. Not
// std::random_device, for whose sake a package would need glibc 2.36. Throws Exit::io.
uint64_t system_random_bits();

// A stream number from a name, the same on every machine (FNV-1a).
inline uint64_t stream_of(std::string_view name) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return h;
}

// The same numbers drawn in sequence, for generators that need an unknown count of them.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  uint64_t bits() { return random_bits(seed_, stream_, index_++); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Uniform in {0, ..., n-1}, n >= 1; the bias of the multiplication is below n / 2^64.
  int64_t below(int64_t n) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(bits()) * static_cast<uint64_t>(n)) >> 64);
  }

 private:
  uint64_t seed_, stream_, index_ = 0;
};

}  // namespace crossply
