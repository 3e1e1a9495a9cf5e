#include "kernels/optim/optimizer.h"

#include <algorithm>

#include "kernels/optim/convert.h"
#include "kernels/optim/sum_slices.h"

namespace crossply {
void refresh_narrow(ParameterTable& params) {
  if (params.narrow_bytes() == 0) return;
  const Stream stream = params.device().stream();
  const Range whole{0, params.values().numel()}, lent{whole.end, params.flat_size()};
  convert(part_of(params.narrow(), whole), params.values(), stream);
  if (params.lends()) convert(part_of(params.narrow(), lent), part_of(params.gradients(), lent), stream);
}

Optimizer::Optimizer(ParameterTable& params, const Buckets& buckets, const AdamwOptions& options)
    : params_(params),
      buckets_(buckets),
      options_(options),
      m_(params.device(), "first moments", static_cast<size_t>(buckets.own_size()) * size_of(params.dtype())),
      v_(params.device(), "second moments", m_.bytes()) {
  if (const int64_t masters = (params.flat_size() - params.values().numel()) / buckets.size(); params.lends())
    masters_ = Arena(params.device(), "own f32 parameters", static_cast<size_t>(masters) * size_of(params.dtype()));
  for (const Parameter& row : params.rows()) sorted_.push_back(&row);
  std::sort(sorted_.begin(), sorted_.end(),
            [](const Parameter* a, const Parameter* b) { return a->offset < b->offset; });
  take_masters();
}

Tensor Optimizer::own_values(const Bucket& bucket) const {
  if (!params_.lends() || !bucket.narrow) return part_of(params_.values(), bucket.slice_of(buckets_.rank()));
  const int64_t begin = bucket.own - params_.narrow_begin() / buckets_.size();
  return part_of(flat(masters_), {begin, begin + bucket.slice});
}

void Optimizer::take_masters() {
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.narrow)
      copy(own_values(bucket), part_of(params_.gradients(), bucket.slice_of(buckets_.rank())),
           params_.device().stream());
}

void Optimizer::return_masters() {
  for (const Bucket& bucket : buckets_.list())
    if (params_.lends() && bucket.narrow)
      copy(part_of(params_.gradients(), bucket.slice_of(buckets_.rank())), own_values(bucket),
           params_.device().stream());
}

void Optimizer::update(double lr, double norm, double scale) {
  ++step;
  AdamwScalars scalars{options_.beta1, options_.beta2, options_.eps, step, scale};
  if (options_.clip > 0) scalars.grad_scale *= std::min(1.0, options_.clip / (norm + 1e-6));
  for (const Bucket& bucket : buckets_.list()) {
    const Range slice = bucket.slice_of(buckets_.rank());
    rows_.clear();  // keeps its memory from step to step
    for (const Parameter* row : sorted_) {
      const int64_t begin = std::max(row->offset, slice.begin);
      const int64_t end = std::min(row->offset + row->shape.numel(), slice.end);
      if (begin < end)
        rows_.push_back(
            {begin - slice.begin, end - slice.begin, lr * row->lr_mul, options_.weight_decay * row->wd_mul});
    }
    adamw_update(own_values(bucket), part_of(m(), bucket.own_range()), part_of(v(), bucket.own_range()),
                 part_of(params_.narrow(), slice), part_of(params_.gradients(), slice), rows_, scalars,
                 params_.device().stream());
  }
}

}  // namespace crossply
