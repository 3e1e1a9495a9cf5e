#include "eval/dunnett.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "eval/deviations.h"
#include "eval/draw.h"
#include "eval/statistics.h"

namespace crossply {
namespace {

constexpr int64_t tables = 100'000;  // of a critical value: its level is then 5 % to 0.07
constexpr int64_t repeats = 10'000;  // of the difference that could be seen
constexpr double family_level = 0.95, cochran_level = 0.99, seen_level = 0.8;

double squared_sum(const std::vector<double>& values) {
  const Spread spread = spread_of(values);
  return spread.n > 1 ? spread.sd * spread.sd * static_cast<double>(spread.n - 1) : 0;
}

// The numbers of seeds of the arms that share a deviation, and its degrees of freedom.
struct Pool {
  std::vector<int64_t> n;
  int64_t degrees = 0;
  double squares = 0;
  void add(const std::vector<double>& losses) {
    degrees += std::max<int64_t>(0, static_cast<int64_t>(losses.size()) - 1);
    squares += squared_sum(losses);
  }
  double sd() const { return degrees > 0 ? std::sqrt(squares / static_cast<double>(degrees)) : NAN; }
};

// What is left of losses, all from the same seeds, once the means of arms and of seeds are taken off. The backbone is
// one of the arms.
void add_residuals(Pool& pool, const std::vector<ArmLosses>& arms) {
  std::map<uint64_t, std::vector<double>> centred;  // by seed
  for (const ArmLosses& arm : arms) {
    const double mean = spread_of(arm.losses()).mean;
    for (const SeedLoss& seed : arm.seeds) centred[seed.seed].push_back(seed.loss - mean);
  }
  for (const auto& [seed, values] : centred) pool.squares += squared_sum(values);
  pool.degrees = static_cast<int64_t>((arms.size() - 1) * (centred.size() - 1));
}

bool have_same_seeds(const std::vector<ArmLosses>& arms) {
  const auto seeds_of = [](const ArmLosses& arm) {
    std::set<uint64_t> seeds;
    for (const SeedLoss& seed : arm.seeds) seeds.insert(seed.seed);
    return seeds;
  };
  return std::all_of(arms.begin(), arms.end(), [&](const ArmLosses& arm) {
    return seeds_of(arm) == seeds_of(arms[0]) && arm.seeds.size() == arms[0].seeds.size();
  });
}

// Over all arms, of those seeds that both have: how far both are from their means there.
double seed_correlation(const ArmLosses& backbone, const std::vector<ArmLosses>& arms) {
  double xy = 0, xx = 0, yy = 0;
  for (const ArmLosses& arm : arms) {
    std::vector<double> x, y;
    for (const SeedLoss& mine : arm.seeds)
      for (const SeedLoss& other : backbone.seeds)
        if (mine.seed == other.seed && std::isfinite(mine.loss) && std::isfinite(other.loss))
          x.push_back(other.loss), y.push_back(mine.loss);
    if (x.size() < 3) continue;  // of two, it is 1 or -1
    const double x_mean = spread_of(x).mean, y_mean = spread_of(y).mean;
    for (size_t i = 0; i < x.size(); ++i) {
      xy += (x[i] - x_mean) * (y[i] - y_mean);
      xx += (x[i] - x_mean) * (x[i] - x_mean), yy += (y[i] - y_mean) * (y[i] - y_mean);
    }
  }
  return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : NAN;
}

}  // namespace

Verdict welch(const Spread& arm, const Spread& backbone, int64_t tests) {
  const double a = arm.sd * arm.sd / static_cast<double>(arm.n), b = backbone.error() * backbone.error();
  Verdict verdict{arm.mean - backbone.mean, std::sqrt(a + b)};
  if (arm.n < 2 || backbone.n < 2) return verdict;
  // Losses that are all equal have no degrees of freedom, and no difference either.
  const double degrees =
      a + b == 0
          ? 1
          : (a + b) * (a + b) / (a * a / static_cast<double>(arm.n - 1) + b * b / static_cast<double>(backbone.n - 1));
  const double level = std::pow(family_level, 1 / static_cast<double>(tests));
  verdict.interval = verdict.error * student_t(level, std::max<int64_t>(1, static_cast<int64_t>(degrees)));
  verdict.tested = verdict.welch = true;
  return verdict;
}

bool ArmLosses::diverged() const {
  return std::any_of(seeds.begin(), seeds.end(), [](const SeedLoss& seed) { return !std::isfinite(seed.loss); });
}

std::vector<double> ArmLosses::losses() const {
  std::vector<double> list;
  for (const SeedLoss& seed : seeds)
    if (std::isfinite(seed.loss)) list.push_back(seed.loss);
  return list;
}

double dunnett_critical(int64_t n0, int64_t backbone_degrees, const std::vector<int64_t>& n, int64_t arms_degrees) {
  std::vector<int64_t> sizes = n;
  std::sort(sizes.begin(), sizes.end());
  return once_for(std::tuple(n0, backbone_degrees, sizes, arms_degrees), [&] {
    Draw draw("dunnett");
    std::vector<double> largest;
    for (int64_t i = 0; i < tables; ++i) {
      const double v = draw.variance(arms_degrees), v0 = backbone_degrees > 0 ? draw.variance(backbone_degrees) : v;
      const double mean0 = draw.normal() / std::sqrt(static_cast<double>(n0));
      double most = 0;
      for (const int64_t count : sizes) {
        const double inverse = 1 / static_cast<double>(count);
        const double difference = draw.normal() * std::sqrt(inverse) - mean0;
        most = std::max(most, difference * difference / (v0 / static_cast<double>(n0) + v * inverse));
      }
      largest.push_back(std::sqrt(most));
    }
    return quantile(std::move(largest), family_level);
  });
}

// The same where arms' variances are drawn, too, around `common` of 1, and each arm's own has degrees[i]. ratio: of the
// backbone's deviation to the common one.
static double critical_of_unequal(int64_t n0, int64_t backbone_degrees, double ratio, const std::vector<int64_t>& n,
                                  const std::vector<int64_t>& degrees, int64_t arms_degrees, double prior) {
  // In steps of an eighth and a tenth, so that a program that judges many tables simulates few of them.
  const auto prior_degrees = std::max<int64_t>(1, std::llround(std::exp(std::round(8 * std::log(prior)) / 8)));
  ratio = std::exp(std::round(10 * std::log(ratio)) / 10);
  return once_for(std::tuple(n0, backbone_degrees, ratio, n, degrees, prior_degrees), [&] {
    Draw draw("dunnett of unequal deviations");
    std::vector<double> largest;
    for (int64_t i = 0; i < tables / 10; ++i) {
      const CommonVariance common{static_cast<double>(prior_degrees), draw.variance(arms_degrees)};
      const double v0 = ratio * ratio * draw.variance(backbone_degrees) / static_cast<double>(n0);
      const double mean0 = ratio * draw.normal() / std::sqrt(static_cast<double>(n0));
      double most = 0;
      for (size_t k = 0; k < n.size(); ++k) {
        const double variance = 1 / draw.variance(prior_degrees), count = static_cast<double>(n[k]);
        const double difference = draw.normal() * std::sqrt(variance / count) - mean0;
        const double known = common.moderated(variance * draw.variance(degrees[k]), degrees[k]) / count;
        most = std::max(most, difference * difference / (v0 + known));
      }
      largest.push_back(std::sqrt(most));
    }
    return quantile(std::move(largest), family_level);
  });
}

double cochran_limit(const std::vector<int64_t>& degrees) {
  std::vector<int64_t> sorted = degrees;
  std::sort(sorted.begin(), sorted.end());
  return once_for(sorted, [&] {
    Draw draw("cochran");
    std::vector<double> shares;
    for (int64_t i = 0; i < tables; ++i) {
      double most = 0, sum = 0;
      for (const int64_t of_one : sorted) {
        const double variance = draw.variance(of_one);
        most = std::max(most, variance), sum += variance;
      }
      shares.push_back(most / sum);
    }
    return quantile(std::move(shares), cochran_level);
  });
}

std::vector<size_t> unsteady(const std::vector<ArmLosses>& arms) {
  struct Variance {
    size_t place;
    double value;
    int64_t degrees;
  };
  std::vector<Variance> left;
  for (size_t i = 0; i < arms.size(); ++i) {
    const Spread spread = spread_of(arms[i].losses());
    if (spread.n > 1 && !arms[i].diverged()) left.push_back({i, spread.sd * spread.sd, spread.n - 1});
  }
  std::vector<size_t> out;
  while (left.size() > 1) {
    const auto largest = std::max_element(left.begin(), left.end(),
                                          [](const Variance& a, const Variance& b) { return a.value < b.value; });
    std::vector<int64_t> degrees;
    double sum = 0;
    for (const Variance& one : left) sum += one.value, degrees.push_back(one.degrees);
    if (!(largest->value > cochran_limit(degrees) * sum)) break;
    out.push_back(largest->place);
    left.erase(largest);
  }
  std::sort(out.begin(), out.end());
  return out;
}

// Where the backbone has a deviation of its own and the arms' are unlike each other: each arm's is moderated by what
// all have in common. False where they are not.
static bool judge_unequal(const Spread& backbone, const std::vector<ArmLosses>& arms, FamilyVerdict& out) {
  std::vector<double> variances;
  std::vector<int64_t> degrees, n;
  std::vector<size_t> places;
  for (size_t i = 0; i < arms.size(); ++i) {
    const Spread arm = spread_of(arms[i].losses());
    if (arms[i].diverged() || arm.n < 2) continue;
    variances.push_back(arm.sd * arm.sd), degrees.push_back(arm.n - 1), n.push_back(arm.n), places.push_back(i);
  }
  const CommonVariance common = common_variance(variances, degrees);
  if (common.equal()) return false;
  int64_t all_degrees = 0;
  for (const int64_t of_one : degrees) all_degrees += of_one;
  out.prior_degrees = common.degrees;
  out.arms_sd = std::sqrt(common.variance), out.arms_degrees = all_degrees;
  out.seeds = n;
  out.critical = critical_of_unequal(backbone.n, backbone.n - 1, backbone.sd / out.arms_sd, n, degrees, all_degrees,
                                     common.degrees);
  for (size_t k = 0; k < places.size(); ++k) {
    Verdict& verdict = out.arms[places[k]];
    const double variance = common.moderated(variances[k], degrees[k]);
    verdict.error =
        std::sqrt(backbone.sd * backbone.sd / static_cast<double>(backbone.n) + variance / static_cast<double>(n[k]));
    verdict.interval = out.critical * verdict.error;
    verdict.tested = true;
    verdict.found = std::abs(verdict.difference) > verdict.interval;
  }
  return true;
}

int64_t FamilyVerdict::fewest_seeds() const { return seeds.empty() ? 0 : *std::ranges::min_element(seeds); }

FamilyVerdict against_backbone(const ArmLosses& backbone, const std::vector<ArmLosses>& arms,
                               const std::vector<ArmLosses>& beside) {
  FamilyVerdict out;
  out.arms.resize(arms.size());
  out.correlation = seed_correlation(backbone, arms);
  const Spread base = spread_of(backbone.losses());
  Pool pool;
  std::vector<ArmLosses> together = {backbone};  // those that share a deviation
  for (const ArmLosses& arm : arms)
    if (!arm.diverged() && !arm.unsteady && !arm.seeds.empty())
      together.push_back(arm), pool.n.push_back(static_cast<int64_t>(arm.seeds.size()));
  out.blocks = together.size() > 1 && have_same_seeds(together);
  for (const ArmLosses& other : beside)
    if (out.blocks && !other.diverged() && !other.unsteady && have_same_seeds({backbone, other}))
      together.push_back(other);
  const bool own = !out.blocks && base.n >= static_cast<int64_t>(seeds_of_own_deviation);
  if (out.blocks) add_residuals(pool, together);
  else
    for (size_t i = own ? 1 : 0; i < together.size(); ++i) pool.add(together[i].losses());
  out.arms_sd = pool.sd(), out.arms_degrees = pool.degrees;
  out.backbone_sd = own ? base.sd : pool.sd(), out.backbone_degrees = own ? base.n - 1 : 0;
  const bool testable = !backbone.diverged() && base.n > 0 && pool.degrees > 0 && !pool.n.empty();
  out.backbone_seeds = base.n;
  out.seeds = pool.n;
  if (testable) out.critical = dunnett_critical(base.n, out.backbone_degrees, pool.n, pool.degrees);
  const auto judged = std::ranges::count_if(arms, [](const ArmLosses& arm) { return !arm.seeds.empty(); });
  for (size_t i = 0; i < arms.size(); ++i) out.arms[i].difference = spread_of(arms[i].losses()).mean - base.mean;
  if (own && testable && judge_unequal(base, arms, out)) return out;
  for (size_t i = 0; i < arms.size(); ++i) {
    const Spread arm = spread_of(arms[i].losses());
    Verdict& verdict = out.arms[i];
    if (arms[i].diverged() || arm.n == 0 || backbone.diverged()) continue;
    if (arms[i].unsteady) {
      verdict = welch(arm, base, judged);
    } else if (testable) {
      verdict.error = std::sqrt(out.backbone_sd * out.backbone_sd / static_cast<double>(base.n) +
                                pool.sd() * pool.sd() / static_cast<double>(arm.n));
      verdict.interval = out.critical * verdict.error;
      verdict.tested = true;
    }
    verdict.found = verdict.tested && std::abs(verdict.difference) > verdict.interval;
  }
  return out;
}

std::vector<FamilyVerdict> against_controls(const std::vector<std::pair<ArmLosses, ArmLosses>>& pairs) {
  Pool pool;
  std::vector<double> variances;  // of each pair that can be tested
  std::vector<int64_t> degrees;
  std::vector<Pool> own(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto& [control, arm] = pairs[i];
    if (control.diverged() || arm.diverged()) continue;
    for (Pool* of : {&pool, &own[i]}) of->add(control.losses()), of->add(arm.losses());
    if (own[i].degrees > 0) variances.push_back(own[i].sd() * own[i].sd()), degrees.push_back(own[i].degrees);
  }
  const CommonVariance common = variances.empty() ? CommonVariance{} : common_variance(variances, degrees);
  std::vector<FamilyVerdict> out;
  const double level = std::pow(family_level, 1 / static_cast<double>(std::max<size_t>(1, pairs.size())));
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto& [control, arm] = pairs[i];
    const Spread a = spread_of(arm.losses()), c = spread_of(control.losses());
    const double own_variance = own[i].degrees > 0 ? own[i].sd() * own[i].sd() : 0;
    FamilyVerdict one;
    one.backbone_seeds = c.n, one.seeds = {a.n}, one.prior_degrees = common.degrees;
    one.backbone_sd = one.arms_sd =
        common.equal() ? pool.sd() : std::sqrt(common.moderated(own_variance, own[i].degrees));
    one.arms_degrees =
        common.equal() ? pool.degrees : static_cast<int64_t>(common.degrees + static_cast<double>(own[i].degrees));
    Verdict verdict;
    verdict.difference = a.mean - c.mean;
    verdict.tested = !control.diverged() && !arm.diverged() && a.n > 0 && c.n > 0 && pool.degrees > 0;
    if (verdict.tested) {
      one.critical = student_t(level, std::max<int64_t>(1, one.arms_degrees));
      verdict.error = one.arms_sd * std::sqrt(1 / static_cast<double>(a.n) + 1 / static_cast<double>(c.n));
      verdict.interval = one.critical * verdict.error;
      verdict.found = std::abs(verdict.difference) > verdict.interval;
    }
    one.arms = {verdict};
    out.push_back(std::move(one));
  }
  return out;
}

