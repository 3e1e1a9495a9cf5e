// Control: the control plane of a job: a star of TCP connections around rank 0. One thread of every process, the watch
// thread, reads the connections and notices a rank that is lost. It never calls MPI, NCCL or CUDA, all of which may
// wait forever for a peer that is gone. What it finds is a verdict: rank 0 forwards it, everybody prints it and ends.
//
//   a rank says  hello, beat (each second), vote, barrier, share, collect, finish, farewell
//   rank 0 says  welcome, beat, verdict, and the answers to vote, barrier, share, collect, finish
//
// Every rank asks the same questions in the same order; rank 0 answers one when it has it of all ranks.
#pragma once

#include <poll.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

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
  enum class State { joining, running, leaving, over };
  struct Progress {  // what a beat says
    int64_t asked = 0, step = 0, stage = 0, milliseconds = 0;
  };
  struct Peer {
    int rank = -1;  // of a guest, who has not said hello yet
    Link connection;
    double heard = 0;           // when the last message came
    std::deque<Message> asked;  // at rank 0: what this rank has asked and not all others yet
    Progress progress;
  };

  // Of the watch thread; but for watch() they hold the mutex.
  void watch();
  void list_sockets();
  void serve(double time);
  void accept_guest(int listener, double time);
  void greet(Peer& guest, const Record& hello);
  void receive(Peer& peer, double time);
  void handle(Peer& peer, Message message);
  void beat(double time);
  void judge_progress();
  void tell() const;
  void leave_word();
  bool done(double time) const;
  // Of both threads, which hold the mutex.
  void post(Peer& to, const Record& record, const std::string& text = "");
  void answer_all();
  void pronounce(const Verdict& verdict);
  void lose(Peer& peer, const std::string& why);
  Progress own_progress() const;
  double limit_of(const Progress& progress) const;  // seconds
  [[noreturn]] void throw_verdict(std::unique_lock<std::mutex>& lock);
  bool all_here() const { return here_ == place_.size; }
  void wake() const;
  // Of the main thread, before there is another.
  Link find_leader() const;
  Link say_hello(const std::string& endpoint, const std::array<int64_t, 2>& token, std::string& why) const;

  const Place place_;
  const JoinOptions options_;
  Meeting meeting_;
  std::array<Descriptor, 2> wake_;  // a pipe: the watch thread waits at its reading end, too
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::joining;
  std::optional<Verdict> verdict_;
  bool told_ = false, forwarded_ = false, stop_ = false, ended_ = false;
  std::vector<Peer> peers_;  // rank 0 has all, by rank, itself without a socket; the others have rank 0 only
  std::list<Peer> guests_;
  int here_ = 1;  // ranks that have said hello, and rank 0
  std::map<int64_t, Message> answers_;
  int64_t asked_ = 0, answered_ = 0;
  Stage stage_ = Stage::start;
  int64_t step_ = 0, steps_timed_ = 0;
  std::array<double, 32> step_seconds_{};  // of the last ones
  const double began_, beat_every_;        // seconds, as all that follows
  double stage_began_, last_pass_, next_beat_ = 0, end_began_ = 0;
  std::vector<pollfd> sockets_;  // what the watch thread waits for, and whose each is: of none, a listener or the pipe
  std::vector<Peer*> owners_;
  std::thread watch_;
};

}  // namespace crossply
