#include "train/lab/step_times.h"

#include <cmath>

#include "eval/statistics.h"
#include "train/run/inputs.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

double step(Trainer& trainer) {
  const double before = trainer.seconds;
  trainer.step();
  return trainer.seconds - before;
}

}  // namespace

std::vector<StepTime> time_steps(const std::vector<TrainPlan>& plans, int64_t rounds) {
  std::vector<StepTime> out;
  for (const TrainPlan& plan : plans) {
    const auto [first_plan, first_data] = open_inputs(plans[0]);
    const auto [other_plan, other_data] = open_inputs(plan);
    Trainer first(first_plan, *first_data.train), other(other_plan, *other_data.train);
    step(first), step(other);  // they take memory for the first time
    std::vector<double> seconds, ratios;
    for (int64_t round = 0; round < rounds; ++round) {
      const double baseline = step(first);
      seconds.push_back(step(other));
      ratios.push_back(seconds.back() / baseline);
    }
    out.push_back({quantile(seconds, 0.5), quantile(ratios, 0.5), quantile(ratios, 0.25), quantile(ratios, 0.75)});
  }
  return out;
}

}  // namespace crossply
