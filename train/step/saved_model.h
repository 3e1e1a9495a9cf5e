// The files of a run's model.
#pragma once

#include <string>
#include <vector>

#include "models/disk/checkpoint.h"
#include "ranks/process_group.h"
#include "train/settings/train_plan.h"

namespace crossply {

// config.json, the weights and the tokenizer into a directory that is being written, and what --init's directory had
// beside them; called by all ranks. Returns the names of the files with weights that this one wrote.
std::vector<std::string> write_model(const CheckpointWriter& writer, const TrainPlan& plan, const World& world,
                                     const ParameterTable& params, const Tokenizer& tokenizer);

}  // namespace crossply
