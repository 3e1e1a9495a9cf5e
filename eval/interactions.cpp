#include "eval/interactions.h"

#include <algorithm>
#include <numeric>

#include "eval/deviations.h"

namespace crossply {

static std::vector<Spread> spreads_of(const std::vector<ArmLosses>& arms) {
  std::vector<Spread> all;
  for (const ArmLosses& arm : arms) all.push_back(arm.diverged() ? Spread{} : spread_of(arm.losses()));
  return all;
}

std::vector<Interaction> interactions(const std::vector<ArmLosses>& arms, const std::vector<Combination>& list) {
  const std::vector<Spread> spread = spreads_of(arms);
  std::vector<double> variances;
  std::vector<int64_t> degrees;
  for (const Spread& arm : spread)
    if (arm.n > 1) variances.push_back(arm.sd * arm.sd), degrees.push_back(arm.n - 1);
  std::vector<Interaction> out(list.size());
  if (variances.empty()) return out;
  const CommonVariance common = common_variance(variances, degrees);
  const int64_t pooled = std::accumulate(degrees.begin(), degrees.end(), int64_t{0});
  const double level = std::pow(0.95, 1 / static_cast<double>(list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    double variance = 0, squares = 0;  // of Satterthwaite's rule
    bool known = true;
    out[i].value = 0;
    const auto take = [&](size_t arm, double factor) {
      const Spread& s = spread[arm];
      known = known && s.n > 0;
      if (!known) return;
      const int64_t own = s.n - 1;
      const double part =
          factor * factor / static_cast<double>(s.n) *
          (common.equal() ? common.variance : common.moderated(own > 0 ? s.sd * s.sd : common.variance, own));
      out[i].value += factor * s.mean, variance += part;
      squares += part * part / (common.degrees + static_cast<double>(own));
    };
    take(list[i].whole, 1);
    for (const size_t part : list[i].parts) take(part, -1);
    take(0, static_cast<double>(list[i].parts.size()) - 1);
    if (!known) {
      out[i].value = NAN;
      continue;
    }
    const double satterthwaite = common.equal() ? static_cast<double>(pooled) : variance * variance / squares;
    const auto freedom = std::max<int64_t>(1, static_cast<int64_t>(satterthwaite));
    out[i].error = std::sqrt(variance);
    out[i].interval = student_t(level, freedom) * out[i].error;
    out[i].detectable = out[i].interval + student_t(0.6, freedom) * out[i].error;  // of two sides: 80 % of one
    out[i].tested = true;
    out[i].found = std::abs(out[i].value) > out[i].interval;
  }
  return out;
}

}  // namespace crossply
