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

// How much further the logarithms are apart than those of equal variances are on average.
double excess(const std::vector<double>& logs, const std::vector<int64_t>& degrees) {
  double mean = 0, expected = 0, squares = 0;
  const auto n = static_cast<double>(logs.size());
  std::vector<double> centred;
  for (size_t i = 0; i < logs.size(); ++i) {
    const double half = static_cast<double>(degrees[i]) / 2;
    centred.push_back(logs[i] - digamma(half) + std::log(half));
    mean += centred.back() / n, expected += trigamma(half) / n;
  }
  for (const double value : centred) squares += (value - mean) * (value - mean);
  return squares / (n - 1) - expected;
}

double largest_excess_of_equals(const std::vector<int64_t>& degrees) {
  std::vector<int64_t> sorted = degrees;
  std::ranges::sort(sorted);
  return once_for(sorted, [&] {
    Draw draw("equal deviations");
    std::vector<double> found;
    for (int64_t i = 0; i < equal_tables; ++i) {
      std::vector<double> logs;
      for (const int64_t of_one : sorted) logs.push_back(std::log(draw.variance(of_one)));
      found.push_back(excess(logs, sorted));
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
  std::vector<double> logs;
  double mean = 0;
  for (size_t i = 0; i < variances.size(); ++i) {
    const double half = static_cast<double>(degrees[i]) / 2;
    logs.push_back(std::log(std::max(variances[i], least)));
    mean += (logs.back() - digamma(half) + std::log(half)) / static_cast<double>(variances.size());
  }
  const double more = excess(logs, degrees);
  if (!(least > 0) || !(more > std::max(0.0, largest_excess_of_equals(degrees)))) return out;
  const double half = inverse_trigamma(more);
  out.degrees = 2 * half;
  out.variance = std::exp(mean + digamma(half) - std::log(half));
  return out;
}

}  // namespace crossply
