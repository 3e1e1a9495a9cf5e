// What a run on one's own files takes where no flag and no preset says it: sequence length, steps, learning rate and
// warm-up, by the size of data and model.
#pragma once

#include "train/settings/options.h"

namespace crossply {

// About how many tokens the files of --data have, by their sizes; nothing is read.
int64_t tokens_about(const DataOptions& data);
// T: short where there is little data, so that there are enough steps.
int64_t usual_seq_of(int64_t tokens);
// The learning rate for a model of so many parameters.
double usual_lr_of(int64_t parameters);
// Two epochs, but no more tokens than 20 for each parameter.
int64_t usual_steps_of(int64_t sequences, int64_t seq_len, int64_t batch, int64_t parameters);

// Fills in what `o.open` names, and says it in o.chosen. The configuration must be complete.
void choose_text_defaults(TrainOptions& o, const Source& train);

}  // namespace crossply
