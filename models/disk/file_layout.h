// How a model's rows stand in its files: a LLaMA's under their own names, a GPT-2's as Hugging Face has them.
#pragma once

#include <string>
#include <vector>

#include "engine/params.h"
#include "models/config.h"

namespace crossply {

// A tensor of a file, and the rows of the table that it holds. A GPT-2's queries, keys and values are one tensor there,
// as far as the model has them, and its linear weights are (in, out) there and (out, in) in the table.
struct FileTensor {
  std::string name;
  Shape shape;
  std::vector<const Parameter*> rows;  // one after the other along the outputs; mostly one
  bool transposed = false;
};
// In the order of the table. What a connection adds has the same name on both backbones.
std::vector<FileTensor> file_layout(const ParameterTable& params, const Config& config);

// A tensor's name as file_layout has it: GPT-2s are also found without "transformer.".
std::string file_name(const std::string& name, const Config& config);
// Tensors of older exports that hold constants, and a head that is tied: no rows.
bool is_no_row(const std::string& name, const Config& config);

}  // namespace crossply
