#include "engine/io/shell.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "engine/io/control_characters.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

// In the shell's $'...', where \NNN is a byte: for what cannot be shown, or is not UTF-8.
std::string escaped_word(const std::string& text) {
  std::string word = "$'";
  for (size_t at = 0, length; at < text.size(); at += length) {
    const Character next = first_character(std::string_view(text).substr(at));
    length = std::max<size_t>(1, next.length);
    const bool quoted = text[at] == '\'' || text[at] == '\\';
    if (next.length > 0 && !is_control(next.code)) {
      word += (quoted ? "\\" : "") + text.substr(at, length);
      continue;
    }
    for (const char byte : text.substr(at, length)) {
      char code[8];
      std::snprintf(code, sizeof code, "\\%03o", static_cast<unsigned>(static_cast<unsigned char>(byte)));
      word += code;
    }
  }
  return word + "'";
}

}  // namespace

std::string shell_word(const std::string& text) {
  const auto plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_./+,:@%-", c); };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  const std::string shown = printable(text);
  if (shown != text || shown.find_first_of("\n\t") != std::string::npos) return escaped_word(text);
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string before_name(const std::string& called) {
  const std::string one_file = "crossply ";
  return std::filesystem::path(called).filename().string().starts_with(one_file) ? one_file : "";
}

std::string shell_command(const std::string& called, const std::string& name) {
  std::filesystem::path path = called;
  const std::string before = before_name(called);
  const std::string program = name.empty() ? path.filename().string().substr(before.size()) : name;
  if (before.empty()) return shell_word(path.replace_filename(program).string());
  return shell_word(path.replace_filename("crossply").string()) + " " + program;
}

}  // namespace crossply
