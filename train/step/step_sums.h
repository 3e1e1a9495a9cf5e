// What a step adds up: losses by replica and micro-step, the squares of the gradients by leaf. All ranks' sums are
// gathered and added in one order, so that neither the number of ranks nor of threads changes a bit. From the totals
// the device decides whether and by what factor the weights change; the host reads them once.
#pragma once

#include <string>
#include <vector>

#include "engine/buckets.h"
#include "kernels/optim/gradient_norm.h"
#include "kernels/optim/optimizer.h"
#include "models/batch/batch_model.h"
#include "ranks/process_group.h"

namespace crossply {

class StepSums {
 public:
  // What the sums of all ranks come to, of gradients as the backward leaves them.
  struct Totals {
    double squares, loss, second;  // second: of Graph::second(); where there is none, the loss
  };
  // with_second: the model has Graph::second(). values: so many numbers of every rank, f32, are gathered and
  // read with the sums, and must be finite, too.
  StepSums(ParameterTable& params, const Buckets& buckets, const BatchModel& model, ProcessGroup& group,
           int64_t micro_steps, bool with_second, int64_t values);

  void clear();
  // Where micro-step m of this rank leaves its losses: one sum for each replica, and with_second as many for these.
  Tensor losses(int64_t m) const { return own({m * each_, (m + 1) * each_}); }
  // This rank's `values`, and all ranks', by rank.
  Tensor own_values() const;
  Tensor all_values() const;
  // From the gradients of this rank's slices to the factor by which the optimizer multiplies all of them. A device may
  // record it.
  void add_squares();
  void compute_clip_factor(Optimizer& optimizer, double clip);
  void begin_read();
  Totals end_read();
  std::vector<float> values() const;   // that were read
  std::vector<float> gather_values();  // the same, now
  // "; the first loss that is not finite is of rank 1's micro-step 2", of several ranks.
  std::string first_not_finite() const;
  size_t bytes_of_values() const { return result_.bytes() - totals * sizeof(double); }

 private:
  static constexpr int64_t totals = 3;
  int64_t size() const { return losses_ + leaves_of(buckets_.own_size()); }  // of one rank
  Tensor all() const { return {sums_.data(), Dtype::f64, Shape{group_.world.size * size()}}; }
  Tensor own(const Range& range) const;
  Tensor total(int64_t i) const;
  std::vector<int32_t> order_of_losses(int64_t first) const;
  std::vector<int32_t> order_of_squares() const;
  std::vector<double> weights_of_squares() const;
  template <class T>
  Arena on_device(const std::vector<T>& list) const;
  // Calls visit(rank, bucket, leaf of it, norm_mul) for the leaves that belong to rows, in the order of the sum.
  template <class F>
  void each_leaf(F&& visit) const;

  ParameterTable& params_;
  const Buckets& buckets_;
  ProcessGroup& group_;
  Device& device_;
  const int64_t replicas_, micro_steps_, each_, losses_, values_;  // each_: sums of a micro-step; losses_: of a step
  Arena sums_;                                                     // f64, of every rank
  Arena result_;                                                   // the totals, f64, and behind them the values, f32
  Arena squares_, loss_, second_;                                  // i32: in which order sums are added
  Arena weights_;                                                  // f64, of the squares; empty: all 1
  std::vector<std::byte> host_;                                    // a copy of result_
};

}  // namespace crossply
