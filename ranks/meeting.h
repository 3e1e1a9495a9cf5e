// Meeting: how the ranks of a job find rank 0, which listens for them. The first of these that there is:
//   1. a Comm over MPI: rank 0's addresses are broadcast;
//   2. MASTER_ADDR and MASTER_PORT, unless from torchrun, whose agent has taken that port: rank 0 listens there;
//   3. a file in the run directory, which all ranks share: .meet, readable by its owner only.
// What it tells is where rank 0 listens and a token, by which ranks of one job know each other: drawn by lot, or under
// 2 made of the names of place and job. A file of the job before costs a connection that is refused, and never joins
// two jobs. This is for the private network of a cluster, as MPI and NCCL are: it keeps mistakes out, not attackers.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "ranks/comm.h"

namespace crossply {

struct MeetingPoint {
  std::vector<std::string> endpoints;  // "10.0.0.1 4711"
  std::array<int64_t, 2> token{};
};

class Meeting {
 public:
  // Rank 0 listens from here on: on this machine's own addresses, or on the loopback where all ranks are on it.
  // mpi: may be null; else all ranks call this. Throws Exit::usage where there is no place to meet, or its port is
  // taken.
  Meeting(const Place& place, const std::string& run_dir, Comm* mpi);
  ~Meeting();  // removes the file
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Where rank 0 says that it is, now: throws where it has not said so yet.
  MeetingPoint look() const;
  const std::vector<Descriptor>& listeners() const { return listeners_; }  // rank 0's

 private:
  void listen(const Place& place, const std::string& master, const std::string& port);
  void broadcast(Comm& mpi);
  std::string file_;  // "" where no file is needed
  MeetingPoint point_;
  std::vector<Descriptor> listeners_;
  bool leads_;
};

}  // namespace crossply
