// What --arch takes where several architectures run side by side: names with their options in place, between commas.
//   llama,hyper:rate=2,mudd:norm=none:intermediate_sizes=[64,96]
// A word behind @ makes another arm of an architecture that stands in the list, too. That one's learning rates are its
// own:
//   lime@frozen     a control: what its routers start with stays
//   llama@again     the same again from other seeds; @again2, @again3, ... likewise
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
  std::string leader = {};                     // the text before @; "": there is none, and it has rates of its own
  bool frozen = false;                         // @frozen
  uint64_t again = 0;                          // N of @againN, 1 of @again; 0: it is no such

  // The text as the name of a directory: hyper-rate-2.
  std::string file_name() const;
  // Makes the configuration this architecture, with these options; general ones that are not named stay.
  void apply(Config& config) const;
};

// "all" stands for the plain backbone and every connection on it. Throws Exit::usage for an architecture or an option
// that does not exist, and for what is named twice; whether a value is allowed is for Config::check.
std::vector<ArchChoice> parse_arch_list(const std::string& list, const std::string& backbone = "llama");
// One of them; what stands before its @ need not be there.
ArchChoice parse_arch(const std::string& text);
// The flag's description, with all names.
std::string arch_list_help();

}  // namespace crossply
