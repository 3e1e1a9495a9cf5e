// What the readers of a tokenizer.json share.
#pragma once

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace crossply {

// A value of an object; null where there is none of that name, or no object.
const nlohmann::json& part_of(const nlohmann::json& object, const char* key);
// Its "type"; "missing" where there is none.
std::string type_of(const nlohmann::json& object);
// "NAME has KEY" for the first key of an object that is not among the known ones; "" if there is none.
std::string unknown_key(const nlohmann::json& object, const std::string& name,
                        std::initializer_list<std::string_view> known);

}  // namespace crossply
