// Places in one stretch of memory for blocks whose lifetimes are known.
#pragma once

#include <cstddef>
#include <vector>

namespace crossply {

struct MemoryBlock {
  size_t bytes;
  int first, last;    // time indices of its life, both included
  size_t offset = 0;  // set by pack()
};

// Gives the blocks their offsets, in this order: each the lowest one at which no earlier block that is alive at the
// same time is in the way. Largest first packs tightest. Lives are within 0 .. times-1. Returns the bytes needed.
size_t pack(std::vector<MemoryBlock>& blocks, int times);

}  // namespace crossply
