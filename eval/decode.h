// Generation with a key/value cache: the model's own code recorded for one new token of each row, and for a chunk of
// a row's prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/model.h"

namespace crossply {

// The key/value caches of a tape, in the order in which they were recorded.
std::vector<Value*> caches_of(const Tape& tape);

class Decoder {
 public:
  // rows sequences at once, each of at most max_length tokens. The parameters must have their memory; for bf16, in
  // which activations and caches are then, their bf16 copies too.
  Decoder(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t max_length,
          Dtype real = Dtype::f32);

  // Appends one token to every row and returns the logits (rows, V) for the next one, valid until the next call.
  // Exit::not_finite where one of them is NaN or infinite.
  const std::vector<float>& feed(const std::vector<int32_t>& tokens);
  // After reset(): reads what each prompt, of at most rows(), has before its last token, row by row in chunks. The same
  // numbers as feeding it, to rounding, and several times faster. Returns how many tokens of each row that are: 0 where
  // it would not pay, for the prompt is short. position() is then the least of them.
  std::vector<int64_t> read(const std::vector<std::vector<int32_t>>& prompts);
  // All rows go on at this position, which is not before the current one. Of those that are still needed, read() has
  // read so many tokens.
  void skip_to(int64_t position) { step_.position = position; }
  void reset() { step_.position = 0; }
  int64_t rows() const { return rows_; }
  int64_t max_length() const { return max_length_; }
  int64_t position() const { return step_.position; }

 private:
  struct Replay {
    Replay(Decoder& decoder, int64_t rows, int64_t T);
    Tape tape;
    Graph graph;
  };
  void read_row(int64_t row, const int32_t* prompt, int64_t count);
  void lend_caches(int64_t row);
  void load_engrams(const Replay& replay, int64_t row, int64_t position);

  Device& device_;
  ParameterTable& params_;
  Config config_;
  int64_t rows_, max_length_;
  Dtype real_;
  Replay token_;
  std::vector<int32_t> text_;      // (rows, max_length): what was fed and read, as far as the position
  std::unique_ptr<Replay> chunk_;  // of one row; made when it is needed
  Step step_;
  std::vector<float> logits_;
  std::vector<bf16> bf16_logits_;  // as they come
};

// Chooses a token from a row's logits (V).
using Sampler = std::function<int32_t(size_t row, const float* logits, int64_t V)>;
int32_t most_likely(size_t row, const float* logits, int64_t V);  // whatever the row

// Continues every prompt until one of `ends` (included in the result), max_new tokens, or the decoder's length. Rows
// advance together: a row whose prompt is longer waits, or is still being read, while others write, so a row's result
// does not depend on its neighbours, but for rounding; rows of about the same length take the least time. At most
// rows() prompts. on_token, if given, sees (row, token) as they come, and says whether the row goes on.
std::vector<std::vector<int32_t>> generate(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts,
                                           int64_t max_new, const std::vector<int32_t>& ends, const Sampler& sampler,
                                           const std::function<bool(size_t, int32_t)>& on_token = {});

}  // namespace crossply