// Of a backbone with a deviation of its own, by the whole procedure: in each repeat it is found out anew whether the
// arms' deviations are unlike each other.
static double detectable_of_own(const FamilyVerdict& of) {
  const auto n0 = static_cast<double>(of.backbone_seeds), n = static_cast<double>(of.fewest_seeds());
  const double ratio = of.backbone_sd / of.arms_sd;
  const auto prior = static_cast<int64_t>(std::isfinite(of.prior_degrees) ? std::max(1.0, of.prior_degrees) : 0);
  std::vector<int64_t> degrees, seeds = of.seeds;
  std::ranges::sort(seeds);
  int64_t all_degrees = 0;
  for (const int64_t count : seeds) degrees.push_back(count - 1), all_degrees += count - 1;
  Draw draw("detectable difference");
  std::vector<double> needed;
  for (int64_t i = 0; i < repeats; ++i) {
    std::vector<double> variances;
    double first = 1;  // the true variance of the arm with the fewest seeds; all over the common one
    for (const int64_t of_one : degrees) {
      const double variance = prior > 0 ? 1 / draw.variance(prior) : 1;
      if (variances.empty()) first = variance;
      variances.push_back(variance * draw.variance(of_one));
    }
    const CommonVariance common = common_variance(variances, degrees);
    const double critical =
        common.equal() ? dunnett_critical(of.backbone_seeds, of.backbone_degrees, seeds, all_degrees)
                       : critical_of_unequal(of.backbone_seeds, of.backbone_degrees, ratio / std::sqrt(common.variance),
                                             seeds, degrees, all_degrees, common.degrees);
    const double error = std::sqrt(ratio * ratio * draw.variance(of.backbone_degrees) / n0 +
                                   common.moderated(variances[0], degrees[0]) / n);
    const double noise = draw.normal() * std::sqrt(first / n) - draw.normal() * ratio / std::sqrt(n0);
    needed.push_back(critical * error - noise);
  }
  return of.arms_sd * quantile(std::move(needed), seen_level);
}

double detectable_difference(const FamilyVerdict& of) {
  if (!std::isfinite(of.critical)) return NAN;
  const bool each_known = std::ranges::all_of(of.seeds, [](int64_t count) { return count > 1; });
  if (of.backbone_degrees > 0 && of.seeds.size() > 2 && each_known) return detectable_of_own(of);
  const auto n0 = static_cast<double>(of.backbone_seeds), n = static_cast<double>(of.fewest_seeds());
  Draw draw("detectable difference");
  std::vector<double> needed;  // in each repeat, on top of its noise
  for (int64_t i = 0; i < repeats; ++i) {
    const double v = of.arms_sd * of.arms_sd * draw.variance(of.arms_degrees);
    const double own = of.backbone_sd * of.backbone_sd;
    const double v0 = of.backbone_degrees > 0 ? own * draw.variance(of.backbone_degrees) : v;
    const double of_arm = draw.normal() * of.arms_sd / std::sqrt(n),
                 of_backbone = draw.normal() * of.backbone_sd / std::sqrt(n0);
    needed.push_back(of.critical * std::sqrt(v0 / n0 + v / n) - (of_arm - of_backbone));
  }
  return quantile(std::move(needed), seen_level);
}

}  // namespace crossply
