#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace crossply {

// The JSON object in a file. Missing: Exit::no_input; unreadable: Exit::io; no valid JSON object, or one nested too
// deep (engine/json.h): Exit::bad_data.
nlohmann::json read_json(const std::string& path);

}  // namespace crossply
