// Muon's matrices on several ranks. Each rank has the momentum of its own slices, and so directions of parts of
// matrices; a matrix is made orthogonal as a whole, by the rank that owns it (kernels/optim/muon_matrices.h).
// Directions go there and come back, in rounds, beside AdamW's update and the products of the rounds before. They have
// the bits of one rank.
//
// Of P numbers in matrices all ranks send 2 e P (W - 1) / W bytes in a step, about: e = 4, or in bf16 2.
#pragma once

#include <vector>

#include "engine/buckets.h"
#include "kernels/optim/optimizer.h"
#include "ranks/comm.h"

namespace crossply {

// Elements of the flat arrays that go from the rank whose slice they are to the owner of their matrix, and back.
struct RoutedPart {
  size_t matrix;  // its place in muon_matrices()
  int holder, owner;
  Range flat;
};
// All that change ranks, in the order of the flat arrays.
std::vector<RoutedPart> routed_parts(const ParameterTable& params, const Buckets& buckets);

class MuonRoutes {
 public:
  // All must outlive it.
  MuonRoutes(const ParameterTable& params, const Buckets& buckets, Comm& comm, Optimizer& optimizer);
  // The step's whole update of this rank's slices, as Optimizer::update() for one rank. A device may record it.
  void update();
  // Transfers of one update: the same number at every rank.
  int64_t transfers() const { return 2 * std::ssize(rounds_); }

 private:
  struct Round {
    std::vector<size_t> matrices;
    std::vector<Piece> given, taken;  // this rank's slices of others' matrices; others' slices of its own
  };
  Comm& comm_;
  Optimizer& optimizer_;
  std::vector<Round> rounds_;
  std::vector<Comm::Ticket> tickets_;  // of each round's way to the owners
};

}  // namespace crossply
