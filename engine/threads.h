// How many threads OpenMP may have here, where the user did not say: a container may give less than the CPUs it shows.
#pragma once

#include <functional>
#include <string>

namespace crossply {

// The least of what `read` says of this process's control group of a controller ("cpu", "memory"), of v1 or v2, and of
// those above it; infinity: no limit. read: of a group's directory. root, self: where the system keeps them.
double min_of_groups(const std::string& controller, const std::function<double(const std::string& dir)>& read,
                     const std::string& root, const std::string& self);

// The CPUs that a container's quota allows, a fraction too: cpu.max of cgroup v2, or cpu.cfs_quota_us of v1, the least
// of this process's group and those above it. 0: no quota. root, self: where the system keeps them.
double cpu_quota(const std::string& root = "/sys/fs/cgroup", const std::string& self = "/proc/self/cgroup");

// Starts up to `wanted` threads that live at the same time, and ends them. Returns how many started. start: for tests,
// may throw what std::thread does.
int threads_that_start(
    int wanted, const std::function<void(int)>& start = [](int) {});

// Whether a launcher (torchrun, Open MPI, MPICH, srun) says that it started several processes of this program.
bool is_one_of_several();

// Where OMP_NUM_THREADS is not set, takes the quota's share among `sharers` processes of this container.
void take_quota(int sharers = 1);

// Takes the quota, then tries the threads, because OpenMP itself ends the program where one does not start; with fewer
// it goes on, and two are left for others. Returns a note where that is so, else "".
std::string choose_thread_count(int sharers = 1);

}  // namespace crossply
