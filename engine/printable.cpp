#include "engine/printable.h"

#include <cstdint>
#include <cstdio>
#include <utility>

namespace crossply {
namespace {

// Bytes of the character that starts with this one; 1 where none does.
size_t expected_length(uint8_t first) {
  return first >= 0xF0 && first <= 0xF4 ? 4 : first >= 0xE0 && first < 0xF0 ? 3 : first >= 0xC2 && first < 0xE0 ? 2 : 1;
}

// Is it a whole character that a terminal shows, or a line break or tab?
bool shows(std::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 1) return (first >= 0x20 && first < 0x7F) || first == '\n' || first == '\t';
  uint32_t code = first & (0x7Fu >> character.size());
  for (const char c : character.substr(1)) code = code << 6 | (static_cast<uint8_t>(c) & 0x3Fu);
  const uint32_t least = character.size() == 2 ? 0xA0 : character.size() == 3 ? 0x800 : 0x10000;  // 0x80..0x9F control
  return code >= least && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
}

void escape(std::string& out, std::string_view bytes) {
  char code[8];
  for (const char c : bytes) {
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
    out += code;
  }
}

}  // namespace

std::string Printable::add(std::string_view text) {
  const std::string all = std::exchange(waiting_, "") + std::string(text);
  std::string out;
  for (size_t begin = 0; begin < all.size();) {
    const size_t want = expected_length(static_cast<uint8_t>(all[begin]));
    size_t length = 1;
    while (length < want && begin + length < all.size() && (all[begin + length] & 0xC0) == 0x80) ++length;
    const std::string_view character(&all[begin], length);
    begin += length;
    if (length < want && begin == all.size()) waiting_ = character;
    else if (length == want && shows(character)) out += character;
    else escape(out, character);
  }
  return out;
}

std::string Printable::finish() {
  std::string out;
  escape(out, std::exchange(waiting_, ""));
  return out;
}

std::string printable(std::string_view text) {
  Printable whole;
  std::string out = whole.add(text);
  return out + whole.finish();
}

std::string excerpt(std::string_view text) {
  constexpr size_t most = 120;  // bytes
  // Printable keeps a character that is cut in two.
  std::string out = text.size() > most ? Printable().add(text.substr(0, most)) + "..." : printable(text);
  for (char& c : out)
    if (c == '\n' || c == '\t') c = ' ';
  return out;
}

}  // namespace crossply
