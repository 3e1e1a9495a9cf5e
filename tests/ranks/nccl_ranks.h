// Ranks of a job by NCCL, for tests: processes whose GPU is the emulator, with the stand-in for NCCL; in a build with
// CUDA two that share one GPU, where CROSSPLY_SHARE_GPU is set, with NCCL itself.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/devices.h"
#include "tests/ranks/comm_checks.h"
#include "tests/ranks/ranks.h"
#include "tests/support/backends.h"
#if !CROSSPLY_CUDA
#include "tests/standin/nccl.h"
#endif

namespace crossply::test {

struct Rank {
  const World world;
  std::unique_ptr<Device> device;
  std::unique_ptr<Comm> comm;
  // n floats, all `value`.
  std::unique_ptr<Flat> floats(size_t n, float value = 0) const {
    auto made = std::make_unique<Flat>(*device, static_cast<int64_t>(n));
    made->set(std::vector<float>(n, value));
    return made;
  }
};

// Whether ranks can run here, and how many.
inline std::vector<int> numbers_of_ranks() {
  if (emulated) return {2, 4};
  if (nccl_library().empty()) {
    std::fprintf(stderr, "Tests of NCCL are skipped: this was built without it\n");
    return {};
  }
  if (std::getenv("CROSSPLY_SHARE_GPU") != nullptr) return {2};
  std::fprintf(stderr, "Tests of NCCL are skipped: CROSSPLY_SHARE_GPU=1 lets two ranks share a GPU\n");
  return {};
}

// NCCL refuses one GPU twice on one machine. Until 2.29 it takes two names for two machines, between which only a
// network is; from 2.30 it can be told to allow it. Two ranks need room for the kernels of both.
inline void share_gpu(int rank) {
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 0); };
  set("NCCL_HOSTID", str("rank", rank));
  set("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  for (const char* name : {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}) set(name, "1");
  set("NCCL_SOCKET_IFNAME", "lo");
  set("NCCL_MAX_CTAS", "2");
}

// What became of the ranks that each did this. Nothing of the GPU may have been used before by this process.
inline std::vector<std::string> with_ranks(int size, const std::function<void(Rank&)>& body) {
  int ends[2];
  CHECK_THAT(pipe(ends) == 0, "no pipe");
  const auto became = run_ranks(size, [&](const World& world) {
    if (!emulated) share_gpu(world.rank);
    std::string id(256, '\0');  // of rank 0
    if (world.leads()) {
      const std::string made = new_nccl_id();
      std::copy(made.begin(), made.end(), id.begin());
      for (int r = 1; r < size; ++r) CHECK_THAT(write(ends[1], id.data(), id.size()) == 256, "no room in a pipe");
    } else {
      CHECK_THAT(read(ends[0], id.data(), id.size()) == 256, "no id in a pipe");
    }
    Rank rank{world, make_device(gpu), make_nccl_comm(world, id)};
    body(rank);
    rank.comm = nullptr;
#if !CROSSPLY_CUDA
    CHECK_THAT(standin::living() == 0, "a communicator was left");
#endif
  });
  for (const int end : ends) close(end);
  return became;
}

inline void check_all_well(const std::vector<std::string>& became) {
  for (size_t rank = 0; rank < became.size(); ++rank) CHECK_MESSAGE(became[rank].empty(), rank << ": " << became[rank]);
}

}  // namespace crossply::test
