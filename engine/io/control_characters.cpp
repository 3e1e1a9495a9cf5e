#include "engine/io/control_characters.h"

#include <algorithm>
#include <cstdio>

#include "engine/io/printable.h"

namespace crossply {

bool is_control(uint32_t code) {
  const auto within = [code](uint32_t first, uint32_t last) { return code >= first && code <= last; };
  return code < 0x20 || within(0x7F, 0x9F) || code == 0x061C || within(0x200E, 0x200F) || within(0x2028, 0x202E) ||
         within(0x2066, 0x2069);
}

std::string printable_json(std::string_view json) {
  std::string out;
  for (size_t length; !json.empty(); json.remove_prefix(length)) {
    const Character next = first_character(json);
    length = std::max<size_t>(1, next.length);
    if (next.length == 0 || next.code < 0x20 || !is_control(next.code)) {  // below 0x20 there is only white space
      out += json.substr(0, length);
      continue;
    }
    char code[16];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(next.code));
    out += code;
  }
  return out;
}

}  // namespace crossply
