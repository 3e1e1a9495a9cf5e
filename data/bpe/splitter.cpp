#include "data/bpe/splitter.h"

#include <algorithm>

#include "data/bpe/tokenizer_json.h"
#include "engine/check.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

using nlohmann::json;

// GPT-2's, which tokenizer.json's ByteLevel stands for.
const char* const gpt2_split = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr std::string_view behaviors[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
constexpr std::string_view schemes[] = {"always", "first", "never"};

template <size_t N>
size_t place_of(const std::string_view (&names)[N], const json& name) {
  return static_cast<size_t>(std::find(names, names + N, name.is_string() ? name.get<std::string>() : "") - names);
}

std::vector<json> steps_of(const json& pre_tokenizer) { return crossply::steps_of(pre_tokenizer, "pretokenizers"); }

// An expression that matches this text and nothing else.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("\\.+*?()|[]{}^$#&-~ ").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

size_t MatchScan::bytes_to(size_t from_byte, size_t from, size_t to) const {
  if (classes_.size() == text_.size()) return to;
  for (; from < to; ++from) {
    const auto c = static_cast<uint8_t>(text_[from_byte]);
    from_byte += c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
  }
  return from_byte;
}

bool MatchScan::next(bool more) {
  Regex::Match match = regex_->find(classes_, end_character, more);
  if (matched_ && match.begin == match.end && match.end == end_character) {  // empty, right behind a match: it is none
    if (end_character >= classes_.size()) return false;
    match = regex_->find(classes_, end_character + 1, more);
  }
  if (match.begin == std::string_view::npos) return false;
  begin_byte = bytes_to(end_byte, end_character, match.begin);
  end_byte = bytes_to(begin_byte, match.begin, match.end);
  end_character = match.end;
  matched_ = true;
  return true;
}

std::string Splitter::foreign_step(const json& step) {
  const std::string type = type_of(step);
  const std::string name = "the pre-tokenizer " + excerpt(type);
  if (type == "ByteLevel") return unknown_key(step, name, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (type == "Digits") return unknown_key(step, name, {"type", "individual_digits"});
  if (type == "Metaspace") {
    const json& mark = part_of(step, "replacement");
    if (!mark.is_string() || mark == "" ||
        first_character(mark.get<std::string>()).length != mark.get<std::string>().size())
      return name + " whose replacement is not one character";
    if (prepend_scheme_of(step).empty()) return name + " whose prepend_scheme and add_prefix_space do not fit together";
    return unknown_key(step, name, {"type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split"});
  }
  if (type != "Split") return name;
  const json& pattern = part_of(step, "pattern");
  if (!pattern.is_object() || pattern.size() != 1 ||
      (!part_of(pattern, "Regex").is_string() && !part_of(pattern, "String").is_string()))
    return name + " without a pattern";
  if (part_of(pattern, "String") == "") return name + " at an empty text";
  if (place_of(behaviors, part_of(step, "behavior")) == 5) return name + " without a behavior";
  return unknown_key(step, name, {"type", "pattern", "behavior", "invert"});
}

std::string Splitter::foreign_part(const json& pre_tokenizer) {
  if (type_of(pre_tokenizer) == "Sequence") {
    if (!part_of(pre_tokenizer, "pretokenizers").is_array()) return "a sequence without steps";
    if (auto key = unknown_key(pre_tokenizer, "the sequence", {"type", "pretokenizers"}); !key.empty()) return key;
  }
  const std::vector<json> steps = steps_of(pre_tokenizer);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (std::string part = foreign_step(steps[i]); !part.empty()) return part;
    for (const char* key : {"invert", "individual_digits", "split", "add_prefix_space", "use_regex"})
      if (steps[i].contains(key) && !steps[i][key].is_boolean())
        return "a pre-tokenizer whose " + std::string(key) + " is not true or false";
    if (type_of(steps[i]) == "ByteLevel" && i + 1 < steps.size()) return "a pre-tokenizer after ByteLevel";
  }
  return steps.size() > max_steps / 2 ? "a pre-tokenizer with " + std::to_string(steps.size()) + " steps" : "";
}

bool Splitter::is_byte_level(const json& pre_tokenizer) {
  const std::vector<json> steps = steps_of(pre_tokenizer);
  return !steps.empty() && type_of(steps.back()) == "ByteLevel";
}

Splitter::Splitter(const json& pre_tokenizer, const std::string& path) {
  for (const json& step : steps_of(pre_tokenizer)) add(step, path);
}

bool Splitter::knows_begin() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) { return step.prepend == Prepend::first; });
}

std::string Splitter::normal_form() const {
  std::string form;
  for (const Step& step : steps_)
    form += str("step ", static_cast<int>(step.kind), " ", static_cast<int>(step.behavior), " ", step.invert, " ",
                static_cast<int>(step.prepend), " ", step.text.size(), " ", step.text, "\n");
  return form;
}

// One that foreign_part() found nothing to say about: one or two of ours.
void Splitter::add(const json& step, const std::string& path) {
  const std::string type = type_of(step);
  const auto is_set = [&](const char* key, bool otherwise) { return step.value(key, otherwise); };
  const auto add_cut = [&](const std::string& regex, Behavior behavior, bool invert) {
    steps_.push_back({Kind::cut, Regex(regex, path), behavior, invert, regex, Prepend::never});
  };
  if (type == "ByteLevel") {
    if (is_set("add_prefix_space", true)) steps_.push_back({Kind::change, Regex(), {}, false, " ", Prepend::always});
    if (is_set("use_regex", true)) add_cut(gpt2_split, Behavior::isolated, false);
  } else if (type == "Digits") {
    add_cut("\\p{N}", is_set("individual_digits", false) ? Behavior::isolated : Behavior::contiguous, false);
  } else if (type == "Metaspace") {
    const std::string mark = step["replacement"];
    steps_.push_back(
        {Kind::change, Regex(), {}, false, mark, static_cast<Prepend>(place_of(schemes, prepend_scheme_of(step)))});
    if (is_set("split", true)) add_cut(escaped(mark), Behavior::with_next, false);
  } else {
    const json& pattern = step["pattern"];
    const bool is_text = pattern.contains("String");
    const std::string text = pattern[is_text ? "String" : "Regex"];
    add_cut(is_text ? escaped(text) : text, static_cast<Behavior>(place_of(behaviors, step["behavior"])),
            is_set("invert", false));
  }
}

std::string Splitter::changed(const Step& step, std::string_view text, bool first) {
  std::string out;
  for (const char c : text) {
    if (c == ' ') out += step.text;
    else out += c;
  }
  const bool prepends = step.prepend == Prepend::always || (step.prepend == Prepend::first && first);
  return prepends && !out.starts_with(step.text) ? step.text + out : out;
}

}  // namespace crossply
