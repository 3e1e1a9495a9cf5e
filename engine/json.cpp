#include "engine/json.h"

#include "engine/printable.h"

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
  return printable(text);
}

}  // namespace crossply
