// Between the host and a recorded model: a batch in, the losses out.
#pragma once

#include "models/model.h"

namespace crossply {

// Copies one batch of the graph's (B, T) tokens and targets to the device.
void load_batch(Device& device, const Graph& graph, const int32_t* tokens, const int32_t* targets);
// The sum of the losses of the last replay, in double and in order.
double sum_losses(Device& device, const Graph& graph);

}  // namespace crossply
