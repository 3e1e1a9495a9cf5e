// JSON from outside, files, lines and flags alike, is parsed here and nowhere else, but for the headers of safetensors
// files, which are never held as a tree. What comes out is in UTF-8 and
// nested at most max_json_depth deep, so that it can be copied, compared and printed: each level of that takes stack.
#pragma once

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "engine/check.h"

namespace crossply {

// No file of a model or a run comes near it: a tokenizer of Hugging Face's has about 8.
constexpr int max_json_depth = 100;

// What the parser would take and should not, in words; "" if there is nothing of the kind: too deep a nesting, a zero
// byte, where it takes the text to end, or a number like 1e-400, which it reads as 0. Right for JSON; anything else the
// parser refuses.
std::string unfit_part(std::string_view text);

// What is wrong with a text that the parser refused, and at which byte, counted from 0. read: how many bytes the parser
// had read; words: its own message.
std::string json_fault(std::string_view text, size_t read, std::string_view words);

// The library's parser and printer take long to compile: engine/io/json.cpp alone does, and others call these functions
// instead of parse() and dump(). Json: nlohmann::json or ordered_json.

// A discarded value (is_discarded()) where `text` is not JSON or unfit.
template <class Json = nlohmann::json>
Json try_parse_json(std::string_view text);

// The same, but such a text is Exit::bad_data; `where` names its file.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where);

// Parses a text that is known to be JSON. Throws nlohmann::json::parse_error.
template <class Json = nlohmann::json>
Json known_json(std::string_view text);

// In one line, or with so many spaces a level. Throws nlohmann::json::type_error where a text is not UTF-8.
std::string json_text(const nlohmann::json& value, int indent = -1);
std::string json_text(const nlohmann::ordered_json& value, int indent = -1);
// The same, but what is not UTF-8 becomes U+FFFD.
std::string json_text_mended(const nlohmann::json& value, int indent = -1);
std::string json_text_mended(const nlohmann::ordered_json& value, int indent = -1);

// Whether a value is of T's type, and a number finite, one that T can hold, and within these bounds.
template <class T>
bool holds(const nlohmann::json& value, double least = -std::numeric_limits<double>::max(),
           double most = std::numeric_limits<double>::max()) {
  const auto within = [&](double number) { return number >= least && number <= most; };
  if constexpr (std::is_same_v<T, std::string>) return value.is_string();
  else if constexpr (std::is_same_v<T, bool>) return value.is_boolean();
  else if constexpr (std::is_floating_point_v<T>) return value.is_number() && within(value.get<double>());
  else if (value.is_number_unsigned())
    return value.get<uint64_t>() <= uint64_t{std::numeric_limits<T>::max()} && within(value.get<double>());
  else return std::is_signed_v<T> && value.is_number_integer() && within(value.get<double>());
}

// The text of a key; "" where there is none.
inline std::string text_at(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);  // its end where this is no object
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// JSON has no NaN and no infinity.
inline nlohmann::json number_or_null(double number) {
  return std::isfinite(number) ? nlohmann::json(number) : nlohmann::json();
}
// Of a list, or a list of lists.
template <class Number>
nlohmann::json numbers_or_nulls(const std::vector<Number>& numbers) {
  nlohmann::json list = nlohmann::json::array();
  for (const Number& x : numbers)
    if constexpr (std::is_same_v<Number, double>) list.push_back(number_or_null(x));
    else list.push_back(numbers_or_nulls(x));
  return list;
}

// For JSON, which is in UTF-8, while a file name may be any bytes: the text itself if it is UTF-8, else printable().
std::string utf8_or_escaped(const std::string& text);

}  // namespace crossply
