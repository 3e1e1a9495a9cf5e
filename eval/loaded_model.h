// A model read from disk, ready to run: what evaluate, generate and gradients start from.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace crossply {

struct LoadedModel {
  // path: a model directory, or a run directory (then its newest valid checkpoint). Throws Exit::no_input, bad_data.
  LoadedModel(const std::string& path, const std::string& device_name, bool with_gradients,
              const std::string& matmul = "fp32");

  ModelDir source;  // held as long as the model is there
  std::string dir;
  Config config;
  std::unique_ptr<Device> device;
  ParameterTable params;  // f64 on the reference device, f32 elsewhere
};

// What a model's ids mean: its directory's tokenizer, or where that has none, the one at `path` (--tokenizer; "": no
// file). Throws Exit::usage where both are there and differ, bad_data where the model's vocabulary is too small for it,
// and what Tokenizer::read throws.
Tokenizer model_tokenizer(const LoadedModel& model, const std::string& path);

}  // namespace crossply
