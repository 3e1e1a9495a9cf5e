// The LLaMA block: pre-norm attention with RoPE and grouped heads, then a SwiGLU feed-forward. Written once for all
// connections.
#pragma once

#include "models/connection.h"

namespace crossply {

// The parameters of block `layer`. Linear weights (out, in) start normal(initializer_range) and decay; norms start at
// 1, biases, where there are any, at 0, and neither decay.
void declare_llama_block(ParameterTable& params, const Config& config, int layer);
// Records block `layer`; the build has a table of angles.
void record_llama_block(const Build& build, Connection& connection, int layer);

}  // namespace crossply
