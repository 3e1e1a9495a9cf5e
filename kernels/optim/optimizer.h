// AdamW over the flat arrays of a parameter table, with per-row learning rate and weight decay, and global-norm
// clipping.
#pragma once

#include <vector>

#include "engine/params.h"
#include "kernels/optim/adamw.h"

namespace crossply {

struct AdamwOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  double clip = 1.0;  // largest global gradient norm; 0: no clipping
};

// The table's bf16 copy again, after the values were changed by anything but the optimizer; without a copy, nothing.
void refresh_narrow(ParameterTable& params);

class Optimizer {
 public:
  Optimizer(ParameterTable& params, const AdamwOptions& options);
  // One update with base rate lr, by the gradients times `scale`, and times min(1, clip / (norm + 1e-6)), norm being
  // their L2 norm after the first. Waits for nothing. Neither NaN nor infinity may get here: the caller stops first.
  void update(double lr, double norm, double scale = 1);

  int64_t step = 0;  // updates done
  Tensor m() const { return Tensor{m_.data(), params_.dtype(), Shape{params_.flat_size()}}; }
  Tensor v() const { return Tensor{v_.data(), params_.dtype(), Shape{params_.flat_size()}}; }

 private:
  ParameterTable& params_;
  AdamwOptions options_;
  Arena m_, v_;
  std::vector<AdamwRow> rows_;  // of the last update
};

}  // namespace crossply
