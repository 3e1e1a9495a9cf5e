// How many threads a program may have: the quota of a container, and the system's own limit.
#include "engine/threads.h"

#include <cstdlib>
#include <filesystem>
#include <new>
#include <system_error>

#include "engine/memory.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A tree of control groups, and what /proc/self/cgroup says.
struct Groups {
  TempDir dir;
  void put(const std::string& file, const std::string& text) {
    const std::filesystem::path path = dir.path / "cgroup" / file;
    std::filesystem::create_directories(path.parent_path());
    write_text(path.string(), text);
  }
  double quota(const std::string& self) {
    write_text(dir.file("self"), self);
    return cpu_quota(dir.file("cgroup"), dir.file("self"));
  }
  uint64_t memory(const std::string& self) {
    write_text(dir.file("self"), self);
    return left_in_groups(dir.file("cgroup"), dir.file("self"));
  }
};

}  // namespace

TEST_CASE("threads: the quota of cgroup v2 is the least of the group and those above it") {
  Groups groups;
  CHECK(groups.quota("0::/\n") == 0);
  groups.put("cpu.max", "max 100000\n");
  CHECK(groups.quota("0::/\n") == 0);
  groups.put("cpu.max", "250000 100000\n");  // a container sees its own group as the root
  CHECK(groups.quota("0::/\n") == 2.5);
  groups.put("pod/cpu.max", "150000 50000\n");
  groups.put("pod/job/cpu.max", "400000 100000\n");
  CHECK(groups.quota("0::/pod/job\n") == 2.5);
  groups.put("cpu.max", "max 100000\n");
  CHECK(groups.quota("0::/pod/job\n") == 3);
  CHECK(groups.quota("0::/pod/job/not/there\n") == 3);
  CHECK(groups.quota("") == 0);
  groups.put("cpu.max", "garbage\n");
  CHECK(groups.quota("0::/\n") == 0);
}

TEST_CASE("threads: the quota of cgroup v1, wherever the controller is mounted") {
  Groups groups;
  const std::string self = "11:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/x\n";
  groups.put("cpu,cpuacct/box/cpu.cfs_quota_us", "-1\n");
  groups.put("cpu,cpuacct/box/cpu.cfs_period_us", "100000\n");
  CHECK(groups.quota(self) == 0);
  groups.put("cpu,cpuacct/box/cpu.cfs_quota_us", "50000\n");
  CHECK(groups.quota(self) == 0.5);
  Groups plain;
  plain.put("cpu/cpu.cfs_quota_us", "300000\n");
  plain.put("cpu/cpu.cfs_period_us", "100000\n");
  CHECK(plain.quota("3:cpu:/docker/0123\n") == 3);  // the container's files stand at its root
  CHECK(plain.quota("3:cpuset:/docker/0123\n") == 0);
}

TEST_CASE("threads: as many are counted as start, and all of them end") {
  CHECK(threads_that_start(0) == 0);
  CHECK(threads_that_start(5) == 5);
  const auto limit = [](int i) {
    if (i == 3) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  };
  CHECK(threads_that_start(8, limit) == 3);
  CHECK(threads_that_start(8, [](int i) { i == 3 ? throw std::bad_alloc() : void(); }) == 3);
}

TEST_CASE("threads: several processes of a launcher are known by their number") {
  const char* const names[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
  for (const char* name : names) ::unsetenv(name);
  CHECK(!is_one_of_several());
  for (const char* name : names) {
    for (const auto& [size, several] : {std::pair("1", false), {"2", true}, {"", false}, {"x", false}}) {
      ::setenv(name, size, 1);
      CHECK(is_one_of_several() == several);
    }
    ::unsetenv(name);
  }
}

TEST_CASE("memory: the least that the limits of the group and of those above it leave") {
  Groups groups;
  CHECK(groups.memory("0::/pod/job\n") == UINT64_MAX);
  groups.put("pod/job/memory.max", "max\n");
  groups.put("pod/job/memory.current", "700\n");
  groups.put("pod/memory.max", "1000\n");
  groups.put("pod/memory.current", "900\n");
  groups.put("pod/memory.stat", "anon 600\ninactive_file 300\n");
  CHECK(groups.memory("0::/pod/job\n") == 400);
  groups.put("pod/job/memory.max", "750\n");
  CHECK(groups.memory("0::/pod/job\n") == 50);
  CHECK(groups.memory("0::/\n") == UINT64_MAX);
}

TEST_CASE("memory: the limit of cgroup v1") {
  Groups groups;
  groups.put("memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(groups.memory("4:memory:/box\n") > uint64_t{1} << 62);  // none
  groups.put("memory/box/memory.limit_in_bytes", "5000\n");
  groups.put("memory/box/memory.usage_in_bytes", "2000\n");
  CHECK(groups.memory("4:memory:/box\n0::/\n") == 3000);
  CHECK(groups.memory("3:cpu:/box\n") == UINT64_MAX);
}
