#include "engine/json.h"

namespace crossply {

bool is_nested_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;  // whatever follows does not end the string
    else if (c == '"') in_string = !in_string;
    else if (!in_string && (c == '[' || c == '{') && ++depth > max_json_depth) return true;
    else if (!in_string && (c == ']' || c == '}')) --depth;
  }
  return false;
}

std::string utf8_or_escaped(const std::string& text) {
  try {
    nlohmann::json(text).dump();
    return text;
  } catch (const nlohmann::json::exception&) {
  }
  std::string out;
  for (const char c : text) {
    const unsigned byte = static_cast<unsigned char>(c);
    const char* digits = "0123456789abcdef";
    if (byte < 0x80) out += c;
    else out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
  }
  return out;
}

}  // namespace crossply
