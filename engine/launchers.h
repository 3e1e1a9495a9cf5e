// What starts the processes of a job, and the variables by which each says so.
#pragma once

#include <vector>

namespace crossply {

// Names of rank, size, rank on the machine, and ranks on the machine.
struct Launcher {
  const char *name, *rank, *size, *local_rank, *local_size;
  std::vector<const char*> variables() const { return {rank, size, local_rank, local_size}; }
};
inline constexpr Launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};

}  // namespace crossply
