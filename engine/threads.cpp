#include "engine/threads.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/check.h"
#include "engine/launchers.h"

namespace crossply {
namespace {

constexpr double none = std::numeric_limits<double>::infinity();

// The quota in a group's own files.
double quota_in(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::ifstream v2(dir + "/cpu.max"); v2 >> quota >> period)  // "max 100000": no number, no quota
    return quota > 0 && period > 0 ? quota / period : none;
  std::ifstream of_quota(dir + "/cpu.cfs_quota_us"), of_period(dir + "/cpu.cfs_period_us");
  const bool known = (of_quota >> quota) && (of_period >> period);  // -1: none
  return known && quota > 0 && period > 0 ? quota / period : none;
}

// The least of a group and those above it, whose directories begin with `mounted`.
double min_upwards(const std::string& mounted, std::string group,
                   const std::function<double(const std::string&)>& read) {
  double least = none;
  while (true) {
    least = std::min(least, read(mounted + group));
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return least;
    group.resize(slash);
  }
}

bool holds_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

}  // namespace

double min_of_groups(const std::string& controller, const std::function<double(const std::string& dir)>& read,
                     const std::string& root, const std::string& self) {
  std::ifstream in(self);
  double least = none;
  for (std::string line; std::getline(in, line);) {  // "0::/group", or of v1 "4:cpu,cpuacct:/group"
    const size_t first = line.find(':'), second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (!controllers.empty() && !holds_word(controllers, controller)) continue;
    for (const std::string& mounted : {root, root + "/" + controller, root + "/" + controllers, root + "/unified"})
      least = std::min(least, min_upwards(mounted, group, read));
  }
  return least;
}

double cpu_quota(const std::string& root, const std::string& self) {
  const double quota = min_of_groups("cpu", quota_in, root, self);
  return quota == none ? 0 : quota;
}

int threads_that_start(int wanted, const std::function<void(int)>& start) {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::vector<std::thread> threads;
  try {
    threads.reserve(static_cast<size_t>(std::max(wanted, 0)));  // before one runs: no thread may be lost
    for (int i = 0; i < wanted; ++i) {
      start(i);
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return over; });
      });
    }
  } catch (const std::exception&) {  // no more of them, or no memory for one
  }
  {
    const std::lock_guard lock(mutex);
    over = true;
  }
  changed.notify_all();
  for (std::thread& thread : threads) thread.join();
  return static_cast<int>(threads.size());
}

bool is_one_of_several() {
  return std::any_of(std::begin(launchers), std::end(launchers), [](const Launcher& launcher) {
    const char* size = std::getenv(launcher.size);
    return size != nullptr && std::atoi(size) > 1;
  });
}

void take_quota(int sharers) {
  if (const double quota = cpu_quota(); quota > 0 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int share = static_cast<int>(std::ceil(quota / sharers));
    omp_set_num_threads(std::clamp(share, 1, omp_get_max_threads()));
  }
}

std::string choose_thread_count(int sharers) {
  take_quota(sharers);
  const int wanted = omp_get_max_threads(), started = 1 + threads_that_start(wanted - 1);
  if (started >= wanted) return "";
  const int left = std::max(1, started - 2);
  omp_set_num_threads(left);
  return str("note: running with ", left, left == 1 ? " thread" : " threads", " instead of ", wanted,
             ": the system starts no more (ulimit -u, or the container's limit on processes)");
}

}  // namespace crossply
