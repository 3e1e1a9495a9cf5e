// --check-replicas: after so many steps, and where a run goes on, all ranks must have the same weights.
#pragma once

#include "ranks/process_group.h"
#include "train/step/attachment.h"

namespace crossply {

class ReplicaCheck : public Attachment {
 public:
  ReplicaCheck(ProcessGroup& group, const ParameterTable& params, int64_t steps)
      : group_(group), params_(params), steps_(steps) {}
  void after_step(int64_t steps_done) override {
    if (steps_done % steps_ == 0) check(steps_done);
  }
  void restore(const nlohmann::json& state, const std::string& path) override;

 private:
  // Throws Exit::internal, at all ranks, where the weights differ.
  void check(int64_t steps_done);

  ProcessGroup& group_;
  const ParameterTable& params_;
  const int64_t steps_;  // between comparisons
};

}  // namespace crossply
