#include "train/step/reduction.h"

#include <algorithm>
#include <bit>

#include "kernels/block/add.h"
#include "kernels/optim/convert.h"
#include "kernels/optim/sum_slices.h"
#include "train/step/declare.h"

namespace crossply {

Buckets divide(ParameterTable& params, const TrainPlan& plan, const World& world) {
  if (storage_type(plan) == Dtype::bf16 && (!world.alone() || plan.sum == "tree")) {
    Tape tape(Dtype::bf16);
    record_model(tape, params, plan.config, 1, 1);
    tape.mark_bf16_only();
  }
  return {params, world.rank, world.size, bucket_bytes(plan, world.size)};
}

std::vector<FinalBucket> final_buckets(const Tape& tape, const ParameterTable& params, const Buckets& buckets) {
  std::vector<FinalBucket> list;
  for (const Bucket& bucket : buckets.list()) {
    size_t node = tape.nodes().size() - 1;
    for (const Parameter& row : params.rows())
      if (row.offset < bucket.flat.end && bucket.flat.begin < row.offset + row.shape.numel())
        node = std::min(node, tape.last_to_add(row));
    list.push_back({&bucket, node});
  }
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.node > b.node; });
  return list;
}

bool has_bits_of_one_rank(const std::string& sum, int64_t micro_steps) {
  return sum != "library" &&
         (micro_steps == 1 || (sum == "tree" && std::has_single_bit(static_cast<uint64_t>(micro_steps))));
}

int64_t parked_copies(const std::string& sum, int64_t micro_steps) {
  return sum == "tree" ? std::bit_width(static_cast<uint64_t>(micro_steps)) - 1 : 0;
}

size_t reduction_bytes(const Buckets& buckets, const std::string& sum, int64_t micro_steps) {
  int64_t flat = 0;
  for (const Bucket& bucket : buckets.list()) flat += bucket.flat.size();
  int64_t elements = parked_copies(sum, micro_steps) * flat;
  if (buckets.size() > 1 && sum != "library")
    elements += std::min<int64_t>(2, std::ssize(buckets.list())) * buckets.largest();
  return static_cast<size_t>(elements) * sizeof(float);
}

namespace {

// Micro-steps add up in the gradients themselves.
class RunningSum : public Reduction {
 public:
  Step micro_step(const Step& step, int64_t m) const override { return step.nth(m); }
};

// One binary tree over the micro-steps, as a binary counter of partial sums.
class TreeSum : public Reduction {
 public:
  TreeSum(ParameterTable& params, int64_t micro_steps) : params_(params), micro_steps_(micro_steps) {
    for (int64_t i = 0; i < parked_copies("tree", micro_steps); ++i)
      parked_.emplace_back(params.device(), "gradients of micro-steps", params.gradients().bytes());
    sizes_.reserve(parked_.size() + 1);
  }
  Step micro_step(const Step& step, int64_t) const override { return step; }
  void after_micro_step(int64_t m) override;
  void add_parked(const Range& part) override;
  void finish() override { add_parked({0, params_.gradients().numel()}); }
  size_t bytes() const override { return parked_.size() * params_.gradients().bytes(); }

 private:
  Tensor parked(size_t i) const { return {parked_[i].data(), params_.gradients().dtype, params_.gradients().shape}; }

  ParameterTable& params_;
  const int64_t micro_steps_;
  std::vector<Arena> parked_;   // a stack of partial sums over micro-steps
  std::vector<int64_t> sizes_;  // over how many, each
};

// Partial sums of equal length are added, the earlier one first.
void TreeSum::after_micro_step(int64_t m) {
  if (m == 0) sizes_.clear();
  if (m + 1 == micro_steps_) return;
  const Stream stream = params_.device().stream();
  const Tensor gradients = params_.gradients();
  int64_t size = 1;
  for (; !sizes_.empty() && sizes_.back() == size; size *= 2, sizes_.pop_back())
    accumulate({gradients, true}, parked(sizes_.size() - 1), stream);
  CHECK_THAT(sizes_.size() < parked_.size(), "micro-step ", m, " of a step with ", parked_.size(), " parked sums");
  copy(parked(sizes_.size()), gradients, stream);
  sizes_.push_back(size);
}

void TreeSum::add_parked(const Range& part) {
  const Tensor to = part_of(params_.gradients(), part);
  for (size_t i = sizes_.size(); i-- > 0;) accumulate({to, true}, part_of(parked(i), part), params_.device().stream());
}

// Each rank's micro-steps in one of the two ways; what the ranks have is exchanged bucket by bucket, as the backward of
// the last micro-step finishes them.
class RanksSum : public Reduction {
 public:
  RanksSum(std::unique_ptr<Reduction> own, ProcessGroup& group, ParameterTable& params, const Buckets& buckets,
           BatchModel& model, bool by_library, int64_t micro_steps);
  Step micro_step(const Step& step, int64_t m) const override {
    Step own = own_->micro_step(step, m);
    own.last = m + 1 == micro_steps_;
    return own;
  }
  void after_micro_step(int64_t m) override { own_->after_micro_step(m); }
  // What is recorded cannot count, so a step's transfers are counted here, also those of its gather_weights().
  void finish() override { transfers_ += std::ssize(order_) + std::ssize(buckets_.list()); }
  void gather_weights() override;
  void gather_values(Optimizer& optimizer) override;
  int64_t transfers() const override { return transfers_; }
  size_t bytes() const override { return own_->bytes() + staging_[0].bytes() + staging_[1].bytes(); }

