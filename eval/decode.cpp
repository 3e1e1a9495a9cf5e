#include "eval/decode.h"

#include <algorithm>
#include <cmath>

namespace crossply {

Decoder::Decoder(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t max_length)
    : device_(device), rows_(rows), max_length_(max_length), tape_(params.dtype(), max_length) {
  CHECK_THAT(params.dtype() == Dtype::f32, "generation runs in f32");
  graph_ = record_model(tape_, params, config, rows, 1);
  tape_.plan(PlanMode::reuse);
  tape_.allocate(device);
  logits_.resize(static_cast<size_t>(rows * config.vocab_size));
}

const std::vector<float>& Decoder::feed(const std::vector<int32_t>& tokens) {
  CHECK_THAT(static_cast<int64_t>(tokens.size()) == rows_ && step_.position < max_length_, "decoder: ", tokens.size(),
             " tokens at position ", step_.position, " of ", max_length_);
  device_.copy_in(graph_.tokens->tensor.data, tokens.data(), tokens.size() * sizeof(int32_t));
  tape_.forward(step_);
  device_.copy_out(logits_.data(), graph_.logits->tensor.data, logits_.size() * sizeof(float));
  const auto bad = std::find_if(logits_.begin(), logits_.end(), [](float logit) { return !std::isfinite(logit); });
  if (bad != logits_.end())
    fail(Exit::not_finite, "the model's logits after token ", step_.position + 1, " of the sequence are not finite (",
         *bad, "): its weights are too large or damaged");
  ++step_.position;
  return logits_;
}

int32_t most_likely(const float* logits, int64_t V) {
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
  std::vector<int32_t> tokens(static_cast<size_t>(decoder.rows()), 0);
  while (decoder.position() < decoder.max_length() && std::count(done.begin(), done.end(), 0) > 0) {
    const size_t t = static_cast<size_t>(decoder.position());
    for (size_t row = 0; row < prompts.size(); ++row)
      tokens[row] = t < prompts[row].size() ? prompts[row][t] : written[row].empty() ? 0 : written[row].back();
    const std::vector<float>& logits = decoder.feed(tokens);
    const int64_t V = static_cast<int64_t>(logits.size()) / decoder.rows();
    for (size_t row = 0; row < prompts.size(); ++row) {
      if (done[row] || t + 1 < prompts[row].size()) continue;
      const int32_t token = sampler(logits.data() + static_cast<int64_t>(row) * V, V);
      written[row].push_back(token);
      const bool goes_on = !on_token || on_token(row, token);
      done[row] = !goes_on || token == eos || static_cast<int64_t>(written[row].size()) >= max_new;
    }
  }
  return written;
}

}  // namespace crossply
