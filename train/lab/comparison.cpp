#include "train/lab/comparison.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "cli/format.h"
#include "engine/io/json.h"

namespace crossply {
namespace {

// Still to be done by this program.
bool is_open(const ComparedRun& run) {
  return is_unfinished(run) && run.state != RunState::running && !run.tried && !run.elsewhere;
}
bool is_pending(const ComparedRun& run) { return is_open(run) || run.state == RunState::running; }

// Those of an arm that `counts`; where its rate is not settled but `will_be`, also the seeds that follow.
template <class Counts, class WillBe>
int64_t count_runs(const Comparison& comparison, Counts&& counts, WillBe&& will_be) {
  int64_t count = 0;
  for (const Arm& arm : arms_of(comparison)) {
    if (!arm.mine) continue;
    for (const size_t i : needed(arm)) count += counts(comparison.runs[i]);
    if (!arm.settled && will_be(arm)) count += std::ssize(arm.seeds);
  }
  return count;
}

Measured last_of(const std::vector<double>& values, const std::vector<double>& steps) {
  return values.empty() ? Measured() : Measured{values.back(), static_cast<int64_t>(steps.back())};
}

Measured task_share(const ComparedRun& run, double at_the_end, const std::vector<double>& before) {
  if (is_done(run)) return {at_the_end < 0 ? NAN : at_the_end, run.plan.steps};
  return last_of(before, run.result.curves.answer_step);
}

}  // namespace

const char* name_of(RunState state) {
  switch (state) {
    case RunState::waiting: return "not started";
    case RunState::running: return "running";
    case RunState::done: return "done";
    case RunState::stopped: return "stopped";
    case RunState::failed: return "failed";
  }
  return "";
}

bool is_done(const ComparedRun& run) { return run.state == RunState::done; }

bool is_unfinished(const ComparedRun& run) { return !is_done(run) && !diverged(run); }

bool diverged(const ComparedRun& run) { return run.state == RunState::failed && run.result.code == Exit::not_finite; }

int64_t steps_of(const ComparedRun& run) {
  const std::vector<double>& steps = run.result.curves.step;
  return steps.empty() ? 0 : static_cast<int64_t>(steps.back());
}

int64_t test_size_of(const Comparison& comparison, const ComparedRun& run) {
  const int64_t all = comparison.test_size, first = all / 2;
  const std::string& part = run.plan.data.test_part;
  return part == "all" ? all : part == "first_half" ? first : all - first;
}

std::string remark(const ComparedRun& run) {
  if (is_done(run)) return "";
  if (run.state == RunState::waiting) return name_of(run.state);
  const std::string at = str(" after step ", steps_of(run), " of ", run.plan.steps);
  return name_of(run.state) + at + (run.error.empty() ? "" : ": " + run.error);
}

Measured train_loss(const ComparedRun& run) {
  if (is_done(run)) return {run.result.train_loss, run.plan.steps};
  return {final_loss(run.result.curves), steps_of(run)};
}
Measured test_loss(const ComparedRun& run) {
  const RunCurves& curves = run.result.curves;
  return is_done(run) ? Measured{run.result.test_loss, run.plan.steps} : last_of(curves.test_loss, curves.test_step);
}
Measured answers(const ComparedRun& run) { return task_share(run, run.result.answers, run.result.curves.answers); }
Measured steps_valid(const ComparedRun& run) {
  return task_share(run, run.result.steps_valid, run.result.curves.steps_valid);
}

std::optional<size_t> next_run(const Comparison& comparison) {
  std::vector<Arm> arms = arms_of(comparison);
  std::erase_if(arms, [](const Arm& arm) { return !arm.mine; });
  for (const Arm& arm : arms)
    for (const size_t i : arm.sweep)
      if (is_open(comparison.runs[i])) return i;
  std::vector<std::vector<size_t>> seeds;
  size_t most = 0;
  for (const Arm& arm : arms) {
    if (!arm.has_rate()) continue;
    seeds.push_back(arm.seeds);
    seeds.back().insert(seeds.back().end(), arm.more.begin(), arm.more.end());
    most = std::max(most, seeds.back().size());
  }
  for (size_t k = 0; k < most; ++k)
    for (const std::vector<size_t>& of_arm : seeds)
      if (k < of_arm.size() && is_open(comparison.runs[of_arm[k]])) return of_arm[k];
  return {};
}

size_t runs_planned(const Arm& arm) {
  const bool half_and_twice = arm.axes.size() == 1 && arm.axes[0].muon;
  return arm.sweep.size() + arm.seeds.size() + (half_and_twice ? 2 : 0);
}

int64_t runs_left(const Comparison& comparison) {
  return count_runs(comparison, is_pending, [&](const Arm& arm) {
    return std::all_of(arm.sweep.begin(), arm.sweep.end(),
                       [&](size_t i) { return is_pending(comparison.runs[i]) || !is_unfinished(comparison.runs[i]); });
  });
}

int64_t runs_unfinished(const Comparison& comparison) {
  return count_runs(comparison, is_unfinished, [](const Arm&) { return true; });
}

int64_t runs_ended(const Comparison& comparison) {
  return count_runs(
      comparison, [](const ComparedRun& run) { return !is_pending(run) && run.state != RunState::stopped; },
      [](const Arm&) { return false; });
}

int64_t runs_in_all(const Comparison& comparison) {
  int64_t ended = 0;
  for (const Arm& arm : arms_of(comparison))
    for (const size_t i : arm.mine ? needed(arm) : std::vector<size_t>()) ended += !is_pending(comparison.runs[i]);
  return ended + runs_left(comparison);
}

std::vector<const ComparedRun*> failures_of(const Comparison& comparison) {
  std::vector<const ComparedRun*> out;
  for (const Arm& arm : arms_of(comparison)) {
    const ComparedRun* worst = nullptr;
    for (const size_t i : needed(arm)) {
      const ComparedRun& run = comparison.runs[i];
      if (run.state != RunState::failed || (diverged(run) && arm.works)) continue;
      if (worst == nullptr || (diverged(*worst) && !diverged(run))) worst = &run;
    }
    if (worst != nullptr) out.push_back(worst);
  }
  return out;
}

std::string lr_text(double lr) { return json_text(nlohmann::json(lr)); }

std::string run_name(const Comparison& comparison, const ComparedRun& run) {
  const bool choice = !comparison.rules.every_rate && (comparison.rates.size() > 1 || comparison.muon_rates.size() > 1);
  return arm_name(comparison, run) + (choice ? rate_name(run) : "") +
         (choice || seeds_of(comparison).size() > 1 ? str(" seed ", run.plan.seed) : "");
}

std::string run_directory(const ComparedRun& run) {
  return run.directory.empty() ? run.choice.file_name() : run.directory;
}

std::string record_path(const Comparison& comparison, const ComparedRun& run) {
  return comparison.out + "/records/" + run_directory(run) + ".json";
}

std::vector<std::string> record_paths(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".json") paths.push_back(it->path().string());
  std::ranges::sort(paths);
  return paths;
}

