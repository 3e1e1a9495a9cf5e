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
#include <memory>
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
size_t reduction_bytes(const Buckets& buckets, const std::string& sum, int64_t micro_steps);

// A step's sum, as one rank or one of several makes it; the trainer does not ask which.
class Reduction {
 public:
  virtual ~Reduction() = default;
  // The first micro-step's Step as micro-step m = 0, 1, ... has it: whether it overwrites or accumulates, and whether
  // the gradients are final after its backward.
  virtual Step micro_step(const Step& step, int64_t m) const = 0;
  // After each micro-step: what the next one would overwrite is put aside.
  virtual void after_micro_step(int64_t /*m*/) {}
  // Adds what was put aside to this part of the gradients.
  virtual void add_parked(const Range& /*part*/) {}
  // After the last micro-step. The own slices are then complete for all later work of the device.
  virtual void finish() {}
  // The own slices of the weights, just updated, to all ranks: in f32, or in bf16 what the ranks read only so. A device
  // may record it.
  virtual void gather_weights() {}
  // The f32 values of all rows at every rank, for checkpoints. Until the next step begins, which lends their memory to
  // the gradients again (ParameterTable::lend_values).
  virtual void gather_values(Optimizer& /*optimizer*/) {}
  virtual int64_t transfers() const { return 0; }  // asked for so far: the same number at every rank
  virtual size_t bytes() const { return 0; }
};

// micro_steps: of this rank in a step. All must outlive it; the table has its memory.
std::unique_ptr<Reduction> make_reduction(ProcessGroup& group, ParameterTable& params, const Buckets& buckets,
                                          BatchModel& model, const std::string& sum, int64_t micro_steps);

}  // namespace crossply
