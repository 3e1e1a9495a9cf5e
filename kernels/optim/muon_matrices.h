// The rows of a parameter table that Muon updates: where they lie, their directions, NorMuon's moments, one update.
// On one rank of a CPU so far.
#pragma once

#include <string>
#include <vector>

#include "engine/buckets.h"
#include "engine/params.h"
#include "kernels/optim/muon.h"
#include "kernels/optim/newton_schulz.h"

namespace crossply {

struct MuonOptions {
  double lr = 0;              // base learning rate of the matrices
  std::string scale = "rms";  // one of muon_scales
  double momentum = 0.95;
  bool nesterov = true;
  int64_t momentum_warmup = 0;        // steps from 0.85 to `momentum`; 0: none
  std::string polynomial = "jordan";  // one of muon_polynomials
  int64_t steps = 0;                  // of Newton-Schulz; 0: all of the polynomial's
  bool normalize_rows = false;        // NorMuon

  // Of the update after k finished ones.
  double momentum_at(int64_t k) const;
};

class MuonMatrices {
 public:
  // The rows with `muon` set, which lie together (ParameterTable::lay_out). The table must have its memory.
  MuonMatrices(ParameterTable& params, const MuonOptions& options, double weight_decay, bool cautious);
  bool empty() const { return matrices_.empty(); }
  Range range() const { return range_; }  // of the flat arrays; all of it is Muon's
  // m: first moments of range(). factor, numbers: as in muon.h.
  void update(const Tensor& m, const Tensor& factor, const Tensor& numbers);
  // A matrix's second moments of its rows, (rows); without data without NorMuon.
  Tensor row_moments(const Parameter& row) const;
  size_t bytes() const { return directions_.bytes() + moments_.bytes(); }

 private:
  // The momentum and its direction: in bf16 in memory of their own, otherwise in the gradients'.
  Tensor directions() const;

  ParameterTable& params_;
  const MuonOptions options_;
  const NewtonSchulz iteration_;
  const bool cautious_;
  Range range_;
  std::vector<const Parameter*> matrices_;  // as they lie
  std::vector<MuonRow> rows_;               // of range()
  std::vector<int64_t> moments_begin_;      // of each matrix
  Arena directions_, moments_;
};

// Where the matrices of a table lie; {0, 0} without any.
Range muon_range(const ParameterTable& params);

}  // namespace crossply
