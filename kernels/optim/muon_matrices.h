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
};

// The rows with `muon` set, as they lie in the flat arrays.
std::vector<const Parameter*> muon_matrices(const ParameterTable& params);
// What they take of the flat arrays, together; {0, 0} without any.
Range muon_range(const ParameterTable& params);
// The sum of their first sizes: NorMuon has a second moment for each row of a matrix.
int64_t muon_row_moments(const ParameterTable& params);

class MuonMatrices {
 public:
  // The table must have its memory.
  MuonMatrices(ParameterTable& params, const MuonOptions& options, double weight_decay, bool cautious);
  bool empty() const { return matrices_.empty(); }
  Range range() const { return range_; }  // of the flat arrays; all of it is Muon's
  // Of the update after k finished ones.
  double momentum_at(int64_t k) const;
  // m: first moments of range(). factor, numbers: as in muon.h.
  void update(const Tensor& m, const Tensor& factor, const Tensor& numbers);
  // A matrix's second moments of its rows, (rows); without data without NorMuon.
  Tensor row_moments(const Parameter& row) const;
  size_t bytes() const { return directions_.bytes() + moments_.bytes(); }

 private:
  ParameterTable& params_;
  const MuonOptions options_;
  const NewtonSchulz iteration_;
  const bool cautious_;
  Range range_;
  Arena directions_, moments_;  // directions: in bf16; in f32 they are in the gradients' memory
  Tensor flat_;                 // the directions, as range()
  std::vector<const Parameter*> matrices_;
  // Of each matrix:
  std::vector<MuonRow> rows_;               // in range()
  std::vector<Tensor> each_, row_moments_;  // direction (m, n), second moments (m) or none
};

}  // namespace crossply
