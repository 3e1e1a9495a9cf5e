// The mean loss of a model over sequences of a source.
#pragma once

#include "data/source.h"
#include "models/batch/batch_model.h"
#include "ranks/process_group.h"

namespace crossply {

struct MeanLoss {
  double loss = 0;                    // 0 if nothing is scored
  int64_t sequences = 0, scored = 0;  // tokens with a target
};
// Over the first `sequences` of a source (0: all), in batches that the ranks of a job share; the same bits whoever
// takes which.
MeanLoss mean_loss(BatchModel& model, const Source& source, int64_t sequences, ProcessGroup& group);

}  // namespace crossply
