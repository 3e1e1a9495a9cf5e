#include "data/task_source.h"

#include <algorithm>

namespace crossply {

void TaskSource::add(const TaskSample& sample) {
  const int64_t length = static_cast<int64_t>(sample.tokens.size());
  CHECK_THAT(length <= layout_.seq_len + 1 && sample.prompt > 0 && sample.prompt < length, "a sample has ", length,
             " tokens, ", sample.prompt, " of them prompt; T is ", layout_.seq_len);
  samples_.add(sample.tokens, sample.prompt);
}

void TaskSource::fill(int64_t count, Seen& seen, const std::function<TaskSample()>& draw) {
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

std::vector<int32_t> TaskSource::prompt(int64_t index) const {
  const auto tokens = prompt_tokens(index);
  return {tokens.begin(), tokens.end()};
}

Answer cut_at_eos(const std::vector<int32_t>& generated, int32_t eos) {
  const auto end = std::find(generated.begin(), generated.end(), eos);
  return {{generated.begin(), end}, end != generated.end()};
}

TaskSplits fill_task(const DataOptions& options, const std::string& name, std::unique_ptr<TaskSource> train,
                     int64_t train_samples, std::unique_ptr<TaskSource> test, int64_t test_samples,
                     const std::vector<std::string>& words, const std::function<TaskSample(Random&)>& draw) {
  TaskSource::Seen seen;
  Random first(options.seed, stream_of(name + ".train")), second(options.seed, stream_of(name + ".test"));
  train->fill(options.train_samples ? options.train_samples : train_samples, seen, [&] { return draw(first); });
  test->fill(options.test_samples ? options.test_samples : test_samples, seen, [&] { return draw(second); });
  return {std::move(train), std::move(test), Tokenizer::words(words)};
}

}  // namespace crossply
