// Tells whether a resumed run has the same data, and the same teacher, wherever the files are now.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>

#include "data/source.h"
#include "models/model.h"
#include "ranks/process_group.h"
#include "train/settings/train_plan.h"

namespace crossply {

struct InputsDigest {
  std::string data;         // the size and some sequences: all that older checkpoints know
  std::string data_digest;  // "": of a run that reads a batch, or nothing
  std::string teacher;      // "" without one
  void save(nlohmann::json& state) const;
  // The settings whose files hold what those of the checkpoint held, so that their names may differ.
  std::set<std::string> moved(const nlohmann::json& state) const;
  // Throws Exit::bad_data for other contents than those that the run in `dir` was trained on.
  void refuse_others(const nlohmann::json& state, const TrainPlan& plan, const std::string& dir) const;
};
InputsDigest digest_inputs(const TrainPlan& plan, const Source& train, const Teacher* teacher, ProcessGroup& group,
                           bool resumed);

}  // namespace crossply
