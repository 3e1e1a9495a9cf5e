// A model on disk: a directory with config.json and model.safetensors, in Hugging Face's names and layouts.
#pragma once

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

// A flat array of a parameter table: values, gradients, moments. In files its tensors are called prefix + parameter.
struct FlatArray {
  std::string prefix;
  Tensor flat;
};
// Flat arrays as one safetensors file of fp32 tensors, one for each parameter of each array.
void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<FlatArray>& arrays,
                  const std::map<std::string, std::string>& metadata = {});
// The same back into f32 arrays; names and shapes must match exactly.
void load_tensors(const std::string& path, ParameterTable& params, const std::vector<FlatArray>& arrays);

void save_config(const std::string& path, const Config& config);

}  // namespace crossply
