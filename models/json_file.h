#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace crossply {

// The JSON object in a file. Missing: Exit::no_input; unreadable: Exit::io; no valid JSON object: Exit::bad_data.
nlohmann::json read_json(const std::string& path);

}  // namespace crossply
