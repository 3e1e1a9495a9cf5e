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

// What the parser would take and should not, in words; "" if there is nothing of the kind: too deep a nesting, a zero
// byte, where it takes the text to end, or a number like 1e-400, which it reads as 0. Right for JSON; anything else the
// parser refuses.
std::string unfit_part(std::string_view text);

// A discarded value (is_discarded()) where `text` is not JSON or unfit. Json: nlohmann::json or ordered_json.
template <class Json = nlohmann::json>
Json try_parse_json(std::string_view text) {
  return unfit_part(text).empty() ? Json::parse(text, nullptr, false) : Json(nlohmann::json::value_t::discarded);
}

// The same, but such a text is Exit::bad_data; `where` names its file.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where) {
  if (const std::string unfit = unfit_part(text); !unfit.empty()) fail(Exit::bad_data, where, ": JSON with ", unfit);
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    fail(Exit::bad_data, where, ": is not a JSON object in UTF-8: wrong at byte ", error.byte);
  }
}

// For JSON, which is in UTF-8, while a file name may be any bytes: the text itself if it is UTF-8, else printable().
std::string utf8_or_escaped(const std::string& text);

}  // namespace crossply
