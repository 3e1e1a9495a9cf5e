// A model read from disk, ready to run: what evaluate, generate and gradients start from.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "engine/document_bounds.h"
#include "models/disk/checkpoint.h"
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
  ParameterTable params;        // f64 on the reference device, f32 elsewhere
  DocumentMark documents = {};  // of the data that an analysis reads: attention stays within them
};

// What a model's ids mean: its directory's tokenizer, or where that has none, the one at `path` (--tokenizer; "": no
// file). Throws Exit::usage where both are there and differ, bad_data where the model's vocabulary is too small for it,
// and what Tokenizer::read throws.
Tokenizer model_tokenizer(const LoadedModel& model, const std::string& path);

// The tokens that end a text: the tokenizer's, and those that config.json and generation_config.json say, one or a
// list. Throws Exit::bad_data for a generation_config.json that is no JSON object.
std::vector<int32_t> ending_tokens(const LoadedModel& model, const Tokenizer& tokenizer);

// The ids of the vocabulary that config.json has at this key ("eos_token_id"), one or a list, in order.
std::vector<int32_t> token_ids(const Config& config, const std::string& key);

// What stands before a text that has nothing before it: the model's beginning of text, else its end of text; -1: none.
int32_t beginning_token(const LoadedModel& model, const Tokenizer& tokenizer);

// The ids of a prompt: those of the text, after what the tokenizer begins texts with, unless the text begins with that.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& text);

}  // namespace crossply
