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
  double low = NAN, high = NAN;  // 95 % of resampled repeats lie between them; at the ends as `times` beyond
};
// On straight lines between the budgets' means, in the logarithm of steps; means that rise with the steps are pooled.
// The interval: seeds are drawn anew, with replacement, of every budget and of the arm. NaN where there are fewer than
// two budgets, or no loss.
Worth worth_of(std::vector<Budget> budgets, const std::vector<double>& losses);

}  // namespace crossply
