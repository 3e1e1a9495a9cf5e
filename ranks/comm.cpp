#include "ranks/comm.h"

namespace crossply {

#if !CROSSPLY_MPI
std::string mpi_library() { return ""; }
std::unique_ptr<Comm> make_mpi_comm(const Place&) { return nullptr; }
#endif

#if !CROSSPLY_NCCL
std::string nccl_library() { return ""; }
std::string new_nccl_id() { return ""; }
std::unique_ptr<Comm> make_nccl_comm(const Place&, const std::string&) { return nullptr; }
#endif

std::string built_comms() {
  const std::string mpi = mpi_library(), nccl = nccl_library();
  if (mpi.empty() && nccl.empty()) return "nothing";
  const std::string on_cpus = mpi.empty() ? "" : "MPI (" + mpi + ")";
  return on_cpus + (mpi.empty() || nccl.empty() ? "" : " and ") + nccl;
}

}  // namespace crossply
