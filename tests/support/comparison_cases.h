// Runs of comparisons that were never trained.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "train/lab/comparison.h"

namespace crossply::test {

inline ComparedRun run_of(const std::string& text, RunState state) {
  ComparedRun run{parse_arch_list(text)[0], {}, {}};
  run.plan.config.arch = run.choice.arch;
  run.plan.config.options = run.choice.options;
  run.plan.config.vocab_size = 32;
  run.plan.config.check(Exit::usage, text);
  run.plan.steps = 6000;
  run.state = state;
  run.result.accounting.parameters = 66496;
  run.result.accounting.flops_per_token = 381234.56;
  run.result.memory = 1000;
  if (state == RunState::waiting) return run;
  run.result.curves.step = {1, 2, 3};
  run.result.curves.loss = {3.0, 2.0, 0.4};
  run.result.curves.test_step = {2};
  run.result.curves.test_loss = {2.1};
  if (state == RunState::stopped) run.result.tokens_per_second = 90000;
  if (state != RunState::done) return run;
  run.result.curves.step.back() = 6000;
  run.result.tokens_per_second = 400040;
  run.result.train_loss = 0.36912;
  run.result.test_loss = 0.07413;
  run.result.answers = 0.13672;
  run.result.steps_valid = 0.0234;
  return run;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace crossply::test
