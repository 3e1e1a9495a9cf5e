// Numbers as people write them. Flags, connections' options and other texts are read here and nowhere else, so that
// what was checked is what is used.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

namespace crossply {

// The whole text as one number; nothing for any other text and for what T cannot hold.
template <class T>
std::optional<T> parse_all(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Decimal digits, perhaps behind a minus: 010 is ten, and 1e3, 0x10 and 2.0 are none.
inline std::optional<int64_t> parse_integer(std::string_view text) { return parse_all<int64_t>(text); }

// A decimal number that is finite: no nan, inf or 1e400.
inline std::optional<double> parse_number(std::string_view text) {
  const auto value = parse_all<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

// true or false.
inline std::optional<bool> parse_truth(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return std::nullopt;
}

}  // namespace crossply
