#include "data/bpe/tokenizer_json.h"

#include <algorithm>

#include "engine/json.h"
#include "engine/printable.h"
#include "engine/sha256.h"

namespace crossply {

using nlohmann::json;

const json& part_of(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string type_of(const json& object) {
  const json& type = part_of(object, "type");
  if (type.is_string()) return type.get<std::string>();
  return object.is_null() ? "missing" : object.is_object() ? "without a type" : object.dump();
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
