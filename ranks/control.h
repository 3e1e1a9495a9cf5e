// Control: the control plane of a process group, a star of TCP connections around rank 0. One thread of every process,
// the watch thread, reads the connections and notices a lost rank. It never calls MPI, NCCL or CUDA, because each of
// them may wait forever for a lost peer. A lost or failed rank aborts the group: rank 0 sends the reason to all ranks,
// and every rank prints it and ends.
//
//   a rank sends  hello, beat (each second), stats, barrier, share, collect, finish, abort
//   rank 0 sends  welcome, beat, reason (all ranks end), and the answers to stats, barrier, share, collect, finish
//
// Every rank asks the same questions in the same order. Rank 0 answers a question once every rank has asked it.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "ranks/link.h"
#include "ranks/process_group.h"
#include "ranks/rendezvous.h"

namespace crossply {

// Why the group aborts.
struct AbortReason {
  Exit code;     // every other rank ends with this
  Exit cause;    // the first failing rank ends with this
  int rank;      // the first failing rank
  int64_t step;  // its step
  std::string why;
};

class Control {
 public:
  // Connects to rank 0; rank 0 starts to listen. Until joined(), the next call throws an abort's reason.
  Control(const World& world, const JoinOptions& options, Comm* mpi);
  ~Control();  // without finish() or abort() before it, the other ranks take this one for lost
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // From here on the watch thread ends the process at an abort.
  void joined();
  // Asks a question and returns its number, for answer().
  int64_t ask(Record::Kind kind, const Numbers& number = {}, std::string text = "");
  Message answer(int64_t question);
  // Says what this rank does from now on. Allocates nothing.
  void enter(Stage stage, int64_t step);
  // Rank 0 calls this while ranks join: all ranks end with this reason.
  [[noreturn]] void refuse(const AbortReason& reason);
  void finish();
  void abort(Exit code, const std::string& why);

 private:
  struct Peer {
    int rank;  // -1: a guest, who has not said hello yet
    Link link;
    double heard;                 // when it last said something
    std::deque<Message> pending;  // at rank 0: this rank's questions that are not answered yet
    Numbers progress{};           // how many questions, step, stage, milliseconds in it
  };

  // The main thread calls these.
  Link find_leader() const;
  [[noreturn]] void end(std::unique_lock<std::mutex>& lock);
  // The watch thread calls these, and holds the mutex, except in watch(). So do the callers of the group below.
  void watch();
  void serve(Peer& peer);
  void greet(Peer& guest, const Record& hello);
  void handle(Peer& peer, Message message);
  void beat(double time);
  void check_progress();
  void lose(Peer& peer, const std::string& why);
  double limit_of(Stage stage) const;  // seconds
  // Both threads call these.
  void answer_all();
  void abort_all(const AbortReason& reason);
  void print_reason() const;
  void write_last_exit() const;
  bool all_here() const { return ranks_.size() == static_cast<size_t>(world_.size); }
  bool is_here(int rank) const;
  bool ends() const { return watch_deadline_ > 0; }

  const World world_;
  const JoinOptions options_;
  Rendezvous rendezvous_;
  std::mutex mutex_;
  std::condition_variable changed_;  // there is an answer or an end
  // At an abort: the main thread throws it (joining), the watch thread ends the process (running), or the main thread
  // ends with its own error (leaving).
  enum class State { joining, running, leaving } state_ = State::joining;
  std::optional<AbortReason> reason_;
  double watch_deadline_ = 0;  // when the watch thread stops, after an abort or the last answer; 0: no deadline
  double main_deadline_ = 0;   // until then the main thread may end with its own error
  std::list<Peer> ranks_;      // at rank 0 all that are here, in order, itself without a link; at the others rank 0
  std::list<Peer> guests_;     // at rank 0
  std::map<int64_t, Message> answers_;
  int64_t asked_ = 0, answered_ = 0;
  Stage stage_ = Stage::start;
  int64_t step_ = 0, steps_timed_ = 0;
  std::array<double, 32> step_seconds_{};  // of the last ones
  const double began_;                     // of seconds_now(), as all times here
  double stage_began_;
  std::thread watch_;
};

}  // namespace crossply
