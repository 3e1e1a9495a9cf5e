// Mean loss of a recorded model over a source: evaluation during training and by the evaluate program.
#pragma once

#include "data/source.h"
#include "models/model.h"

namespace crossply {

struct MeanLoss {
  double loss = 0;         // over the scored tokens; 0 if there are none
  int64_t sequences = 0, scored = 0;
};

// Copies one batch of the graph's (B, T) tokens and targets to the device.
void load_batch(Device& device, const Graph& graph, const int32_t* tokens, const int32_t* targets);
// The sum of the losses of the last replay, in double and in order.
double sum_losses(Device& device, const Graph& graph);

// Over the first `sequences` samples (at most the source's size); forward only.
MeanLoss mean_loss(Device& device, Tape& tape, const Graph& graph, const Source& source, int64_t sequences);

}  // namespace crossply
