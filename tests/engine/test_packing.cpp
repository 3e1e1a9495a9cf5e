#include "engine/packing.h"

#include <algorithm>

#include "engine/rng.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

bool together(const MemoryBlock& a, const MemoryBlock& b) { return a.first <= b.last && b.first <= a.last; }

// The lowest place by looking at all blocks before it.
size_t lowest_place(const std::vector<MemoryBlock>& blocks, size_t i) {
  std::vector<MemoryBlock> others;
  for (size_t j = 0; j < i; ++j)
    if (together(blocks[i], blocks[j])) others.push_back(blocks[j]);
  std::sort(others.begin(), others.end(),
            [](const MemoryBlock& a, const MemoryBlock& b) { return a.offset < b.offset; });
  size_t offset = 0;
  for (const MemoryBlock& other : others) {
    if (offset + blocks[i].bytes <= other.offset) break;
    offset = std::max(offset, other.offset + other.bytes);
  }
  return offset;
}

// What a step of L layers looks like: blocks that live from a layer's forward to its backward, and short-lived ones.
std::vector<MemoryBlock> nested(int layers) {
  std::vector<MemoryBlock> blocks;
  const int times = 4 * layers;
  for (int i = 0; i < layers; ++i) {
    blocks.push_back({512, 2 * i, times - 1 - 2 * i});
    blocks.push_back({256, 2 * i + 1, 2 * i + 1});
    blocks.push_back({512, times - 2 - 2 * i, times - 1 - 2 * i});
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const MemoryBlock& a, const MemoryBlock& b) { return a.bytes > b.bytes; });
  return blocks;
}

}  // namespace

TEST_CASE("packing: every block is at the lowest place that those before it leave") {
  Random random(1, 2);
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    const int times = 1 + static_cast<int>(random.below(70));
    std::vector<MemoryBlock> blocks;
    for (int64_t i = 0, n = random.below(60); i < n; ++i) {
      const int a = static_cast<int>(random.below(times)), b = static_cast<int>(random.below(times));
      blocks.push_back({static_cast<size_t>(random.below(7)) * 256, std::min(a, b), std::max(a, b)});
    }
    if (round % 2 == 0)
      std::stable_sort(blocks.begin(), blocks.end(),
                       [](const MemoryBlock& a, const MemoryBlock& b) { return a.bytes > b.bytes; });
    const size_t bytes = pack(blocks, times);
    size_t want = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
      CHECK(blocks[i].offset == lowest_place(blocks, i));
      want = std::max(want, blocks[i].offset + blocks[i].bytes);
    }
    CHECK(bytes == want);
  }
}

TEST_CASE("packing: nested lives need no more than what is alive together, also a hundred thousand of them") {
  // Comparing all pairs of so many would take minutes.
  constexpr int layers = 40000;
  std::vector<MemoryBlock> blocks = nested(layers);
  CHECK(pack(blocks, 4 * layers) == size_t{512} * (layers + 1));
}

TEST_CASE("packing: a life outside the time indices is an error") {
  for (const auto& [first, last] : std::vector<std::pair<int, int>>{{-1, 0}, {2, 1}, {0, 4}}) {
    std::vector<MemoryBlock> blocks{{256, first, last}};
    CHECK_THROWS_AS(pack(blocks, 4), Error);
  }
}
