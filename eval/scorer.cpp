#include "eval/scorer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/block/matmul.h"
#include "models/batch/batch_model.h"

namespace crossply {
namespace {

// Rows whose logits are asked for at once. Always as many: a GPU chooses how to multiply for each number of rows anew.
constexpr int64_t asked = 16;
// Of a token with a loss below log 2 the probability is above one half, so that no other has more; a little less, for
// the rounding.
constexpr float surely = 0.69f;

// One of few lengths, 8 and 12 times powers of two, that hold n tokens: few lengths are few recordings.
int64_t padded(int64_t n, int64_t longest) {
  int64_t length = 8;
  while (length < n) length = length % 3 == 0 ? length / 3 * 4 : length / 2 * 3;
  return std::min(length, longest);
}

}  // namespace

double finite_logprob(float loss, int32_t token, size_t position) {
  if (!std::isfinite(loss))
    fail(Exit::not_finite, "the log-probability of token ", token, " at position ", position + 1,
         " of a sequence is not finite (", -loss, "): the model's weights are too large or damaged");
  return -static_cast<double>(loss);
}

Passage passage_of(const std::vector<int32_t>& context, const std::vector<int32_t>& continuation, int64_t longest) {
  Passage passage{context, 0};
  passage.tokens.insert(passage.tokens.end(), continuation.begin(), continuation.end());
  const size_t most = static_cast<size_t>(longest) + 1;
  if (passage.tokens.size() > most)
    passage.tokens.erase(passage.tokens.begin(), passage.tokens.end() - static_cast<ptrdiff_t>(most));
  passage.first = passage.tokens.size() - continuation.size();
  return passage;
}

std::vector<Passage> rolling_passages(const std::vector<int32_t>& tokens, size_t first, int64_t longest) {
  std::vector<Passage> passages;
  const size_t window = static_cast<size_t>(longest) + 1;  // with the token that is only predicted
  CHECK_THAT(first >= 1 && first < window, "the first token to score is number ", first, " of windows of ", longest);
  for (size_t done = first; done < tokens.size();) {
    const size_t end = std::min(done == first ? window : done + window - 1, tokens.size());
    const size_t begin = end > window ? end - window : 0;
    const auto from = tokens.begin() + static_cast<ptrdiff_t>(begin);
    passages.push_back({{from, from + static_cast<ptrdiff_t>(end - begin)}, done - begin});
    done = end;
  }
  return passages;
}

Scorer::Recorded::Recorded(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t length)
    : B(rows), T(length), tape(params.dtype()) {
  graph = record_model(tape, params, config, B, T);
  tape.plan(PlanMode::reuse);
  tape.allocate(device);
}

Scorer::Scorer(Device& device, ParameterTable& params, const Config& config, int64_t batch_tokens)
    : device_(device),
      params_(params),
      config_(config),
      batch_tokens_(batch_tokens),
      hidden_(device, "rows whose logits are asked for",
              static_cast<size_t>(asked * config.hidden_size) * sizeof(float)),
      logits_(device, "their logits", static_cast<size_t>(asked * config.vocab_size) * sizeof(float)),
      host_logits_(static_cast<size_t>(asked * config.vocab_size)) {
  CHECK_THAT(params.dtype() == Dtype::f32, "scores are computed in f32");
}

void Scorer::record(int64_t B, int64_t T) {
  if (recorded_ != nullptr && recorded_->B == B && recorded_->T == T) return;
  recorded_.reset();  // its memory first
  recorded_ = std::make_unique<Recorded>(device_, params_, config_, B, T);
}

std::vector<Score> Scorer::score(const std::vector<Passage>& passages,
                                 const std::function<void(int64_t, int64_t)>& told) {
  std::vector<Score> scores(passages.size());
  std::vector<size_t> order(passages.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto length = [&](size_t i) {
    return padded(std::ssize(passages[i].tokens) - 1, config_.max_position_embeddings);
  };
  // The longest first: what does not fit into the memory shows at once, and no time left is too short.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return length(a) > length(b); });
  int64_t all = 0, done = 0;
  for (const size_t i : order) all += length(i);
  for (size_t begin = 0; begin < order.size();) {
    const int64_t T = length(order[begin]), most = std::max<int64_t>(1, batch_tokens_ / T);
    size_t end = begin;
    while (end < order.size() && length(order[end]) == T) ++end;
    const int64_t count = static_cast<int64_t>(end - begin), batches = (count + most - 1) / most;
    record((count + batches - 1) / batches, T);
    for (; begin < end; begin += static_cast<size_t>(recorded_->B)) {
      const size_t here = std::min(end - begin, static_cast<size_t>(recorded_->B));
      score_batch(passages, &order[begin], here, scores);
      if (told) told(done += static_cast<int64_t>(here) * T, all);
    }
    begin = end;
  }
  return scores;
}

void Scorer::score_batch(const std::vector<Passage>& passages, const size_t* which, size_t count,
                         std::vector<Score>& scores) {
  const size_t T = static_cast<size_t>(recorded_->T), size = static_cast<size_t>(recorded_->B) * T;
  std::vector<int32_t> tokens(size, 0), targets(size, -1);
  for (size_t i = 0; i < count; ++i) {
    const Passage& passage = passages[which[i]];
    std::copy(passage.tokens.begin(), passage.tokens.end() - 1, tokens.begin() + static_cast<ptrdiff_t>(i * T));
    for (size_t t = passage.first; t < passage.tokens.size(); ++t) targets[i * T + t - 1] = passage.tokens[t];
  }
  load_batch(device_, recorded_->graph, tokens.data(), targets.data());
  recorded_->tape.run(Step{});
  std::vector<float> losses(size);
  device_.copy_out(losses.data(), recorded_->graph.losses->tensor.data, size * sizeof(float));
  std::vector<std::vector<Doubt>> doubts(count);
  for (size_t row = 0; row < count * T; ++row) {
    if (targets[row] < 0) continue;
    scores[which[row / T]].logprob += finite_logprob(losses[row], targets[row], row % T);
    if (!(losses[row] < surely)) doubts[row / T].push_back({static_cast<int64_t>(row), targets[row], losses[row]});
  }
  settle(doubts, which, scores);
}

// Asks for the logits of few rows: the least likely token of each sequence first, which mostly decides it.
void Scorer::settle(std::vector<std::vector<Doubt>>& doubts, const size_t* which, std::vector<Score>& scores) {
  for (auto& own : doubts)
    std::sort(own.begin(), own.end(), [](const Doubt& a, const Doubt& b) { return a.loss < b.loss; });
  for (;;) {
    std::vector<Doubt> questions;
    std::vector<size_t> of;
    for (bool more = true; more;) {
      more = false;
      for (size_t i = 0; i < doubts.size() && std::ssize(questions) < asked; ++i) {
        if (doubts[i].empty()) continue;
        questions.push_back(doubts[i].back()), of.push_back(i);
        doubts[i].pop_back(), more = true;
      }
    }
    if (questions.empty()) return;
    const std::vector<char> yes = are_most_likely(questions);
    for (size_t q = 0; q < of.size(); ++q)
      if (!yes[q]) scores[which[of[q]]].greedy = false, doubts[of[q]].clear();
  }
}

std::vector<char> Scorer::are_most_likely(const std::vector<Doubt>& doubts) {
  const int64_t C = config_.hidden_size, V = config_.vocab_size;
  const ops::LogitHead& head = recorded_->graph.head;
  std::vector<float> rows(static_cast<size_t>(asked * C), 0.f);
  for (size_t i = 0; i < doubts.size(); ++i)
    device_.copy_out(&rows[i * static_cast<size_t>(C)], head.inp->tensor.as<float>() + doubts[i].row * C,
                     static_cast<size_t>(C) * sizeof(float));
  device_.copy_in(hidden_.data(), rows.data(), rows.size() * sizeof(float));
  const Tensor inp{hidden_.data(), Dtype::f32, Shape{asked, C}}, out{logits_.data(), Dtype::f32, Shape{asked, V}};
  matmul_forward({out}, inp, {head.weight->tensor}, device_.stream());  // a cap would leave the largest where it is
  device_.copy_out(host_logits_.data(), logits_.data(), host_logits_.size() * sizeof(float));
  std::vector<char> answers;
  for (size_t i = 0; i < doubts.size(); ++i) {
    const float* z = &host_logits_[i * static_cast<size_t>(V)];
    answers.push_back(std::max_element(z, z + V) - z == doubts[i].token);
  }
  return answers;
}

}  // namespace crossply
