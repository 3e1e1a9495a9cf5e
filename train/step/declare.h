// A run's model without memory, and with it: the parameter table with the run's own learning rates, the teacher's, and
// how a micro-step's batch is run.
#pragma once

#include <memory>
#include <string>

#include "models/batch/batch_model.h"
#include "train/settings/train_plan.h"

namespace crossply {

// The parameter table with the run's own learning rates, without memory.
void declare(ParameterTable& params, const TrainPlan& plan);
// The teacher's table, without memory; null for none.
std::unique_ptr<Teacher> declare_teacher(const TrainPlan& plan);
// The same with its weights, on the run's device.
std::unique_ptr<Teacher> load_teacher(const TrainPlan& plan, Device& device);
size_t memory_of(const Teacher* teacher);  // bytes; 0 for none
// Tells whether two tables of the same rows hold the same numbers: of the values, and of their bf16 copies where the
// table has these.
std::string digest_of(const ParameterTable& params);
// Of --teacher's weights, as a checkpoint records it.
std::string digest_of_teacher(const TrainPlan& plan);
// A micro-step's batch.
Batch batch_of(const TrainPlan& plan, int64_t T, Teacher* teacher = nullptr);

}  // namespace crossply
