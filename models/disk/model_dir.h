// A model on disk: a directory with config.json and model.safetensors, in Hugging Face's names and layouts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/io/safetensors.h"
#include "engine/params.h"
#include "models/config.h"
#include "models/disk/checkpoint.h"

namespace crossply {

// The configuration of a model directory, as its weights bear it out. Where config.json ties the head to the embedding
// and the files hold a head with other values, the model is untied, and a note on stderr says so. Throws what
// load_config throws, and Exit::bad_data for weight files that cannot be read.
Config load_model_config(const std::string& dir);

// Fills every declared parameter from DIR/model.safetensors, or from the shards that DIR/model.safetensors.index.json
// lists. A missing, superfluous or misshapen tensor is Exit::bad_data with its name, and nothing is filled before all
// are checked; so is a weight that is not finite in the table's type. A head that the configuration ties may be there
// too, if it equals the embedding.
void load_weights(const std::string& dir, const Config& config, ParameterTable& params);
// The weights of a `source` directory into a model of `config`: the same architecture with fewer blocks, or one that a
// plain LLaMA becomes. What the source has no tensor for keeps its value.
void load_initial_weights(const std::string& dir, const Config& source, const Config& config, ParameterTable& params);

// Tensors of the table's device as they stand in a file: one after the other along the last dimension of `shape`, each
// transposed, or as it is.
struct NamedTensor {
  std::string name;
  Shape shape;
  std::vector<Tensor> parts;
  bool transposed = false;
};
// Every row's value, or its gradient, as models/disk/file_layout.h has them.
std::vector<NamedTensor> values_of(const ParameterTable& params, const Config& config);
std::vector<NamedTensor> gradients_of(const ParameterTable& params, const Config& config);
// All of these as one safetensors file of fp32 tensors.
void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<NamedTensor>& tensors,
                  const std::map<std::string, std::string>& metadata = {});
// Throws an Error of this code, with the tensor, the index and the number, for the first that is not finite in fp32.
void require_finite(const ParameterTable& params, const std::vector<NamedTensor>& tensors, Exit code);
// The values of all rows, which this and all other ranks of a job call with the same: rank 0 writes model.safetensors;
// where that would be of more than `most` bytes and there are several, they write Hugging Face's shards,
// model-0000i-of-0000n.safetensors with i = 1 to n, in turns, and rank 0 the index. No tensor is split. Returns the
// names of the files that this rank wrote.
std::vector<std::string> save_weights(const CheckpointWriter& writer, const ParameterTable& params,
                                      const Config& config, int rank, int size, int64_t most);
// A shape in a file's words.
inline std::vector<int64_t> sizes_of(const Shape& shape) { return {shape.dim.begin(), shape.dim.begin() + shape.rank}; }

void save_config(const std::string& path, const Config& config);

// Brings what a model directory carries for the transformers library up to what this build writes: its modelling files,
// and the keys of config.json that name them. Nothing else changes. Returns the names of the files that were rewritten.
std::vector<std::string> refresh_model_dir(const std::string& dir);

}  // namespace crossply
