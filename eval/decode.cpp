#include "eval/decode.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace crossply {

namespace {

// A chunk of a row fills the units of a CPU, or a good part of a GPU's, with so many tokens.
constexpr int64_t chunk_tokens = 64;
// Prompts that are shorter are read as fast one token at a time, of all rows together: a chunk takes about as long as
// several tokens of a row, or one token of very many rows.
constexpr int64_t min_chunk = 8, rows_of_a_token = 4;

}  // namespace

std::vector<Value*> caches_of(const Tape& tape) {
  std::vector<Value*> caches;
  for (const auto& node : tape.nodes())
    if (std::string_view(node->op()) == "cached_attn")
      for (Value* cache : node->reads)  // layers may share one
        if (std::find(caches.begin(), caches.end(), cache) == caches.end()) caches.push_back(cache);
  return caches;
}

Decoder::Replay::Replay(Decoder& d, int64_t rows, int64_t T) : tape(d.real_, d.max_length_) {
  graph = record_model(tape, d.params_, d.config_, rows, T);
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
      token_(*this, rows, 1),
      text_(static_cast<size_t>(rows * max_length), 0),
      logits_(static_cast<size_t>(rows * config.vocab_size)) {
  CHECK_THAT(params.dtype() == Dtype::f32, "generation runs in f32 or bf16");
  if (real == Dtype::bf16) bf16_logits_.resize(logits_.size());
}

const std::vector<float>& Decoder::feed(const std::vector<int32_t>& tokens) {
  CHECK_THAT(static_cast<int64_t>(tokens.size()) == rows_ && step_.position < max_length_, "decoder: ", tokens.size(),
             " tokens at position ", step_.position, " of ", max_length_);
  for (int64_t row = 0; row < rows_; ++row)
    text_[static_cast<size_t>(row * max_length_ + step_.position)] = tokens[static_cast<size_t>(row)];
  device_.copy_in(token_.graph.tokens->tensor.data, tokens.data(), tokens.size() * sizeof(int32_t));
  load_engrams(token_, 0, step_.position);
  token_.tape.forward(step_);
  const Value& logits = *token_.graph.logits;
  void* host = real_ == Dtype::bf16 ? static_cast<void*>(bf16_logits_.data()) : logits_.data();
  device_.copy_out(host, logits.tensor.data, logits.bytes());
  std::copy(bf16_logits_.begin(), bf16_logits_.end(), logits_.begin());
  const auto bad = std::find_if(logits_.begin(), logits_.end(), [](float logit) { return !std::isfinite(logit); });
  if (bad != logits_.end())
    fail(Exit::not_finite, "the model's logits after token ", step_.position + 1, " of the sequence are not finite (",
         *bad, "): its weights are too large or damaged");
  ++step_.position;
  return logits_;
}

std::vector<int64_t> Decoder::read(const std::vector<std::vector<int32_t>>& prompts) {
  CHECK_THAT(step_.position == 0 && std::ssize(prompts) <= rows_, "decoder: ", prompts.size(), " prompts at position ",
             step_.position);
  std::vector<int64_t> counts;
  for (const auto& prompt : prompts) {
    const int64_t count = std::min<int64_t>(std::ssize(prompt), max_length_) - 1;
    const bool pays = count >= std::max(min_chunk, rows_ / rows_of_a_token);
    if (pays) read_row(std::ssize(counts), prompt.data(), count);
    counts.push_back(pays ? count : 0);
  }
  step_.position = counts.empty() ? 0 : *std::min_element(counts.begin(), counts.end());
  return counts;
}

void Decoder::read_row(int64_t row, const int32_t* prompt, int64_t count) {
  const int64_t T = std::min(chunk_tokens, max_length_);
  if (!chunk_) chunk_ = std::make_unique<Replay>(*this, 1, T);
  lend_caches(row);
  int32_t* text = text_.data() + row * max_length_;
  std::copy_n(prompt, count, text);
  for (int64_t next = 0; next < count; next += T) {
    // The last chunk may begin with tokens that were read before, and end with others than the prompt's, which
    // nothing before them sees, and whose places in the caches are written anew before anything after them is.
    const int64_t begin = std::min(next, max_length_ - T);
    device_.copy_in(chunk_->graph.tokens->tensor.data, text + begin, static_cast<size_t>(T) * sizeof(int32_t));
    load_engrams(*chunk_, row, begin);
    chunk_->tape.forward(Step{.position = begin});
  }
}

// Of the replay's rows, of which `row` is the first, at this position.
void Decoder::load_engrams(const Replay& replay, int64_t row, int64_t position) {
  for (const auto& engram : replay.graph.engrams)
    engram->load(device_, text_.data() + row * max_length_ + position, max_length_, position);
}

// The chunk's caches are the row's from now on.
void Decoder::lend_caches(int64_t row) {
  const std::vector<Value*> ours = caches_of(token_.tape), lent = caches_of(chunk_->tape);
  CHECK_THAT(ours.size() == lent.size(), "decoder: ", lent.size(), " caches of ", ours.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    const size_t bytes = lent[i]->bytes();
    CHECK_THAT(bytes * static_cast<size_t>(rows_) == ours[i]->bytes(), "decoder: ", lent[i]->name, " ",
               lent[i]->shape.str(), " of ", ours[i]->shape.str());
    lent[i]->tensor.data = static_cast<std::byte*>(ours[i]->tensor.data) + static_cast<size_t>(row) * bytes;
  }
}

int32_t most_likely(size_t, const float* logits, int64_t V) {
  return static_cast<int32_t>(std::max_element(logits, logits + V) - logits);
}

std::vector<std::vector<int32_t>> generate(Decoder& decoder, const std::vector<std::vector<int32_t>>& prompts,
                                           int64_t max_new, const std::vector<int32_t>& ends, const Sampler& sampler,
                                           const std::function<bool(size_t, int32_t)>& on_token) {
  CHECK_THAT(static_cast<int64_t>(prompts.size()) <= decoder.rows(), prompts.size(), " prompts");
  std::vector<std::vector<int32_t>> written(prompts.size());
  std::vector<char> done(prompts.size(), max_new < 1);
  for (const auto& prompt : prompts) CHECK_THAT(!prompt.empty(), "empty prompt");
  decoder.reset();
  const std::vector<int64_t> read = decoder.read(prompts);
  std::vector<int32_t> tokens(static_cast<size_t>(decoder.rows()), 0);
  while (decoder.position() < decoder.max_length() && std::count(done.begin(), done.end(), 0) > 0) {
    // Where all that were shorter are done, what was read of the others need not be fed.
    int64_t next = decoder.max_length();
    for (size_t row = 0; row < prompts.size(); ++row)
      if (!done[row]) next = std::min(next, read[row]);
    decoder.skip_to(std::max(next, decoder.position()));
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
      const bool ended = std::find(ends.begin(), ends.end(), token) != ends.end();
      done[row] = !goes_on || ended || static_cast<int64_t>(written[row].size()) >= max_new;
    }
  }
  return written;
}

}  // namespace crossply
