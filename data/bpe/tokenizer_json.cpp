#include "data/bpe/tokenizer_json.h"

#include <algorithm>

#include "engine/json.h"
#include "engine/printable.h"

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
  return type.is_string() ? type.get<std::string>() : "missing";
}

std::string unknown_key(const json& object, const std::string& name, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end()) return name + " has " + excerpt(key);
  return "";
}

}  // namespace crossply
