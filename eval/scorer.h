// How likely a model finds given tokens: the log-probabilities that lm-evaluation-harness asks for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/model.h"

namespace crossply {

// The tokens from `first` on are scored, each given all before it. 1 <= first, and at most one token more than the
// model's longest sequence, because the last one is not read.
struct Passage {
  std::vector<int32_t> tokens;
  size_t first = 1;
};
// The continuation after the context, of which the end is taken where both are too long; neither may be empty, and the
// continuation has at most `longest` tokens.
Passage passage_of(const std::vector<int32_t>& context, const std::vector<int32_t>& continuation, int64_t longest);
// A whole text, whose tokens from `first` on are scored once each, given as many tokens as fit, in windows of `longest`
// that begin where the one before ended; the last one overlaps it, to be full. 1 <= first <= longest.
std::vector<Passage> rolling_passages(const std::vector<int32_t>& tokens, size_t first, int64_t longest);

// Of a token that is predicted from this position, counted from 0. Throws Exit::not_finite.
double finite_logprob(float loss, int32_t token, size_t position);

struct Score {
  double logprob = 0;  // natural logarithm, summed over the scored tokens
  bool greedy = true;  // is each of them the most likely one?
};

class Scorer {
 public:
  // batch_tokens: what one run computes at most, unless a single sequence is longer. The parameters, of f32, must have
  // their memory.
  Scorer(Device& device, ParameterTable& params, const Config& config, int64_t batch_tokens);

  // One score for each passage. Sequences of similar length go through the model together, padded on the right; the
  // company changes no more than a number's rounding. told, if given, hears how many tokens of how many are done.
  // Throws Exit::not_finite.
  std::vector<Score> score(const std::vector<Passage>& passages,
                           const std::function<void(int64_t done, int64_t all)>& told = {});

 private:
  struct Recorded {
    Recorded(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t length);
    int64_t B, T;
    Tape tape;
    Graph graph;
  };
  // A scored token that is not surely the most likely one.
  struct Doubt {
    int64_t row;  // of (B, T)
    int32_t token;
    float loss;
  };
  void record(int64_t B, int64_t T);
  void score_batch(const std::vector<Passage>& passages, const size_t* which, size_t count, std::vector<Score>& scores);
  std::vector<char> are_most_likely(const std::vector<Doubt>& doubts);
  void settle(std::vector<std::vector<Doubt>>& doubts, const size_t* which, std::vector<Score>& scores);

  Device& device_;
  ParameterTable& params_;
  const Config& config_;
  int64_t batch_tokens_;
  std::unique_ptr<Recorded> recorded_;  // the last one only: each has the activations of a batch
  Arena hidden_, logits_;               // (asked, C), (asked, V)
  std::vector<float> host_logits_;
};

}  // namespace crossply
