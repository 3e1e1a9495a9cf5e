// Comm by MPI. One thread makes every call to MPI, and so needs nothing but MPI_THREAD_FUNNELED of the library: it
// takes works from a queue, one after the other. Waiting inside MPI would keep a core busy: it asks and sleeps instead.
//
// A module of its own, beside the programs, which ranks/comm.cpp opens when several processes train: MPIs differ in
// their binary interface, and to be linked with one costs a single process time and memory.
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ranks/comm.h"

namespace crossply {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(Exit::device, call, " failed: ", std::string(text, length));
}

class MpiComm : public Comm {
 public:
  explicit MpiComm(const World& world) : world_(world), thread_([this] { run(); }) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return started_; });
    if (!failure_) return;
    lock.unlock();
    thread_.join();
    std::rethrow_exception(failure_);
  }

  ~MpiComm() override {
    // While an error ends this process, the others may never do their part of what is under way.
    abandoned_ = std::uncaught_exceptions() > 0;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::string describe() const override { return CROSSPLY_MPI; }

  void exchange(const Tensor& from, const Tensor& to) override {
    CHECK_THAT(from.bytes() == to.bytes(), from.str(), " against ", to.str());
    const int64_t slice = slice_bytes(from);
    ask([this, a = static_cast<char*>(from.data), b = static_cast<char*>(to.data), slice] {
      each_other([&](int rank) { receive(b + rank * slice, slice, rank); });
      each_other([&](int rank) { send(a + rank * slice, slice, rank); });
      complete();
    });
  }

  void gather(const Tensor& whole) override {
    ask([this, data = static_cast<char*>(whole.data), slice = slice_bytes(whole)] {
      each_other([&](int rank) { receive(data + rank * slice, slice, rank); });
      each_other([&](int rank) { send(data + world_.rank * slice, slice, rank); });
      complete();
    });
  }

  void broadcast(const Tensor& whole, int root) override {
    CHECK_THAT(root >= 0 && root < world_.size, "root ", root, " of ", world_.size);
    ask([this, data = static_cast<char*>(whole.data), bytes = bounded(whole), root] {
      if (world_.rank == root) each_other([&](int rank) { send(data, bytes, rank); });
      else receive(data, bytes, root);
      complete();
    });
  }

  void route(const std::vector<Piece>& sends, const std::vector<Piece>& receives) override {
    for (const auto* pieces : {&sends, &receives})
      for (const Piece& piece : *pieces) bounded(piece.part), check_other(piece.rank);
    ask([this, sends, receives] {
      for (const auto& [rank, part] : receives)
        receive(static_cast<char*>(part.data), static_cast<int64_t>(part.bytes()), rank);
      for (const auto& [rank, part] : sends)
        send(static_cast<const char*>(part.data), static_cast<int64_t>(part.bytes()), rank);
      complete();
    });
  }

  // In place, MPI leaves the sum of the own slice where `whole` begins; the library's scratch is as large as `whole`.
  // The call that waits is quicker where cores are idle, and many times slower where ranks compute on them meanwhile.
  void reduce_scatter(const Tensor& whole) override {
    ask([this, data = whole.as<float>(), slice = slice_bytes(whole) / static_cast<int64_t>(sizeof(float))] {
      check(MPI_Ireduce_scatter_block(MPI_IN_PLACE, data, static_cast<int>(slice), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                      &request(0)),
            "MPI_Ireduce_scatter_block");
      complete();
      if (world_.rank > 0) std::memcpy(data + world_.rank * slice, data, slice * sizeof(float));
    });
  }

  Ticket mark() override {
    const std::lock_guard lock(mutex_);
    return asked_;
  }

  void wait(Ticket ticket) override {
    std::unique_lock lock(mutex_);
    CHECK_THAT(ticket <= asked_, "ticket ", ticket, " of ", asked_);
    if (done_ >= ticket && !failure_) return;
    const auto begin = Clock::now();
    changed_.wait(lock, [&] { return done_ >= ticket || failure_; });
    seconds_waited_ += std::chrono::duration<double>(Clock::now() - begin).count();
    if (failure_) std::rethrow_exception(failure_);
  }

  double seconds_waited() const override { return seconds_waited_; }

 private:
  using Work = std::function<void()>;

  void ask(Work work) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) std::rethrow_exception(failure_);
      queue_.push_back(std::move(work));
      ++asked_;
    }
    changed_.notify_all();
  }

  int64_t bounded(const Tensor& whole) const {
    CHECK_THAT(whole.bytes() <= size_t{1} << 30, whole.str(), " is more than 1 GiB");
    return static_cast<int64_t>(whole.bytes());
  }
  void check_other(int rank) const {
    CHECK_THAT(rank >= 0 && rank < world_.size && rank != world_.rank, "rank ", world_.rank, " and rank ", rank);
  }
  int64_t slice_bytes(const Tensor& whole) const {
    CHECK_THAT(whole.numel() % world_.size == 0, whole.str(), " for ", world_.size, " ranks");
    return bounded(whole) / world_.size;
  }

  // The rest is the thread's.

  void run() {
    bool initialised = false;
    try {
      start(initialised);
    } catch (...) {
      failure_ = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    started_ = true;
    changed_.notify_all();
    while (!failure_) {
      changed_.wait(lock, [&] { return !queue_.empty() || closing_; });
      if (queue_.empty() || abandoned_) break;
      const Work work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::exception_ptr failure;
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      if (failure) failure_ = failure;
      else ++done_;
      changed_.notify_all();
    }
    // The others must take part in the end, unless there are none.
    if (initialised && !abandoned_ && (!failure_ || alone_)) MPI_Finalize();
  }

  void start(bool& initialised) {
    int done = 0, level = 0, size = 0, rank = 0;
    check(MPI_Initialized(&done), "MPI_Initialized");
    CHECK_THAT(!done, "MPI starts once in a process");
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    initialised = true;
    // What MPI stands on may abort where a peer vanishes in the middle of a copy. First others shall notice who it was.
    std::signal(SIGABRT, [](int) { ::sleep(2); });
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    alone_ = size == 1;
    if (level < MPI_THREAD_FUNNELED) fail(Exit::device, CROSSPLY_MPI, " does not support MPI_THREAD_FUNNELED");
    if (size != world_.size || rank != world_.rank)
      fail(Exit::usage, "the launcher's variables say rank ", world_.rank, " of ", world_.size, ", but MPI says rank ",
           rank, " of ", size, ": processes on CPUs are started by the mpirun of ", CROSSPLY_MPI,
           ", which this program is built with: mpirun -n ", world_.size, " ...");
  }

  template <class F>
  void each_other(F&& body) {  // every rank begins with another one
    for (int d = 1; d < world_.size; ++d) body((world_.rank + d) % world_.size);
  }
  // One more of the work under way, that must bring so many bytes.
  MPI_Request& request(int64_t bytes) {
    sizes_.push_back(bytes);
    return requests_.emplace_back();
  }
  void receive(char* to, int64_t bytes, int from) {
    check(MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, from, 0, MPI_COMM_WORLD, &request(bytes)), "MPI_Irecv");
  }
  void send(const char* from, int64_t bytes, int to) {
    check(MPI_Isend(from, static_cast<int>(bytes), MPI_BYTE, to, 0, MPI_COMM_WORLD, &request(0)), "MPI_Isend");
  }

  // Returns when all requests are done.
  void complete() {
    const int count = static_cast<int>(requests_.size());
    std::vector<MPI_Status> statuses(count);
    Clock::time_point awake_until = Clock::now() + 300us;  // what is small comes in less than a sleep
    for (int done = 0; done == 0;) {
      const auto begin = Clock::now();
      const int code = MPI_Testall(count, requests_.data(), &done, statuses.data());
      const auto end = Clock::now();
      if (code == MPI_ERR_IN_STATUS) {
        for (const MPI_Status& status : statuses)
          if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, "a transfer");
      }
      check(code, "MPI_Testall");
      if (abandoned_) fail(Exit::device, "abandoned");
      // Asking that took long has moved a piece of what is to be moved, and the next one may be there at once.
      if (end - begin > 4us) awake_until = end + 100us;
      if (done == 0 && end < awake_until) std::this_thread::yield();
      if (done == 0 && end >= awake_until) std::this_thread::sleep_for(50us);
    }
    for (int i = 0; i < count; ++i) {
      int got = 0;
      if (sizes_[i] == 0) continue;
      check(MPI_Get_count(&statuses[i], MPI_BYTE, &got), "MPI_Get_count");
      if (got != sizes_[i])
        fail(Exit::device, "rank ", statuses[i].MPI_SOURCE, " sent ", got, " bytes to rank ", world_.rank,
             ", which expected ", sizes_[i], ": they do not make the same calls");
    }
    requests_.clear();
    sizes_.clear();
  }

  const World world_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Work> queue_;
  Ticket asked_ = 0, done_ = 0;
  bool started_ = false, closing_ = false;
  std::exception_ptr failure_;
  double seconds_waited_ = 0;  // the caller's
  std::atomic<bool> abandoned_ = false;
  bool alone_ = false;  // the thread's, like what follows: of the work under way
  std::vector<MPI_Request> requests_;
  std::vector<int64_t> sizes_;  // bytes that a receive must bring; 0 of others
  std::thread thread_;          // last: it uses all of the above
};

}  // namespace
}  // namespace crossply

// What make_mpi_comm() calls.
extern "C" crossply::Comm* crossply_mpi_comm(const crossply::World& world) { return new crossply::MpiComm(world); }
