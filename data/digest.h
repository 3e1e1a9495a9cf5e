// Digest: 64 bits that tell whether data is still the same, at 9 GB/s on one core, where SHA-256 does 0.3 in plain code
// and 1.5 with the CPU's help. 10 GB of shards are read, looked through for the largest token and digested in three
// seconds, so nothing is remembered from one start to the next. No protection against somebody who wants to deceive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace crossply {

class Digest {
 public:
  // Depends on how the data is cut into pieces. A change inside one word of 8 bytes always shows.
  void add(const void* data, size_t bytes);
  uint64_t value() const;

 private:
  void add_block(const char* block);
  std::array<uint64_t, 4> lanes_{1, 2, 3, 4};  // every fourth word of 8 bytes each: four chains that do not wait
};

}  // namespace crossply
