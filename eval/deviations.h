// What the deviations of many arms have in common, where each is known from a few seeds only. If arms' variances are
// drawn from one distribution, d0 s0^2 / chi^2(d0), then s_i^2 of d_i degrees of freedom is best taken for
//
//   (d0 s0^2 + d_i s_i^2) / (d0 + d_i)
//
// d0 and s0 are those by which the logarithms of s_i^2 have the mean and the variance that they have. d0 is infinite,
// and all variances are one, where the s_i^2 differ no more than three of four tables of equals.
//
// Smyth, Linear models and empirical Bayes methods for assessing differential expression, 2004.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace crossply {

struct CommonVariance {
  double degrees = INFINITY;  // d0
  double variance = NAN;      // s0^2; of infinite degrees the pooled one
  bool equal() const { return std::isinf(degrees); }
  double moderated(double own, int64_t own_degrees) const;
};
// Of arms with at least one degree of freedom each; degrees: as many as variances.
CommonVariance common_variance(const std::vector<double>& variances, const std::vector<int64_t>& degrees);

// Derivatives of the logarithm of the gamma function, for x > 0, to about 1e-10.
double digamma(double x);
double trigamma(double x);

}  // namespace crossply
