// Comparisons of several seeds.
#include <cmath>
#include <filesystem>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "tests/support/comparison_cases.h"
#include "tests/support/temp_dir.h"
#include "train/lab/side_by_side.h"

using namespace crossply;
using namespace crossply::test;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// LLaMA and LIMe at one rate from several seeds: nothing done yet.
Comparison experiment(const std::vector<uint64_t>& seeds = {1, 2, 3}, double lr = 0.001,
                      const std::string& out = "nowhere") {
  Comparison comparison{"text:x", out, {}};
  for (const char* arch : {"llama", "lime"})
    for (const uint64_t seed : seeds) {
      ComparedRun run = run_of(arch, RunState::waiting);
      run.plan.lr = lr, run.plan.seed = seed;
      run.directory = str(arch, "-", lr, "-", seed);
      comparison.runs.push_back(run);
    }
  comparison.rates = {lr};
  return comparison;
}

ComparedRun& run_at(Comparison& comparison, const std::string& arch, uint64_t seed) {
  for (ComparedRun& run : comparison.runs)
    if (run.choice.text == arch && run.plan.seed == seed) return run;
  throw std::logic_error("no such run");
}

void finish(ComparedRun& run, double test_loss) {
  const ComparedRun done = run_of(run.choice.text, RunState::done);
  run.state = RunState::done;
  run.result = done.result;
  run.result.test_loss = test_loss;
  run.result.answers = run.result.steps_valid = -1;
}

void fail_with(ComparedRun& run, Exit code) {
  run.state = RunState::failed;
  run.result.code = code;
  run.tried = true;
}

// Trains what is next until nothing is, by a rule for the loss.
template <class Loss>
void train_all_runs(Comparison& comparison, Loss&& loss) {
  while (const auto next = next_run(comparison)) {
    ComparedRun& run = comparison.runs[*next];
    if (const double value = loss(run); std::isfinite(value)) finish(run, value);
    else fail_with(run, Exit::not_finite);
  }
}

}  // namespace

TEST_CASE(
    "comparison: an architecture of which a seed diverges has failed, and so has one of which a run could not end") {
  Comparison comparison = experiment();
  train_all_runs(comparison, [](const ComparedRun& run) { return run.choice.text == "lime" ? double{NAN} : 1.0; });
  REQUIRE(failures_of(comparison).size() == 1);
  CHECK(failures_of(comparison)[0]->choice.text == "lime");
  CHECK(failures_of(comparison)[0]->result.code == Exit::not_finite);
  CHECK(has(results_verdicts(comparison), "no seed has ended for both: cannot be told"));
  fail_with(run_at(comparison, "llama", 1), Exit::io);
  REQUIRE(failures_of(comparison).size() == 2);
  CHECK(failures_of(comparison)[0]->result.code == Exit::io);
  CHECK(runs_unfinished(comparison) == 1);
  run_at(comparison, "llama", 1).tried = false;  // resumed
  CHECK(run_name(comparison, comparison.runs[*next_run(comparison)]) == "llama seed 1");
}

TEST_CASE("comparison: after a stop it says what is left to do, with the last numbers") {
  Comparison comparison = experiment({1, 2});
  finish(run_at(comparison, "llama", 1), 1);
  ComparedRun& stopped = run_at(comparison, "llama", 2);
  stopped.state = RunState::stopped, stopped.tried = true;
  CHECK(has(results_table(comparison), "\n3 runs are still to be done\n"));
  CHECK(has(results_table(comparison), "  1 of 2  "));
  Comparison seeds = experiment({1, 2});
  seeds.runs[0].state = RunState::stopped;
  seeds.runs[0].result.curves = run_of("llama", RunState::stopped).result.curves;
  CHECK(has(results_table(seeds), "  2.100 @2"));
}

