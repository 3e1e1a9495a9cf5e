// The directory that a program makes under a temporary name and renames when it is complete.
#pragma once

#include <string>

namespace crossply {

// Where `out` leads: without slashes at its end, without . or .. as its last part, and to a link's target. The
// directory need not exist.
std::string resolve_out(const std::string& out);

// Throws Exit::usage if a rename cannot replace the directory `out`: the current directory and a mount point. Call it
// before the work begins. A directory that does not exist is fine.
void require_replaceable(const std::string& out);
// The same, and unless `out` is new or an empty directory.
void require_new_directory(const std::string& out);

}  // namespace crossply
