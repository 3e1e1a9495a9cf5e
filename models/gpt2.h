// The GPT-2 block: pre-norm attention, then a GELU feed-forward. Written once for all connections, under the interface
// of the LLaMA block. Its rows have the LLaMA's names, so that connections find them; in files they have Hugging Face's
// (models/disk/file_layout.h).
#pragma once

#include "models/connection.h"

namespace crossply {

// The parameters of block `layer`. Linear weights (out, in) start normal(initializer_range), those of the two output
// projections with 1 / sqrt(2 L) of it, and decay; norms start at 1, biases at 0, and do not.
void declare_gpt2_block(ParameterTable& params, const Config& config, int layer);
void record_gpt2_block(const Build& build, Connection& connection, int layer);

}  // namespace crossply
