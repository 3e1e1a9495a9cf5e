#include "data/bpe/unicode.h"

namespace crossply {

Ranges characters_of(std::string_view category) {
  Ranges ranges;
  uint32_t next = 0;
  for (const int32_t run : category_runs()) {
    const uint32_t first = next;
    next += static_cast<uint32_t>(run) / 32;
    if (!category_names()[static_cast<size_t>(run % 32)].starts_with(category)) continue;
    if (!ranges.empty() && ranges.back().last + 1 == first) ranges.back().last = next - 1;
    else ranges.push_back({first, next - 1});
  }
  return ranges;
}

}  // namespace crossply
