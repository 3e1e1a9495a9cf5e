// AdamW over the flat arrays of a parameter table, with per-row learning rate and weight decay, and global-norm
// clipping. Of several ranks each updates its own slices, of which it alone has the moments; and, where the ranks
// otherwise have them in bf16 only, the f32 values, its masters.
#pragma once

#include <vector>

#include "engine/buckets.h"
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
  // The table must have its values, of which the masters are taken.
  Optimizer(ParameterTable& params, const Buckets& buckets, const AdamwOptions& options);
  // One update of this rank's slices with base rate lr, by the gradients times `scale`, and times
  // min(1, clip / (norm + 1e-6)), norm being the L2 norm of all gradients after the first. Waits for nothing. Neither
  // NaN nor infinity may get here: the caller stops first.
  void update(double lr, double norm, double scale = 1);

  int64_t step = 0;  // updates done
  // Arrays of own slices.
  Tensor m() const { return flat(m_); }
  Tensor v() const { return flat(v_); }
  // Where narrow rows have lent their values' memory (ParameterTable::allocate): takes the own slices of the values as
  // masters, and the other way.
  void take_masters();
  void return_masters();
  size_t bytes() const { return m_.bytes() + v_.bytes() + masters_.bytes(); }

 private:
  Tensor flat(const Arena& arena) const {
    return Tensor{arena.data(), params_.dtype(), Shape{static_cast<int64_t>(arena.bytes() / size_of(params_.dtype()))}};
  }
  // What is updated of a bucket, f32.
  Tensor own_values(const Bucket& bucket) const;

  ParameterTable& params_;
  Buckets buckets_;
  AdamwOptions options_;
  Arena m_, v_, masters_;
  std::vector<const Parameter*> sorted_;  // by offset
  std::vector<AdamwRow> rows_;            // of a bucket, in the last update
};

}  // namespace crossply
