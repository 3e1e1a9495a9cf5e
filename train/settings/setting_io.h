// One setting into JSON and back, for lists of settings that call a visitor with the key, the variable, and what it may
// be beside the usual: its smallest and largest number, or its words.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bounds.h"
#include "engine/io/byte_names.h"
#include "engine/io/json.h"

namespace crossply {

struct PutSetting {
  nlohmann::json& settings;
  template <class T>
  void operator()(const char* key, const T& value, const auto&...) const {
    if constexpr (std::is_same_v<T, std::string>) settings[key] = name_as_utf8(value);
    else settings[key] = value;
  }
};

// The largest value of a flag of this type, where it names no other; the seed may be any.
template <class T>
constexpr double max_of = std::is_same_v<T, int64_t> ? static_cast<double>(max_count) : max_number;

// Throws Exit::bad_data with the path for a value that no flag could have.
struct TakeSetting {
  const nlohmann::json& settings;
  const std::string& path;
  bool complete = false;  // refuse a missing one; else it was written before there was such a flag
  template <class T>
  void operator()(const char* key, T& variable, double least = 0, double most = max_of<T>) const {
    if (!complete && !settings.contains(key)) return;
    const nlohmann::json value = settings.value(key, nlohmann::json());
    if (!holds<T>(value, least, most)) refuse(key);
    value.get_to(variable);
    if constexpr (std::is_same_v<T, std::string>) variable = name_from_utf8(variable);
  }
  void operator()(const char* key, std::string& variable, const std::vector<std::string>& words) const {
    operator()(key, variable);
    if (!complete && !settings.contains(key)) return;
    if (std::find(words.begin(), words.end(), variable) == words.end()) refuse(key);
  }
  [[noreturn]] void refuse(const char* key) const {
    fail(Exit::bad_data, path, ": \"", key, "\" cannot be ", json_text(settings.value(key, nlohmann::json())),
         "; mend it or start a new run");
  }
};

}  // namespace crossply
