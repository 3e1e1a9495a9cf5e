// Several connections in one model: the architecture "mhc+lime".
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "models/registry.h"

namespace crossply {

// What a connection can own, in words. dev/reference/combined.py has the same.
inline constexpr const char *owned_stream = "the stream", *owned_heads = "a layer's own queries, keys and values",
                            *owned_choice = "the choice of keys and values", *owned_attention = "attention";

// The names between '+'; one where it is no combination.
std::vector<std::string> parts_of(const std::string& arch);
inline bool is_combined(const std::string& arch) { return arch.find('+') != std::string::npos; }
// The names with `between` between them.
std::string joined_names(const std::vector<std::string>& names, const char* between);
// The same parts, in any order?
bool same_architecture(const std::string& a, const std::string& b);
// The key of a combination for an option of one of its parts: the part stands in front of a key that another part has,
// too.
std::string option_key(const std::string& arch, const std::string& part, const std::string& key);
// The part's own configuration, with its options by their own names.
Config part_config(const Config& config, const std::string& part);

// Of registered architectures: throws `code`, naming `where`, for an unknown, missing or double part. Which parts go
// together depends on their options: make() throws Exit::usage, naming two parts and what both want.
Architecture combined_architecture(const std::string& name, Exit code, const std::string& where);
// The order in which the name is written: by what the parts own.
std::string ordered_name(const Config& config);
// Owns the part nothing, with its options? Then none of its hooks are called. A connection alone never does.
bool is_idle(const Config& config, const std::string& part);

// For a start from the weights of architecture `from`, which is the plain backbone, or one of the parts: what the
// others' start_as_plain() and plain_name() do and say. The rows must be declared.
std::string start_beside(const std::string& from, ParameterTable& params, const Config& config);
std::function<std::string(std::string)> names_beside(const std::string& from, const Config& config);

}  // namespace crossply
