#include "train/profile.h"

#include <algorithm>

#include "cli/format.h"

namespace crossply {

std::string format_profile(std::vector<OpCost> costs, int64_t workers, int64_t steps) {
  OpCost all{"all"};
  for (const OpCost& cost : costs) all += cost;
  std::stable_sort(costs.begin(), costs.end(), [](const OpCost& a, const OpCost& b) { return a.seconds > b.seconds; });
  costs.push_back(all);
  std::vector<std::vector<std::string>> table = {{"op", "ms/step", "share", "calls/step", "GFLOP/s", "GB/s"}};
  const double parallel = static_cast<double>(workers), n = static_cast<double>(steps);
  for (const OpCost& cost : costs) {
    const double seconds = cost.seconds / parallel;
    const auto rate = [&](double amount) {
      return amount > 0 && seconds > 0 ? format_number("%.1f", amount / seconds * 1e-9) : "";
    };
    table.push_back({cost.op, format_number("%.3f", seconds / n * 1e3),
                     format_number("%.1f%%", all.seconds > 0 ? 100 * cost.seconds / all.seconds : 0),
                     format_number("%.0f", static_cast<double>(cost.calls) / n), rate(cost.flops), rate(cost.bytes)});
  }
  return format_table(table) +
         "GFLOP/s: two per multiply-add, the backward as two forwards. GB/s: every tensor that an op names, once.\n";
}

}  // namespace crossply