TEST_CASE("comparison: differences of means, and their verdict by Dunnett's test") {
  Comparison comparison = experiment();
  const double llama[] = {2.0, 3.0, 4.0}, lime[] = {1.98, 2.978, 3.98};  // seeds differ, lime's lead does not
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    finish(run_at(comparison, "llama", seed), llama[seed - 1]);
    finish(run_at(comparison, "lime", seed), lime[seed - 1]);
  }
  // Of one arm and the same seeds it is Student's of the differences, as far as that is simulated.
  const std::vector<Arm> arms = arms_of(comparison);
  const std::vector<Family> families = families_of_architectures(comparison, arms);
  REQUIRE(families.size() == 1);
  CHECK(families[0].baseline == &arms[0]);
  const Verdict& verdict = families[0].of(arms[1]);
  CHECK(verdict.difference == doctest::Approx(-0.0620 / 3));
  CHECK(verdict.interval == doctest::Approx(4.3027 * 0.002 / 3).epsilon(0.03));
  CHECK(families_of_optimizers(comparison, arms).empty());
  CHECK(has(results_verdicts(comparison), "test loss against llama, over 3 seeds; 80 % of repeats would find 0.00"));
  CHECK(has(results_verdicts(comparison), "  lime: lower by 0.0207 +- 0.002"));
  CHECK(has(results_verdicts(comparison), ": significant\n"));
  CHECK(has(results_table(comparison), "3.0000 +- 1.0000"));
  const std::string text = results_markdown(comparison);
  CHECK(has(text, "* lime: lower by 0.0207 +- 0.002"));
  CHECK(has(text, "deviation of what arms and seeds leave 0.0008 (2 degrees of freedom), critical value 4."));
  CHECK(has(text, "losses of the same seed correlate by 1.00."));
  const json arm = known_json(results_json(comparison))["architectures"][1];
  CHECK(arm["larger_than_spread"] == true);
  CHECK(arm["difference_interval"].get<double>() == verdict.interval);

  finish(run_at(comparison, "lime", 3), 4.5);
  CHECK(has(results_verdicts(comparison), "  lime: higher by 0.1527 +- 0.7"));
  CHECK(has(results_verdicts(comparison), ": not significant\n"));
  run_at(comparison, "lime", 3).state = RunState::stopped;
  CHECK(has(results_verdicts(comparison), " (2 seeds): not significant"));  // the third is no block
  CHECK(has(results_table(comparison), "  2 of 3  "));
  fail_with(run_at(comparison, "lime", 3), Exit::not_finite);
  CHECK(has(results_verdicts(comparison), "; a seed of lime diverged: not judged"));
  run_at(comparison, "lime", 3).state = RunState::waiting;
  run_at(comparison, "lime", 2).state = RunState::waiting;
  for (const uint64_t seed : {2, 3}) run_at(comparison, "llama", seed).state = RunState::waiting;
  CHECK(has(results_markdown(comparison), "with one seed: whether seeds differ by as much cannot be told"));
  CHECK(known_json(results_json(comparison))["architectures"][1]["larger_than_spread"].is_null());
  run_at(comparison, "llama", 1).result.answers = 0.5;  // of a task there is more to say
  comparison.data = "arith:3";
  CHECK(has(results_markdown(comparison), "which also draw the task's data"));
  for (const std::string& line : lines_of(results_table(comparison) + results_verdicts(comparison)))
    CHECK_MESSAGE(line.size() <= 80, line);
}

TEST_CASE("comparison: of several rates and seeds as many runs at a time as --jobs says, but for large ones") {
  CHECK(choose_jobs(experiment(), 4).count == 4);
  CHECK(choose_jobs(experiment(), 4).reason.empty());
  Comparison huge = experiment();
  for (ComparedRun& run : huge.runs) run.result.planned_memory = 1e18;
  CHECK(has(choose_jobs(huge, 4).reason, "too small for 4 runs at a time; with --jobs 1 "));
  Comparison large = experiment();
  large.runs[0].result.accounting.flops_per_token = 1e12;
  large.runs[0].plan.data.seq_len = 16;
  CHECK(choose_jobs(large, 0).count == 1);
}

TEST_CASE("comparison: the picture of several seeds has bands") {
  const TempDir scratch;
  Comparison comparison = experiment({1, 2}, 0.001, scratch.path);
  for (ComparedRun& run : comparison.runs) {
    finish(run, 1);
    run.result.curves.loss[1] += static_cast<double>(run.plan.seed);
  }
  write_results(comparison);
  const std::string svg = read_text(scratch.file("compare.svg"));
  CHECK(has(svg, "<polygon"));
  CHECK(has(svg, "test loss, mean \u00B1 one standard deviation over the seeds"));
  CHECK(has(svg, ">training loss, mean over the seeds<"));
}

TEST_CASE("comparison: resumed with more or fewer seeds and architectures, it keeps every run") {
  const TempDir scratch;
  Comparison before = experiment({1, 2}, 0.001, scratch.path);
  train_all_runs(before, [](const ComparedRun& run) { return 2 - run.plan.lr; });
  for (const ComparedRun& run : before.runs) fs::create_directory(scratch.file(run.directory));
  write_results(before);
  Experiment read;
  REQUIRE(take_comparison_settings(scratch.path, read));
  CHECK(read.rates == std::vector<double>{0.001});
  CHECK(read.seeds == std::vector<uint64_t>{1, 2});

  Comparison more = experiment({1, 2, 3}, 0.001, scratch.path);
  for (ComparedRun& run : more.runs) run.directory = "new-" + run.directory;
  take_up(more);
  CHECK(runs_left(more) == 2);
  CHECK(run_at(more, "lime", 2).directory == "lime-0.001-2");
  CHECK(run_at(more, "lime", 3).directory == "new-lime-0.001-3");

  Comparison fewer = experiment({1}, 0.001, scratch.path);
  fewer.runs.resize(1);  // llama's
  take_up(fewer);
  CHECK(runs_left(fewer) == 0);
  CHECK(fewer.others.size() == 3);
  write_results(fewer);
  CHECK(known_json(read_text(scratch.file("results.json")))["others"].size() == 3);
  Comparison again = experiment({1, 2}, 0.001, scratch.path);
  take_up(again);
  CHECK(runs_left(again) == 0);
  CHECK(again.others.empty());

  Comparison other = experiment({1}, 0.5, scratch.path);
  CHECK(has(error_of([&] { take_up(other); }).what(), "--lr 0.001, the flags say 0.5"));
  json changed = read_json(scratch.file("results.json"));
  for (const json& damaged : {json("../x"), json(""), json(3), json(".git")}) {
    changed["runs"][0]["directory"] = damaged;
    write_text(scratch.file("results.json"), json_text(changed));
    Comparison copy = experiment({1, 2}, 0.001, scratch.path);
    CHECK_MESSAGE(error_of([&] { take_up(copy); }).code == Exit::bad_data, json_text(damaged));
  }
}
