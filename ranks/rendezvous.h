// Rendezvous: how the ranks of a group find rank 0, which listens for them. They use the first one that exists:
//   1. a Comm over MPI: rank 0's addresses are broadcast;
//   2. MASTER_ADDR and MASTER_PORT, unless from torchrun, whose agent has taken that port: rank 0 listens there;
//   3. a file in the run directory, which all ranks share: .meet, readable by its owner only.
// It gives rank 0's addresses and a token that all ranks of one group have: a random number, or under 2 a hash of
// MASTER_ADDR, MASTER_PORT and the launcher's name for the job. An old file costs a refused connection and never joins
// two groups. This is for the private network of a cluster, like MPI and NCCL: the token stops mistakes, not attackers.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "ranks/comm.h"

namespace crossply {

// How to reach rank 0.
struct RankZero {
  std::vector<std::string> addresses;  // "10.0.0.1 4711"
  std::array<int64_t, 2> token{};
};

class Rendezvous {
 public:
  // Rank 0 listens from here on: on the loopback if all ranks are on this machine, otherwise on all its addresses.
  // mpi: may be null; otherwise all ranks call this. Throws Exit::usage if none of the three exists, or if the port is
  // taken.
  Rendezvous(const World& world, const std::string& run_dir, Comm* mpi);
  ~Rendezvous();  // removes the file
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // How to reach rank 0, read anew. Throws if rank 0 has not published it yet.
  RankZero rank_zero() const;
  const std::vector<Descriptor>& listeners() const { return listeners_; }  // rank 0's

 private:
  void listen(const World& world, const std::string& master, const std::string& port);
  void broadcast(Comm& mpi);
  std::string file_;  // "" where no file is needed
  RankZero rank_zero_;
  std::vector<Descriptor> listeners_;
  bool leads_;
};

}  // namespace crossply
