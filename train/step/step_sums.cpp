#include "train/step/step_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/optim/clip.h"
#include "kernels/optim/gradient_norm.h"
#include "kernels/optim/sum_slices.h"

namespace crossply {

StepSums::StepSums(ParameterTable& params, const Buckets& buckets, const BatchModel& model, ProcessGroup& group,
                   int64_t micro_steps, bool with_second, int64_t values)
    : params_(params),
      buckets_(buckets),
      group_(group),
      device_(params.device()),
      replicas_(model.layout().replicas),
      micro_steps_(micro_steps),
      each_((with_second ? 2 : 1) * replicas_),
      losses_(micro_steps * each_),
      values_(values),
      sums_(device_, "sums of a step", static_cast<size_t>(group.world.size * size()) * sizeof(double)),
      result_(device_, "verdict on a step",
              totals * sizeof(double) + static_cast<size_t>(group.world.size * values) * sizeof(float)),
      squares_(on_device(order_of_squares())),
      loss_(on_device(order_of_losses(0))),
      second_(on_device(order_of_losses(with_second ? replicas_ : 0))),
      weights_(on_device(weights_of_squares())),
      host_(result_.bytes()) {}

void StepSums::clear() { device_.fill(sums_.data(), 0, sums_.bytes()); }

Tensor StepSums::own(const Range& range) const {
  const int64_t first = group_.world.rank * size();
  return part_of(all(), {first + range.begin, first + range.end});
}

Tensor StepSums::total(int64_t i) const { return part_of({result_.data(), Dtype::f64, Shape{totals}}, {i, i + 1}); }

Tensor StepSums::all_values() const {
  if (values_ == 0) return {};
  return {result_.data() + totals * sizeof(double), Dtype::f32, Shape{group_.world.size * values_}};
}

Tensor StepSums::own_values() const {
  return part_of(all_values(), {group_.world.rank * values_, (group_.world.rank + 1) * values_});
}

// Every rank has its losses first, micro-step by micro-step.
std::vector<int32_t> StepSums::order_of_losses(int64_t first) const {
  std::vector<int32_t> order;
  for (int64_t r = 0; r < group_.world.size; ++r)
    for (int64_t m = 0; m < micro_steps_; ++m)
      for (int64_t i = 0; i < replicas_; ++i) order.push_back(static_cast<int32_t>(r * size() + m * each_ + first + i));
  return order;
}

// Leaves between the rows are left out: how many there are depends on the number of ranks.
template <class F>
void StepSums::each_leaf(F&& visit) const {
  std::vector<double> norm_muls(static_cast<size_t>(leaves_of(params_.flat_size())));  // 0: of no row
  for (const Parameter& row : params_.rows())
    for (int64_t l = row.offset / leaf; l < leaves_of(row.offset + row.shape.numel()); ++l)
      norm_muls[static_cast<size_t>(l)] = row.norm_mul;
  for (auto bucket = buckets_.list().rbegin(); bucket != buckets_.list().rend(); ++bucket)
    for (int r = 0; r < buckets_.size(); ++r)
      for (int64_t l = 0; l < leaves_of(bucket->slice); ++l)
        if (const double by = norm_muls[static_cast<size_t>(bucket->slice_of(r).begin / leaf + l)]; by != 0)
          visit(r, *bucket, l, by);
}

std::vector<int32_t> StepSums::order_of_squares() const {
  std::vector<int32_t> order;
  each_leaf([&](int r, const Bucket& bucket, int64_t l, double) {
    order.push_back(static_cast<int32_t>(r * size() + losses_ + bucket.own / leaf + l));
  });
  return order;
}

// Empty where all are 1.
std::vector<double> StepSums::weights_of_squares() const {
  if (std::ranges::all_of(params_.rows(), [](const Parameter& row) { return row.norm_mul == 1; })) return {};
  std::vector<double> weights;
  each_leaf([&](int, const Bucket&, int64_t, double by) { weights.push_back(by * by); });
  return weights;
}

template <class T>
Arena StepSums::on_device(const std::vector<T>& list) const {
  Arena arena(device_, "order of a step's sums", list.size() * sizeof(T));
  if (!list.empty()) device_.copy_in(arena.data(), list.data(), arena.bytes());
  return arena;
}

void StepSums::add_squares() {
  for (const Bucket& bucket : buckets_.list())
    leaf_squares(own({losses_ + bucket.own / leaf, losses_ + leaves_of(bucket.own + bucket.slice)}),
                 part_of(params_.gradients(), bucket.slice_of(buckets_.rank())), device_.stream());
}

void StepSums::compute_clip_factor(Optimizer& optimizer, double clip) {
  Comm& comm = group_.comm();
  comm.gather(all());
  if (values_ > 0) comm.gather(all_values());
  comm.wait(comm.mark());
  int64_t i = 0;
  for (const Arena* order : {&squares_, &loss_, &second_}) {
    const auto n = static_cast<int64_t>(order->bytes() / sizeof(int32_t));
    const bool weighted = order == &squares_ && weights_.bytes() > 0;
    ordered_sum(total(i++), all(), {order->data(), Dtype::i32, Shape{n}}, device_.stream(),
                weighted ? Tensor{weights_.data(), Dtype::f64, Shape{n}} : Tensor{});
  }
  clip_factor(optimizer.factor(), optimizer.scale(), {result_.data(), Dtype::f64, Shape{totals}}, all_values(), clip,
              device_.stream());
}

void StepSums::begin_read() { device_.begin_read(result_.data(), result_.bytes()); }

StepSums::Totals StepSums::end_read() {
  device_.end_read(host_.data());
  Totals read;
  static_assert(sizeof read == totals * sizeof(double));
  std::memcpy(&read, host_.data(), sizeof read);
  return read;
}

std::vector<float> StepSums::values() const {
  std::vector<float> read(static_cast<size_t>(group_.world.size * values_));
  std::memcpy(read.data(), host_.data() + totals * sizeof(double), read.size() * sizeof(float));
  return read;
}

std::vector<float> StepSums::gather_values() {
  group_.comm().gather(all_values());
  group_.comm().wait(group_.comm().mark());
  std::vector<float> read(static_cast<size_t>(all_values().numel()));
  device_.copy_out(read.data(), all_values().data, all_values().bytes());
  return read;
}

std::string StepSums::first_not_finite() const {
  if (group_.world.alone()) return "";
  std::vector<double> numbers(static_cast<size_t>(all().numel()));
  device_.copy_out(numbers.data(), sums_.data(), sums_.bytes());
  for (int64_t r = 0; r < group_.world.size; ++r)
    for (int64_t i = 0; i < losses_; ++i)
      if (!std::isfinite(numbers[static_cast<size_t>(r * size() + i)]))
        return str("; the first loss that is not finite is of rank ", r, "'s micro-step ", i / each_ + 1);
  return "; all losses are finite, a gradient is not";
}

}  // namespace crossply
