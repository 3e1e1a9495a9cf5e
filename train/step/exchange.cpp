#include "train/step/exchange.h"

#include <algorithm>
#include <bit>

#include "engine/io/json.h"
#include "kernels/block/add.h"
#include "kernels/optim/convert.h"
#include "kernels/optim/sum_slices.h"
#include "ranks/agree.h"
#include "train/step/declare.h"

namespace crossply {

Buckets divide(ParameterTable& params, const TrainPlan& o, const World& world) {
  if (storage_type(o) == Dtype::bf16 && (!world.alone() || o.sum == "tree")) {
    Tape tape(Dtype::bf16);
    record_model(tape, params, o.config, 1, 1);
    tape.mark_bf16_only();
  }
  return {params, world.rank, world.size, bucket_bytes(o, world.size)};
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

size_t exchange_bytes(const Buckets& buckets, const std::string& sum, int64_t micro_steps) {
  int64_t flat = 0;
  for (const Bucket& bucket : buckets.list()) flat += bucket.flat.size();
  int64_t elements = parked_copies(sum, micro_steps) * flat;
  if (buckets.size() > 1 && sum != "library")
    elements += std::min<int64_t>(2, std::ssize(buckets.list())) * buckets.largest();
  return static_cast<size_t>(elements) * sizeof(float);
}

Exchange::Exchange(ProcessGroup& group, ParameterTable& params, const Buckets& buckets, BatchModel& model,
                   const std::string& sum, int64_t micro_steps, int64_t check_every)
    : group_(group),
      params_(params),
      buckets_(buckets),
      tree_(sum == "tree"),
      library_(sum == "library"),
      micro_steps_(micro_steps),
      check_every_(check_every) {
  if (!hooked()) return;
  const size_t flat = params.gradients().bytes(), largest = static_cast<size_t>(buckets.largest()) * sizeof(float);
  for (int64_t i = 0; i < parked_copies(sum, micro_steps); ++i)
    parked_.emplace_back(params.device(), "gradients of micro-steps", flat);
  sizes_.reserve(parked_.size() + 1);
  std::vector<size_t> nodes;
  for (const auto& [bucket, node] : final_buckets(model.tape(), params, buckets))
    nodes.push_back(node), order_.push_back(bucket);
  tickets_.resize(order_.size());
  if (!group.world.alone() && !library_)
    for (size_t i = 0; i < std::min<size_t>(2, order_.size()); ++i)
      staging_[i] = Arena(params.device(), "gradients of other ranks", largest);
  model.when_final(nodes, [this](size_t k) { begin(k); });
}

// A binary counter: partial sums of equal length are added, the earlier one first.
void Exchange::after_micro_step(int64_t m) {
  if (!tree_ || m + 1 == micro_steps_) return;
  const Stream stream = params_.device().stream();
  const Tensor gradients = params_.gradients();
  int64_t size = 1;
  for (; !sizes_.empty() && sizes_.back() == size; size *= 2, sizes_.pop_back())
    accumulate({gradients, true}, Tensor{parked_[sizes_.size() - 1].data(), gradients.dtype, gradients.shape}, stream);
  CHECK_THAT(sizes_.size() < parked_.size(), "micro-step ", m, " of a step with ", parked_.size(), " parked sums");
  copy(Tensor{parked_[sizes_.size()].data(), gradients.dtype, gradients.shape}, gradients, stream);
  sizes_.push_back(size);
}

void Exchange::add_parked(const Range& range) {
  const Tensor to = part_of(params_.gradients(), range);
  for (size_t i = sizes_.size(); i-- > 0;)
    accumulate({to, true}, part_of(Tensor{parked_[i].data(), to.dtype, params_.gradients().shape}, range),
               params_.device().stream());
}

void Exchange::begin(size_t k) {
  const Range& range = order_[k]->flat;
  add_parked(range);
  if (group_.world.alone()) return;
  if (k == 0) completed_ = 0;
  const Tensor gradients = part_of(params_.gradients(), range);
  if (library_) {
    group_.comm().reduce_scatter(gradients);
  } else {
    if (k >= 2) complete(k - 2);  // its staging is needed
    group_.comm().exchange(gradients, Tensor{staging_[k % 2].data(), gradients.dtype, gradients.shape});
  }
  tickets_[k] = group_.comm().mark();
  if (k + 1 < order_.size()) return;
  while (completed_ < order_.size()) complete(completed_);
}

void Exchange::complete(size_t k) {
  CHECK_THAT(k == completed_, "bucket ", k, " is complete after ", completed_, " others");
  ++completed_;
  group_.comm().wait(tickets_[k]);
  if (library_) return;
  const Bucket& bucket = *order_[k];
  const Stream stream = params_.device().stream();
  const Tensor own = part_of(params_.gradients(), bucket.slice_of(group_.world.rank));
  const Tensor all{staging_[k % 2].data(), own.dtype, Shape{group_.world.size, bucket.slice}};
  const int64_t first = group_.world.rank * bucket.slice;
  copy(part_of(all, {first, first + bucket.slice}), own, stream);
  sum_slices(own, all, stream);
}

void Exchange::finish() {
  sizes_.clear();
  if (!group_.world.alone()) transfers_ += std::ssize(order_);
}

void Exchange::count_gathers() {
  if (!group_.world.alone()) transfers_ += std::ssize(buckets_.list());
}

void Exchange::gather_weights() {
  if (group_.world.alone()) return;
  for (const Bucket& bucket : buckets_.list())
    group_.comm().gather(
        part_of(params_.lends() && bucket.bf16_only ? params_.bf16_copy() : params_.values(), bucket.flat));
  group_.comm().wait(group_.comm().mark());
  if (params_.bf16_copy_bytes() > 0)
    convert(part_of(params_.bf16_copy(), {0, params_.values().numel()}), params_.values(), params_.device().stream());
}

void Exchange::gather_values(Optimizer& optimizer) {
  if (!params_.lends()) return;
  optimizer.return_masters();
  for (const Bucket& bucket : buckets_.list())
    if (bucket.bf16_only) group_.comm().gather(part_of(params_.gradients(), bucket.flat)), ++transfers_;
  group_.comm().wait(group_.comm().mark());
  params_.lend_values(false);
}

void Exchange::share_choices(const std::function<void()>& run) {
  Device& device = params_.device();
  if (group_.world.alone() || device.arithmetic().versions.empty()) return;
  if (group_.world.leads()) run();
  const nlohmann::json choices = known_json(group_.share(json_text(nlohmann::json(device.arithmetic().choices))));
  device.adopt(choices.get<std::map<std::string, std::string>>(), "rank 0");
}

void Exchange::check_replicas(int64_t steps_done) {
  if (group_.world.alone() || check_every_ == 0) return;
  group_.enter(Stage::check, steps_done);
  if (const std::string others = ranks_that_differ(group_, digest_of(params_)); !others.empty())
    fail_at_all(group_, Exit::internal,
                str("after step ", steps_done, " the weights of ", others, " are not those of rank 0: ",
                    "memory or network may be broken; resume from a checkpoint, without these machines"));
}

void Exchange::after_step(int64_t steps_done) {
  if (check_every_ > 0 && steps_done % check_every_ == 0) check_replicas(steps_done);
}

size_t Exchange::bytes() const {
  size_t sum = staging_[0].bytes() + staging_[1].bytes();
  for (const Arena& arena : parked_) sum += arena.bytes();
  return sum;
}

}  // namespace crossply
