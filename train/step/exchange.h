// How a step's gradients are summed, over its micro-steps and over the ranks of the job, and how the updated weights
// reach all ranks. The gradients stay where the backward leaves them; a rank's own slices hold the sum afterwards.
//
//   --sum running  each rank adds up its micro-steps as they come, then the ranks' sums are added by a tree.
//   --sum tree     one binary tree over all micro-steps of the job, of which a rank has a subtree: the bits do not
//                  depend on the number of ranks where a rank's micro-steps are a power of two. Needs
//                  floor(log2(micro-steps of a rank)) more arrays of gradients.
//   --sum library  as running, but MPI or NCCL adds the ranks' sums, in an order of its own.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "engine/buckets.h"
#include "kernels/optim/optimizer.h"
#include "models/batch/batch_model.h"
#include "ranks/process_group.h"
#include "train/settings/train_plan.h"

namespace crossply {

// Of gradients that are exchanged at once: for many ranks more, since each message costs time however small it is.
inline int64_t bucket_bytes(const TrainPlan& plan, int64_t ranks) {
  return plan.bucket_bytes > 0 ? plan.bucket_bytes : std::max(int64_t{64} << 20, ranks << 18);
}

// The declared table's buckets for one of so many ranks; rows that are read in bf16 only get a region of their own. One
// rank that adds up as micro-steps come needs no regions.
Buckets divide(ParameterTable& params, const TrainPlan& plan, const World& world);
// Buckets as the backward finishes their gradients, each with the node after whose backward it has.
struct FinalBucket {
  const Bucket* bucket;
  size_t node;
};
std::vector<FinalBucket> final_buckets(const Tape& tape, const ParameterTable& params, const Buckets& buckets);
// Whether a rank with so many micro-steps in a step has a part in the bits of one rank with --sum tree.
bool has_bits_of_one_rank(const std::string& sum, int64_t micro_steps);

// Copies of the gradients that `sum` keeps beside them for so many micro-steps of a rank.
int64_t parked_copies(const std::string& sum, int64_t micro_steps);
// Bytes of a rank beside parameters, gradients and moments: parked gradients, and what comes from other ranks.
size_t exchange_bytes(const Buckets& buckets, const std::string& sum, int64_t micro_steps);

class Exchange {
 public:
  // micro_steps: of this rank in a step; check_every: steps between comparisons of the ranks' weights, 0: never. All
  // must outlive it; the table has its memory.
  Exchange(ProcessGroup& group, ParameterTable& params, const Buckets& buckets, BatchModel& model,
           const std::string& sum, int64_t micro_steps, int64_t check_every = 0);
  // How micro-step m = 0, 1, ... of a step treats the gradients: overwrites or adds, and whether they are final then.
  Step micro_step(Step step, int64_t m) const {
    step.overwrite = m == 0 || tree_;
    step.last = hooked() && m + 1 == micro_steps_;
    return step;
  }
  // After each micro-step. With --sum tree the gradients are put aside.
  void after_micro_step(int64_t m);
  // After the last one. The own slices are then complete for all later work of the device.
  void finish();
  // The own slices of the weights, just updated, to all ranks: in f32, or in bf16 what the ranks read only so.
  // A device may record it: what it asks for is counted by count_gathers, once a step.
  void gather_weights();
  void count_gathers();
  // The f32 values of all rows at every rank, for checkpoints. Until the next step begins, which lends their memory to
  // the gradients again (ParameterTable::lend_values).
  void gather_values(Optimizer& optimizer);
  // On GPUs the algorithms that rank 0 finds by timing, while it runs `run`, become everybody's.
  void share_choices(const std::function<void()>& run);
  // Throws Exit::internal, at all ranks, where their weights are not the same after so many steps: always, and after
  // those steps that are to be checked.
  void check_replicas(int64_t steps_done);
  void after_step(int64_t steps_done);
  int64_t transfers() const { return transfers_; }  // asked for so far: the same number at every rank
  size_t bytes() const;

 private:
  bool hooked() const { return tree_ || !group_.world.alone(); }  // is there something to do when gradients are final?
  // Of the k-th bucket that becomes final: its exchange, and its sum. A device may record both and replay them, so what
  // they count is the same in every step.
  void begin(size_t k);
  void complete(size_t k);
  void add_parked(const Range& range);

  ProcessGroup& group_;
  ParameterTable& params_;
  const Buckets& buckets_;
  const bool tree_, library_;
  const int64_t micro_steps_, check_every_;
  std::vector<const Bucket*> order_;   // as the backward finishes them
  std::vector<Comm::Ticket> tickets_;  // of the buckets that were begun
  size_t completed_ = 0;
  std::vector<Arena> parked_;   // a stack of partial sums over micro-steps
  std::vector<int64_t> sizes_;  // over how many, each
  Arena staging_[2];
  int64_t transfers_ = 0;
};

}  // namespace crossply
