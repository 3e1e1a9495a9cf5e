// What a loss is worth in steps: how many times the steps a backbone would need for it, by its own losses at several
// numbers of steps, each trained to its end with its own schedule. A loss read off a curve in mid-schedule is not the
// loss of a shorter run.
#pragma once

#include <cmath>
#include <vector>

namespace crossply {

// The backbone, trained for so many times the steps, from some seeds.
struct Budget {
  double times;
  std::vector<double> losses;
};

struct Worth {
  double times = NAN;            // the steps; beyond the budgets the nearest of them,
  int beyond = 0;                // and this is -1 or 1
  double low = NAN, high = NAN;  // 95 % of resampled repeats lie between them; NaN where every mean is of one seed
  bool low_open = false, high_open = false;  // that end is the shortest or the longest budget: it may lie beyond
};
// On straight lines between the budgets' means, in the logarithm of steps; means that rise with the steps are pooled.
// The interval: deviations of all seeds from their means, those of n seeds times sqrt(n / (n - 1)), are one pool, from
// which every mean is drawn anew. Three seeds alone would give intervals that hold the truth in 80 of 100 tables. NaN
// where there are fewer than two budgets, or no loss.
Worth worth_of(std::vector<Budget> budgets, const std::vector<double>& losses);

}  // namespace crossply
