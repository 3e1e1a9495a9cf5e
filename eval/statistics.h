// What a few numbers say about many: mean, spread, and the quantiles of Student's distribution.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace crossply {

struct Spread {
  double mean = NAN, sd = NAN;  // sample standard deviation, by n - 1; NaN of fewer than two
  int64_t n = 0;
  double error() const;  // standard error of the mean
};
Spread spread_of(const std::vector<double>& values);

// Of those that are finite; NaN of none.
double mean_of_finite(std::span<const double> values);

// The value that a share of them lies below, the largest where the share is 1; of some.
double quantile(std::vector<double> values, double share);

// t for which |T| <= t with this probability, of Student's distribution.
double student_t(double probability, int64_t degrees_of_freedom);

}  // namespace crossply
