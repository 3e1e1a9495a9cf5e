// TaskSource: what generated tasks share. A sample is a token sequence, prompt first and eos last. It is read padded on
// the right, with only the tokens after the prompt as targets. Tokens are the task's own words, stored in bytes;
// data/encoded_task.h has the same samples in the tokens of a model that was trained on text.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "data/source.h"
#include "engine/rng.h"

namespace crossply {

struct TaskSample {
  std::vector<uint8_t> tokens;  // at most T + 1
  int64_t prompt = 0;           // how many of them are the prompt
};

// Sequences one behind another. Each is a prompt and its solution.
template <class Token>
class SampleStore {
 public:
  void add(std::span<const Token> sequence, int64_t prompt) {
    tokens_.insert(tokens_.end(), sequence.begin(), sequence.end());
    ends_.push_back(static_cast<int64_t>(tokens_.size()));
    prompts_.push_back(prompt);
    longest_ = std::max(longest_, static_cast<int64_t>(sequence.size()));
  }
  int64_t size() const { return static_cast<int64_t>(prompts_.size()); }
  int64_t longest() const { return longest_; }  // tokens of a sequence
  std::span<const Token> sequence(int64_t index) const {
    CHECK_THAT(index >= 0 && index < size(), "sample ", index, " of ", size());
    const size_t i = static_cast<size_t>(index);
    const int64_t begin = i == 0 ? 0 : ends_[i - 1];
    return {tokens_.data() + begin, static_cast<size_t>(ends_[i] - begin)};
  }
  std::span<const Token> prompt(int64_t index) const {
    return sequence(index).first(static_cast<size_t>(prompts_[static_cast<size_t>(index)]));
  }
  // As Source::read, padded with `pad`.
  void read(int64_t index, int64_t T, int32_t pad, int32_t* tokens, int32_t* targets) const {
    const auto all = sequence(index);
    const int64_t length = static_cast<int64_t>(all.size()), prompt = prompts_[static_cast<size_t>(index)];
    const Token* s = all.data();
    for (int64_t t = 0; t < T; ++t) {
      tokens[t] = t < length ? s[t] : pad;
      targets[t] = t + 1 >= prompt && t + 1 < length ? s[t + 1] : -1;
    }
  }

 private:
  std::vector<Token> tokens_;
  std::vector<int64_t> ends_;     // (size) where each sequence ends in tokens_
  std::vector<int64_t> prompts_;  // (size) prompt lengths
  int64_t longest_ = 0;
};

class TaskSource : public Source, public Task {
 public:
  struct Layout {
    int64_t seq_len, vocab_size;
    int32_t pad, eos;
  };
  explicit TaskSource(const Layout& layout) : layout_(layout) {}

  int64_t size() const override { return samples_.size(); }
  int64_t seq_len() const override { return layout_.seq_len; }
  int64_t vocab_size() const override { return layout_.vocab_size; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    samples_.read(index, layout_.seq_len, layout_.pad, tokens, targets);
  }
  const Task* task() const override { return this; }
  std::vector<int32_t> prompt(int64_t index) const override;
  int32_t eos() const override { return layout_.eos; }

  // prompt, solution, eos; and its first part
  std::span<const uint8_t> sequence(int64_t index) const { return samples_.sequence(index); }
  std::span<const uint8_t> prompt_tokens(int64_t index) const { return samples_.prompt(index); }

  // Words as people write them. The text of a prompt is the beginning of its sample's text. eos has no text.
  virtual std::string text_of(std::span<const uint8_t> words) const = 0;
  // The inverse: the words of any text, -1 where a word is unknown. Spaces between words do not count.
  virtual std::vector<int32_t> words_of(const std::string& text) const = 0;

  // Hashes of every sequence that any split has. A collision drops a fresh sample, but never lets a duplicate in.
  using Seen = std::unordered_set<uint64_t>;
  // Draws until there are `count` samples that no split has seen.
  void fill(int64_t count, Seen& seen, const std::function<TaskSample()>& draw);

 private:
  void add(const TaskSample& sample);

  Layout layout_;
  SampleStore<uint8_t> samples_;
};

// What was generated before the first eos, and whether there was one.
struct Answer {
  std::vector<int32_t> tokens;
  bool has_eos;
};
Answer cut_at_eos(const std::vector<int32_t>& generated, int32_t eos);

// Both splits of a task, and its words.
struct TaskSplits {
  std::unique_ptr<TaskSource> train, test;
  Tokenizer words;
};
// Filled by `draw`, as many samples as the options ask for, or these. `name` is of the random streams.
TaskSplits fill_task(const DataOptions& options, const std::string& name, std::unique_ptr<TaskSource> train,
                     int64_t train_samples, std::unique_ptr<TaskSource> test, int64_t test_samples,
                     const std::vector<std::string>& words, const std::function<TaskSample(Random&)>& draw);

}  // namespace crossply
