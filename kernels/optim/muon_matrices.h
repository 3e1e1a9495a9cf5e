// The rows of a parameter table that Muon updates: where they lie, their directions, NorMuon's moments, one update.
//
// Of several ranks each has the momentum of its own slices (engine/buckets.h), but a matrix is made orthogonal as a
// whole, by its owner:
//
//   make_directions   of own slices, from their gradients and momentum
//   (train/step/muon_routes.h brings all of a matrix to its owner)
//   orthogonalise     whole matrices
//   (and back)
//   apply             to own slices of the weights
//
// Directions lie as the rows do in the flat arrays: in f32 they are in the gradients' memory.
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
// The owner of each of them: the one that costs most first, each to the rank that has the least to do so far.
std::vector<int> muon_owners(const ParameterTable& params, int ranks);
// Those that this rank owns.
std::vector<const Parameter*> own_muon_matrices(const ParameterTable& params, int rank, int ranks);
// NorMuon has a second moment for each row of a matrix: those of the matrices of one rank.
int64_t muon_row_moments(const ParameterTable& params, int rank, int ranks);
// What the matrices take of an array of own slices.
Range own_muon_range(const ParameterTable& params, const Buckets& buckets);

// A rank's part of a bucket that is all of matrices.
struct MuonPart {
  Range flat, own;            // of the flat arrays, and of an array of own slices
  Tensor values;              // f32
  std::vector<MuonRow> rows;  // in it
};

class MuonMatrices {
 public:
  // The table must have its memory.
  MuonMatrices(ParameterTable& params, const Buckets& buckets, const MuonOptions& options, double weight_decay,
               bool cautious);
  bool empty() const { return matrices_.empty(); }
  bool normalizes_rows() const { return options_.normalize_rows; }
  Range own() const { return own_; }  // of an array of own slices; all of it is Muon's
  // Of the update after k finished ones.
  double momentum_at(int64_t k) const;

  // In the order of the flat arrays, with the rank that owns each.
  const std::vector<const Parameter*>& matrices() const { return matrices_; }
  const std::vector<int>& owners() const { return owners_; }
  std::vector<MuonRow> rows_in(const Range& flat) const;
  // The directions of these elements of the flat arrays.
  Tensor directions(const Range& flat) const;

  // m: first moments of all own slices. factor, numbers: as in muon.h.
  void make_directions(const std::vector<MuonPart>& parts, const Tensor& m, const Tensor& factor,
                       const Tensor& numbers);
  // Of these matrices, by their places in matrices(), the ones that this rank owns.
  void orthogonalise(const std::vector<size_t>& places, const Tensor& factor);
  // Multiplies as orthogonalise() does, one matrix of each shape, whoever owns it: a GPU's choices of algorithms are
  // those of all ranks. What directions hold is lost.
  void try_products();
  void apply(const std::vector<MuonPart>& parts, const Tensor& factor, const Tensor& numbers);
  // A matrix's second moments of its rows, (rows); without data without NorMuon, and where another rank owns it.
  Tensor row_moments(const Parameter& row) const;
  size_t bytes() const { return directions_.bytes() + moments_.bytes(); }

 private:
  ParameterTable& params_;
  const MuonOptions options_;
  const NewtonSchulz iteration_;
  const double weight_decay_;
  const bool cautious_;
  const int rank_;
  Range range_, own_;
  Arena directions_, moments_;  // directions: in bf16, of range_
  std::vector<const Parameter*> matrices_;
  // Of each matrix:
  std::vector<int> owners_;
  std::vector<Tensor> row_moments_;  // (m) or none
};

}  // namespace crossply
