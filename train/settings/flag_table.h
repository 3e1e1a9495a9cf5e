// Every flag of a training run, once: what --help says of it, what it takes, where its value is, and what a resumed
// run may do with it. Parsing and --help (flags.cpp), flags.json, and what a resumed run must keep (flags_json.cpp)
// are made of these rows. A new flag is a member of Settings and a row here.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "cli/needs.h"
#include "train/settings/settings.h"

namespace crossply {

enum class Resume {  // the order matters: saved ones first, the strictest in front
  fixed,             // in flags.json and in checkpoints; a resumed run must have the same
  may_grow,          // the same, or a larger number
  free,              // in flags.json; a resumed run may have another, which changes none of its numbers
  of_model,          // in config.json, which must be the same
  this_call          // not saved: it applies to this call only
};

using Member = std::variant<int64_t*, uint64_t*, double*, bool*, std::string*, std::vector<std::string>*>;

// The values of a flag.
struct Takes {
  double min = 0, max = 0;              // of a number
  std::vector<std::string> words = {};  // a text: only one of these
  // A text: its placeholder in --help. FILE and DIR are paths, SOURCE and GLOB name data: these are saved as absolute
  // paths, so that they are the same files from any directory.
  std::string text = "";
  bool sets = false;  // a bool: giving the flag sets it; otherwise it takes "true" or "false"
};

struct FlagRow {
  std::string flag;  // "--weight-decay", in flags.json "weight_decay"
  Resume resume;
  Member (*member)(Settings&);
  Takes takes;
  std::string help;                                     // "": no flag; in flags.json only
  std::vector<Need> needs = {};                         // has no effect without one of these (cli/needs.h)
  std::vector<std::string> excludes = {};               // rows before this one
  std::string backbone = "";                            // is there only with this one
  bool (*kept_if)(const Settings& settings) = nullptr;  // else it is not in flags.json
  bool per_rank = false;                                // the ranks of a job may have different ones

  std::string key() const;
};
struct FlagGroup {
  std::string name;
  std::vector<FlagRow> rows;
};
// In the order of --help.
const std::vector<FlagGroup>& training_flags();

}  // namespace crossply
