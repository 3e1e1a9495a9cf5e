#include "engine/io/json.h"

#include <algorithm>
#include <cctype>

#include "engine/io/printable.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

std::string describe_bad_byte(std::string_view text) {
  const size_t at = valid_utf8(text);
  if (at == text.size()) return str("not UTF-8 at byte ", at);
  return str(printable(text.substr(at, 1)), " at byte ", at,
             " is not UTF-8; iconv -f latin1 -t utf-8 converts Latin-1");
}

// The escape \uXXXX at or before a byte that has no other half.
std::string describe_surrogate(std::string_view text, size_t at) {
  size_t begin = text.rfind("\\u", at);
  if (begin == std::string_view::npos) return str("a lone surrogate before byte ", at);
  const std::string_view code = text.substr(begin, 6);
  const bool is_half = code.size() == 6 && (code[2] == 'd' || code[2] == 'D') &&
                       std::string_view("89abcdefABCDEF").find(code[3]) != std::string_view::npos;
  if (!is_half && begin >= 6) begin -= 6;  // its follower, which is no half
  return str("a lone surrogate, ", excerpt(text.substr(begin, 6)), ", at byte ", begin,
             ": half of a character, which UTF-8 cannot hold");
}

// The word or number that a byte is in; where it begins.
std::pair<size_t, std::string_view> word_at(std::string_view text, size_t at) {
  const auto in_word = [&](size_t i) {
    return std::isalnum(static_cast<unsigned char>(text[i])) != 0 || text[i] == '-' || text[i] == '+' || text[i] == '_';
  };
  size_t begin = at, end = at;
  while (begin > 0 && in_word(begin - 1)) --begin;
  while (end < text.size() && in_word(end)) ++end;
  return {begin, text.substr(begin, end - begin)};
}

}  // namespace

std::string json_fault(std::string_view text, size_t read, std::string_view words) {
  words = words.substr(0, words.find("; last read:"));  // behind it stands what the file says
  const auto says = [&](const char* what) { return words.find(what) != std::string_view::npos; };
  const size_t at = std::min(read - std::min<size_t>(read, 1), text.size());
  if (says("UTF-8")) return describe_bad_byte(text);
  if (says("surrogate")) return describe_surrogate(text, at);
  if (at == text.size())
    return str("it ends too early, at byte ", at, says("closing quote") ? ", inside a string" : "");
  if (says("control character"))
    return str("a control character in a string, ", printable(text.substr(at, 1)), ", at byte ", at,
               ": JSON writes it as an escape");
  const auto [begin, word] = word_at(text, at);
  std::string lower(word);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::string bare = lower.substr(std::min(lower.find_first_not_of("+-"), lower.size()));
  if (bare == "nan" || bare == "inf" || bare == "infinity")
    return str(word, " at byte ", begin, ": JSON has no such number; write null");
  if (bare == "none" || bare == "true" || bare == "false" || bare == "undefined")
    return str(word, " at byte ", begin, ": JSON writes true, false and null");
  if (text[at] == '\'') return str("a single quote at byte ", at, ": JSON writes strings in double quotes");
  if (says("expected end of input")) return str("more text behind the value, wrong at byte ", at);
  return str("wrong at byte ", at, ", at ", excerpt(text.substr(at, 20)));
}

std::string unfit_part(std::string_view text) {
  if (const size_t zero = text.find('\0'); zero != text.npos) return str("a zero byte at byte ", zero);
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

template <class Json>
Json try_parse_json(std::string_view text) {
  return unfit_part(text).empty() ? Json::parse(text, nullptr, false) : Json(nlohmann::json::value_t::discarded);
}
template nlohmann::json try_parse_json(std::string_view text);
template nlohmann::ordered_json try_parse_json(std::string_view text);

template <class Json>
Json parse_json(std::string_view text, const std::string& where) {
  if (const std::string unfit = unfit_part(text); !unfit.empty()) fail(Exit::bad_data, where, ": JSON with ", unfit);
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    fail(Exit::bad_data, where, ": is not a JSON object in UTF-8: ", json_fault(text, error.byte, error.what()));
  }
}
template nlohmann::json parse_json(std::string_view text, const std::string& where);
template nlohmann::ordered_json parse_json(std::string_view text, const std::string& where);

template <class Json>
Json known_json(std::string_view text) {
  return Json::parse(text);
}
template nlohmann::json known_json(std::string_view text);
template nlohmann::ordered_json known_json(std::string_view text);

std::string json_text(const nlohmann::json& value, int indent) { return value.dump(indent); }
std::string json_text(const nlohmann::ordered_json& value, int indent) { return value.dump(indent); }
std::string json_text_mended(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}
std::string json_text_mended(const nlohmann::ordered_json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string utf8_or_escaped(const std::string& text) {
  try {
    json_text(nlohmann::json(text));
    return text;
  } catch (const nlohmann::json::exception&) {
  }
  return printable(text);
}

}  // namespace crossply
