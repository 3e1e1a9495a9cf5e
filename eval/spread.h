// Mean and standard deviation of a few numbers, such as the losses of several seeds.
#pragma once

#include <cmath>
#include <vector>

namespace crossply {

struct Spread {
  double mean = 0, deviation = NAN;  // the sample's, with n - 1; NaN of a single number
};

inline Spread spread_of(const std::vector<double>& values) {
  Spread s;
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  const auto n = static_cast<double>(values.size());
  s.mean = sum / n;
  for (const double value : values) squares += (value - s.mean) * (value - s.mean);
  if (values.size() > 1) s.deviation = std::sqrt(squares / (n - 1));
  return s;
}

}  // namespace crossply
