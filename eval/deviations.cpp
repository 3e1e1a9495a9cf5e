#include "eval/deviations.h"

#include <algorithm>

#include "eval/draw.h"

namespace crossply {
namespace {

constexpr int64_t equal_tables = 20'000;
constexpr double equal_share = 0.75;  // of tables of equals that are taken for such
// Equal losses have a variance of 0, whose logarithm is not finite. None is taken for less than this share of the
// median.
constexpr double min_share = 1e-5;

// Of logarithms of variances, over what those of equal variances of 1 are on average: their mean, and how much further
// apart they are.
struct Logs {
  double mean = 0, excess = 0;
};
Logs logs_of(const std::vector<double>& variances, const std::vector<int64_t>& degrees) {
  Logs out;
  std::vector<double> centred;
  const auto n = static_cast<double>(variances.size());
  for (size_t i = 0; i < variances.size(); ++i) {
    const double half = static_cast<double>(degrees[i]) / 2;
    centred.push_back(std::log(variances[i]) - digamma(half) + std::log(half));
    out.mean += centred.back() / n, out.excess -= trigamma(half);
  }
  out.excess /= n;
  for (const double value : centred) out.excess += (value - out.mean) * (value - out.mean) / (n - 1);
  return out;
}

double largest_excess_of_equals(const std::vector<int64_t>& degrees) {
  std::vector<int64_t> sorted = degrees;
  std::ranges::sort(sorted);
  return once_for(sorted, [&] {
    Draw draw("equal deviations");
    std::vector<double> found;
    for (int64_t i = 0; i < equal_tables; ++i) {
      std::vector<double> variances;
      for (const int64_t of_one : sorted) variances.push_back(draw.variance(of_one));
      found.push_back(logs_of(variances, sorted).excess);
    }
    return quantile(std::move(found), equal_share);
  });
}

double inverse_trigamma(double y) {
  double low = 1e-3, high = 1e6;
  while (high / low > 1 + 1e-9) {
    const double middle = std::sqrt(low * high);
    (trigamma(middle) > y ? low : high) = middle;
  }
  return low;
}

}  // namespace

// By the recurrence up to 10, then Stirling's series.
double digamma(double x) {
  double sum = 0;
  for (; x < 10; ++x) sum -= 1 / x;
  const double y = 1 / (x * x);
  return sum + std::log(x) - 1 / (2 * x) -
         y * (1.0 / 12 - y * (1.0 / 120 - y * (1.0 / 252 - y * (1.0 / 240 - y / 132))));
}

double trigamma(double x) {
  double sum = 0;
  for (; x < 10; ++x) sum += 1 / (x * x);
  const double y = 1 / (x * x);
  return sum + 1 / x + y / 2 + y / x * (1.0 / 6 - y * (1.0 / 30 - y * (1.0 / 42 - y / 30)));
}

double CommonVariance::moderated(double own, int64_t own_degrees) const {
  if (equal()) return variance;
  const auto d = static_cast<double>(own_degrees);
  return (degrees * variance + d * own) / (degrees + d);
}

CommonVariance common_variance(const std::vector<double>& variances, const std::vector<int64_t>& degrees) {
  CommonVariance out;
  double squares = 0, sum = 0;
  for (size_t i = 0; i < variances.size(); ++i)
    squares += variances[i] * static_cast<double>(degrees[i]), sum += static_cast<double>(degrees[i]);
  out.variance = squares / sum;
  if (variances.size() < 3) return out;
  const double least = min_share * quantile(variances, 0.5);
  if (!(least > 0)) return out;
  std::vector<double> positive = variances;
  for (double& variance : positive) variance = std::max(variance, least);
  const Logs logs = logs_of(positive, degrees);
  if (!(logs.excess > std::max(0.0, largest_excess_of_equals(degrees)))) return out;
  const double half = inverse_trigamma(logs.excess);
  out.degrees = 2 * half;
  out.variance = std::exp(logs.mean + digamma(half) - std::log(half));
  return out;
}

}  // namespace crossply
