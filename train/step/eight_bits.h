// --matmul fp8: the scales of a step, from the largest numbers of the steps before (train/step/delayed_scales.h).
// Not yet run on hardware: only in the emulator.
#pragma once

#include "train/step/attachment.h"
#include "train/step/delayed_scales.h"

namespace crossply {

class EightBits : public Attachment {
 public:
  EightBits(Device& device, BatchModel& model, StepSums& of_step)
      : device_(device), model_(model), sums_(of_step), scales_(model.tape().quantized()) {}
  // Without scales the first step's gradients would vanish, so a batch in bf16 is measured first.
  void before_run(const Step& first, const std::function<void(const Step&)>& run) override;
  void before_step() override;
  void after_backward() override;
  std::string after_read() override { return scales_.add(sums_.values()); }
  void save(nlohmann::json& state) const override;
  void restore(const nlohmann::json& state, const std::string& path) override;

 private:
  Device& device_;
  BatchModel& model_;
  StepSums& sums_;
  DelayedScales scales_;
};

}  // namespace crossply
