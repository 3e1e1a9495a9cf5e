// Generation with a key/value cache: the model's own code recorded for one new token of each row.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/model.h"

namespace crossply {

class Decoder {
 public:
  // rows sequences at once, each of at most max_length tokens. The parameters must have their memory.
  Decoder(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t max_length);

  // Appends one token to every row and returns the logits (rows, V) for the next one, valid until the next call.
  // Exit::not_finite where one of them is NaN or infinite.
  const std::vector<float>& feed(const std::vector<int32_t>& tokens);
  void reset() { step_.position = 0; }
  int64_t rows() const { return rows_; }
  int64_t max_length() const { return max_length_; }
  int64_t position() const { return step_.position; }

 private:
  Device& device_;
  int64_t rows_, max_length_;
  Tape tape_;
  Graph graph_;
  Step step_;
  std::vector<float> logits_;
};

// Chooses a token from a row's logits (V).
using Sampler = std::function<int32_t(const float* logits, int64_t V)>;
int32_t most_likely(const float* logits, int64_t V);

// Continues every prompt until `eos` (included in the result), max_new tokens, or the decoder's length. Rows advance
// together: a row whose prompt is longer is still being read while others already write, so a row's result does not
// depend on its neighbours. At most rows() prompts. on_token, if given, sees (row, token) as they come,
// and says whether the row goes on.
std::vector<std::vector<int32_t>> generate(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts,
                                           int64_t max_new, int32_t eos, const Sampler& sampler,
                                           const std::function<bool(size_t, int32_t)>& on_token = {});

}  // namespace crossply
