#include "ranks/comm.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "engine/platform.h"

namespace crossply {

#ifdef CROSSPLY_MPI

std::string mpi_library() { return CROSSPLY_MPI; }

// The module stays open, for the Comm's code is in it; its names are for all, for Open MPI's plugins need MPI's.
std::unique_ptr<Comm> make_mpi_comm(const World& world) {
  std::string file = std::filesystem::path(own_program()).parent_path() / "comm_mpi.so";
  if (const char* named = std::getenv("CROSSPLY_MPI_MODULE")) file = named;
  void* module = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* make = module == nullptr ? nullptr : dlsym(module, "crossply_mpi_comm");
  if (make == nullptr)
    fail(Exit::device, "cannot open ", file, ", which several processes on CPUs need: ", dlerror(),
         ". It is built with the programs and stays beside them; it needs ", mpi_library(),
         ": install that, or build again with the MPI that is here, or start one process");
  return std::unique_ptr<Comm>(reinterpret_cast<Comm* (*)(const World&)>(make)(world));
}

#else
std::string mpi_library() { return ""; }
std::unique_ptr<Comm> make_mpi_comm(const World&) { return nullptr; }
#endif

std::string built_comms() {
  const std::string mpi = mpi_library(), nccl = nccl_library();
  if (mpi.empty() && nccl.empty()) return "nothing";
  const std::string on_cpus = mpi.empty() ? "" : "MPI (" + mpi + ")";
  return on_cpus + (mpi.empty() || nccl.empty() ? "" : " and ") + nccl;
}

}  // namespace crossply
