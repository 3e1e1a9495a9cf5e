#include "data/bpe/character_set.h"

#include <algorithm>

namespace crossply {

Ranges in_order(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end(), [](CharacterRange a, CharacterRange b) { return a.first < b.first; });
  Ranges out;
  for (const CharacterRange range : ranges) {
    if (!out.empty() && range.first <= out.back().last + 1) out.back().last = std::max(out.back().last, range.last);
    else out.push_back(range);
  }
  return out;
}

Ranges both_of(Ranges a, const Ranges& b) {
  a.insert(a.end(), b.begin(), b.end());
  return in_order(std::move(a));
}

Ranges all_but(const Ranges& ranges) {
  Ranges out;
  uint32_t next = 0;
  for (const auto [first, last] : ranges) {
    if (first > next) out.push_back({next, first - 1});
    next = last + 1;
  }
  if (next <= last_character) out.push_back({next, last_character});
  return out;
}

bool contains(const Ranges& ranges, uint32_t character) {
  const auto above = std::upper_bound(ranges.begin(), ranges.end(), character,
                                      [](uint32_t value, CharacterRange range) { return value < range.first; });
  return above != ranges.begin() && character <= std::prev(above)->last;
}

const Ranges& white_space() {
  static const Ranges ranges = {{'\t', '\r'},     {' ', ' '},       {0x85, 0x85},     {0xA0, 0xA0},
                                {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                {0x205F, 0x205F}, {0x3000, 0x3000}};
  return ranges;
}

const Ranges& word_characters() {
  static const Ranges ranges = [] {
    Ranges all = {{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
    for (const char* category : {"L", "M", "Nd", "Nl", "Pc"}) all = both_of(std::move(all), characters_of(category));
    return all;
  }();
  return ranges;
}

void append_utf8(std::string& text, uint32_t character) {
  const auto add = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (character < 0x80) return add(character);
  if (character < 0x800) add(0xC0 | character >> 6);
  else if (character < 0x10000) add(0xE0 | character >> 12), add(0x80 | (character >> 6 & 0x3F));
  else add(0xF0 | character >> 18), add(0x80 | (character >> 12 & 0x3F)), add(0x80 | (character >> 6 & 0x3F));
  add(0x80 | (character & 0x3F));
}

}  // namespace crossply
