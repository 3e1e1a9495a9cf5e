// Comm: moves flat device memory between the ranks of a group, by MPI between CPUs and by NCCL between GPUs. It adds
// nothing up: a sum is an exchange and our own kernel (kernels/optim/sum_slices.h), so that its bits depend neither on
// the library nor on the network.
//
// Every rank makes the same calls in the same order, with tensors of the same sizes. A call returns at once. Its
// transfer begins after what the device's stream did before the call and after the transfers before it, and runs beside
// later work: until somebody waits for it, nobody may write what it reads, or touch what it writes.
//
// Throws Exit::device, with what the library says, where a call, or one before it, has failed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/tensor.h"

namespace crossply {

// Which process of a group this is, and which one on its machine.
struct World {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  bool alone() const { return size == 1; }
  bool leads() const { return rank == 0; }
};

// Contiguous device memory, of at most 1 GiB, and the rank at the other end of its way.
struct Piece {
  int rank;
  Tensor part;
};

class Comm {
 public:
  virtual ~Comm() = default;
  virtual std::string describe() const = 0;  // "Open MPI 4.1.4": for the log

  // Tensors are contiguous device memory of `size` slices of equal length, at most 1 GiB in all; slice r is rank r's.
  // Slice r of `from` goes to rank r, slice r of `to` comes from rank r. The own slice of `to` stays as it is.
  virtual void exchange(const Tensor& from, const Tensor& to) = 0;
  // In place: afterwards every rank has all slices.
  virtual void gather(const Tensor& whole) = 0;
  // The whole tensor, of any length up to that, is afterwards the root's at every rank.
  virtual void broadcast(const Tensor& whole, int root) = 0;
  // Pieces of any sizes to and from other ranks, none of them this one. What one rank sends to another, and what that
  // one receives from it, are pieces of the same sizes in the same order.
  virtual void route(const std::vector<Piece>& sends, const std::vector<Piece>& receives) = 0;
  // The library's own sum of f32 over all ranks, in an order of its choice, in the own slice of `whole`; the other
  // slices are undefined afterwards. For --sum library only.
  virtual void reduce_scatter(const Tensor& whole) = 0;

  // All transfers that were asked for so far.
  using Ticket = int64_t;
  virtual Ticket mark() = 0;
  // What these transfers brought is there for all later work on the device's stream. Between CPUs the caller waits, on
  // a GPU only its stream does.
  virtual void wait(Ticket ticket) = 0;
  // Seconds that callers of wait() have waited so far; of CPUs.
  virtual double seconds_waited() const { return 0; }
};

// Between CPUs; null where this was built without MPI. Opens the module comm_mpi.so (ranks/comm_mpi.cpp) beside the
// program, or the one that tests name in CROSSPLY_MPI_MODULE, and starts MPI, in a thread of its own. Throws
// Exit::device if it or MPI's library is missing, and Exit::usage if MPI counts other ranks than the launcher's
// variables say, as where mpirun is of another MPI.
std::unique_ptr<Comm> make_mpi_comm(const World& world);
// Between GPUs (ranks/comm_nccl.cpp); null where this was built without NCCL. id: of new_nccl_id(), rank 0's.
std::string new_nccl_id();
std::unique_ptr<Comm> make_nccl_comm(const World& world, const std::string& id);
// "MPI (Open MPI 4.1.4) and NCCL 2.28.9", "nothing": what this was built with. An absent part is empty.
std::string built_comms();
std::string mpi_library();   // "Open MPI 4.1.4": what comm_mpi.so was built with
std::string nccl_library();  // "NCCL 2.28.9"

}  // namespace crossply
