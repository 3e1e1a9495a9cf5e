// Settings of a tokenizer or of generation that another program wrote, which our directories carry on.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace crossply {

// Removes, at any depth, the keys by which a library of Hugging Face's runs Python code of the directory: who loads our
// directory with trust_remote_code trusts ours. A tokenizer whose class was such code becomes one of the library's own,
// which reads tokenizer.json. Returns whether there was such a key.
bool remove_code_references(nlohmann::ordered_json& settings);

// The text of tokenizer_config.json, special_tokens_map.json or generation_config.json without such keys. A text that
// has none stays as it is, but for the name of a class that only transformers 5 has. One that is no JSON object becomes
// "". A note on standard error says what is not carried; path: for that note.
std::string carried_settings(const std::string& text, const std::string& path);

// The text of tokenizer.json without truncation and padding, the state of somebody's last call. A text that has none,
// or that is no JSON object, stays as it is.
std::string carried_tokenizer(const std::string& text);

}  // namespace crossply
