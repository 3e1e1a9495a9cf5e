#include "data/preparation_settings.h"

#include <algorithm>

#include "engine/check.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
using Json = nlohmann::ordered_json;

Json member(const Json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object[key] : Json();
}

Json settings_of(const PrepareOptions& o, const std::vector<SourceFile>& sources) {
  Json settings;
  settings["tokenizer"] = o.tokenizer.empty() ? Json() : Json(digest_of_file(tokenizer_file(o.tokenizer)));
  if (o.vocab > 0) settings["vocab"] = o.vocab, settings["style"] = o.style;
  settings["eot"] = utf8_or_escaped(o.eot);
  settings["special_tokens"] = o.special_tokens;
  settings["field"] = utf8_or_escaped(o.field);
  settings["val"] = o.val;
  settings["shard_tokens"] = o.shard_tokens;
  settings["inputs"] = Json::array();
  for (const SourceFile& source : sources) settings["inputs"].push_back({{"path", utf8_or_escaped(source.path)}});
  return settings;
}

void require_same(const Json& was, const Json& is, size_t inputs, const std::string& file, const std::string& where,
                  const std::string& advice) {
  const Json before = member(was, "inputs"), now = is["inputs"];
  if (!was.is_object() || !before.is_array())
    fail(Exit::bad_data, file,
         ": is damaged, or not of this program: it has no \"settings\" with a list of \"inputs\"; ", advice);
  for (size_t i = 0; i < std::min(inputs, std::max(before.size(), now.size())); ++i) {
    const auto path = [&](const Json& list) {
      const Json text = i < list.size() ? member(list[i], "path") : Json();
      return text.is_string() ? text.get<std::string>() : "none";
    };
    const std::string a = path(before), b = path(now);
    if (a != b)
      fail(Exit::usage, where, " is of other inputs: number ", i + 1, " was ", a, " and is ", b, "; ", advice);
  }
  for (const auto& [key, value] : is.items()) {
    const Json old = key == "special_tokens" && !member(was, "special_tokens").is_string()
                         ? Json("token")  // older ones have no choice
                         : member(was, key.c_str());
    if (key == "tokenizer" && value != old) fail(Exit::usage, where, " has another --tokenizer or --vocab; ", advice);
    if (key == "inputs" || value == old) continue;
    std::string flag = key;
    for (char& letter : flag) letter = letter == '_' ? '-' : letter;
    fail(Exit::usage, where, " has --", flag, " ", excerpt(json_text(old)), ", now it is ", json_text(value), "; ",
         advice);
  }
}

}  // namespace crossply
