#include "data/carried_settings.h"

#include <cstdio>

#include "data/bpe/tokenizer_json.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

using Json = nlohmann::ordered_json;

// auto_map names classes of Python files, custom_pipelines and custom_generate functions of them.
constexpr const char* code_keys[] = {"auto_map", "custom_pipelines", "custom_generate", "trust_remote_code"};

bool remove_keys(Json& value) {
  bool found = false;
  if (value.is_object())
    for (const char* key : code_keys) found = value.erase(key) > 0 || found;
  if (value.is_structured())
    for (Json& part : value) found = remove_keys(part) || found;
  return found;
}

// auto_map is {"AutoTokenizer": [...], ...}, and in files of older versions the list itself.
bool tokenizer_is_code(const Json& settings) {
  const auto map = settings.is_object() ? settings.find("auto_map") : settings.end();
  return map != settings.end() && (map->is_array() || map->contains("AutoTokenizer"));
}

}  // namespace

bool remove_code_references(Json& settings) {
  if (tokenizer_is_code(settings)) settings["tokenizer_class"] = "PreTrainedTokenizerFast";
  return remove_keys(settings);
}

std::string carried_settings(const std::string& text, const std::string& path) {
  Json settings = try_parse_json<Json>(text);
  const bool is_object = settings.is_object();
  // What transformers 5 calls the class that reads tokenizer.json alone; older versions do not know the name.
  const bool renamed = is_object && settings.value("tokenizer_class", Json()) == "TokenizersBackend";
  if (renamed) settings["tokenizer_class"] = "PreTrainedTokenizerFast";
  if (is_object && !remove_code_references(settings)) return renamed ? json_text(settings, 2) + "\n" : text;
  std::fprintf(stderr, "note: %s %s\n", printable(path).c_str(),
               is_object ? "names Python code for trust_remote_code (auto_map): that is not carried along"
                         : "is not a JSON object: it is not carried along");
  return is_object ? json_text_mended(settings, 2) + "\n" : "";
}

std::string carried_tokenizer(const std::string& text) {
  const nlohmann::json tokenizer = try_parse_json<nlohmann::json>(text);  // an ordered one takes quadratic time
  return call_state_of(tokenizer).empty() ? text : without_call_state(tokenizer);
}

}  // namespace crossply
