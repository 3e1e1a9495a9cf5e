// --branch: a run that goes on from the stable phase of another one, with a schedule of its own. It has the bits of a
// run that had been planned so from its first step. The other run is only read.
#pragma once

#include <cstdint>
#include <string>

#include "train/settings/settings.h"

namespace crossply {

// The flags of `run`, which those of the command line change; nothing where it is "".
void take_branch_settings(const std::string& run, Settings& settings);

// After which step of --branch the run goes on: --from-step, or the newest valid checkpoint in both stable phases.
// settings: as resolved. Throws Exit::usage, with the numbers, where the two schedules do not agree up to that step, or
// another setting differs, and Exit::no_input where there is no such run or checkpoint.
int64_t branch_step(const Settings& settings);

// Copies that checkpoint into the run directory, with the settings' schedule, and the metrics up to it. Writes
// flags.json first, so that --resume makes the copy where a kill has prevented it. Returns the checkpoint.
std::string make_branch(const Settings& settings);

}  // namespace crossply
