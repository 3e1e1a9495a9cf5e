// What the tests of the data room share.
#pragma once

#include <set>
#include <vector>

#include "data/task_source.h"
#include "tests/support/temp_dir.h"

namespace crossply::test {

inline DataOptions data_options(const std::string& spec, int64_t T, const std::string& val = "") {
  DataOptions o;
  o.spec = spec, o.val_spec = val, o.seq_len = T;
  return o;
}

// Of a generated task: so many samples for training and for tests.
inline DataOptions task_options(const std::string& spec, int64_t train, int64_t test, uint64_t seed = 1) {
  DataOptions o;
  o.spec = spec, o.seed = seed, o.train_samples = train, o.test_samples = test;
  return o;
}

struct Sample {
  std::vector<int32_t> tokens, targets;
  bool operator==(const Sample&) const = default;
};

inline Sample read_sample(const Source& source, int64_t index) {
  const size_t T = static_cast<size_t>(source.seq_len());
  Sample sample{std::vector<int32_t>(T, -77), std::vector<int32_t>(T, -77)};
  source.read(index, sample.tokens.data(), sample.targets.data());
  return sample;
}

// What follows the prompt of a task's sample, with eos.
inline std::vector<int32_t> solution_of(const TaskSource& source, int64_t index) {
  const auto all = source.sequence(index);
  return {all.begin() + static_cast<int64_t>(source.prompt_tokens(index).size()), all.end()};
}

// Runs body, which must refuse a file in one line that holds every one of `parts`.
template <class F>
void check_refused_in_a_line(const std::vector<std::string>& parts, F&& body) {
  check_fails(Exit::bad_data, parts, body);
  CHECK(!has(error_of(body).what(), "\n"));
}

// What a task's first sample says to an answer: wrong, answer, or answer+steps.
inline std::string verdict_of(const Task& task, const std::vector<int32_t>& generated) {
  const Task::Verdict v = task.judge(0, generated);
  return std::string(v.answer ? "answer" : "wrong") + (v.steps ? "+steps" : "");
}

// Of tokens that count from 0 on: first .. last - 1 but `never` are targets once each, of the token before, with all
// that stands before it in its window.
inline void check_scored_once(const Source& source, int32_t first, int64_t last, const std::set<int32_t>& never = {}) {
  std::multiset<int32_t> scored;
  for (int64_t i = 0; i < source.size(); ++i) {
    const Sample s = read_sample(source, i);
    for (size_t t = 0; t < s.targets.size(); ++t) {
      if (s.targets[t] < 0) continue;
      scored.insert(s.targets[t]);
      for (size_t u = 0; u <= t; ++u) CHECK(s.tokens[u] == s.targets[t] - static_cast<int32_t>(t - u) - 1);
    }
  }
  for (int32_t token = first; token < last; ++token) CHECK(scored.count(token) == (never.contains(token) ? 0 : 1));
  CHECK(static_cast<int64_t>(scored.size()) == last - first - static_cast<int64_t>(never.size()));
}

// Of tokens that count: the windows that a random one may be, in order, begin with these tokens.
inline void check_offsets(const Source& source, const std::vector<int32_t>& firsts) {
  const size_t T = static_cast<size_t>(source.seq_len());
  REQUIRE(source.offsets(source.seq_len()) == static_cast<int64_t>(firsts.size()));
  std::vector<int32_t> tokens(T), targets(T);
  for (size_t i = 0; i < firsts.size(); ++i) {
    source.read_at(static_cast<int64_t>(i), source.seq_len(), tokens.data(), targets.data());
    for (size_t t = 0; t < T; ++t) {
      CHECK(tokens[t] == firsts[i] + static_cast<int32_t>(t));
      CHECK(targets[t] == tokens[t] + 1);
    }
  }
}

}  // namespace crossply::test
