// Accuracy on a generated task: every test prompt is continued greedily and judged by the task itself.
#pragma once

#include "data/source.h"
#include "eval/decode.h"

namespace crossply {

struct Answers {
  int64_t asked = 0, right = 0, valid = 0;
  std::vector<int32_t> sample_prompt, sample;  // the first one, to look at
  double correct() const { return static_cast<double>(right) / static_cast<double>(asked); }
  double steps_valid() const { return static_cast<double>(valid) / static_cast<double>(asked); }
};

// Over the first `count` items of a source with a task.
Answers answer_task(Device& device, ParameterTable& params, const Config& config, const Source& source, int64_t count);

}  // namespace crossply
