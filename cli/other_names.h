// The names that other programs give to our flags.
#pragma once

#include <string>

#include "cli/flags.h"

namespace crossply {

// "--batch" of "--batch-size" or "--batch_size", with a word on it where the two differ; "" where no program that is
// known here has this flag, or `app` has none like it.
std::string flag_of_other_name(const CLI::App& app, const std::string& typed);

}  // namespace crossply
