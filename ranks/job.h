// Job: one training run as one or many processes, its ranks, as the run sees it. Tensors move through the Comm;
// everything small, who is there, what step it is, who must stop, goes over the control plane (ranks/control.h), which
// also notices a rank that is lost: then every process ends with Exit::peer_lost, whatever it is waiting for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/check.h"
#include "ranks/comm.h"

namespace crossply {

// What a rank is doing, for those that watch it: a stage has a time limit.
enum class Stage { start, step, evaluate, save, check, finish };

// One rank's part in a step. Of step, position and transfers all ranks must say the same, or the job ends with
// Exit::internal.
struct Vote {
  int64_t step = 0, position = 0, transfers = 0;
  int64_t scored = 0;       // tokens; summed
  bool stop = false;        // one is enough
  double busy_seconds = 0;  // of the step before, without waiting for others
};
struct Tally {
  int64_t scored = 0;
  bool stop = false;
  double min_busy = 0, median_busy = 0, max_busy = 0;
  int slowest = 0;  // rank
};

class Job {
 public:
  explicit Job(const Place& p) : place(p) {}
  virtual ~Job() = default;
  const Place place;
  bool apart = false;  // one of several that has not met the others yet

  // Set once the device is there. One rank has one from the beginning, which does nothing.
  void set_comm(std::unique_ptr<Comm> comm) { comm_ = std::move(comm); }
  std::unique_ptr<Comm> take_comm() { return std::move(comm_); }
  Comm& comm() const {
    CHECK_THAT(comm_ != nullptr, "rank ", place.rank, " has no Comm yet");
    return *comm_;
  }

  // A step's vote: sent by the first, and by the second waited for.
  virtual void start_vote(const Vote& mine) = 0;
  virtual Tally finish_vote() = 0;
  // Returns when every rank has come here.
  virtual void barrier(const char* why) = 0;
  // Rank 0's text, of at most 1 MiB, at every rank.
  virtual std::string share(const std::string& text) = 0;
  // Every rank's text, of at most 1 MiB, by rank, at rank 0; nothing elsewhere.
  virtual std::vector<std::string> collect(const std::string& text) = 0;
  // Tells the others what this rank is about to do.
  virtual void enter(Stage stage, int64_t step) = 0;
  // The last call: all ranks came to their end together.
  virtual void finish() = 0;
  // The others end with Exit::peer_lost and quote this; the caller ends with `code` itself.
  virtual void farewell(Exit code, const std::string& why) = 0;

 private:
  std::unique_ptr<Comm> comm_;
};

// An error that rank 0 has found, or heard of, and says; the others end with it, too.
struct SharedError : Error {
  using Error::Error;
};

// Of one rank, or of one that has not met the others yet: nothing waits, nothing is sent.
std::unique_ptr<Job> one_rank_job(const Place& place = {});

struct JoinOptions {
  std::string run_dir;       // a directory that all ranks share: where they meet, unless the launcher says better
  double peer_timeout = 30;  // seconds of silence after which a peer is lost
  double join_timeout = 300;
  // Seconds that a rank may be in a stage: the first micro-step; another one, or ten times the median of the last ones
  // if that is longer; all other stages.
  double first_limit = 300, step_limit = 100, long_limit = 1800;
  // By what it is of: the build, each flag. Must be equal at all ranks, or it is Exit::usage; of the data
  // Exit::bad_data.
  std::map<std::string, std::string> same;
  std::string data;
};
// Meets the other ranks (ranks/meeting.h). mpi: where there is one already, the meeting place goes over it.
std::unique_ptr<Job> join_job(const Place& place, const JoinOptions& options, Comm* mpi);

}  // namespace crossply
