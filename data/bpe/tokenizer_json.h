// What the readers of a tokenizer.json share.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace crossply {

// A value of an object; null where there is none of that name, or no object.
const nlohmann::json& part_of(const nlohmann::json& object, const char* key);
// Its "type"; where there is none, what stands there instead: "missing", "without a type", "5".
std::string type_of(const nlohmann::json& object);
// The type of a tokenizer.json's model. Files before version 0.9 of the package tokenizers have none: then the keys of
// the model say which it is, as they do for the package. "without a type": they do not.
std::string model_type_of(const nlohmann::json& model);
// When a Metaspace puts its mark before a text: "always", "first" or "never". Files before version 0.15 of the package
// have add_prefix_space instead. "": the step has both and they contradict each other, or it has an unknown scheme.
std::string prepend_scheme_of(const nlohmann::json& step);
// A Sequence's steps, which it has under `name`, or the one step; none of null.
std::vector<nlohmann::json> steps_of(const nlohmann::json& object, const char* name);
// null, or nothing within.
bool is_empty(const nlohmann::json& value);
// Which of truncation and padding, the state of somebody's last call, a tokenizer.json has: "truncation, padding"; "":
// none of them.
std::string call_state_of(const nlohmann::json& object);
// The file without them.
std::string without_call_state(nlohmann::json object);
// 64 bits of the SHA-256 of a text.
uint64_t fingerprint_of(const std::string& text);
// "NAME has KEY" for the first key of an object that is not among the known ones; "" if there is none.
std::string unknown_key(const nlohmann::json& object, const std::string& name,
                        std::initializer_list<std::string_view> known);

}  // namespace crossply
