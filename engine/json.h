// JSON from outside, files, lines and flags alike, is parsed here and nowhere else, but for the headers of safetensors
// files, which are never held as a tree. What comes out is in UTF-8 and
// nested at most max_json_depth deep, so that it can be copied, compared and printed: each level of that takes stack.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "engine/check.h"

namespace crossply {

// No file of a model or a run comes near it: a tokenizer of Hugging Face's has about 8.
constexpr int max_json_depth = 100;

// Counts the brackets outside of strings; right for JSON, and for anything else the parser refuses.
bool is_nested_too_deep(std::string_view text);

// A discarded value (is_discarded()) where `text` is not JSON or nested too deep. Json: nlohmann::json or ordered_json.
template <class Json = nlohmann::json>
Json try_parse_json(std::string_view text) {
  return is_nested_too_deep(text) ? Json(nlohmann::json::value_t::discarded) : Json::parse(text, nullptr, false);
}

// The same, but such a text is Exit::bad_data; `where` names its file.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where) {
  if (is_nested_too_deep(text)) fail(Exit::bad_data, where, ": JSON nested more than ", max_json_depth, " deep");
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    fail(Exit::bad_data, where, ": is not a JSON object in UTF-8: wrong at byte ", error.byte);
  } catch (const nlohmann::json::out_of_range&) {
    fail(Exit::bad_data, where, ": JSON with a number that is too large");
  }
}

// For JSON, which is in UTF-8, while a file name may be any bytes: the text itself if it is UTF-8, else printable().
std::string utf8_or_escaped(const std::string& text);

}  // namespace crossply
