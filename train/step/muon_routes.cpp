#include "train/step/muon_routes.h"

#include <algorithm>

namespace crossply {
namespace {

constexpr size_t bytes_of_round = size_t{256} << 20;  // that a rank owns

// The matrices in the order of the flat arrays, in as few rounds as that allows.
std::vector<std::vector<size_t>> rounds_of(const MuonMatrices& muon, int ranks) {
  std::vector<std::vector<size_t>> rounds;
  std::vector<size_t> owned(static_cast<size_t>(ranks), bytes_of_round);
  for (size_t i = 0; i < muon.matrices().size(); ++i) {
    const Parameter& row = *muon.matrices()[i];
    const size_t bytes = muon.directions({row.offset, row.offset + row.shape.numel()}).bytes();
    const auto owner = static_cast<size_t>(muon.owners()[i]);
    if (rounds.empty() || owned[owner] + bytes > bytes_of_round) {
      rounds.emplace_back();
      owned.assign(owned.size(), 0);
    }
    rounds.back().push_back(i);
    owned[owner] += bytes;
  }
  return rounds;
}

}  // namespace

std::vector<RoutedPart> routed_parts(const ParameterTable& params, const Buckets& buckets) {
  const std::vector<const Parameter*> matrices = muon_matrices(params);
  const std::vector<int> owners = muon_owners(params, buckets.size());
  std::vector<RoutedPart> parts;
  for (size_t i = 0; i < matrices.size(); ++i)
    for (int rank = 0; rank < buckets.size(); ++rank) {
      if (rank == owners[i]) continue;
      for (const OwnPart& part : buckets.parts_of(*matrices[i], rank))
        parts.push_back({i, rank, owners[i], {matrices[i]->offset + part.begin, matrices[i]->offset + part.end}});
    }
  return parts;
}

MuonRoutes::MuonRoutes(const ParameterTable& params, const Buckets& buckets, Comm& comm, Optimizer& optimizer)
    : comm_(comm), optimizer_(optimizer) {
  const MuonMatrices& muon = optimizer.muon();
  std::vector<size_t> round_of(muon.matrices().size());
  for (std::vector<size_t>& matrices : rounds_of(muon, buckets.size())) {
    for (const size_t i : matrices) round_of[i] = rounds_.size();
    rounds_.push_back({std::move(matrices), {}, {}});
  }
  for (const RoutedPart& part : routed_parts(params, buckets)) {
    Round& round = rounds_[round_of[part.matrix]];
    if (part.holder == buckets.rank()) round.given.push_back({part.owner, muon.directions(part.flat)});
    if (part.owner == buckets.rank()) round.taken.push_back({part.holder, muon.directions(part.flat)});
  }
  tickets_.resize(rounds_.size());
}

void MuonRoutes::update() {
  optimizer_.make_directions();
  for (size_t i = 0; i < rounds_.size(); ++i) {
    comm_.route(rounds_[i].given, rounds_[i].taken);
    tickets_[i] = comm_.mark();
  }
  optimizer_.update_by_adamw();
  for (size_t i = 0; i < rounds_.size(); ++i) {
    comm_.wait(tickets_[i]);
    optimizer_.orthogonalise(rounds_[i].matrices);
    comm_.route(rounds_[i].taken, rounds_[i].given);
  }
  comm_.wait(comm_.mark());
  optimizer_.apply_directions();
}

}  // namespace crossply
