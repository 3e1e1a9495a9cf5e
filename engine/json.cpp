#include "engine/json.h"

#include "engine/numbers.h"
#include "engine/printable.h"

namespace crossply {

std::string unfit_part(std::string_view text) {
  if (const size_t zero = text.find('\0'); zero != text.npos) return str("a zero byte, its byte ", zero + 1);
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;  // whatever follows does not end the string
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '[' || c == '{')) {
      if (++depth > max_json_depth) return str("more than ", max_json_depth, " levels: nested too deep");
    } else if (!in_string && (c == ']' || c == '}')) {
      --depth;
    } else if (!in_string && c >= '0' && c <= '9') {
      const std::string_view number = text.substr(i, text.find_first_not_of("0123456789.eE+-", i) - i);
      if (!parse_number(number)) return str("the number ", excerpt(number), ", too large or too small for a double");
      i += number.size() - 1;
    }
  }
  return "";
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
