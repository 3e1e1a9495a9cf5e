// Which crossply this is. Defined by dev/commit.cmake.
#pragma once

#include <string>

namespace crossply {

// The version and the commit: "0.3.0, commit 1cd692dba734".
std::string version();
// The commit that this program was built from, as git describes it; "unknown" without git.
std::string commit();

}  // namespace crossply
