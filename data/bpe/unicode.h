// Sets of Unicode's characters, in the version of the `tokenizers` package (16.0): unicode_table.cpp has the table.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace crossply {

struct CharacterRange {
  uint32_t first, last;
};
// In order, apart from each other by at least one character.
using Ranges = std::vector<CharacterRange>;

constexpr uint32_t last_character = 0x10FFFF;

// The characters of a general category, "Lu", or of a group of them, "L"; empty for a name that is none.
Ranges characters_of(std::string_view category);

// The table. Its names, of two letters each, and the runs of characters of one category, from 0 on: 32 times their
// number, plus the category's place among the names.
std::span<const std::string_view> category_names();
std::span<const int32_t> category_runs();

}  // namespace crossply
