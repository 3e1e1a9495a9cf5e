// What a training step of each model takes, measured one beside the other on this machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "train/settings/train_plan.h"

namespace crossply {

struct StepTime {
  double seconds = 0;                       // the median
  double ratio = 1, low = NAN, high = NAN;  // to a step of the first model just before: median and quartiles
};
// Of each plan, in their order. Two models are in memory at a time, the first and another, and step in turn, `rounds`
// times. The machine must be idle: whatever else it does is in the numbers.
std::vector<StepTime> time_steps(const std::vector<TrainPlan>& plans, int64_t rounds);

}  // namespace crossply
