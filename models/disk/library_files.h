// What a saved model carries beside config.json, weights and tokenizer.json so that the transformers library reads it.
#pragma once

#include <map>
#include <string>

#include "data/tokenizer.h"
#include "models/config.h"

namespace crossply {

// Names and contents: the modelling file of what is no plain LLaMA, Qwen3 or GPT-2; where the tokenizer is known,
// tokenizer_config.json; where it or the configuration knows tokens that begin or end a text, generation_config.json.
std::map<std::string, std::string> library_files(const Config& config, const Tokenizer& tokenizer);

}  // namespace crossply
