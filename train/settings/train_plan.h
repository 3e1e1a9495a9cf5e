// What a run will do: settings in which nothing is left open, and what its data, --init and --teacher have added. A run
// works with it and does not change it, and its flags.json holds it. resolve() makes it of what a user says; programs
// of several runs make one of another, and the settings of a plan resolve to the same plan again.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "train/settings/settings.h"

namespace crossply {

struct TrainPlan : Settings {
  TrainPlan() = default;
  explicit TrainPlan(Settings settings) : Settings(std::move(settings)) {}

  // A tenth of the run, where nothing else is said.
  int64_t steps_between_evaluations() const { return eval_every > 0 ? eval_every : std::max<int64_t>(1, steps / 10); }
  int64_t steps_between_saves() const { return save_every > 0 ? save_every : std::max<int64_t>(1, steps / 10); }

  Schedule rates() const { return {schedule_kind(schedule), warmup, std::max<int64_t>(steps, 1), lr_floor, cooldown}; }
  int64_t tokens_per_step() const { return batch * accumulate * data.seq_len; }

  std::set<int64_t> kept_steps;                // whose checkpoints stay: of --save-at, and the end of the stable phase
  std::optional<Config> initial_config;        // of --init's model
  std::map<std::string, std::string> carried;  // files of it that saved models carry along, by name
  std::optional<Config> teacher_config;        // of --teacher's
  DocumentMark documents;                      // what --documents says of the data
  std::string chosen;                          // what the size of the data decided, in words; "": nothing
};

}  // namespace crossply
