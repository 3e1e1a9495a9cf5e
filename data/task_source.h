// TaskSource: what generated tasks share. A sample is a token sequence, prompt first and eos last. It is stored in
// bytes, and read padded on the right, with only the tokens after the prompt as targets.
#pragma once

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

class TaskSource : public Source, public Task {
 public:
  struct Layout {
    int64_t seq_len, vocab_size;
    int32_t pad, eos;
  };
  explicit TaskSource(const Layout& layout) : layout_(layout) {}

  int64_t size() const override { return static_cast<int64_t>(prompts_.size()); }
  int64_t seq_len() const override { return layout_.seq_len; }
  int64_t vocab_size() const override { return layout_.vocab_size; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override;
  const Task* task() const override { return this; }
  std::vector<int32_t> prompt(int64_t index) const override;
  int32_t eos() const override { return layout_.eos; }

  std::span<const uint8_t> sequence(int64_t index) const;       // prompt, solution, eos
  std::span<const uint8_t> prompt_tokens(int64_t index) const;  // its first part

  // Hashes of every sequence that any split has. A collision drops a fresh sample, but never lets a duplicate in.
  using Seen = std::unordered_set<uint64_t>;
  // Draws until there are `count` samples that no split has seen.
  void fill(int64_t count, Seen& seen, const std::function<TaskSample()>& draw);

 private:
  void add(const TaskSample& sample);

  Layout layout_;
  std::vector<uint8_t> tokens_;
  std::vector<int64_t> ends_;     // (size) where each sequence ends in tokens_
  std::vector<int64_t> prompts_;  // (size) prompt lengths
};

// What was generated before the first eos, and whether there was one.
struct Answer {
  std::vector<int32_t> tokens;
  bool has_eos;
};
Answer cut_at_eos(const std::vector<int32_t>& generated, int32_t eos);

// Both splits of a task filled by `draw`, as many samples as the options ask for, or these. `name` is of the random
// streams.
Dataset fill_task(const DataOptions& options, const std::string& name, std::unique_ptr<TaskSource> train,
                  int64_t train_samples, std::unique_ptr<TaskSource> test, int64_t test_samples,
                  const std::vector<std::string>& words, const std::function<TaskSample(Random&)>& draw);

}  // namespace crossply
