// config.json: a Config from Hugging Face's keys and the object "crossply", and back.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "models/config.h"

namespace crossply {

// From a config.json. A model of another type, unknown keys, and known ones with a value that crossply does not compute
// (windows shorter than the context, biases of other layers), are refused by name. Throws Exit::no_input,
// Exit::bad_data. load_config names on stderr the keys that mean something elsewhere and nothing here; parse_config
// lists them in *ignored.
Config load_config(const std::string& path);
Config parse_config(const nlohmann::json& json, const std::string& where, std::string* ignored = nullptr);
// What a config.json holds. A plain LLaMA, one with q/k norms of the same epsilon, which is a Qwen3, one with biases of
// q, k and v, which is a Qwen2, and a plain GPT-2 with biases get no "crossply" object and load in transformers as they
// are.
nlohmann::json to_json(const Config& config);

}  // namespace crossply
