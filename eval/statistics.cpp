#include "eval/statistics.h"

#include <algorithm>
#include <numbers>

#include "engine/check.h"

namespace crossply {
namespace {

// P(|T| <= t): the sum in closed form that Student's distribution has for whole degrees of freedom v, with
// theta = atan(t / sqrt(v)).
//   odd v:  2/pi (theta + sin (cos + 2/3 cos^3 + 2/3 4/5 cos^5 + ...)), up to cos^(v-2)
//   even v: sin (1 + 1/2 cos^2 + 1/2 3/4 cos^4 + ...), up to cos^(v-2)
double probability_within(double t, int64_t v) {
  const double theta = std::atan(t / std::sqrt(static_cast<double>(v)));
  const double sine = std::sin(theta), cosine = std::cos(theta);
  const bool odd = v % 2 == 1;
  double term = odd ? cosine : 1, sum = 0;
  for (int64_t power = odd ? 1 : 0; power <= v - 2; power += 2) {
    sum += term;
    term *= cosine * cosine * static_cast<double>(power + 1) / static_cast<double>(power + 2);
  }
  return odd ? 2 / std::numbers::pi * (theta + sine * sum) : sine * sum;
}

}  // namespace

double student_t(double probability, int64_t v) {
  CHECK_THAT(v >= 1 && probability > 0 && probability < 1, "degrees of freedom: ", v, ", probability ", probability);
  double low = 0, high = 1;
  while (probability_within(high, v) < probability) low = high, high *= 2;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (probability_within(middle, v) < probability ? low : high) = middle;
  }
  return high;
}

double quantile(std::vector<double> values, double share) {
  const auto n = static_cast<double>(values.size());
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(std::min(share * n, n - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double mean_of_finite(std::span<const double> values) {
  double sum = 0, count = 0;
  for (const double x : values)
    if (std::isfinite(x)) sum += x, count += 1;
  return count > 0 ? sum / count : NAN;
}

Spread spread_of(const std::vector<double>& values) {
  Spread out;
  out.n = static_cast<int64_t>(values.size());
  if (values.empty()) return out;
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  out.mean = sum / static_cast<double>(out.n);
  for (const double value : values) squares += (value - out.mean) * (value - out.mean);
  if (out.n > 1) out.sd = std::sqrt(squares / static_cast<double>(out.n - 1));
  return out;
}

double Spread::error() const { return sd / std::sqrt(static_cast<double>(n)); }

}  // namespace crossply
