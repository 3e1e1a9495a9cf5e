// What the readers of config.json share: one for each backbone, config.cpp and config_gpt2.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>

#include "models/config.h"

namespace crossply {

extern const std::set<std::string> token_keys;

std::set<std::string> split_words(const std::string& text);
// A value in an error's words.
std::string shown(const nlohmann::json& value);
// A key that crossply accepts only at the value that leaves the model as it is, or null.
void require(const nlohmann::json& object, const std::string& key, const nlohmann::json& neutral,
             const std::string& where);
// Refuses keys that are unknown, and those of `neutral` with other values. used: what is read; ignored: what this
// backbone ignores beside what all do. Returns the names of what is there and ignored.
std::string check_keys(const nlohmann::json& object, const std::set<std::string>& used, const nlohmann::json& neutral,
                       const std::set<std::string>& ignored, const std::string& where);
// The object "crossply", and what every backbone writes for a model that is no plain one: of that object the
// architecture and its options, its own model_type and name, and where transformers finds its module
// (models/disk/modelling_file.h).
void read_crossply(const nlohmann::json& object, Config& config, const std::string& where);
void mark_as_variant(nlohmann::json& object, const Config& config);

// Gemma 2's key for a cap of the logits, of every backbone; null and 0 say none.
void read_softcap(const nlohmann::json& object, Config& config, const std::string& where);

// The rotary keys of a LLaMA (config_rope.cpp), and what they say as "rope_parameters". The model's length must be read
// before: it is the original one where yarn's keys say none.
void read_rope(const nlohmann::json& object, Config& config, const std::string& where);
nlohmann::json rope_json(const Config& config);

// GPT-2's keys (config_gpt2.cpp).
bool is_gpt2(const nlohmann::json& object, const std::string& where);
Config parse_gpt2(const nlohmann::json& object, const std::string& where, std::string* ignored);
nlohmann::json gpt2_json(const Config& config);

}  // namespace crossply
