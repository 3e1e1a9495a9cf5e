#include "data/task_source.h"

#include <algorithm>

namespace crossply {

void TaskSource::add(const TaskSample& sample) {
  const int64_t length = static_cast<int64_t>(sample.tokens.size());
  CHECK_THAT(length <= layout_.seq_len + 1 && sample.prompt > 0 && sample.prompt < length, "a sample has ", length,
             " tokens, ", sample.prompt, " of them prompt; T is ", layout_.seq_len);
  tokens_.insert(tokens_.end(), sample.tokens.begin(), sample.tokens.end());
  ends_.push_back(static_cast<int64_t>(tokens_.size()));
  prompts_.push_back(sample.prompt);
}

std::span<const uint8_t> TaskSource::sequence(int64_t index) const {
  CHECK_THAT(index >= 0 && index < size(), "sample ", index, " of ", size());
  const size_t i = static_cast<size_t>(index);
  const int64_t begin = i == 0 ? 0 : ends_[i - 1];
  return {tokens_.data() + begin, static_cast<size_t>(ends_[i] - begin)};
}

std::span<const uint8_t> TaskSource::prompt_tokens(int64_t index) const {
  const auto all = sequence(index);
  return all.first(static_cast<size_t>(prompts_[static_cast<size_t>(index)]));
}

void TaskSource::read(int64_t index, int32_t* tokens, int32_t* targets) const {
  const auto all = sequence(index);
  const int64_t length = static_cast<int64_t>(all.size()), T = layout_.seq_len;
  const int64_t prompt = prompts_[static_cast<size_t>(index)];
  const uint8_t* s = all.data();
  for (int64_t t = 0; t < T; ++t) {
    tokens[t] = t < length ? s[t] : layout_.pad;
    targets[t] = t + 1 >= prompt && t + 1 < length ? s[t + 1] : -1;
  }
}

std::vector<int32_t> TaskSource::prompt(int64_t index) const {
  const auto tokens = prompt_tokens(index);
  return {tokens.begin(), tokens.end()};
}

Answer cut_at_eos(const std::vector<int32_t>& generated, int32_t eos) {
  const auto end = std::find(generated.begin(), generated.end(), eos);
  return {{generated.begin(), end}, end != generated.end()};
}

}  // namespace crossply
