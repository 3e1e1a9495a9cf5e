// Which token comes next, as Hugging Face's generate() decides it: the same settings have the same meaning, and are
// applied in the same order: repetition penalty, temperature, top-k, top-p, min-p.
#pragma once

#include <cstdint>
#include <vector>

namespace crossply {

struct SamplingOptions {
  double temperature = 0;  // divides the logits; 0: the most likely token
  int64_t top_k = 0;       // only tokens as likely as the k-th one (0: all)
  double top_p = 1;        // only the most likely tokens that together reach this probability
  double min_p = 0;        // only tokens with at least this share of the most likely one's probability
  double repetition_penalty =
      1;  // logits of tokens that are there already: divided by it where positive, else times it
};

struct Candidate {
  int32_t token;
  double probability;
};

// What is sampled from, given the logits (V) after the tokens `seen`: what the options leave, with probabilities that
// sum to 1. In the order of the tokens, or where top_p is below 1, from the most likely one down.
std::vector<Candidate> probabilities(const float* logits, int64_t V, const std::vector<int32_t>& seen,
                                     const SamplingOptions& options);

// The candidate at u, in [0, 1), of the whole.
int32_t draw(const std::vector<Candidate>& candidates, double u);

// The random number behind token n that row `sample` of prompt `prompt` writes: it depends on nothing else, so neither
// does the row.
double sampling_number(uint64_t seed, int64_t prompt, int64_t sample, int64_t n);

}  // namespace crossply
