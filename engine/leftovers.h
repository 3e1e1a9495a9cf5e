// Temporary files and directories, .tmp-NAME-PID, that a killed process leaves beside what it was writing.
#pragma once

#include <cstdint>
#include <string>

namespace crossply {

// Whether `name` is .tmp-NAME-PID of a process that is gone; NAME goes to *of. This process counts as gone: after a
// restart in a container the number is often the same one.
bool is_leftover(const std::string& name, std::string* of);

// Whether a file system of this type (statfs) belongs to one machine. One that is not known may be shared.
bool is_local_file_system(int64_t type);

// Removes the leftovers of this one file or directory, from beside it. One that cannot be removed stays. On a file
// system that other machines may write to, a process that is not known here may be at work there: what carries another
// number than this process's is removed only where nothing of it was modified for an hour.
void remove_leftovers_of(const std::string& path);
// The same, where the file system is known: for tests.
void remove_leftovers_of(const std::string& path, bool is_local);

}  // namespace crossply
