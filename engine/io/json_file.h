#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace crossply {

// The JSON object in a file. Missing: Exit::no_input; unreadable: Exit::io; no valid JSON object, or one nested too
// deep (engine/io/json.h): Exit::bad_data.
nlohmann::json read_json(const std::string& path);

// The value of a key; where it is absent or null, `into` stays as it is. Another type, or a number that T cannot hold,
// is Exit::bad_data, with `where`.
// T: bool, int64_t, double, std::string.
template <class T>
void read(const nlohmann::json& object, const char* key, T& into, const std::string& where);

}  // namespace crossply
