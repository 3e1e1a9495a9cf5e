#include "kernels/optim/optimizer.h"

#include <algorithm>

#include "kernels/optim/convert.h"

namespace crossply {

void refresh_narrow(ParameterTable& params) {
  if (params.narrow_bytes() > 0) convert(params.narrow(), params.values(), params.device().stream());
}

Optimizer::Optimizer(ParameterTable& params, const AdamwOptions& options)
    : params_(params),
      options_(options),
      m_(params.device(), "first moments", params.values().bytes()),
      v_(params.device(), "second moments", params.values().bytes()) {}

void Optimizer::update(double lr, double norm, double scale) {
  ++step;
  rows_.clear();  // keeps its memory from step to step
  for (const Parameter& row : params_.rows())
    rows_.push_back({row.offset, row.offset + row.shape.numel(), lr * row.lr_mul, options_.weight_decay * row.wd_mul});
  AdamwScalars scalars{options_.beta1, options_.beta2, options_.eps, step, scale};
  if (options_.clip > 0) scalars.grad_scale *= std::min(1.0, options_.clip / (norm + 1e-6));
  adamw_update(params_.values(), m(), v(), params_.narrow(), params_.gradients(), rows_, scalars,
               params_.device().stream());
}

}  // namespace crossply
