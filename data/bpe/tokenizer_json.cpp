#include "data/bpe/tokenizer_json.h"

#include <algorithm>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/io/sha256.h"

namespace crossply {

using nlohmann::json;

const json& part_of(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string call_state_of(const json& object) {
  std::string names;
  for (const char* key : {"truncation", "padding"})
    if (!part_of(object, key).is_null()) names += str(names.empty() ? "" : ", ", key);
  return names;
}

std::string without_call_state(json object) {
  object["truncation"] = object["padding"] = nullptr;
  return json_text(object) + "\n";
}

std::string type_of(const json& object) {
  const json& type = part_of(object, "type");
  if (type.is_string()) return type.get<std::string>();
  return object.is_null() ? "missing" : object.is_object() ? "without a type" : json_text(object);
}

std::string model_type_of(const json& model) {
  if (!model.is_object() || model.contains("type") || !model.contains("vocab")) return type_of(model);
  if (model["vocab"].is_array()) return "Unigram";
  if (model.contains("merges")) return "BPE";
  if (model.contains("continuing_subword_prefix") && model.contains("max_input_chars_per_word")) return "WordPiece";
  return model.contains("unk_token") ? "WordLevel" : type_of(model);
}

std::string prepend_scheme_of(const json& step) {
  const json &scheme = part_of(step, "prepend_scheme"), &adds = part_of(step, "add_prefix_space");
  if (!adds.is_null() && !adds.is_boolean()) return "";
  const std::string written = adds == false ? "never" : "always";
  if (scheme.is_null()) return written;
  const bool known = scheme == "always" || scheme == "first" || scheme == "never";
  return known && (adds != false || scheme == "never") ? scheme.get<std::string>() : "";
}

std::vector<json> steps_of(const json& object, const char* name) {
  if (object.is_null()) return {};
  if (type_of(object) != "Sequence" || !part_of(object, name).is_array()) return {object};
  return part_of(object, name).get<std::vector<json>>();
}

bool is_empty(const json& value) { return value.empty() || value == ""; }

uint64_t fingerprint_of(const std::string& text) {
  Sha256 sha;
  sha.update(text.data(), text.size());
  return std::stoull(sha.hex().substr(0, 16), nullptr, 16);
}

std::string unknown_key(const json& object, const std::string& name, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end()) return name + " has " + excerpt(key);
  return "";
}

}  // namespace crossply
