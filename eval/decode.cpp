#include "eval/decode.h"

#include <algorithm>
#include <cmath>

namespace crossply {

namespace {

// A chunk fills the units of a CPU, or a good part of a GPU's, with so many tokens of all rows together.
constexpr int64_t chunk_tokens = 64;
constexpr int64_t least_chunk = 8;  // tokens of a row; fewer are read as fast one by one

// The key/value caches of a tape, in the order in which they were recorded.
std::vector<const Value*> caches_of(const Tape& tape) {
  std::vector<const Value*> caches;
  for (const Value& value : tape.values())
    if (value.name.ends_with(".k_cache") || value.name.ends_with(".v_cache")) caches.push_back(&value);
  return caches;
}

}  // namespace

Decoder::Replay::Replay(Decoder& d, int64_t T) : tape(d.real_, d.max_length_) {
  graph = record_model(tape, d.params_, d.config_, d.rows_, T);
  tape.plan(PlanMode::reuse);
  tape.allocate(d.device_);
}

Decoder::Decoder(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t max_length,
                 Dtype real)
    : device_(device),
      params_(params),
      config_(config),
      rows_(rows),
      max_length_(max_length),
      real_(real),
      token_(*this, 1),
      logits_(static_cast<size_t>(rows * config.vocab_size)) {
  CHECK_THAT(params.dtype() == Dtype::f32, "generation runs in f32 or bf16");
  if (real == Dtype::bf16) narrow_.resize(logits_.size());
}

const std::vector<float>& Decoder::feed(const std::vector<int32_t>& tokens) {
  CHECK_THAT(static_cast<int64_t>(tokens.size()) == rows_ && step_.position < max_length_, "decoder: ", tokens.size(),
             " tokens at position ", step_.position, " of ", max_length_);
  device_.copy_in(token_.graph.tokens->tensor.data, tokens.data(), tokens.size() * sizeof(int32_t));
  token_.tape.forward(step_);
  const Value& logits = *token_.graph.logits;
  void* host = real_ == Dtype::bf16 ? static_cast<void*>(narrow_.data()) : logits_.data();
  device_.copy_out(host, logits.tensor.data, logits.bytes());
  std::copy(narrow_.begin(), narrow_.end(), logits_.begin());
  const auto bad = std::find_if(logits_.begin(), logits_.end(), [](float logit) { return !std::isfinite(logit); });
  if (bad != logits_.end())
    fail(Exit::not_finite, "the model's logits after token ", step_.position + 1, " of the sequence are not finite (",
         *bad, "): its weights are too large or damaged");
  ++step_.position;
  return logits_;
}

void Decoder::read(const std::vector<std::vector<int32_t>>& prompts) {
  CHECK_THAT(step_.position == 0, "decoder: prompts at position ", step_.position);
  int64_t count = max_length_ - 1;
  for (const auto& prompt : prompts) count = std::min(count, std::ssize(prompt) - 1);
  const int64_t T = std::min(chunk_tokens / rows_, max_length_);
  if (T < least_chunk || count < least_chunk) return;
  if (!chunk_) chunk_ = std::make_unique<Replay>(*this, T);
  std::vector<int32_t> tokens(static_cast<size_t>(rows_ * T));
  for (int64_t next = 0; next < count; next += T) {
    // The last chunk may begin with tokens that were read before, and end with others than the prompt's, which
    // nothing before them sees.
    const int64_t begin = std::min(next, max_length_ - T), end = std::min(begin + T, count);
    for (size_t row = 0; row < prompts.size(); ++row)
      std::copy(prompts[row].begin() + begin, prompts[row].begin() + end,
                tokens.begin() + static_cast<int64_t>(row) * T);
    device_.copy_in(chunk_->graph.tokens->tensor.data, tokens.data(), tokens.size() * sizeof(int32_t));
    chunk_->tape.forward(Step{.position = begin});
  }
  take_caches(count);
  step_.position = count;
}

// The first `count` positions of the chunks' caches, for every row.
void Decoder::take_caches(int64_t count) {
  const std::vector<const Value*> from = caches_of(chunk_->tape), to = caches_of(token_.tape);
  std::vector<std::byte> host;
  for (size_t i = 0; i < from.size(); ++i) {
    const size_t row = from[i]->bytes() / static_cast<size_t>(rows_);
    host.resize(row / static_cast<size_t>(max_length_) * static_cast<size_t>(count));
    for (size_t b = 0; b < static_cast<size_t>(rows_); ++b) {
      device_.copy_out(host.data(), static_cast<const std::byte*>(from[i]->tensor.data) + b * row, host.size());
      device_.copy_in(static_cast<std::byte*>(to[i]->tensor.data) + b * row, host.data(), host.size());
    }
  }
}

int32_t most_likely(size_t, const float* logits, int64_t V) {
  return static_cast<int32_t>(std::max_element(logits, logits + V) - logits);
}

std::vector<std::vector<int32_t>> generate(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts,
                                           int64_t max_new, int32_t eos, const Sampler& sampler,
                                           const std::function<bool(size_t, int32_t)>& on_token) {
  CHECK_THAT(static_cast<int64_t>(prompts.size()) <= decoder.rows(), prompts.size(), " prompts");
  std::vector<std::vector<int32_t>> written(prompts.size());
  std::vector<char> done(prompts.size(), max_new < 1);
  for (const auto& prompt : prompts) CHECK_THAT(!prompt.empty(), "empty prompt");
  decoder.reset();
  decoder.read(prompts);
  std::vector<int32_t> tokens(static_cast<size_t>(decoder.rows()), 0);
  while (decoder.position() < decoder.max_length() && std::count(done.begin(), done.end(), 0) > 0) {
    const size_t t = static_cast<size_t>(decoder.position());
    for (size_t row = 0; row < prompts.size(); ++row)
      tokens[row] = t < prompts[row].size() ? prompts[row][t] : written[row].empty() ? 0 : written[row].back();
    const std::vector<float>& logits = decoder.feed(tokens);
    const int64_t V = static_cast<int64_t>(logits.size()) / decoder.rows();
    for (size_t row = 0; row < prompts.size(); ++row) {
      if (done[row] || t + 1 < prompts[row].size()) continue;
      const int32_t token = sampler(row, logits.data() + static_cast<int64_t>(row) * V, V);
      written[row].push_back(token);
      const bool goes_on = !on_token || on_token(row, token);
      done[row] = !goes_on || token == eos || static_cast<int64_t>(written[row].size()) >= max_new;
    }
  }
  return written;
}

}  // namespace crossply
