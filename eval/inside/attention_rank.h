// How far attention has collapsed (arXiv 2404.08634): into how few directions, and onto how few tokens.
//
//   A (T, T): a head's probabilities for one sequence, causal: row t is over columns 0 .. t and 0 beyond;
//             singular values s_1 >= s_2 >= ...
//   rank k*(tau) = min {k : sum_{i<=k} s_i^2 >= tau |A|^2}          |A|^2 = sum_i s_i^2, Frobenius
//   mass m*(eta) = min {m : sum_{i<=m} c_(i) >= eta},               c_j = |column j|^2 / |A|^2, the largest first
//
// The k largest of the s_i^2 sum up to no less than any k of the column energies (Schur and Horn): k*(tau) <= m*(tau).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

// Of a symmetric matrix a (n, n), row after row, which is overwritten: the eigenvalues, the largest first, to about
// 1e-15 of the largest magnitude.
std::vector<double> symmetric_eigenvalues(double* a, int64_t n);

// The squares of the singular values of A (T, T), and of the norms of its columns, the largest first.
std::vector<double> singular_energies(const double* A, int64_t T);
std::vector<double> column_energies(const double* A, int64_t T);
// How many of these, which descend, make up `share` of their sum; 0 of nothing. The slack is a share for rounding.
int64_t fewest(const std::vector<double>& energies, double share, double slack = 1e-9);

// k*(tau) and m*(eta) of one A (T, T). Throws Exit::internal if k*(eta) > m*(eta), which cannot be.
struct RankMass {
  int64_t rank, mass;
};
RankMass rank_and_mass(const double* A, int64_t T, double tau, double eta);

// A head of a layer over N sequences.
struct HeadCollapse {
  int64_t ranks = 0, masses = 0;  // summed over the sequences
};

struct LayerCollapse {
  int64_t N = 0;
  std::vector<HeadCollapse> heads;  // none in a layer without attention

  double rank(size_t head) const;  // Rank(h, l): the mean over the sequences
  double mass(size_t head) const;
  double max_rank() const;  // MaxRank(l): the largest of the heads; NaN without heads
  double mean_rank() const;
  double mean_mass() const;   // AvgMass(l): the mean of the heads
  bool lazy() const;          // MaxRank(l) = 1: rank 1 in every head for every sequence
  int64_t collapsed() const;  // heads of Rank < 1.5
};

// AvgRank of the layers begin .. end-1: the mean of MaxRank over those that have attention. NaN if none has.
double average_rank(const std::vector<LayerCollapse>& layers, size_t begin, size_t end);

// A group of neighbouring layers, begin .. end-1.
struct LayerGroup {
  size_t begin, end;
};
// The lazy groups, floor(AvgRank) = 1: the longest that begins and ends with a layer of MaxRank < 2, then the longest
// of what is left on both sides, and so on; in the order of the layers.
std::vector<LayerGroup> lazy_groups(const std::vector<LayerCollapse>& layers);

}  // namespace crossply
