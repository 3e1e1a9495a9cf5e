// How alike two representations of the same tokens are, whatever the directions and the scale they are written in:
// linear centred kernel alignment (Kornblith et al., arXiv 1905.00414), with plain, biased sums.
//
//   CKA(X, Y) = |Y^T X|^2 / (|X^T X| |Y^T Y|)      X (n, C), Y (n, D): rows of tokens, columns centred; |.| Frobenius
//             = <K, L> / (|K| |L|)                 K = X X^T, L = Y Y^T
//
// from 0 to 1, where Y is X rotated and scaled.
#pragma once

#include <cstdint>
#include <vector>

namespace crossply {

struct StateRows {
  int64_t columns;
  std::vector<double> x;  // (n, columns)
};

// Subtracts every column's mean over n rows. What is constant becomes 0, without rounding.
void centre_columns(StateRows& features, int64_t n);

// CKA of each with each, of n centred rows; NaN beside one that is 0. It needs no more memory than a few rows of the
// kernels K.
std::vector<std::vector<double>> linear_cka(const std::vector<const StateRows*>& all, int64_t n);

// Which `count` of `total` things, each with the same chance, in ascending order; all of them where there are no more.
std::vector<int64_t> sample_tokens(int64_t total, int64_t count, uint64_t seed);

}  // namespace crossply
