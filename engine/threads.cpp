#include "engine/threads.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/check.h"

namespace crossply {
namespace {

// The quota in a group's own files; 0: none.
double quota_in(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::ifstream v2(dir + "/cpu.max"); v2 >> quota >> period)  // "max 100000": no number, no quota
    return quota > 0 && period > 0 ? quota / period : 0;
  std::ifstream of_quota(dir + "/cpu.cfs_quota_us"), of_period(dir + "/cpu.cfs_period_us");
  const bool known = (of_quota >> quota) && (of_period >> period);  // -1: none
  return known && quota > 0 && period > 0 ? quota / period : 0;
}

// The least of a group and those above it, whose directories begin with `root`.
double least_quota(const std::string& root, std::string group) {
  double least = 0;
  while (true) {
    if (const double own = quota_in(root + group); own > 0) least = least > 0 ? std::min(least, own) : own;
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return least;
    group.resize(slash);
  }
}

bool holds_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

}  // namespace

double cpu_quota(const std::string& root, const std::string& self) {
  std::ifstream in(self);
  for (std::string line; std::getline(in, line);) {  // "0::/group", or of v1 "4:cpu,cpuacct:/group"
    const size_t first = line.find(':'), second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (!controllers.empty() && !holds_word(controllers, "cpu")) continue;
    for (const std::string& mounted : {root, root + "/cpu", root + "/" + controllers, root + "/unified"})
      if (const double quota = least_quota(mounted, group); quota > 0) return quota;
  }
  return 0;
}

int threads_that_start(int wanted, const std::function<void(int)>& start) {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::vector<std::thread> threads;
  try {
    for (int i = 0; i < wanted; ++i) {
      start(i);
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return over; });
      });
    }
  } catch (const std::system_error&) {  // no more of them
  }
  {
    const std::lock_guard lock(mutex);
    over = true;
  }
  changed.notify_all();
  for (std::thread& thread : threads) thread.join();
  return static_cast<int>(threads.size());
}

std::string choose_thread_count(int sharers) {
  if (const double quota = cpu_quota(); quota > 0 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int share = static_cast<int>(std::ceil(quota / sharers));
    omp_set_num_threads(std::clamp(share, 1, omp_get_max_threads()));
  }
  const int wanted = omp_get_max_threads(), started = 1 + threads_that_start(wanted - 1);
  if (started >= wanted) return "";
  const int left = std::max(1, started - 2);
  omp_set_num_threads(left);
  return str("note: running with ", left, left == 1 ? " thread" : " threads", " instead of ", wanted,
             ": the system starts no more (ulimit -u, or the container's limit on processes)");
}

}  // namespace crossply
