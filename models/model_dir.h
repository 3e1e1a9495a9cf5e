// A model on disk: a directory with config.json and model.safetensors, in Hugging Face's names and layouts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/params.h"
#include "engine/safetensors.h"
#include "models/config.h"

namespace crossply {

// Fills every declared parameter from DIR/model.safetensors, or from the shards that DIR/model.safetensors.index.json
// lists. A missing, superfluous or misshapen tensor is Exit::bad_data with its name, and nothing is filled before all
// are checked; so is a weight that is not finite. A head that the configuration ties may be there too, and is ignored.
void load_weights(const std::string& dir, const Config& config, ParameterTable& params);
// The weights of a `source` directory into a model of `config`: the same architecture with fewer blocks, or one that a
// plain LLaMA becomes. What the source has no tensor for keeps its value.
void load_initial_weights(const std::string& dir, const Config& source, const Config& config, ParameterTable& params);

// A tensor for every parameter: its value, its gradient, its moments. In files they are called prefix + parameter.
struct RowTensors {
  std::string prefix;
  std::function<Tensor(const Parameter&)> of;
};
inline Tensor value_of(const Parameter& row) { return row.value; }
inline Tensor gradient_of(const Parameter& row) { return row.grad; }
// All of these as one safetensors file of fp32 tensors.
void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<RowTensors>& arrays,
                  const std::map<std::string, std::string>& metadata = {});
// The same back into f32 tensors; names and shapes must match exactly.
void load_tensors(const std::string& path, ParameterTable& params, const std::vector<RowTensors>& arrays);

void save_config(const std::string& path, const Config& config);

}  // namespace crossply
