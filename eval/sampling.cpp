#include "eval/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/rng.h"

namespace crossply {
namespace {

// The logits, and those of every token seen, however often, made less likely.
std::vector<double> penalised(const float* logits, int64_t V, const std::vector<int32_t>& seen, double penalty) {
  std::vector<double> scores(logits, logits + V);
  if (penalty == 1) return scores;
  for (const int32_t token : seen) {
    const auto logit = static_cast<double>(logits[token]);  // not the score: once is enough
    scores[static_cast<size_t>(token)] = logit > 0 ? logit / penalty : logit * penalty;
  }
  return scores;
}

void normalise(std::vector<Candidate>& candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.probability;
  for (Candidate& c : candidates) c.probability /= sum;
}

// Tokens as likely as the k-th one stay, be they more than k.
void keep_top_k(std::vector<Candidate>& candidates, int64_t k) {
  if (k <= 0 || k >= std::ssize(candidates)) return;
  std::vector<double> order;
  for (const Candidate& c : candidates) order.push_back(c.probability);
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
  std::erase_if(candidates, [&](const Candidate& c) { return c.probability < order[static_cast<size_t>(k - 1)]; });
  normalise(candidates);
}

void keep_top_p(std::vector<Candidate>& candidates, double top_p) {
  if (top_p >= 1) return;
  // All of these together are below 1 - top_p, so none of them can stay; most tokens need no sorting.
  const double least = (1 - top_p) / static_cast<double>(candidates.size());
  std::erase_if(candidates, [&](const Candidate& c) { return c.probability < least; });
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
  });
  double sum = candidates[0].probability;
  size_t kept = 1;
  for (; kept < candidates.size() && sum < top_p; ++kept) sum += candidates[kept].probability;
  candidates.resize(kept);
  normalise(candidates);
}

void keep_min_p(std::vector<Candidate>& candidates, double min_p) {
  if (min_p <= 0) return;
  double most = 0;
  for (const Candidate& c : candidates) most = std::max(most, c.probability);
  std::erase_if(candidates, [&](const Candidate& c) { return c.probability < min_p * most; });
  normalise(candidates);
}

}  // namespace

std::vector<Candidate> probabilities(const float* logits, int64_t V, const std::vector<int32_t>& seen,
                                     const SamplingOptions& o) {
  const std::vector<double> scores = penalised(logits, V, seen, o.repetition_penalty);
  const auto top = std::max_element(scores.begin(), scores.end());
  if (o.temperature == 0) return {{static_cast<int32_t>(top - scores.begin()), 1}};
  std::vector<Candidate> candidates;
  candidates.reserve(scores.size());
  for (size_t i = 0; i < scores.size(); ++i)
    candidates.push_back({static_cast<int32_t>(i), std::exp((scores[i] - *top) / o.temperature)});
  normalise(candidates);
  keep_top_k(candidates, o.top_k);
  keep_top_p(candidates, o.top_p);
  keep_min_p(candidates, o.min_p);
  return candidates;
}

int32_t draw(const std::vector<Candidate>& candidates, double u) {
  for (const Candidate& c : candidates)
    if ((u -= c.probability) < 0) return c.token;
  // Rounding has left something: the last one that can be drawn.
  return std::find_if(candidates.rbegin(), candidates.rend(), [](const Candidate& c) { return c.probability > 0; })
      ->token;
}

double sampling_number(uint64_t seed, int64_t prompt, int64_t sample, int64_t n) {
  const uint64_t own = random_bits(seed, stream_of("generate"), static_cast<uint64_t>(prompt));
  return random_uniform(own, static_cast<uint64_t>(sample), static_cast<uint64_t>(n));
}

}  // namespace crossply
