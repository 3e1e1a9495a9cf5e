// Control: the control plane of a job: a star of TCP connections around rank 0. One thread of every process, the watch
// thread, reads the connections and notices a rank that is lost. It never calls MPI, NCCL or CUDA, all of which may
// wait forever for a peer that is gone. What it finds is a verdict: rank 0 forwards it, everybody prints it and ends.
//
//   a rank says  hello, beat (each second), vote, barrier, share, collect, finish, farewell
//   rank 0 says  welcome, beat, verdict, and the answers to vote, barrier, share, collect, finish
//
// Every rank asks the same questions in the same order; rank 0 answers one when it has it of all ranks.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "ranks/job.h"
#include "ranks/link.h"
#include "ranks/meeting.h"

namespace crossply {

// Why a job ends.
struct Verdict {
  Exit code;     // of those who hear it
  Exit cause;    // that of the rank where it began
  int rank;      // that rank
  int64_t step;  // and its step
  std::string why;
};

class Control {
 public:
  // Meets rank 0, or as rank 0 begins to listen. Until joined() a verdict is what the next call throws.
  Control(const Place& place, const JoinOptions& options, Comm* mpi);
  ~Control();  // without finish() or farewell() before it, this rank is lost to the others
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // From here on the watch thread ends the process at a verdict.
  void joined();
  // Asks a question; its number is what answer() waits for.
  int64_t ask(Record::Kind kind, const Numbers& number = {}, std::string text = "");
  Message answer(int64_t question);
  // What this rank does from now on. Allocates nothing.
  void enter(Stage stage, int64_t step);
  // Rank 0's, while they join: all end with this.
  [[noreturn]] void refuse(const Verdict& verdict);
  void finish();
  void farewell(Exit code, const std::string& why);

 private:
  struct Peer {
    int rank;  // -1: a guest, who has not said hello yet
    Link link;
    double heard;               // when it last said something
    std::deque<Message> asked;  // at rank 0: what this rank has asked and not all others yet
    Numbers progress{};         // how many questions, step, stage, milliseconds in it
  };

  // Of the main thread.
  Link find_leader() const;
  [[noreturn]] void end(std::unique_lock<std::mutex>& lock);
  // Of the watch thread. These hold the mutex, but for watch(), and so do those that follow.
  void watch();
  void serve(Peer& peer);
  void greet(Peer& guest, const Record& hello);
  void handle(Peer& peer, Message message);
  void beat(double time);
  void judge_progress();
  void lose(Peer& peer, const std::string& why);
  double limit_of(Stage stage) const;  // seconds
  // Of both.
  void answer_all();
  void pronounce(const Verdict& verdict);
  void say_verdict() const;
  void leave_word() const;
  bool all_here() const { return ranks_.size() == static_cast<size_t>(place_.size); }
  bool is_here(int rank) const;
  bool ends() const { return end_ > 0; }

  const Place place_;
  const JoinOptions options_;
  Meeting meeting_;
  std::mutex mutex_;
  std::condition_variable changed_;  // there is an answer or an end
  // Whose exit code a verdict becomes: thrown by the main thread, ended by the watch thread, the main thread's own.
  enum class State { joining, running, leaving } state_ = State::joining;
  std::optional<Verdict> verdict_;
  double end_ = 0;          // when the watch thread ends, after a verdict or the last answer; 0: it goes on
  double own_end_ = 0;      // until then the main thread may reach an end of its own
  std::list<Peer> ranks_;   // at rank 0 all that are here, in order, itself without a link; at the others rank 0
  std::list<Peer> guests_;  // at rank 0
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
