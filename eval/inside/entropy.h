// How many directions the tokens of a sequence take up: the entropy of a representation's spectrum (Sanchez Giraldo,
// Rao and Principe's matrix-based Rényi entropy, as arXiv 2502.09245 measures hidden states and values with it).
//
//   Z (T, C)   a sequence's rows, each channel z-scored by the mean and the unbiased deviation of all rows of the data:
//              z = (x - mean) / (deviation + 1e-5)
//   p_i        the eigenvalues of Z Z^T as shares of its trace
//   S_alpha    log(sum_i p_i^alpha) / (1 - alpha); of alpha 1, - sum_i p_i log p_i.   0 <= S_alpha <= log(min(T, C))
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossply {

// Of the channels of all rows so far: of each block of rows first its own moments, then those of both together, so that
// nothing cancels.
struct ChannelMoments {
  int64_t rows = 0;
  std::vector<double> mean, squares;  // (C): squares: the sum of (x - mean)^2

  void add(const double* x, int64_t n, int64_t C);  // x (n, C); C as ever
  double deviation(size_t channel) const;           // unbiased; 0 of fewer than two rows
};

// In nats.
struct MatrixEntropy {
  double renyi = 0, shannon = 0;
};

// Of eigenvalues in any order. Those below 0 count nothing, and neither do those that are rounding: below n epsilon
// times the largest, which the square root of alpha 0.5 would lift to 1e-7 each. Of nothing at all: 0.
MatrixEntropy entropy_of_spectrum(const std::vector<double>& eigenvalues, double alpha);

// Of x (n, C), one sequence, with the moments of its data.
MatrixEntropy matrix_entropy(const double* x, int64_t n, int64_t C, const ChannelMoments& moments, double alpha);

}  // namespace crossply
