#include "engine/io/byte_names.h"

#include <cstdint>
#include <string_view>

#include "engine/io/printable.h"

namespace crossply {
namespace {

constexpr uint32_t base = 0xEF00;  // bytes from 0x80 on: all others are UTF-8

bool stands_for_a_byte(uint32_t code) { return code >= base + 0x80 && code <= base + 0xFF; }

std::string character_for(unsigned char byte) {
  const uint32_t code = base + byte;
  return {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3F)),
          static_cast<char>(0x80 | (code & 0x3F))};
}

}  // namespace

std::string name_as_utf8(const std::string& bytes) {
  std::string text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const Character first = first_character(rest);
    const size_t length = first.length > 0 ? first.length : 1;
    const bool as_is = first.length > 0 && !stands_for_a_byte(first.code);
    for (const char byte : rest.substr(0, length))
      text += as_is ? std::string(1, byte) : character_for(static_cast<unsigned char>(byte));
    rest.remove_prefix(length);
  }
  return text;
}

std::string name_from_utf8(const std::string& text) {
  std::string bytes;
  for (std::string_view rest = text; !rest.empty();) {
    const Character first = first_character(rest);
    const size_t length = first.length > 0 ? first.length : 1;
    if (first.length > 0 && stands_for_a_byte(first.code)) bytes += static_cast<char>(first.code - base);
    else bytes += rest.substr(0, length);
    rest.remove_prefix(length);
  }
  return bytes;
}

}  // namespace crossply
