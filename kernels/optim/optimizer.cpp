#include "kernels/optim/optimizer.h"

#include <algorithm>

#include "kernels/optim/convert.h"
#include "kernels/optim/sum_slices.h"

namespace crossply {
void refresh_bf16_copy(ParameterTable& params) {
  if (params.bf16_copy_bytes() == 0) return;
  const Stream stream = params.device().stream();
  const Range whole{0, params.values().numel()}, lent{whole.end, params.flat_size()};
  convert(part_of(params.bf16_copy(), whole), params.values(), stream);
  if (params.lends()) convert(part_of(params.bf16_copy(), lent), params.lent_values(), stream);
}

Optimizer::Optimizer(ParameterTable& params, const Buckets& buckets, const AdamwOptions& options)
    : params_(params),
      buckets_(buckets),
      options_(options),
      numbers_(params.device(), "numbers of a step", sizeof(double) + sizeof(AdamwNumbers)),
      m_(params.device(), "first moments", static_cast<size_t>(buckets.own_size()) * size_of(params.dtype())),
      v_(params.device(), "second moments", m_.bytes()) {
  if (const int64_t masters = (params.flat_size() - params.values().numel()) / buckets.size(); params.lends())
    masters_ = Arena(params.device(), "own f32 parameters", static_cast<size_t>(masters) * size_of(params.dtype()));
  for (const Bucket& bucket : buckets.list()) rows_.push_back(own_rows(bucket));
  take_masters();
}

Tensor Optimizer::own_values(const Bucket& bucket) const {
  if (!params_.lends() || !bucket.bf16_only) return part_of(params_.values(), bucket.slice_of(buckets_.rank()));
  const int64_t begin = bucket.own - params_.bf16_only_begin() / buckets_.size();
  return part_of(flat(masters_), {begin, begin + bucket.slice});
}

void Optimizer::take_masters() {
  const auto from_second = [&](const Range& range) {
    const int64_t begin = params_.values().numel();
    return part_of(params_.lent_values(), {range.begin - begin, range.end - begin});
  };
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.bf16_only)
      copy(own_values(bucket), from_second(bucket.slice_of(buckets_.rank())), params_.device().stream());
}

void Optimizer::return_masters() {
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.bf16_only)
      copy(part_of(params_.gradients(), bucket.slice_of(buckets_.rank())), own_values(bucket),
           params_.device().stream());
}

std::vector<AdamwRow> Optimizer::own_rows(const Bucket& bucket) const {
  const Range slice = bucket.slice_of(buckets_.rank());
  std::vector<AdamwRow> rows;
  for (const Parameter& row : params_.rows()) {
    const int64_t begin = std::max(row.offset, slice.begin);
    const int64_t end = std::min(row.offset + row.shape.numel(), slice.end);
    if (begin < end)
      rows.push_back({begin - slice.begin, end - slice.begin, row.lr_mul, options_.weight_decay * row.wd_mul});
  }
  std::sort(rows.begin(), rows.end(), [](const AdamwRow& a, const AdamwRow& b) { return a.begin < b.begin; });
  return rows;
}

void Optimizer::begin_step(double lr, double scale) {
  const struct {
    double scale;
    AdamwNumbers numbers;
  } next{scale, adamw_numbers({options_.beta1, options_.beta2, options_.eps}, ++step, lr, scale)};
  params_.device().copy_in(numbers_.data(), &next, sizeof next);
}

void Optimizer::update() {
  const Tensor numbers{factor().data, Dtype::f64, Shape{4}};
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Bucket& bucket = buckets_.list()[i];
    const Range slice = bucket.slice_of(buckets_.rank());
    adamw_update(own_values(bucket), part_of(m(), bucket.own_range()), part_of(v(), bucket.own_range()),
                 part_of(params_.bf16_copy(), slice), part_of(params_.gradients(), slice), numbers, rows_[i],
                 {options_.beta1, options_.beta2, options_.eps}, params_.device().stream());
  }
}

}  // namespace crossply
