// How much memory a program may still take.
#pragma once

#include <cstdint>
#include <string>

namespace crossply {

// In bytes, what the limits of this process's control group and of those above it leave; UINT64_MAX: no limit. The page
// cache, which a group can take back, counts as free. root, self: where the system keeps them.
uint64_t left_in_groups(const std::string& root = "/sys/fs/cgroup", const std::string& self = "/proc/self/cgroup");

// In bytes, the smallest of: what the system calls available, what a container has left, and what the limit of this
// process's address space leaves.
uint64_t available_memory();

// Throws Exit::device with `what` ("the text of FILE needs"), both numbers, and `advice` where fewer bytes are
// available.
void require_memory(uint64_t bytes, const std::string& what, const std::string& advice);

}  // namespace crossply
