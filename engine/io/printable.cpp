#include "engine/io/printable.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/io/control_characters.h"

namespace crossply {
namespace {

// Bytes of the character that starts with this one; 1 where none does.
size_t expected_length(uint8_t first) {
  return first >= 0xF0 && first <= 0xF4 ? 4 : first >= 0xE0 && first < 0xF0 ? 3 : first >= 0xC2 && first < 0xE0 ? 2 : 1;
}

bool is_continuation(char c) { return (c & 0xC0) == 0x80; }

// Is it one that a terminal shows, or a line break or tab?
bool shows(uint32_t code) { return !is_control(code) || code == '\n' || code == '\t'; }

// Does it end within its first character?
bool is_cut(std::string_view text) {
  return text.size() < expected_length(static_cast<uint8_t>(text[0])) &&
         std::all_of(text.begin() + 1, text.end(), is_continuation);
}

void escape(std::string& out, std::string_view bytes) {
  char code[8];
  for (const char c : bytes) {
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
    out += code;
  }
}

}  // namespace

Character first_character(std::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  const size_t length = expected_length(first);
  if (length == 1) return first < 0x80 ? Character{1, first} : Character{};
  uint32_t code = first & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || !is_continuation(text[i])) return {};
    code = code << 6 | (static_cast<uint8_t>(text[i]) & 0x3Fu);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  return overlong || surrogate || code > 0x10FFFF ? Character{} : Character{length, code};
}

size_t valid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (at + 8 <= text.size() && (std::memcpy(&eight, text.data() + at, 8), (eight & 0x8080808080808080u) == 0)) {
      at += 8;
      continue;
    }
    const size_t length = first_character(text.substr(at)).length;
    if (length == 0) break;
    at += length;
  }
  return at;
}

std::string Printable::add(std::string_view text) {
  const std::string all = std::exchange(waiting_, "") + std::string(text);
  std::string out;
  for (std::string_view rest = all; !rest.empty();) {
    const auto [length, code] = first_character(rest);
    if (length == 0 && is_cut(rest)) {
      waiting_ = rest;
      break;
    }
    const std::string_view bytes = rest.substr(0, std::max<size_t>(1, length));
    if (length > 0 && shows(code)) out += bytes;
    else escape(out, bytes);
    rest.remove_prefix(bytes.size());
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
