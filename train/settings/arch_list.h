// What --arch takes where several architectures run side by side: names with their options in place, between commas.
//   llama,hyper:rate=2,mudd:norm=none:intermediate_sizes=[64,96]
#pragma once

#include <map>
#include <string>
#include <vector>

#include "models/config.h"

namespace crossply {

struct ArchChoice {
  std::string text;  // as it was written: the name of its row and its curve
  std::string arch;
  std::map<std::string, std::string> options;  // the architecture's own and general ones

  // The text as the name of a directory: hyper-rate-2.
  std::string file_name() const;
  // Makes the configuration this architecture, with these options; general ones that are not named stay.
  void apply(Config& config) const;
};

// "all" stands for the plain backbone and every connection on it. Throws Exit::usage for an architecture or an option
// that does not exist, and for what is named twice; whether a value is allowed is for Config::check.
std::vector<ArchChoice> parse_arch_list(const std::string& list, const std::string& backbone = "llama");
// The flag's description, with all names.
std::string arch_list_help();

}  // namespace crossply
