#include "train/step/step_profile.h"

#include <omp.h>

#include <algorithm>

#include "cli/format.h"

namespace crossply {

StepProfile::StepProfile(bool on, Device& device, BatchModel& model) : on_(on), device_(device), model_(model) {
  if (on_) model.start_profile();
}

void StepProfile::add_phase(const char* name, double bytes, std::chrono::steady_clock::time_point start) {
  device_.wait();
  add_cost(phases_,
           {name, 1, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 0, bytes});
}

void StepProfile::add_waiting(double seconds) {
  if (on_ && seconds > 0) add_cost(phases_, {"waiting for other ranks", 1, seconds, 0, 0});
}

namespace {

// workers: threads that ran ops side by side, each taking its own time; steps: how many the costs are of.
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

}  // namespace

std::string StepProfile::table() const {
  if (!on_ || steps_ == 0) return "";
  const int64_t workers = std::min<int64_t>(model_.layout().replicas, omp_get_max_threads());
  std::vector<OpCost> costs = model_.costs();
  for (OpCost cost : phases_) {
    cost.seconds *= static_cast<double>(workers);  // these ran alone
    costs.push_back(cost);
  }
  return format_profile(std::move(costs), workers, steps_);
}

}  // namespace crossply
