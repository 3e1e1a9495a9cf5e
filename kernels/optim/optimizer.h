// AdamW over the flat arrays of a parameter table, with per-row learning rate and weight decay, and Muon for the rows
// that are its matrices. With several ranks each rank updates its own slices and alone has their moments. If the other
// ranks have the values in bf16 only, it also has their f32 master weights.
#pragma once

#include <vector>

#include "engine/buckets.h"
#include "engine/params.h"
#include "kernels/optim/adamw.h"
#include "kernels/optim/muon_matrices.h"

namespace crossply {

struct AdamwOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  double clip = 1.0;      // largest global gradient norm; 0: no clipping (kernels/optim/clip.h)
  bool cautious = false;  // weight decay only where the step makes the weight smaller
};

// A step's base learning rates, and its factor of all weight decay.
struct StepRates {
  double lr, muon_lr = 0, decay = 1;
};

// The table's bf16 copy again, after the values were changed by anything but the optimizer; without a copy, nothing.
void refresh_bf16_copy(ParameterTable& params);

class Optimizer {
 public:
  // The table must have its values, of which the masters are taken.
  Optimizer(ParameterTable& params, const Buckets& buckets, const AdamwOptions& options, const MuonOptions& muon = {});
  // Copies the next step's scalars to the device: its rates, and `scale`, which turns the gradients as they are into
  // those of the loss.
  void begin_step(const StepRates& rates, double scale = 1);
  void begin_step(double lr, double scale = 1) { begin_step(StepRates{lr}, scale); }
  // One f64 each, on the device. clip_factor (kernels/optim/clip.h) makes the second from the first; until then it is
  // the same.
  Tensor scale() const { return number(0); }
  Tensor factor() const { return number(1); }
  // Updates this rank's slices by the gradients times the factor. Waits for nothing, and a device may record it. Where
  // the factor is not finite nothing changes. Several ranks call the parts below, for Muon's matrices travel in between
  // (train/step/muon_routes.h).
  void update();
  // All that is not Muon's.
  void update_by_adamw();
  // What MuonMatrices does, with this step's numbers.
  void make_directions() { muon_.make_directions(muon_parts_, m(), factor(), muon_numbers()); }
  void orthogonalise(const std::vector<size_t>& places) { muon_.orthogonalise(places, factor()); }
  void apply_directions() { muon_.apply(muon_parts_, factor(), muon_numbers()); }

  int64_t step = 0;  // begun
  // First moments of all own slices. Second moments of own elements, none of them Muon's: its matrices have none.
  Tensor m() const { return flat(m_); }
  Tensor v(const Range& own) const;
  const MuonMatrices& muon() const { return muon_; }
  MuonMatrices& muon() { return muon_; }
  // If bf16_only rows have lent their values' memory (ParameterTable::allocate): copies the own slices of the values
  // into the masters, and the masters back into the gradients' memory.
  void take_masters();
  void return_masters();
  size_t bytes() const { return m_.bytes() + v_.bytes() + masters_.bytes() + muon_.bytes(); }

 private:
  Tensor flat(const Arena& arena) const {
    return Tensor{arena.data(), params_.dtype(), Shape{static_cast<int64_t>(arena.bytes() / size_of(params_.dtype()))}};
  }
  Tensor number(int64_t i, int64_t count = 1) const {
    return part_of({numbers_.data(), Dtype::f64, Shape{sizeof(Numbers) / sizeof(double)}}, {i, i + count});
  }
  Tensor muon_numbers() const {
    return number(1 + sizeof(AdamwNumbers) / sizeof(double), sizeof(MuonNumbers) / sizeof(double));
  }
  // What is updated of a bucket, f32.
  Tensor own_values(const Bucket& bucket) const;
  std::vector<AdamwRow> rows_in(const Range& flat) const;
  void add_parts(const Bucket& bucket);

  ParameterTable& params_;
  Buckets buckets_;
  AdamwOptions options_;
  MuonMatrices muon_;
  struct Numbers {
    double scale;
    AdamwNumbers adamw;
    MuonNumbers muon;
  };
  Arena numbers_;  // Numbers
  Arena m_, v_, masters_;
  struct AdamwPart {
    Range flat, own;
    Tensor values;  // f32
    std::vector<AdamwRow> rows;
  };
  std::vector<AdamwPart> parts_;  // all that is not Muon's
  std::vector<MuonPart> muon_parts_;
};

}  // namespace crossply
