// Temporary files and directories, .tmp-NAME-PID, that a killed process leaves beside what it was writing.
#pragma once

#include <string>

namespace crossply {

// Whether `name` is .tmp-NAME-PID of a process that is gone; NAME goes to *of. This process counts as gone: after a
// restart in a container the number is often the same one.
bool is_leftover(const std::string& name, std::string* of);

// Whether a directory is on a file system that is known to belong to this machine alone.
bool is_on_local_disk(const std::string& dir);

// Removes the leftovers of this one file or directory, from beside it. One that cannot be removed stays. On a disk that
// other machines may share, a process that is gone here may be at work there: what has another number than this
// process's is removed only where nothing of it was modified for an hour. local_disk: is_on_local_disk, but for tests.
void remove_leftovers_of(const std::string& path, bool (*local_disk)(const std::string& dir) = is_on_local_disk);

}  // namespace crossply
