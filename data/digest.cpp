#include "data/digest.h"

#include <bit>
#include <cstring>

#include "engine/rng.h"

namespace crossply {

// Each line is a bijection of the lane for a fixed word, and of the word for a fixed lane.
void Digest::add_block(const char* block) {
  std::array<uint64_t, 4> words;
  std::memcpy(words.data(), block, sizeof words);
  for (size_t i = 0; i < 4; ++i) lanes_[i] = std::rotl((lanes_[i] ^ words[i]) * 0x9E3779B97F4A7C15ull, 29);
}

void Digest::add(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  constexpr size_t block = sizeof lanes_;
  for (size_t left = bytes; left > 0; left -= block, from += block) {
    if (left >= block) {
      add_block(from);
      continue;
    }
    char last[block] = {};
    std::memcpy(last, from, left);
    add_block(last);
    break;
  }
  lanes_[0] = mix_bits(lanes_[0] ^ bytes);  // zeros at the end count, too
}

uint64_t Digest::value() const {
  uint64_t value = 0;
  for (const uint64_t lane : lanes_) value = mix_bits(value ^ lane);
  return value;
}

}  // namespace crossply
