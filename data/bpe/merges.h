// The heart of byte-pair encoding: of a piece of text, of its bytes or characters, the pair of neighbours whose merge
// stands first in the list is merged, the leftmost of equal ones, again and again.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace crossply {

class Merges {
 public:
  struct Result {
    int32_t rank, id;  // rank -1: the pair is not merged
  };
  void reserve(size_t count);
  // A pair that is there already gets the new rank. Not after find().
  void add(int32_t left, int32_t right, Result result);
  Result find(int32_t left, int32_t right) const {
    const uint64_t key = key_of(left, right);
    for (size_t at = place_of(key);; at = (at + 1) & mask_)
      if (slots_[at].key == key || slots_[at].key == none) return slots_[at].result;
  }
  // The pairs that are merged, those first that are merged first.
  std::vector<std::pair<int32_t, int32_t>> in_order() const;
  // Merges the symbols in place, in time n log n.
  void apply(std::vector<int32_t>& symbols) const;

 private:
  static constexpr uint64_t none = ~uint64_t{0};
  struct Slot {
    uint64_t key = none;
    Result result{-1, -1};
  };
  static uint64_t key_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  size_t place_of(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift_; }
  void apply_to_few(std::vector<int32_t>& symbols) const;
  void apply_to_many(std::vector<int32_t>& symbols) const;

  std::vector<Slot> slots_ = std::vector<Slot>(2);  // at least half of them free
  size_t mask_ = 1, count_ = 0;
  int shift_ = 63;
};

}  // namespace crossply
