// Generation with a key/value cache: the model's own code recorded for one new token of each row, and for a chunk of
// the prompts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/model.h"

namespace crossply {

class Decoder {
 public:
  // rows sequences at once, each of at most max_length tokens. The parameters must have their memory; for bf16, in
  // which activations and caches are then, their narrow copies too.
  Decoder(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t max_length,
          Dtype real = Dtype::f32);

  // Appends one token to every row and returns the logits (rows, V) for the next one, valid until the next call.
  // Exit::not_finite where one of them is NaN or infinite.
  const std::vector<float>& feed(const std::vector<int32_t>& tokens);
  // After reset(): appends what all prompts have before their last token, in chunks of all rows together. The same
  // numbers as feeding it, to rounding, and several times faster. Where that would not pay, because it is too little,
  // or because there are so many rows that feed() is as fast, it does nothing.
  void read(const std::vector<std::vector<int32_t>>& prompts);
  void reset() { step_.position = 0; }
  int64_t rows() const { return rows_; }
  int64_t max_length() const { return max_length_; }
  int64_t position() const { return step_.position; }

 private:
  struct Replay {
    Replay(Decoder& decoder, int64_t T);
    Tape tape;
    Graph graph;
  };
  void take_caches(int64_t count);

  Device& device_;
  ParameterTable& params_;
  Config config_;
  int64_t rows_, max_length_;
  Dtype real_;
  Replay token_;
  std::unique_ptr<Replay> chunk_;  // made when it is needed
  Step step_;
  std::vector<float> logits_;
  std::vector<bf16> narrow_;  // as they come
};

// Chooses a token from a row's logits (V).
using Sampler = std::function<int32_t(size_t row, const float* logits, int64_t V)>;
int32_t most_likely(size_t row, const float* logits, int64_t V);  // whatever the row

// Continues every prompt until `eos` (included in the result), max_new tokens, or the decoder's length. Rows advance
// together: a row whose prompt is longer is still being read while others already write, so a row's result does not
// depend on its neighbours, but for the rounding of what read() takes together. At most rows() prompts. on_token, if
// given, sees (row, token) as they come, and says whether the row goes on.
std::vector<std::vector<int32_t>> generate(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts,
                                           int64_t max_new, int32_t eos, const Sampler& sampler,
                                           const std::function<bool(size_t, int32_t)>& on_token = {});

}  // namespace crossply
