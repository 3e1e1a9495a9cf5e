#include "cli/shell.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace crossply {

std::string shell_word(const std::string& text) {
  const auto plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_./+,:@%-", c); };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

}  // namespace crossply
