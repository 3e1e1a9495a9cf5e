// Taps: any value or gradient of one training step, as a safetensors file.
#pragma once

#include <string>
#include <vector>

#include "models/batch/batch_model.h"

namespace crossply {

inline const char* const dumped_kind = "tensors of one step";  // in the file's metadata

struct Dumped {
  double loss;
  size_t tensors;
};
// One forward and backward of the model on (B, T) tokens and targets, of which the tensors with these names go into the
// file at `path`, whole or not at all: values as --dump-tape names them ("L3.attn.q"), parameters by their own names,
// gradients, those of the mean loss over the scored tokens, with "d:" in front. A * in a name stands for any letters.
// Each value is what it was right after the op that wrote it, each gradient what it was when all who add to it had
// done so, whoever takes their memory later. The whole batch goes through one tape. Changes the table's gradients and
// nothing else. Returns the loss and how many tensors were written. Throws Exit::usage, with names that are near, for
// a name that is not there, and for a value that is never in memory by itself, with the name that is.
Dumped dump_tensors(const std::vector<std::string>& names, const std::string& path, ParameterTable& params,
                    const Config& config, const Batch& batch, const int32_t* tokens, const int32_t* targets);

}  // namespace crossply
