#include "tests/standin/nccl.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "kernels/cuda/cuda.h"
#include "kernels/emulator/emulator.h"
#include "tests/standin/meeting.h"

using namespace crossply;
using standin::Span;

struct ncclComm {
  int rank, ranks;
  std::unique_ptr<standin::Mesh> mesh;  // null after the end
  ncclResult_t error = ncclSuccess;
  std::string words{};       // of the last error
  int64_t run = 0;           // transfers so far
  int64_t under_way = 0;     // asked for, but not run
  std::set<int> ran_once{};  // kinds of transfers that were asked for outside of recordings
  std::shared_ptr<int> recordings = std::make_shared<int>(0);  // each recorded transfer holds it, too
};

namespace {

enum Kind { group, all_gather, broadcast, reduce_scatter };

// What ranks tell each other before a transfer.
struct Header {
  int64_t number, kind, count, type, root, recorded;
  struct Messages {
    int64_t bytes, count;
    uint64_t sizes;  // a hash of each one's
    bool operator==(const Messages&) const = default;
  };
  Messages to_you, from_you;  // in a group
};

using Messages = std::vector<Span>;  // to or from one rank

struct Transfer {
  ncclComm* comm;
  Header header{};
  std::vector<Messages> out, in;  // by rank
  Span whole{};                   // of a ReduceScatter
  std::shared_ptr<int> recording{};
  // From when it is asked for until it runs: hashes of what goes out; whether NaN was put where it comes in. Not of
  // memory that a transfer before this one has still to do with.
  struct Asked {
    std::vector<std::optional<uint64_t>> hashes;
    std::vector<bool> poisoned;
    std::vector<std::byte> copy;  // of the whole of a ReduceScatter
  };
  std::deque<Asked> asked{};
};

std::vector<std::unique_ptr<ncclComm>> all;  // also after their end, to tell who uses them then
std::string words_of_none;                   // of an error without a communicator
std::deque<std::vector<Span>> under_way;     // memory of the transfers that were asked for, in their order
int groups = 0;
std::unique_ptr<Transfer> open_group;
double patience = 300;
struct {
  standin::Fault fault = standin::Fault::none;
  int64_t transfer = 0;
  double seconds = 0;
} injected;

ncclResult_t refuse(ncclComm* comm, ncclResult_t result, const std::string& words) {
  (comm != nullptr ? comm->words : words_of_none) = "stand-in for NCCL: " + words;
  return result;
}
template <class... Args>
[[noreturn]] void fail_transfer(const Transfer& t, const Args&... args) {
  fail(Exit::internal, "stand-in for NCCL: transfer ", t.comm->run, ": ", args...);
}
std::string text_of(const Header& h) {
  const char* names[] = {"a group of sends and receives", "AllGather", "Broadcast", "ReduceScatter"};
  const std::string recorded = h.recorded != 0 ? ", recorded" : "";
  if (h.kind == group) return names[h.kind] + recorded;
  return str(names[h.kind], " of ", h.count, " x type ", h.type, " with root ", h.root, recorded);
}
std::string text_of(const char* what, const Header::Messages& m) {
  return m.count <= 1 ? str("a ", what, " of ", m.bytes, " bytes")
                      : str(m.count, " ", what, "s of ", m.bytes, " bytes");
}
size_t size_of_type(ncclDataType_t type) { return type == ncclFloat32 ? 4 : 1; }

// -----------------------------------------------------------------------------------------------------------------
// Memory.

uint64_t hash_of(const Span& span, uint64_t hash = 0xCBF29CE484222325ull) {
  const auto* bytes = static_cast<const uint8_t*>(span.data);
  for (size_t i = 0; i < span.bytes; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3ull;
  return hash;
}
Header::Messages summary_of(const Messages& messages) {
  Header::Messages sum{0, static_cast<int64_t>(messages.size()), hash_of({})};
  for (const Span& one : messages) {
    size_t bytes = one.bytes;
    sum.bytes += static_cast<int64_t>(bytes), sum.sizes = hash_of({&bytes, sizeof bytes}, sum.sizes);
  }
  return sum;
}
bool is_poisoned(const Span& span) {
  const auto* bytes = static_cast<const uint8_t*>(span.data);
  return std::all_of(bytes, bytes + span.bytes, [](uint8_t byte) { return byte == 0xFF; });
}
void poison(const Span& span) {
  if (span.bytes > 0) std::memset(span.data, 0xFF, span.bytes);
}
bool overlap(const Span& a, const Span& b) {
  const auto *from = static_cast<std::byte*>(a.data), *other = static_cast<std::byte*>(b.data);
  return a.bytes > 0 && b.bytes > 0 && from < other + b.bytes && other < from + a.bytes;
}
bool is_free(const Span& span) {
  return std::none_of(under_way.begin(), under_way.end(), [&](const std::vector<Span>& spans) {
    return std::any_of(spans.begin(), spans.end(), [&](const Span& other) { return overlap(span, other); });
  });
}

void begin(Transfer& t) {
  Transfer::Asked asked;
  if (t.whole.bytes > 0 && is_free(t.whole)) {
    const auto* data = static_cast<const std::byte*>(t.whole.data);
    asked.copy.assign(data, data + t.whole.bytes);
    poison(t.whole);
  }
  std::vector<Span> touched = {t.whole};
  for (const Messages& to_one : t.out)
    for (const Span& out : to_one) {
      asked.hashes.push_back(is_free(out) ? std::optional(hash_of(out)) : std::nullopt);
      touched.push_back(out);
    }
  for (const Messages& from_one : t.in)
    for (const Span& in : from_one) {
      asked.poisoned.push_back(is_free(in));
      if (asked.poisoned.back()) poison(in);
      touched.push_back(in);
    }
  under_way.push_back(std::move(touched));
  t.asked.push_back(std::move(asked));
  ++t.comm->under_way;
}

void check_memory(const Transfer& t, const Transfer::Asked& asked) {
  size_t sent = 0, received = 0;
  for (size_t r = 0; r < t.out.size(); ++r)
    for (const Span& out : t.out[r])
      if (const auto& hash = asked.hashes[sent++]; hash && hash_of(out) != *hash)
        fail_transfer(t, "rank ", t.comm->rank, " wrote what goes to rank ", r, " before that was waited for, in ",
                      text_of(t.header));
  for (size_t r = 0; r < t.in.size(); ++r)
    for (const Span& in : t.in[r])
      if (asked.poisoned[received++] && !is_poisoned(in))
        fail_transfer(t, "rank ", t.comm->rank, " wrote where something comes from rank ", r,
                      " before that was waited for, in ", text_of(t.header));
  if (!asked.copy.empty() && !is_poisoned(t.whole))
    fail_transfer(t, "rank ", t.comm->rank, " wrote what is summed before that was waited for");
}

// -----------------------------------------------------------------------------------------------------------------
// Running.

void deliver(standin::Fault fault, ncclComm& comm) {
  switch (fault) {
    case standin::Fault::none: return;
    case standin::Fault::delay: return std::this_thread::sleep_for(std::chrono::duration<double>(injected.seconds));
    case standin::Fault::error: comm.error = refuse(&comm, ncclRemoteError, "an injected error"); return;
    case standin::Fault::hang:
      for (;;) pause();
    case standin::Fault::die: kill(getpid(), SIGKILL);
  }
}

void compare(const Transfer& t, const Header& mine, const Header& theirs, size_t other) {
  const auto say = [&](const std::string& here, const std::string& there) {
    fail_transfer(t, "rank ", t.comm->rank, " has ", here, ", rank ", other, " has ", there);
  };
  const auto key = [](const Header& h) { return std::array{h.number, h.kind, h.count, h.type, h.root, h.recorded}; };
  if (key(mine) != key(theirs)) say(text_of(mine), text_of(theirs));
  if (mine.to_you != theirs.from_you) say(text_of("send", mine.to_you), text_of("receive", theirs.from_you));
  if (mine.from_you != theirs.to_you) say(text_of("receive", mine.from_you), text_of("send", theirs.to_you));
}

void meet(const Transfer& t) {
  std::vector<Header> mine(t.out.size(), t.header), theirs(t.out.size());
  std::vector<Span> out, in;
  for (size_t r = 0; r < mine.size(); ++r) {
    mine[r].number = t.comm->run;
    if (t.header.kind == group) mine[r].to_you = summary_of(t.out[r]), mine[r].from_you = summary_of(t.in[r]);
    out.push_back({&mine[r], sizeof(Header)});
    in.push_back({&theirs[r], sizeof(Header)});
  }
  t.comm->mesh->swap(out, in, patience);
  for (size_t r = 0; r < mine.size(); ++r)
    if (static_cast<int>(r) != t.comm->rank) compare(t, mine[r], theirs[r], r);
}

// The own slice of `to` becomes the sum of all ranks' slices.
void sum_slices(const Transfer& t, std::vector<std::byte> from) {
  const auto ranks = static_cast<size_t>(t.comm->ranks), own = static_cast<size_t>(t.comm->rank);
  const size_t bytes = from.size() / ranks;
  std::vector<std::vector<float>> slices(ranks, std::vector<float>(bytes / sizeof(float)));
  std::vector<Span> out, in;
  for (size_t r = 0; r < ranks; ++r) {
    out.push_back({from.data() + r * bytes, bytes});
    in.push_back({slices[r].data(), bytes});
  }
  std::memcpy(slices[own].data(), out[own].data, bytes);
  t.comm->mesh->swap(out, in, patience);
  static uint64_t lots = 0;
  std::vector<size_t> order(ranks);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t left = ranks; left > 1; --left)
    std::swap(order[left - 1], order[(++lots * 0x9E3779B97F4A7C15ull >> 33) % left]);
  std::vector<float> sum = slices[order[0]];
  for (size_t i = 1; i < ranks; ++i)
    for (size_t j = 0; j < sum.size(); ++j) sum[j] += slices[order[i]][j];
  std::memcpy(static_cast<std::byte*>(t.whole.data) + own * bytes, sum.data(), bytes);
}

// All that goes to a rank at once, and all that comes from it.
void swap_messages(const Transfer& t) {
  std::vector<std::vector<std::byte>> sent(t.out.size()), received(t.in.size());
  std::vector<Span> out, in;
  for (size_t r = 0; r < t.out.size(); ++r) {
    for (const Span& one : t.out[r]) {
      const auto* data = static_cast<const std::byte*>(one.data);
      sent[r].insert(sent[r].end(), data, data + one.bytes);
    }
    received[r].resize(static_cast<size_t>(summary_of(t.in[r]).bytes));
    out.push_back({sent[r].data(), sent[r].size()}), in.push_back({received[r].data(), received[r].size()});
  }
  t.comm->mesh->swap(out, in, patience);
  for (size_t r = 0; r < t.in.size(); ++r) {
    size_t at = 0;
    for (const Span& one : t.in[r]) std::memcpy(one.data, received[r].data() + at, one.bytes), at += one.bytes;
  }
}

void move(const Transfer& t, Transfer::Asked& asked) {
  if (t.whole.bytes == 0) return swap_messages(t);
  if (asked.copy.empty()) {
    const auto* data = static_cast<const std::byte*>(t.whole.data);
    asked.copy.assign(data, data + t.whole.bytes);
    poison(t.whole);
  }
  sum_slices(t, std::move(asked.copy));
}

void run(Transfer& t) {
  Transfer::Asked asked = std::move(t.asked.front());
  t.asked.pop_front();
  under_way.pop_front();
  --t.comm->under_way;
  if (t.comm->mesh == nullptr) return;  // aborted
  try {
    if (injected.transfer == t.comm->run) deliver(injected.fault, *t.comm);
    meet(t);
    check_memory(t, asked);
    move(t, asked);
  } catch (const standin::Lost& lost) {
    t.comm->error = ncclRemoteError;
    fail(Exit::device, lost.what(), ", at transfer ", t.comm->run, " of rank ", t.comm->rank, ", ", text_of(t.header));
  }
  ++t.comm->run;
}

// -----------------------------------------------------------------------------------------------------------------
// Asking.

// Whether this communicator may be used; else with words why not.
ncclResult_t look_at(ncclComm* comm) {
  const auto known = [&](const std::unique_ptr<ncclComm>& one) { return one.get() == comm; };
  if (std::none_of(all.begin(), all.end(), known))
    return refuse(nullptr, ncclInvalidArgument, "this is no communicator");
  if (comm->mesh == nullptr) return refuse(comm, ncclInvalidArgument, "a communicator is used after its end");
  return ncclSuccess;
}
ncclResult_t look_at(ncclComm* comm, const void* data, cudaStream_t stream) {
  if (const ncclResult_t result = look_at(comm); result != ncclSuccess) return result;
  if (comm->error != ncclSuccess) return comm->error;
  if (stream != transfer_stream()) return refuse(comm, ncclInvalidArgument, "not on the transfer stream");
  try {
    emulator::check_device_memory("NCCL", data);
  } catch (const Error& error) {
    return refuse(comm, ncclInvalidArgument, error.what());
  }
  return ncclSuccess;
}

Transfer new_transfer(ncclComm* comm, Kind kind, size_t count, ncclDataType_t type, int root) {
  const auto ranks = static_cast<size_t>(comm->ranks);
  return {comm,
          {0, kind, int64_t(count), type, root, emulator::captures(), {}, {}},
          std::vector<Messages>(ranks),
          std::vector<Messages>(ranks)};
}

ncclResult_t ask(Transfer transfer) {
  ncclComm* comm = transfer.comm;
  const auto kind = static_cast<int>(transfer.header.kind);
  if (groups > 0) return refuse(comm, ncclInvalidUsage, "it knows only sends and receives in groups");
  if (!emulator::captures()) comm->ran_once.insert(kind);
  if (comm->ran_once.count(kind) == 0)
    return refuse(comm, ncclInvalidUsage, text_of(transfer.header) + ", which has never run plainly before");
  if (emulator::captures()) transfer.recording = comm->recordings;
  const auto shared = std::make_shared<Transfer>(std::move(transfer));
  emulator::enqueue_transfer([shared] { begin(*shared); }, [shared] { run(*shared); });
  return ncclSuccess;
}

Span slice_of(const void* data, int r, size_t bytes) {
  return {static_cast<std::byte*>(const_cast<void*>(data)) + static_cast<size_t>(r) * bytes, bytes};
}

// One side of a message in a group.
ncclResult_t add_message(const void* data, size_t bytes, int peer, ncclComm* comm, cudaStream_t stream, bool sends) {
  if (const ncclResult_t result = look_at(comm, data, stream); result != ncclSuccess) return result;
  if (groups == 0) return refuse(comm, ncclInvalidUsage, "it knows sends and receives only in groups");
  if (peer < 0 || peer >= comm->ranks || peer == comm->rank)
    return refuse(comm, ncclInvalidArgument, str("rank ", comm->rank, " sends to or receives from ", peer));
  if (open_group == nullptr) open_group = std::make_unique<Transfer>(new_transfer(comm, group, 0, ncclInt8, 0));
  if (open_group->comm != comm) return refuse(comm, ncclInvalidUsage, "a group of two communicators");
  (sends ? open_group->out : open_group->in)[static_cast<size_t>(peer)].push_back(slice_of(data, 0, bytes));
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add_message(from, count * size_of_type(type), peer, comm, stream, true);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add_message(to, count * size_of_type(type), peer, comm, stream, false);
}
ncclResult_t ncclGroupStart() {
  ++groups;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (groups == 0) return refuse(nullptr, ncclInvalidUsage, "a group ends that has not begun");
  if (--groups > 0) return ncclSuccess;
  // A rank that sends and receives nothing meets the others, too. A process has one communicator at a time.
  if (open_group == nullptr && !all.empty() && all.back()->mesh != nullptr)
    open_group = std::make_unique<Transfer>(new_transfer(all.back().get(), group, 0, ncclInt8, 0));
  const auto ended = std::move(open_group);
  return ended != nullptr ? ask(std::move(*ended)) : ncclSuccess;
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  if (const ncclResult_t result = look_at(comm, to, stream); result != ncclSuccess) return result;
  const size_t bytes = count * size_of_type(type);
  const Span own = slice_of(to, comm->rank, bytes);
  if (from != own.data) return refuse(comm, ncclInvalidArgument, "it knows AllGather only in place");
  Transfer t = new_transfer(comm, all_gather, count, type, 0);
  for (int r = 0; r < comm->ranks; ++r)
    if (r != comm->rank) t.out[static_cast<size_t>(r)] = {own}, t.in[static_cast<size_t>(r)] = {slice_of(to, r, bytes)};
  return ask(std::move(t));
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  if (const ncclResult_t result = look_at(comm, to, stream); result != ncclSuccess) return result;
  if (from != to) return refuse(comm, ncclInvalidArgument, "it knows Broadcast only in place");
  if (root < 0 || root >= comm->ranks) return refuse(comm, ncclInvalidArgument, str("Broadcast from rank ", root));
  Transfer t = new_transfer(comm, broadcast, count, type, root);
  const Span whole = slice_of(to, 0, count * size_of_type(type));
  if (comm->rank != root) t.in[static_cast<size_t>(root)] = {whole};
  for (int r = 0; r < comm->ranks; ++r)
    if (comm->rank == root && r != root) t.out[static_cast<size_t>(r)] = {whole};
  return ask(std::move(t));
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t result = look_at(comm, to, stream); result != ncclSuccess) return result;
  const size_t bytes = count * size_of_type(type);
  if (op != ncclSum || type != ncclFloat32 || to != slice_of(from, comm->rank, bytes).data)
    return refuse(comm, ncclInvalidArgument, "it knows only sums of floats in place");
  Transfer t = new_transfer(comm, reduce_scatter, count, type, 0);
  t.whole = slice_of(from, 0, bytes * static_cast<size_t>(comm->ranks));
  return ask(std::move(t));
}

