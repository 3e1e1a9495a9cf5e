// A model on disk: a directory with config.json and model.safetensors, in Hugging Face's names and layouts.
#pragma once

#include <string>

#include "engine/params.h"
#include "engine/safetensors.h"
#include "models/config.h"

namespace crossply {

// Fills every declared parameter from DIR/model.safetensors, or from the shards that DIR/model.safetensors.index.json
// lists. A missing, superfluous or misshapen tensor is Exit::bad_data with its name; nothing is filled before all are
// checked. A head that the configuration ties may be there too, and is ignored.
void load_weights(const std::string& dir, const Config& config, ParameterTable& params);

// One flat array of the table (values, gradients, moments) as a safetensors file of fp32 tensors, one per parameter.
void save_tensors(const std::string& path, const ParameterTable& params, const Tensor& flat);
// The same back, for moments: names and shapes must match exactly.
void load_tensors(const std::string& path, ParameterTable& params, const Tensor& flat);

void save_config(const std::string& path, const Config& config);

}  // namespace crossply
