// A feature that is attached to a trainer: it is called at fixed places of a run, and the trainer does not ask which
// one it is.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "engine/tape.h"
#include "train/step/step_sums.h"

namespace crossply {

struct Attachment {
  virtual ~Attachment() = default;
  // Before the first step of a new run. first: as its first micro-step will run; run: runs the batch at the data's
  // position, and changes nothing but what the attachment looks at.
  virtual void before_run(const Step& /*first*/, const std::function<void(const Step&)>& /*run*/) {}
  virtual void before_step() {}
  // After the last micro-step's backward, before the sums of all ranks. A device may record it.
  virtual void after_backward() {}
  // With the step's sums on the host. Returns which tensor has numbers that are not finite, "" for none.
  virtual std::string after_read() { return ""; }
  virtual void after_step(int64_t /*steps_done*/) {}
  // In train_state.json. restore() comes last: weights and moments are there.
  virtual void save(nlohmann::json& /*state*/) const {}
  virtual void restore(const nlohmann::json& /*state*/, const std::string& /*path*/) {}
};

}  // namespace crossply
