// Flags that have an effect only beside others: stated beside each flag, checked in one place.
#pragma once

#include <string>
#include <vector>

#include "cli/flags.h"

namespace crossply {

// What gives a flag its effect: another flag with one of these values. "arith:*" is any text that begins so, "!1" any
// other than 1. No values: it is on, which is to say given, and not 0, false or [].
struct Need {
  std::string flag;  // "--schedule"
  std::vector<std::string> values = {};
};
// The flag has no effect unless one of the needs is met: --help says so, and check_needs() asks for it. Called twice,
// both are needed. Returns the flag.
Flag needs(CLI::App& app, Flag flag, const std::vector<Need>& any_of);
// After parsing. Throws Exit::usage for a flag on the command line whose needs are not met, with what is missing.
// run_program() calls it.
void check_needs(CLI::App& app);
// A line for each flag that is not on the command line, whose default differs from that in `plain`, because a preset or
// a resumed run set it, and whose needs are not met. plain: the same flags without preset and run.
std::string notes_on_needs(CLI::App& app, const CLI::App& plain);

}  // namespace crossply
