// Sets of Unicode's characters, in the version of the `tokenizers` package (16.0): data/bpe/unicode.cpp has the table.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace crossply {

struct Range {
  uint32_t first, last;
};
// In order, apart from each other by at least one character.
using Ranges = std::vector<Range>;

constexpr uint32_t last_character = 0x10FFFF;

// The characters of a general category, "Lu", or of a group of them, "L"; empty for a name that is none.
Ranges characters_of(std::string_view category);

}  // namespace crossply