static Spread spread_over(const Comparison& comparison, const std::vector<size_t>& places, Measure measure) {
  std::vector<double> values;
  for (const size_t i : places)
    if (const double value = measure(comparison.runs[i]).value; is_done(comparison.runs[i]) && std::isfinite(value))
      values.push_back(value);
  return spread_of(values);
}

Spread spread_over(const Comparison& comparison, const Arm& arm, Measure measure) {
  return spread_over(comparison, arm.seeds, measure);
}

Spread further_spread(const Comparison& comparison, const Arm& arm) {
  return spread_over(comparison, arm.more, test_loss);
}

double tokens_per_second_of(const Comparison& comparison, const Arm& arm) {
  std::vector<double> rates;
  for (const size_t i : arm.seeds) {
    const ComparedRun& run = comparison.runs[i];
    if (run.side_by_side > 1) return NAN;
    if (run.result.tokens_per_second > 0) rates.push_back(run.result.tokens_per_second);
  }
  return spread_of(rates).mean;
}

double relative_time(const Comparison& comparison, const std::vector<size_t>& of) {
  const auto rate = [&](const std::vector<size_t>& places) {
    std::vector<double> rates;
    for (const size_t i : places) {
      const ComparedRun& run = comparison.runs[i];
      if (is_done(run) && run.side_by_side == 1 && run.result.tokens_per_second > 0)
        rates.push_back(run.result.tokens_per_second);
    }
    return spread_of(rates).mean;
  };
  return rate(arms_of(comparison)[0].seeds) / rate(of);
}

double relative_memory(const Comparison& comparison, const ComparedRun& run) {
  return static_cast<double>(run.result.memory) / static_cast<double>(comparison.runs[0].result.memory);
}

std::string parameter_warning(const Comparison& comparison) {
  const ComparedRun& baseline = comparison.runs[0];
  std::vector<std::string> differing;
  const std::vector<Arm> arms = arms_of(comparison);
  std::set<std::string> seen;
  for (const Arm& arm : arms) {
    if (!seen.insert(arm.arch).second) continue;
    const ComparedRun& run = comparison.runs[arm.seeds[0]];
    const double ratio = static_cast<double>(run.result.accounting.parameters) /
                         static_cast<double>(baseline.result.accounting.parameters);
    if (std::abs(ratio - 1) > 0.1) differing.push_back(arm.arch + format_number(" %+.0f %%", 100 * (ratio - 1)));
  }
  std::string list;
  for (const std::string& one : differing) list += (list.empty() ? " " : ", ") + one;
  return list.empty() ? "" : "warning: not as many parameters as " + baseline.choice.text + ":" + list;
}

}  // namespace crossply
