// TaskSource: what generated tasks share. A sample is a token sequence, prompt first and eos last. It is stored in
// bytes, and read padded on the right, with only the tokens after the prompt as targets.
#pragma once

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
  template <class Draw>
  void fill(int64_t count, Seen& seen, Draw&& draw);

 private:
  void add(const TaskSample& sample);

  Layout layout_;
  std::vector<uint8_t> tokens_;
  std::vector<int64_t> ends_;     // (size) where each sequence ends in tokens_
  std::vector<int64_t> prompts_;  // (size) prompt lengths
};

template <class Draw>
void TaskSource::fill(int64_t count, Seen& seen, Draw&& draw) {
  constexpr int64_t most = int64_t{1} << 27;  // they are kept in memory
  if (count > most) fail(Exit::usage, "a task has at most ", most, " generated samples, asked for ", count);
  constexpr int patience = 10000;  // so many duplicates in a row mean that there is hardly a fresh sample left
  for (int duplicates = 0; size() < count;) {
    const TaskSample sample = draw();
    const std::string_view bytes(reinterpret_cast<const char*>(sample.tokens.data()), sample.tokens.size());
    if (seen.insert(stream_of(bytes)).second) {
      add(sample);
      duplicates = 0;
    } else if (++duplicates == patience) {
      fail(Exit::usage, "asked for more samples than there are: after ", seen.size(), " different ones came ", patience,
           " duplicates in a row");
    }
  }
}

// What was generated before the first eos, and whether there was one.
struct Answer {
  std::vector<int32_t> tokens;
  bool has_eos;
};
Answer cut_at_eos(const std::vector<int32_t>& generated, int32_t eos);

}  // namespace crossply
