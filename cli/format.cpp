#include "cli/format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engine/io/printable.h"

namespace crossply {

std::string format_seconds(double seconds) {
  const long s = std::lround(seconds);
  char text[32];
  if (s >= 3600) std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  else std::snprintf(text, sizeof text, "%ld:%02ld", s / 60, s % 60);
  return text;
}

std::string format_count(int64_t count) {
  std::string digits = std::to_string(count), out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && digits[i - 1] != '-' && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string with_article(const std::string& arch) {
  return (arch.starts_with('a') || arch == "mhc" || arch.starts_with("mhc+") ? "an " : "a ") + arch;
}

std::string format_number(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string wrap(const std::string& text, size_t width, size_t indent) {
  std::string out;
  size_t column = 0, hang = 0;
  auto new_line = [&] { out += "\n" + std::string(indent, ' '), column = 0; };
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '\n') {
      new_line(), ++at;
      hang = 2;
      continue;
    }
    const size_t end = std::min(text.find_first_of(" \n", at), text.size());
    const size_t length = end - at;
    if (column > 0 && column + 1 + length > width) new_line(), out.append(hang, ' '), column = hang;
    else if (column > 0) out += ' ', ++column;
    out += text.substr(at, length), column += length;
    at = end + (end < text.size() && text[end] == ' ');
  }
  return out;
}

namespace {

// What it takes on a terminal, where every character is one column wide: of UTF-8, all bytes but those that go on.
size_t columns_of(const std::string& text) {
  return static_cast<size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns_of(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string room(widths[i] - columns_of(row[i]), ' ');
      out += i == 0 ? row[i] + (row.size() > 1 ? room : "") : "  " + room + row[i];
    }
    out += "\n";
  }
  return out;
}

std::string format_markdown(const std::string& text) {
  std::string out;
  for (const char c : printable(text)) {
    if (c == '|') out += '\\';
    if (c == '<') out += "&lt;";
    else out += c == '\n' || c == '\r' ? ' ' : c;
  }
  return out;
}

std::string format_markdown_row(const std::vector<std::string>& cells) {
  std::string out = "|";
  for (const std::string& text : cells) out += " " + format_markdown(text) + " |";
  return out + "\n";
}

}  // namespace crossply
