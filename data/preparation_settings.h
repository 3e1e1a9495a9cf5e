// The settings that decide what `prepare` writes, as its state.json and manifest.json hold them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "data/document_feed.h"
#include "data/preparation.h"

namespace crossply {

nlohmann::ordered_json settings_of(const PrepareOptions& o, const std::vector<SourceFile>& sources);

// Of an object read from a file; null where it has no such key, or is no object.
nlohmann::ordered_json member(const nlohmann::ordered_json& object, const char* key);

// Throws Exit::usage with the first difference; of the inputs the first so many count. `was` was read from `file`.
void require_same(const nlohmann::ordered_json& was, const nlohmann::ordered_json& is, size_t inputs,
                  const std::string& file, const std::string& where, const std::string& advice);

}  // namespace crossply
