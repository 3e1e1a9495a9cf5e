// --profile: what the steps of a run spend their time on.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "models/batch/batch_model.h"

namespace crossply {

class StepProfile {
 public:
  StepProfile(bool on, Device& device, BatchModel& model);
  // Runs a part of a step outside the tape, and takes its time; bytes: that it moves.
  template <class F>
  void phase(const char* name, double bytes, F&& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    if (on_) add_phase(name, bytes, start);
  }
  // Runs work that a device may record; with a profile it is not recorded, because phases wait for the device.
  template <class F>
  void replay(Recording& recording, F&& work) {
    on_ ? work() : device_.replay(recording, work);
  }
  void add_waiting(double seconds);  // for other ranks
  void end_step() { ++steps_; }
  // A table: ms a step, share of all, calls a step, GFLOP/s, GB/s, dearest first. Empty without --profile.
  std::string table() const;

 private:
  void add_phase(const char* name, double bytes, std::chrono::steady_clock::time_point start);

  const bool on_;
  Device& device_;
  BatchModel& model_;
  std::vector<OpCost> phases_;
  int64_t steps_ = 0;
};

}  // namespace crossply
