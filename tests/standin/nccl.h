// A stand-in for NCCL, by the same names, for processes whose GPU is the emulator: what ranks/comm_nccl.cpp calls of
// it, and no more. Processes meet at Unix sockets; the unique id holds their folder. A transfer is work of the
// emulator's transfer lane: what it reads must be the same when it runs as when it was asked for, and what it writes is
// NaN between.
//
// Where NCCL would hang, or move the wrong bytes, a transfer throws Error when it runs: Exit::internal if ranks call
// differently (another function, count, type or root; a send without its receive; recorded here but not there), or if
// memory changed too early; the message names both sides. A rank that is gone, or does not come in time, is
// Exit::device. Other misuse is returned, with words, as NCCL does: use after the end, another stream, the host's
// memory, a recording of what never ran plainly, an end while transfers or recordings of them are there.
//
// What it cannot show: topologies, a GPU without room for NCCL's kernels, the order of memory accesses, NCCL's own
// rules of recording, networks, speed.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#define NCCL_VERSION_CODE 22809
#define NCCL_VERSION(X, Y, Z) ((X)*10000 + (Y)*100 + (Z))
#define NCCL_UNIQUE_ID_BYTES 128

using cudaStream_t = void*;
using ncclComm_t = struct ncclComm*;
struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
};
enum ncclDataType_t { ncclInt8 = 0, ncclFloat32 = 7 };
enum ncclRedOp_t { ncclSum = 0 };

struct ncclConfig_t {
  int blocking;
  const char* commName;
};
#define NCCL_CONFIG_INITIALIZER \
  { INT_MIN, nullptr }

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream);
// In place only. In an order of the ranks that is drawn by lot for each call: NCCL promises none either.
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);

namespace crossply::standin {

// What happens to this process's transfer of this number, counted from 0 in each communicator: it comes later, fails
// as NCCL reports it, never ends, or the process is killed.
enum class Fault { none, delay, error, hang, die };
void inject(Fault fault, int64_t transfer, double seconds = 0);
void set_patience(double seconds);  // for other ranks: 300
int living();                       // communicators that were neither destroyed nor aborted

}  // namespace crossply::standin
