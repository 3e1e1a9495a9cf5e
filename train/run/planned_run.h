// A training run's tape, parameters and buckets without their memory, and what they would take of it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/buckets.h"
#include "models/batch/batch_model.h"
#include "train/settings/train_plan.h"

namespace crossply {

struct PlannedRun {
  // One rank of a job of so many, which divide the micro-steps.
  PlannedRun(const TrainPlan& plan, int ranks);
  std::unique_ptr<Teacher> teacher;  // null: there is none
  ParameterTable params;
  Tape tape;
  Layout layout{1, 1};
  Buckets buckets;
  int64_t micro_steps;  // of a rank in a step
  double forward_flops_per_token, training_flops_per_token, training_bytes_per_token;
};

struct MemoryPart {
  std::string name;
  double bytes;
};
double total(const std::vector<MemoryPart>& parts);
// Of one rank. The second one with what is no more than an estimate.
std::vector<MemoryPart> memory_parts(const TrainPlan& plan, PlannedRun& planned);
std::vector<MemoryPart> planned_parts(const TrainPlan& plan, PlannedRun& planned);

// --world: memory, buckets, bytes sent and the predicted time of a job, as text.
std::string describe_world(const TrainPlan& plan, PlannedRun& planned);
// A line for each bucket, by the node after whose backward it is final: for --dump-tape.
std::multimap<size_t, std::string> bucket_notes(const PlannedRun& planned);

}  // namespace crossply
