// What a few numbers say about many: mean, spread, and whether a difference is larger than chance.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace crossply {

struct Spread {
  double mean = NAN, sd = NAN;  // sample standard deviation, by n - 1; NaN of fewer than two
  int64_t n = 0;
  double error() const;     // standard error of the mean
  double interval() const;  // half the width of Student's 95 % interval around the mean, n - 1 degrees of freedom
  // Whether that interval leaves out 0; false of fewer than two.
  bool differs_from_zero() const;
};
Spread spread_of(const std::vector<double>& values);

// Of those that are finite; NaN of none.
double mean_of_finite(std::span<const double> values);

// t for which |T| <= t with this probability, of Student's distribution; and in 95 of 100 cases.
double student_t(double probability, int64_t degrees_of_freedom);
double student_t95(int64_t degrees_of_freedom);

}  // namespace crossply
