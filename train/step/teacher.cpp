// --teacher of a run: its table, its weights, and what tells whether they are the same.
#include "kernels/devices.h"
#include "models/disk/model_dir.h"
#include "train/step/declare.h"

namespace crossply {

std::unique_ptr<Teacher> declare_teacher(const TrainPlan& plan) {
  if (plan.teacher.empty()) return nullptr;
  auto teacher = std::make_unique<Teacher>();
  teacher->config = *plan.teacher_config;
  teacher->how = {plan.kd.alpha, plan.kd.tau, plan.kd_reduction == "element"};
  declare_model(teacher->params, teacher->config);
  return teacher;
}

std::unique_ptr<Teacher> load_teacher(const TrainPlan& plan, Device& device) {
  std::unique_ptr<Teacher> teacher = declare_teacher(plan);
  if (teacher == nullptr) return nullptr;
  teacher->params.allocate(device, Dtype::f32, false);
  load_weights(ModelDir(plan.teacher).path(), teacher->config, teacher->params);
  if (storage_type(plan) == Dtype::bf16) teacher->params.allocate_bf16_copy();
  refresh_bf16_copy(teacher->params);
  return teacher;
}

size_t memory_of(const Teacher* teacher) {
  return teacher != nullptr ? teacher->params.values().bytes() + teacher->params.bf16_copy_bytes() : 0;
}

std::string digest_of_teacher(const TrainPlan& plan) {
  const auto host = make_device("cpu");
  return digest_of(load_teacher(plan, *host)->params);
}

}  // namespace crossply
