// Temporary files and directories, .tmp-NAME-PID, that a killed process leaves beside what it was writing.
#pragma once

#include <string>

namespace crossply {

// Whether `name` is .tmp-NAME-PID of a process that is gone; NAME goes to *of. This process counts as gone: after a
// restart in a container the number is often the same one.
bool is_leftover(const std::string& name, std::string* of);

// Removes the leftovers of this one file or directory, from beside it. One that cannot be removed stays.
void remove_leftovers_of(const std::string& path);

}  // namespace crossply
