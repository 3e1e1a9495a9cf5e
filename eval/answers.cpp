#include "eval/answers.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace crossply {
namespace {

// Rank 0 adds up what all have counted. Throws at all ranks what one has met.
void add_others(Answers& answers, const std::string& failure, ProcessGroup& group) {
  std::array numbers{&answers.asked, &answers.right, &answers.valid, &answers.hard, &answers.hard_right};
  std::string mine;
  for (const int64_t* number : numbers) mine += str(*number, " ");
  std::string first_failure;
  const std::vector<std::string> all = group.collect(mine + failure);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream theirs(all[rank]);
    for (int64_t* number : numbers) {
      int64_t more = 0;
      theirs >> more;
      if (rank > 0) *number += more;
    }
    if (std::string why; first_failure.empty() && std::getline(theirs >> std::ws, why)) first_failure = why;
  }
  first_failure = group.share(first_failure);
  if (!first_failure.empty()) fail(Exit::not_finite, first_failure);
}

}  // namespace

int64_t answer_length(const Config& config, int64_t T) {
  return config.gpt2() ? std::min(T + 1, config.max_position_embeddings) : T + 1;
}

Answers answer_task(Device& device, ParameterTable& params, const Config& config, const Source& source, int64_t count,
                    int64_t rows, ProcessGroup& group) {
  const Task& task = *source.task();
  Answers answers;
  count = std::min(count, source.size());
  rows = std::min(count, rows);
  Decoder decoder(device, params, config, rows, answer_length(config, source.seq_len()));
  const auto answer = [&](int64_t first) {
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t i = first; i < std::min(first + rows, count); ++i) prompts.push_back(task.prompt(i));
    const auto written = generate(decoder, prompts, task.max_new_tokens(), {task.eos()}, most_likely);
    for (size_t row = 0; row < written.size(); ++row) {
      const int64_t index = first + static_cast<int64_t>(row);
      const Task::Verdict verdict = task.judge(index, written[row]);
      ++answers.asked;
      answers.right += verdict.answer;
      answers.valid += verdict.steps;
      answers.hard += task.is_hard(index);
      answers.hard_right += task.is_hard(index) && verdict.answer;
    }
    if (first == 0) answers.sample_prompt = prompts[0], answers.sample = written[0];
  };
  if (group.world.alone()) {
    for (int64_t first = 0; first < count; first += rows) answer(first);
    return answers;
  }
  std::string failure;
  try {
    // Who has nothing to answer does the first ones as well: then devices stay alike in what they have recorded.
    if (group.world.rank * rows >= count) answer(0), answers = {};
    for (int64_t first = group.world.rank * rows; first < count; first += rows * group.world.size) answer(first);
  } catch (const Error& error) {
    if (error.code != Exit::not_finite) throw;
    failure = error.what();
  }
  add_others(answers, failure, group);
  return answers;
}

}  // namespace crossply
