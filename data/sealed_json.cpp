#include "data/sealed_json.h"

#include "engine/io/json.h"
#include "engine/io/sha256.h"

namespace crossply {
namespace {

constexpr const char* checksum_key = "checksum";

std::string checksum_of(const nlohmann::ordered_json& object) {
  Sha256 sha;
  const std::string text = json_text(object);
  sha.update(text.data(), text.size());
  return sha.hex();
}

}  // namespace

std::string seal(nlohmann::ordered_json object) {
  object.erase(checksum_key);
  object[checksum_key] = checksum_of(object);
  return json_text(object, 2) + "\n";
}

nlohmann::ordered_json unseal(const std::string& text, const std::string& where, const std::string& advice) {
  auto object = try_parse_json<nlohmann::ordered_json>(text);
  const bool sealed = object.is_object() && object.contains(checksum_key);
  const nlohmann::ordered_json found = sealed ? object[checksum_key] : nlohmann::ordered_json();
  if (sealed) object.erase(checksum_key);
  if (!sealed || found != checksum_of(object))
    fail(Exit::bad_data, where, ": is damaged: it ",
         sealed ? "does not fit its checksum" : "has no checksum, as an older version left it", "; ", advice);
  return object;
}

}  // namespace crossply
