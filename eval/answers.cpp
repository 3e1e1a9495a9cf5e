#include "eval/answers.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace crossply {
namespace {

void add_others(Answers& answers, Job& job) {
  std::array numbers{&answers.asked, &answers.right, &answers.valid, &answers.hard, &answers.hard_right};
  std::string mine;
  for (const int64_t* number : numbers) mine += str(*number, " ");
  const std::vector<std::string> all = job.collect(mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    std::istringstream theirs(all[rank]);
    for (int64_t* number : numbers) {
      int64_t more = 0;
      theirs >> more;
      *number += more;
    }
  }
}

}  // namespace

Answers answer_task(Device& device, ParameterTable& params, const Config& config, const Source& source, int64_t count,
                    int64_t rows, Job& job) {
  const Task& task = *source.task();
  Answers answers;
  count = std::min(count, source.size());
  rows = std::min(count, rows);
  Decoder decoder(device, params, config, rows, source.seq_len() + 1);
  for (int64_t first = job.place.rank * rows; first < count; first += rows * job.place.size) {
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t i = first; i < std::min(first + rows, count); ++i) prompts.push_back(task.prompt(i));
    const auto written = generate(decoder, prompts, task.max_new_tokens(), task.eos(), most_likely);
    for (size_t row = 0; row < written.size(); ++row) {
      const int64_t index = first + static_cast<int64_t>(row);
      const Task::Verdict verdict = task.judge(index, written[row]);
      ++answers.asked;
      answers.right += verdict.answer;
      answers.valid += verdict.steps;
      answers.hard += task.is_hard(index);
      answers.hard_right += task.is_hard(index) && verdict.answer;
    }
    if (first == 0) {
      answers.sample_prompt = prompts[0];
      answers.sample = written[0];
    }
  }
  if (!job.place.alone()) add_others(answers, job);
  return answers;
}

}  // namespace crossply
