#include "engine/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "engine/check.h"

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

// Of a container: the page cache, which it can take back, counts as free.
uint64_t left_in_container(const std::string& dir, const char* limit, const char* used, const char* cache) {
  const uint64_t most = number_in(dir + limit);
  if (most == 0) return UINT64_MAX;  // "max", or no such file
  return left_of(most, left_of(number_in(dir + used), number_after((dir + "memory.stat").c_str(), cache)));
}

}  // namespace

uint64_t available_memory() {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  uint64_t available = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  if (const uint64_t kilobytes = number_after("/proc/meminfo", "MemAvailable:"))
    available = std::min(available, kilobytes * 1024);
  const std::string groups = "/sys/fs/cgroup/";
  available = std::min(
      {available, left_in_container(groups, "memory.max", "memory.current", "inactive_file"),
       left_in_container(groups + "memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")});
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
