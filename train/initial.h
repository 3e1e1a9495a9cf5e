// The model that a run starts from: --init.
#pragma once

#include "train/options.h"

namespace crossply {

// Reads the model directory o.init into o.initial: configuration, tokenizer and its other files. For a new run also
// decides o.config: the sizes are the model's, but for --layers, and a plain LLaMA may start another architecture. A
// run that was started has its configuration in flags.json and the rest in its newest checkpoint, so that the directory
// is no longer needed. Throws Exit::usage for flags that do not go with the model, and what reading throws.
void take_initial(TrainOptions& o, bool started);

}  // namespace crossply
