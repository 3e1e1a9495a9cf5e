// What a run says of its optimizer at the start and in a dry run.
#pragma once

#include <string>
#include <vector>

#include "engine/params.h"
#include "train/settings/train_plan.h"

namespace crossply {

// Lines, with Muon only: how many rows and parameters are its matrices, its learning rate, and what Newton-Schulz
// costs, with a warning if that is more than a fifth of a step. training_flops: of forward and backward of a step.
std::vector<std::string> describe_optimizer(const TrainPlan& plan, const ParameterTable& params, double training_flops);

}  // namespace crossply
