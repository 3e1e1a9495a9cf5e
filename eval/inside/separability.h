// How well a linear classifier that was trained very shortly tells classes of vectors apart: accuracy near 1 where they
// lie apart without more ado, near 1 / classes where they do not.
#pragma once

#include <cstdint>
#include <vector>

#include "eval/inside/occurrences.h"

namespace crossply {

namespace separability {
constexpr int64_t folds = 5, batch = 64;
constexpr int64_t paper_updates = 84;  // of 1,668 vectors of each of four classes
constexpr double rate = 1e-2, beta1 = 0.9, beta2 = 0.999, adam_epsilon = 1e-8;  // of Adam, without decay
}  // namespace separability

// 0, ..., n-1 in an order by chance: Fisher and Yates' shuffle from the end with Random(seed, stream).
std::vector<int64_t> shuffled_order(int64_t n, uint64_t seed, uint64_t stream);

// The rows of each fold, increasing. Folds differ in size by at most one, the larger ones first.
std::vector<std::vector<int64_t>> test_folds(int64_t n, uint64_t seed);

// One linear layer C -> classes with bias, in double precision.
struct LinearProbe {
  int64_t C, classes;
  std::vector<double> W;  // (classes, C), then (classes) of bias

  // Uniform within 1 / sqrt(C).
  LinearProbe(int64_t channels, int64_t outputs, uint64_t seed, uint64_t stream);
  // Adam on the mean cross-entropy of batches of 64 rows in this order, each row once. Returns the number of updates.
  int64_t train_epoch(const float* rows, const std::vector<int>& labels, const std::vector<int64_t>& order);
  // The mean over batches of 64 rows of the share that is right; a smaller last batch counts as much as the others.
  double accuracy(const float* rows, const std::vector<int>& labels, const std::vector<int64_t>& test) const;
};

struct Separability {
  std::vector<double> folds;  // accuracy of each
  double mean() const;
  double deviation() const;  // of the folds, as a population
};
// Every fold is tested by a probe that was trained on all others for one epoch. What is random depends on the seed and
// the number of rows and channels only, so that it is the same for all layers.
Separability linear_separability(const Vectors& vectors, const std::vector<int>& labels, int64_t classes,
                                 uint64_t seed);
// Of a fold's probe, by all rows.
int64_t updates_of_probe(int64_t rows);
// What linear_separability takes, about.
double separability_flops(int64_t rows, int64_t classes, int64_t C);

}  // namespace crossply
