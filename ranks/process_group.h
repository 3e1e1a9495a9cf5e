// ProcessGroup: the processes (ranks) of one training run, as in PyTorch. Tensors move through the Comm. Small messages
// (who is there, step statistics, stop requests) use the control plane (ranks/control.h). It also notices a lost rank:
// then every process ends with Exit::peer_lost, whatever it is waiting for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/check.h"
#include "ranks/comm.h"

namespace crossply {

// What a rank is doing. Each stage has a time limit, which the control plane checks.
enum class Stage { start, step, evaluate, save, check, finish };

// One rank's statistics of a step. Step, position and transfers must be equal at all ranks, or the group aborts with
// Exit::internal.
struct RankStats {
  int64_t step = 0, position = 0, transfers = 0;
  int64_t scored = 0;       // tokens
  bool stop = false;        // this rank was asked to stop
  double busy_seconds = 0;  // of the step before, without waiting for other ranks
};
// The statistics of all ranks: scored is the sum, stop is true if it is at one rank.
struct StepStats {
  int64_t scored = 0;
  bool stop = false;
  double min_busy = 0, median_busy = 0, max_busy = 0;
  int slowest = 0;  // rank
};

class ProcessGroup {
 public:
  explicit ProcessGroup(const World& p) : world(p) {}
  virtual ~ProcessGroup() = default;
  const World world;
  bool joining = false;  // one of several ranks, which has not joined the others yet

  // Called once the device is open. A group of one rank has a Comm from the beginning, which does nothing.
  void set_comm(std::unique_ptr<Comm> comm) { comm_ = std::move(comm); }
  std::unique_ptr<Comm> take_comm() { return std::move(comm_); }
  Comm& comm() const {
    CHECK_THAT(comm_ != nullptr, "rank ", world.rank, " has no Comm yet");
    return *comm_;
  }

  // All-reduce of a step's statistics: start_stats() sends this rank's, finish_stats() waits for the result.
  virtual void start_stats(const RankStats& mine) = 0;
  virtual StepStats finish_stats() = 0;
  // Returns when every rank has called it.
  virtual void barrier(const char* why) = 0;
  // Rank 0's text, of at most 1 MiB, at every rank.
  virtual std::string share(const std::string& text) = 0;
  // Every rank's text, of at most 1 MiB, by rank, at rank 0; nothing elsewhere.
  virtual std::vector<std::string> collect(const std::string& text) = 0;
  // Tells the other ranks what this rank is about to do.
  virtual void enter(Stage stage, int64_t step) = 0;
  // The last call of a run that ends at all ranks.
  virtual void finish() = 0;
  // The other ranks end with Exit::peer_lost and quote `why`; the caller then ends with `code` itself.
  virtual void abort(Exit code, const std::string& why) = 0;

 private:
  std::unique_ptr<Comm> comm_;
};

// An error that rank 0 found or received. All ranks end with it.
struct SharedError : Error {
  using Error::Error;
};

// A group of one rank, or a rank that has not joined the others yet: nothing waits and nothing is sent.
std::unique_ptr<ProcessGroup> one_rank_group(const World& world = {});

struct JoinOptions {
  std::string run_dir;       // a directory that all ranks share: for the rendezvous, unless the launcher has another
  double peer_timeout = 30;  // seconds of silence after which a peer is lost
  double join_timeout = 300;
  // Seconds that a rank may be in a stage.
  double first_limit = 300;  // the first micro-step
  double step_limit = 100;   // a later one, or ten times the median of the last ones if that is longer
  double long_limit = 1800;  // any other stage
  // The build and each flag, by name. They must be equal at all ranks, or joining throws Exit::usage; for `data`
  // Exit::bad_data.
  std::map<std::string, std::string> same;
  std::string data;
};
// Joins the other ranks (ranks/rendezvous.h). mpi: an open Comm over MPI, for the rendezvous; null: none.
std::unique_ptr<ProcessGroup> join_group(const World& world, const JoinOptions& options, Comm* mpi);

}  // namespace crossply
