// How many threads OpenMP may have here, where the user did not say: a container may give less than the CPUs it shows.
#pragma once

#include <functional>
#include <string>

namespace crossply {

// The CPUs that a container's quota allows, a fraction too: cpu.max of cgroup v2, or cpu.cfs_quota_us of v1, the least
// of this process's group and those above it. 0: no quota. root, self: where the system keeps them.
double cpu_quota(const std::string& root = "/sys/fs/cgroup", const std::string& self = "/proc/self/cgroup");

// Starts up to `wanted` threads that live at the same time, and ends them. Returns how many started. start: for tests,
// may throw std::system_error as std::thread does.
int threads_that_start(
    int wanted, const std::function<void(int)>& start = [](int) {});

// Where OMP_NUM_THREADS is not set, takes the quota's share among `sharers` processes of this container. Then tries the
// threads, because OpenMP itself ends the program where one does not start; with fewer it goes on, and two are left for
// others. Returns a note where that is so, else "".
std::string choose_thread_count(int sharers = 1);

}  // namespace crossply
