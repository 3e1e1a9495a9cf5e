// Comm between GPUs, by NCCL: one communicator, whose calls all come from one thread, in the order of the program, on
// the transfer stream (kernels/cuda/cuda.h). It moves bytes and sets none of NCCL's algorithms, for what is only moved
// has the same bits by all of them. Its recordings must be destroyed before it.
//
// The library is opened when it is first needed, as kernels/cuda/cublaslt.cpp does it: a program that is linked with
// one does not start where that is missing, and on one GPU nobody needs it. Tests without a GPU link this file with a
// stand-in (tests/standin/nccl.h).
//
// Not yet run on hardware: only with a stand-in for NCCL.
#include "ranks/comm.h"

#if CROSSPLY_NCCL

#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/library.h"

namespace crossply {
namespace {

constexpr int oldest = NCCL_VERSION(2, 19, 0);
static_assert(NCCL_VERSION_CODE >= oldest, "crossply needs NCCL 2.19 or newer");
constexpr size_t max_bytes = size_t{1} << 30;

#if CROSSPLY_CUDA
void* find_nccl(const char* name) {
  static void* const library = open_library(
      "libnccl.so.2", cuda_library_folders(),
      "Install NCCL (or pip install nvidia-nccl-cu13 for a python3 of PATH), or name the folder of libnccl.so.2 in "
      "LD_LIBRARY_PATH, or train on one GPU");
  return find_function(library, name, "libnccl.so.2");
}
// The function of the library, looked up once, with the type that the header says.
#define NCCL(name)                                                                    \
  [] {                                                                                \
    static const auto function = reinterpret_cast<decltype(&name)>(find_nccl(#name)); \
    return function;                                                                  \
  }()
#else
#define NCCL(name) name
#endif

std::string text_of(int version) { return str("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100); }

// All that NCCL says of an error: its kind, and the last of its own words.
void check(ncclResult_t result, const char* what, ncclComm_t comm) {
  if (result == ncclSuccess) return;
  const char* words = NCCL(ncclGetLastError)(comm);
  fail(Exit::device, "NCCL: ", what, ": ", NCCL(ncclGetErrorString)(result),
       words != nullptr && *words != '\0' ? ": " : "", words != nullptr ? words : "");
}

// It prints what went wrong, which no result of a call says.
int version_at_hand() {
  setenv("NCCL_DEBUG", "WARN", 0);
  int version = 0;
  check(NCCL(ncclGetVersion)(&version), "ncclGetVersion", nullptr);
  if (version < oldest) fail(Exit::device, text_of(version), " is too old; install 2.19 or newer");
  return version;
}

class NcclComm : public Comm {
 public:
  NcclComm(const World& world, const ncclUniqueId& id, int version) : world_(world), version_(version) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;  // each call returns when its work is on the stream; a stuck one is the watch thread's to end
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    config.commName = "crossply";
#endif
    issue(NCCL(ncclCommInitRankConfig)(&comm_, world.size, id, world.rank, &config), "ncclCommInitRankConfig");
  }
  // After an error it is left to the end of the process: a communicator whose peer is gone may never return from either
  // of its ends.
  ~NcclComm() override {
    if (failed_ || std::uncaught_exceptions() > 0) return;
    try {
      synchronize_transfers();
      issue(NCCL(ncclCommDestroy)(comm_), "ncclCommDestroy");
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
  }
  std::string describe() const override { return text_of(version_); }

  void exchange(const Tensor& from, const Tensor& to) override {
    const size_t slice = slice_bytes(from);
    CHECK_THAT(to.bytes() == from.bytes(), "exchange of ", from.str(), " to ", to.str());
    start();
    issue(NCCL(ncclGroupStart)(), "ncclGroupStart");
    for (int distance = 1; distance < world_.size; ++distance) {
      const int next = (world_.rank + distance) % world_.size;
      const int last = (world_.rank - distance + world_.size) % world_.size;
      issue(NCCL(ncclSend)(slice_of(from, next), slice, ncclInt8, next, comm_, stream()), "ncclSend");
      issue(NCCL(ncclRecv)(slice_of(to, last), slice, ncclInt8, last, comm_, stream()), "ncclRecv");
    }
    issue(NCCL(ncclGroupEnd)(), "ncclGroupEnd");
  }
  void gather(const Tensor& whole) override {
    const size_t slice = slice_bytes(whole);
    start();
    issue(NCCL(ncclAllGather)(slice_of(whole, world_.rank), whole.data, slice, ncclInt8, comm_, stream()),
          "ncclAllGather");
  }
  void broadcast(const Tensor& whole, int root) override {
    CHECK_THAT(whole.bytes() <= max_bytes && root >= 0 && root < world_.size, whole.str(), " from rank ", root);
    start();
    issue(NCCL(ncclBroadcast)(whole.data, whole.data, whole.bytes(), ncclInt8, root, comm_, stream()), "ncclBroadcast");
  }
  void route(const std::vector<Piece>& sends, const std::vector<Piece>& receives) override {
    for (const auto* pieces : {&sends, &receives})
      for (const auto& [rank, part] : *pieces)
        CHECK_THAT(part.bytes() <= max_bytes && rank >= 0 && rank < world_.size && rank != world_.rank, part.str(),
                   " between ranks ", world_.rank, " and ", rank);
    start();
    issue(NCCL(ncclGroupStart)(), "ncclGroupStart");
    for (const auto& [rank, part] : sends)
      issue(NCCL(ncclSend)(part.data, part.bytes(), ncclInt8, rank, comm_, stream()), "ncclSend");
    for (const auto& [rank, part] : receives)
      issue(NCCL(ncclRecv)(part.data, part.bytes(), ncclInt8, rank, comm_, stream()), "ncclRecv");
    issue(NCCL(ncclGroupEnd)(), "ncclGroupEnd");
  }
  void reduce_scatter(const Tensor& whole) override {
    const size_t count = slice_bytes(whole) / sizeof(float);
    CHECK_THAT(whole.dtype == Dtype::f32, whole.str());
    start();
    issue(
        NCCL(ncclReduceScatter)(whole.data, slice_of(whole, world_.rank), count, ncclFloat32, ncclSum, comm_, stream()),
        "ncclReduceScatter");
  }

  Ticket mark() override { return mark_transfers(); }
  void wait(Ticket ticket) override {
    poll();
    wait_for_transfers(ticket);
  }

 private:
  size_t slice_bytes(const Tensor& whole) const {
    const auto size = static_cast<size_t>(world_.size);
    CHECK_THAT(whole.numel() % world_.size == 0 && whole.bytes() / size <= max_bytes, whole.str(), " in ", size,
               " slices of at most 1 GiB");
    return whole.bytes() / size;
  }
  std::byte* slice_of(const Tensor& whole, int rank) const {
    return static_cast<std::byte*>(whole.data) + static_cast<size_t>(rank) * slice_bytes(whole);
  }
  static cudaStream_t stream() { return static_cast<cudaStream_t>(transfer_stream()); }

  // Every call of NCCL on this communicator ends here. With blocking = 0 it would wait for ncclInProgress to pass.
  void issue(ncclResult_t result, const char* what) {
    failed_ |= result != ncclSuccess;
    check(result, what, comm_);
  }
  // What went wrong since, in a transfer that had been issued.
  void poll() {
    ncclResult_t error = ncclSuccess;
    issue(NCCL(ncclCommGetAsyncError)(comm_, &error), "ncclCommGetAsyncError");
    issue(error, "a transfer");
  }
  void start() {
    poll();
    start_transfers();
  }

  const World world_;
  const int version_;
  ncclComm_t comm_ = nullptr;
  bool failed_ = false;
};

}  // namespace

// NCCL's own id, and behind it the version.
std::string new_nccl_id() {
  const int version = version_at_hand();
  ncclUniqueId id;
  check(NCCL(ncclGetUniqueId)(&id), "ncclGetUniqueId", nullptr);
  return std::string(id.internal, sizeof id.internal) + std::to_string(version);
}

std::unique_ptr<Comm> make_nccl_comm(const World& world, const std::string& id) {
  const int version = version_at_hand();
  ncclUniqueId unique;
  CHECK_THAT(id.size() > sizeof unique.internal, "an id of NCCL with ", id.size(), " bytes");
  std::memcpy(unique.internal, id.data(), sizeof unique.internal);
  const int theirs = std::atoi(id.c_str() + sizeof unique.internal);
  if (theirs != version)
    fail(Exit::usage, "rank ", world.rank, " has ", text_of(version), ", rank 0 has ", text_of(theirs),
         "; install the same everywhere");
  return std::make_unique<NcclComm>(world, unique, version);
}

std::string nccl_library() { return text_of(NCCL_VERSION_CODE); }

}  // namespace crossply

#else

// Weak: of the tests the stand-in's come first.
namespace crossply {
[[gnu::weak]] std::string new_nccl_id() { return {}; }
[[gnu::weak]] std::unique_ptr<Comm> make_nccl_comm(const World&, const std::string&) { return nullptr; }
[[gnu::weak]] std::string nccl_library() { return {}; }
}  // namespace crossply

#endif
