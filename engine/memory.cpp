#include "engine/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>

#include "engine/check.h"
#include "engine/threads.h"

namespace crossply {
namespace {

// The number behind `key` in a file of lines "key: number"; 0 if there is none.
uint64_t number_after(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;)
    if (uint64_t number = 0; word == key && file >> number) return number;
  return 0;
}

uint64_t number_in(const std::string& path) {
  uint64_t number = 0;
  return std::ifstream(path) >> number ? number : 0;
}

uint64_t left_of(uint64_t limit, uint64_t used) { return limit > used ? limit - used : 0; }

// The memory of one group.
double left_in(const std::string& dir, const char* limit, const char* used, const char* cache) {
  const uint64_t most = number_in(dir + limit);
  if (most == 0) return std::numeric_limits<double>::infinity();  // "max", or no such file
  const uint64_t taken = left_of(number_in(dir + used), number_after((dir + "/memory.stat").c_str(), cache));
  return static_cast<double>(left_of(most, taken));
}

double left_in_group(const std::string& dir) {
  return std::min(left_in(dir, "/memory.max", "/memory.current", "inactive_file"),
                  left_in(dir, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"));
}

}  // namespace

uint64_t left_in_groups(const std::string& root, const std::string& self) {
  const double left = min_of_groups("memory", left_in_group, root, self);
  return left < 0x1p63 ? static_cast<uint64_t>(left) : UINT64_MAX;
}

uint64_t available_memory() {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  uint64_t available = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  if (const uint64_t kilobytes = number_after("/proc/meminfo", "MemAvailable:"))
    available = std::min(available, kilobytes * 1024);
  available = std::min(available, left_in_groups());
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    available = std::min(available, left_of(limit.rlim_cur, number_in("/proc/self/statm") * page));
  return available;
}

void require_memory(uint64_t bytes, const std::string& what, const std::string& advice) {
  const uint64_t available = available_memory();
  if (bytes <= available) return;
  constexpr uint64_t mega = 1'000'000;
  fail(Exit::device, "out of memory: ", what, " about ", bytes / mega, " MB, and ", available / mega,
       " MB are available; ", advice);
}

}  // namespace crossply
