// First fit. Comparing every block with every other one takes long for thousands of layers, so what is taken is kept in
// a binary tree over the time indices. Few nodes cover a life: at most twice the tree's height. Each node has two
// unions of memory: of the blocks whose cover it belongs to, and of all that are alive at one of its times. Blocks that
// are alive together lie without many gaps, so these unions are short lists.
#include "engine/packing.h"

#include <algorithm>
#include <utility>

#include "engine/check.h"

namespace crossply {
namespace {

// A union of intervals [begin, end): disjoint, not even touching, ascending.
class Union {
 public:
  void add(size_t begin, size_t end) {
    const auto from = std::lower_bound(list_.begin(), list_.end(), begin, ends_before);
    auto to = from;
    for (; to != list_.end() && to->first <= end; ++to) {
      begin = std::min(begin, to->first);
      end = std::max(end, to->second);
    }
    if (from == to) {
      list_.insert(from, {begin, end});
      return;
    }
    *from = {begin, end};
    list_.erase(from + 1, to);
  }

  // The lowest place for so many bytes, not below `offset`.
  size_t room_for(size_t bytes, size_t offset) const {
    auto next = std::lower_bound(list_.begin(), list_.end(), offset + 1, ends_before);
    for (; next != list_.end() && next->first < offset + bytes; ++next) offset = next->second;
    return offset;
  }

 private:
  using Interval = std::pair<size_t, size_t>;
  static bool ends_before(const Interval& interval, size_t at) { return interval.second < at; }

  std::vector<Interval> list_;
};

class TimeTree {
 public:
  explicit TimeTree(int count) {
    while (leaves_ < static_cast<size_t>(count)) leaves_ *= 2;
    throughout_.resize(2 * leaves_);
    sometime_.resize(2 * leaves_);
  }

  void take(const MemoryBlock& block) {
    if (block.bytes == 0) return;
    const size_t end = block.offset + block.bytes;
    for (const size_t node : cover(block)) {
      throughout_[node].add(block.offset, end);
      sometime_[node].add(block.offset, end);
    }
    for (const size_t node : above(block)) sometime_[node].add(block.offset, end);
  }

  // A block that is alive together with this one is so throughout a node above one of its ends, or at some time of a
  // node of its cover.
  size_t lowest_place(const MemoryBlock& block) const {
    std::vector<const Union*> unions;
    for (const size_t node : cover(block)) unions.push_back(&sometime_[node]);
    for (const size_t node : above(block)) unions.push_back(&throughout_[node]);
    size_t offset = 0, before;
    do {
      before = offset;
      for (const Union* taken : unions) offset = taken->room_for(block.bytes, offset);
    } while (offset != before);
    return offset;
  }

 private:
  // The fewest nodes whose times are those of the block.
  std::vector<size_t> cover(const MemoryBlock& block) const {
    std::vector<size_t> nodes;
    size_t from = leaves_ + static_cast<size_t>(block.first), to = leaves_ + static_cast<size_t>(block.last) + 1;
    for (; from < to; from /= 2, to /= 2) {
      if (from % 2 == 1) nodes.push_back(from++);
      if (to % 2 == 1) nodes.push_back(--to);
    }
    return nodes;
  }
  // The block's first and last time, and all nodes above them.
  std::vector<size_t> above(const MemoryBlock& block) const {
    std::vector<size_t> nodes;
    size_t a = leaves_ + static_cast<size_t>(block.first), b = leaves_ + static_cast<size_t>(block.last);
    for (; a != b; a /= 2, b /= 2) nodes.insert(nodes.end(), {a, b});
    for (; a > 0; a /= 2) nodes.push_back(a);
    return nodes;
  }

  size_t leaves_ = 1;
  std::vector<Union> throughout_, sometime_;  // by node: 1 is the root, n has 2n and 2n + 1 below it
};

}  // namespace

size_t pack(std::vector<MemoryBlock>& blocks, int times) {
  TimeTree taken(times);
  size_t bytes = 0;
  for (MemoryBlock& block : blocks) {
    CHECK_THAT(0 <= block.first && block.first <= block.last && block.last < times, "a block lives from ", block.first,
               " to ", block.last, " of ", times, " time indices");
    block.offset = taken.lowest_place(block);
    taken.take(block);
    bytes = std::max(bytes, block.offset + block.bytes);
  }
  return bytes;
}

}  // namespace crossply
