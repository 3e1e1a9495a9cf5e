// The architectures by name: what they mean, which options they have, how to make their connection.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/connection.h"

namespace crossply {

// A key of config.json's "crossply" object, and a flag of the trainer by the same name.
struct Option {
  std::string key;
  std::string default_value;         // the default, as it would stand in JSON; a text without quotes
  std::string help;
  std::vector<std::string> choices;  // of a text; empty for numbers, truth values and lists
};

struct Architecture {
  std::string name;
  std::string meaning;  // one line
  std::vector<Option> options;
  // Throws Exit::usage for options that contradict each other.
  std::function<std::unique_ptr<Connection>(const Config&)> make;
};

const std::vector<Architecture>& architectures();
// Throws `code`, naming `where` and the known architectures.
const Architecture& find_architecture(const std::string& name, Exit code = Exit::usage, const std::string& where = "--arch");

}  // namespace crossply