 private:
  // Of the k-th bucket that becomes final: its exchange, and its sum. A device may record both and replay them.
  void begin(size_t k);
  void complete(size_t k);

  const std::unique_ptr<Reduction> own_;  // of this rank's micro-steps
  ProcessGroup& group_;
  ParameterTable& params_;
  const Buckets& buckets_;
  const bool by_library_;
  const int64_t micro_steps_;
  std::vector<const Bucket*> order_;   // as the backward finishes them
  std::vector<Comm::Ticket> tickets_;  // of the buckets that were begun
  size_t completed_ = 0;
  Arena staging_[2];
  int64_t transfers_ = 0;
};

RanksSum::RanksSum(std::unique_ptr<Reduction> own, ProcessGroup& group, ParameterTable& params, const Buckets& buckets,
                   BatchModel& model, bool by_library, int64_t micro_steps)
    : own_(std::move(own)),
      group_(group),
      params_(params),
      buckets_(buckets),
      by_library_(by_library),
      micro_steps_(micro_steps) {
  std::vector<size_t> nodes;
  for (const auto& [bucket, node] : final_buckets(model.tape(), params, buckets))
    nodes.push_back(node), order_.push_back(bucket);
  tickets_.resize(order_.size());
  const size_t largest = static_cast<size_t>(buckets.largest()) * sizeof(float);
  for (size_t i = 0; !by_library && i < std::min<size_t>(2, order_.size()); ++i)
    staging_[i] = Arena(params.device(), "gradients of other ranks", largest);
  model.when_final(nodes, [this](size_t k) { begin(k); });
}

void RanksSum::begin(size_t k) {
  const Range& range = order_[k]->flat;
  own_->add_parked(range);
  if (k == 0) completed_ = 0;
  const Tensor gradients = part_of(params_.gradients(), range);
  if (by_library_) {
    group_.comm().reduce_scatter(gradients);
  } else {
    if (k >= 2) complete(k - 2);  // its staging is needed
    group_.comm().exchange(gradients, Tensor{staging_[k % 2].data(), gradients.dtype, gradients.shape});
  }
  tickets_[k] = group_.comm().mark();
  if (k + 1 < order_.size()) return;
  while (completed_ < order_.size()) complete(completed_);
}

void RanksSum::complete(size_t k) {
  CHECK_THAT(k == completed_, "bucket ", k, " is complete after ", completed_, " others");
  ++completed_;
  group_.comm().wait(tickets_[k]);
  if (by_library_) return;
  const Bucket& bucket = *order_[k];
  const Stream stream = params_.device().stream();
  const Tensor own = part_of(params_.gradients(), bucket.slice_of(group_.world.rank));
  const Tensor all{staging_[k % 2].data(), own.dtype, Shape{group_.world.size, bucket.slice}};
  const int64_t first = group_.world.rank * bucket.slice;
  copy(part_of(all, {first, first + bucket.slice}), own, stream);
  sum_slices(own, all, stream);
}

void RanksSum::gather_weights() {
  for (const Bucket& bucket : buckets_.list())
    group_.comm().gather(
        part_of(params_.lends() && bucket.bf16_only ? params_.bf16_copy() : params_.values(), bucket.flat));
  group_.comm().wait(group_.comm().mark());
  if (params_.bf16_copy_bytes() > 0)
    convert(part_of(params_.bf16_copy(), {0, params_.values().numel()}), params_.values(), params_.device().stream());
}

void RanksSum::gather_values(Optimizer& optimizer) {
  if (!params_.lends()) return;
  optimizer.return_masters();
  for (const Bucket& bucket : buckets_.list())
    if (bucket.bf16_only) group_.comm().gather(part_of(params_.gradients(), bucket.flat)), ++transfers_;
  group_.comm().wait(group_.comm().mark());
  params_.lend_values(false);
}

}  // namespace

std::unique_ptr<Reduction> make_reduction(ProcessGroup& group, ParameterTable& params, const Buckets& buckets,
                                          BatchModel& model, const std::string& sum, int64_t micro_steps) {
  std::unique_ptr<Reduction> own;
  if (sum == "tree") own = std::make_unique<TreeSum>(params, micro_steps);
  else own = std::make_unique<RunningSum>();
  if (group.world.alone()) return own;
  return std::make_unique<RanksSum>(std::move(own), group, params, buckets, model, sum == "library", micro_steps);
}

}  // namespace crossply
