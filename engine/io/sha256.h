// SHA-256 (FIPS 180-4), for the manifest of a checkpoint: the same digest that sha256sum prints.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace crossply {

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  std::string hex();  // the digest of all updates, 64 lower-case digits; the object is used up

 private:
  void compress(const uint8_t* block);
  // The first 32 bits of the fractional parts of the square roots of the first eight primes.
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t used_ = 0;  // bytes waiting in block_
  uint64_t total_ = 0;
};

}  // namespace crossply
