// Accuracy on a generated task: every test prompt is continued greedily and judged by the task itself.
#pragma once

#include "data/source.h"
#include "eval/decode.h"
#include "ranks/process_group.h"

namespace crossply {

struct Answers {
  int64_t asked = 0, right = 0, valid = 0;
  int64_t hard = 0, hard_right = 0;            // those that the task's known shortcut does not answer
  std::vector<int32_t> sample_prompt, sample;  // the first one, to look at
  double correct() const { return static_cast<double>(right) / static_cast<double>(asked); }
  double hard_correct() const { return static_cast<double>(hard_right) / static_cast<double>(hard); }
  double steps_valid() const { return static_cast<double>(valid) / static_cast<double>(asked); }
};

// How many tokens generation feeds a model at most, for a prompt and its answer. Samples have T + 1; their last token
// needs no position, so a GPT-2 that has learned T gives every answer that counts.
int64_t answer_length(const Config& config, int64_t T);
// Over the first `count` items of a source with a task, `rows` at a time, which the ranks of a job share. Rank 0 gets
// all; the others what they answered themselves.
Answers answer_task(Device& device, ParameterTable& params, const Config& config, const Source& source, int64_t count,
                    int64_t rows, ProcessGroup& group);

}  // namespace crossply