// -----------------------------------------------------------------------------------------------------------------
// Beginning and end.

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  const std::string folder = standin::new_folder();
  if (folder.size() >= sizeof id->internal) return refuse(nullptr, ncclSystemError, folder + " is too long");
  std::memcpy(id->internal, folder.c_str(), folder.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *comm = nullptr;
  if (emulator::captures()) return refuse(nullptr, ncclInvalidUsage, "a communicator is made in a recording");
  if (rank < 0 || rank >= ranks) return refuse(nullptr, ncclInvalidArgument, str("rank ", rank, " of ", ranks));
  if (config->blocking != 1) return refuse(nullptr, ncclInvalidArgument, "it knows only blocking = 1");
  try {
    auto mesh = std::make_unique<standin::Mesh>(id.internal, rank, ranks, patience);
    all.push_back(std::make_unique<ncclComm>(ncclComm{rank, ranks, std::move(mesh)}));
  } catch (const standin::Lost& lost) {
    return refuse(nullptr, ncclSystemError, lost.what());
  }
  *comm = all.back().get();
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (const ncclResult_t result = look_at(comm); result != ncclSuccess) return result;
  if (emulator::captures()) return refuse(comm, ncclInvalidUsage, "a communicator is destroyed in a recording");
  if (comm->under_way > 0)
    return refuse(comm, ncclInvalidUsage, str(comm->under_way, " transfers of a communicator are still to be done"));
  if (comm->recordings.use_count() > 1)
    return refuse(comm, ncclInvalidUsage, "recordings still hold transfers of a communicator that is destroyed");
  comm->mesh = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (const ncclResult_t result = look_at(comm); result != ncclSuccess) return result;
  comm->mesh = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (const ncclResult_t result = look_at(comm); result != ncclSuccess) return result;
  *error = comm->error;
  return ncclSuccess;
}
const char* ncclGetLastError(ncclComm_t comm) { return (comm != nullptr ? comm->words : words_of_none).c_str(); }
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "system error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "error of another rank, or of the network";
    default: return "another error";
  }
}

namespace crossply::standin {

void inject(Fault fault, int64_t transfer, double seconds) { injected = {fault, transfer, seconds}; }
void set_patience(double seconds) { patience = seconds; }
int living() {
  return static_cast<int>(
      std::count_if(all.begin(), all.end(), [](const std::unique_ptr<ncclComm>& one) { return one->mesh != nullptr; }));
}

}  // namespace crossply::standin
