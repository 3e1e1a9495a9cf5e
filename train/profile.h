// Where the time of training steps went, by op.
#pragma once

#include <string>
#include <vector>

#include "engine/tape.h"

namespace crossply {

// A table: ms a step, share of all, calls a step, GFLOP/s, GB/s, dearest first. workers: threads that ran ops side by
// side, each taking its own time; steps: how many the costs are of.
std::string format_profile(std::vector<OpCost> costs, int64_t workers, int64_t steps);

}  // namespace crossply
