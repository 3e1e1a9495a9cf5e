// A JSON file that a program writes for itself, with a checksum of its contents: what somebody changed is not believed.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace crossply {

// The object as text, with "checksum", the SHA-256 of the rest, behind its keys.
std::string seal(nlohmann::ordered_json object);

// The object in such a text, without the checksum. Throws Exit::bad_data, with `where` and `advice`, for any other.
nlohmann::ordered_json unseal(const std::string& text, const std::string& where, const std::string& advice);

}  // namespace crossply
