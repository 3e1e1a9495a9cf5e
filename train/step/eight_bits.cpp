// Not yet run on hardware: only in the emulator.
#include "train/step/eight_bits.h"

#include <nlohmann/json.hpp>

#include "kernels/optim/sum_slices.h"

namespace crossply {

void EightBits::before_run(const Step& first, const std::function<void(const Step&)>& run) {
  Step measuring = first;
  measuring.measures = true;
  run(measuring);
  after_backward();
  scales_.add(sums_.gather_values());
}

void EightBits::before_step() {
  const Tape& tape = model_.tape();
  const std::vector<float> scales = scales_.scales(), inverses = scales_.inverses();
  device_.copy_in(tape.scales().data, scales.data(), tape.scales().bytes());
  device_.copy_in(tape.inverses().data, inverses.data(), tape.inverses().bytes());
  device_.fill(tape.amaxes().data, 0, tape.amaxes().bytes());
}

void EightBits::after_backward() { copy(sums_.own_values(), model_.tape().amaxes(), device_.stream()); }

void EightBits::save(nlohmann::json& state) const { state["eight_bits"] = scales_.to_json(); }

void EightBits::restore(const nlohmann::json& state, const std::string& path) {
  scales_.read(state.value("eight_bits", nlohmann::json()), path);
}

}  // namespace crossply
