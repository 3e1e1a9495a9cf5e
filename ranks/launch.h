// What the program that started this one left for it: which rank it is, and which CPUs.
#pragma once

#include <string>
#include <vector>

#include "ranks/comm.h"

namespace crossply {

// From the environment variables of torchrun, Open MPI, MPICH or srun, whichever set is complete first; one rank where
// there is none. Throws Exit::usage, naming the variables, if a set lacks some or contradicts itself.
World world_from_environment();

// What a rank takes of the CPUs that it may run on, `mine`, where its launcher may run on `launcher` of them. Ranks
// that may all run everywhere take a part each; those that the launcher has bound to CPUs keep them.
struct CpuShare {
  int threads = 0;        // for OpenMP; 0: as many as by itself
  std::vector<int> cpus;  // to run on; empty: as before
  std::string advice;     // for the user, where the launcher left fewer CPUs than there are; else empty
};
// asked: OMP_NUM_THREADS, 0 if unset.
CpuShare cpu_share(const World& world, const std::vector<int>& mine, int launcher, int asked);

// Takes it, of several ranks, or where a launcher started the only one: before the first parallel part. Returns
// the advice, a line to print.
std::string take_cpu_share(const World& world);

}  // namespace crossply
