// How likely a model finds each sentence of minimal pairs: two sentences that differ in a few words (BLiMP). What a
// pair has in common at its beginning is computed once, into the key/value caches that generation has too:
//
//   1. the first sentence      tokens 0 ..   fills the caches and has its losses
//   2. the second one's rest   tokens p ..   continues after the p shared ones, and overwrites the first one's rest
//
// The token after the shared ones is predicted by the same hidden state h in both sentences: with its loss for the
// first sentence's token a, that for the second one's token b is loss(a) - (w_b - w_a) h, for rows w of the head. No
// other logits are kept.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/model.h"

namespace crossply {

// Both begin with the same token, which is given and not scored. Each has two tokens or more, and at most one more than
// the model's longest sequence, because the last one is not read.
struct TokenPair {
  std::vector<int32_t> good, bad;
};
struct PairScore {
  double good = 0, bad = 0;  // log-probabilities, summed over all tokens but the first
};

// The tokens that the model reads for a pair: of both sentences, then those of each alone.
struct PairTokens {
  int64_t shared, good, bad;
  int64_t sum() const { return shared + good + bad; }
};
PairTokens tokens_read(const TokenPair& pair);

class PairScorer {
 public:
  // batch_tokens: what one batch computes at most, unless a single pair is longer. The parameters, of f32, must have
  // their memory. Throws Exit::usage for a model that cannot generate.
  PairScorer(Device& device, ParameterTable& params, const Config& config, int64_t batch_tokens);

  // One score for each pair; equal sentences have equal ones. Pairs go through the model together that share as many
  // tokens, padded on the right; the company changes no more than a number's rounding. told, if given, hears how many
  // tokens of how many are done. Throws Exit::not_finite.
  std::vector<PairScore> score(const std::vector<TokenPair>& pairs,
                               const std::function<void(int64_t done, int64_t all)>& told = {});

 private:
  struct Job {
    const TokenPair* pair;
    PairTokens tokens;
    PairScore* score;
  };
  struct Pass {
    Pass(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t length, int64_t cached);
    int64_t T;
    Tape tape;
    Graph graph;
  };
  // Of consecutive jobs that share as many tokens.
  struct Sizes {
    int64_t B, shared, first, second;  // first, second: tokens of the two passes; no second pass: 0
    int64_t cached() const { return std::max(first, shared + second); }
    bool operator==(const Sizes&) const = default;
  };
  size_t end_of_batch(const std::vector<Job>& jobs, size_t begin) const;
  void record(const Sizes& sizes);
  void score_batch(const std::vector<Job>& jobs);
  std::vector<float> run(Pass& pass, const std::vector<const std::vector<int32_t>*>& texts, int64_t position);
  double logit_difference(int64_t row, int32_t token, int32_t other);

  Device& device_;
  ParameterTable& params_;
  const Config& config_;
  int64_t batch_tokens_;
  Sizes sizes_{};
  std::unique_ptr<Pass> first_, second_;  // of the last batch's sizes
};

}  // namespace crossply
