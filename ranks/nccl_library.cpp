// NCCL without linking with it, as kernels/cuda/cublaslt.cpp does it with cuBLASLt: what is linked with a library does
// not start where that is missing, and only a job of several GPUs needs it. These are its functions by their own names,
// and each passes on to the library, which the first of them opens.
#if CROSSPLY_NCCL

#include <nccl.h>

#include "engine/check.h"
#include "kernels/cuda/library.h"

namespace crossply {
namespace {

void* find_nccl(const char* name) {
  static void* const library = open_library(
      "libnccl.so.2", cuda_library_folders(),
      "Install NCCL (or pip install nvidia-nccl-cu13 for a python3 of PATH), or name the folder of libnccl.so.2 in "
      "LD_LIBRARY_PATH, or train on one GPU");
  return find_function(library, name, "libnccl.so.2");
}

}  // namespace
}  // namespace crossply

// The function of the library, looked up once, with the type that the header says.
#define NCCL(name)                                                                              \
  [] {                                                                                          \
    static const auto function = reinterpret_cast<decltype(&name)>(crossply::find_nccl(#name)); \
    return function;                                                                            \
  }()

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return NCCL(ncclGetVersion)(version); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return NCCL(ncclGetUniqueId)(id); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return NCCL(ncclCommInitRankConfig)(comm, ranks, id, rank, config);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return NCCL(ncclCommDestroy)(comm); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return NCCL(ncclCommGetAsyncError)(comm, error);
}
const char* ncclGetErrorString(ncclResult_t result) { return NCCL(ncclGetErrorString)(result); }
const char* ncclGetLastError(ncclComm_t comm) { return NCCL(ncclGetLastError)(comm); }

ncclResult_t ncclGroupStart() { return NCCL(ncclGroupStart)(); }
ncclResult_t ncclGroupEnd() { return NCCL(ncclGroupEnd)(); }
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return NCCL(ncclSend)(from, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return NCCL(ncclRecv)(to, count, type, peer, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return NCCL(ncclAllGather)(from, to, count, type, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return NCCL(ncclBroadcast)(from, to, count, type, root, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return NCCL(ncclReduceScatter)(from, to, count, type, op, comm, stream);
}

}  // extern "C"

#endif
