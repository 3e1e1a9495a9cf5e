// Arms of a comparison: which rates are tried, by which seed and on which half of the test set, and which is the best.
#include <cmath>
#include <filesystem>
#include <set>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "tests/support/comparison_cases.h"
#include "tests/support/temp_dir.h"
#include "train/settings/resolve.h"

using namespace crossply;
using namespace crossply::test;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// As compare plans it: nothing done yet.
Comparison tuned(const std::vector<std::string>& with, const std::vector<double>& rates,
                 const std::vector<double>& muon_rates = {}, const std::string& out = "nowhere") {
  Comparison comparison{"text:x", out, {}};
  comparison.rates = rates, comparison.muon_rates = muon_rates, comparison.choosing_seed = usual_choosing_seed;
  for (const char* arch : {"llama", "lime"})
    for (const std::string& optimizer : with) {
      ComparedRun run = run_of(arch, RunState::waiting);
      run.plan.optimizer = optimizer, run.plan.lr = rates[0], run.plan.muon.lr = 1;
      choose_muon(run.plan);
      for (const double rate : optimizer == "adamw" ? rates : muon_rates) add_rate(comparison, run, rate, {1, 2, 3});
    }
  name_directories(comparison);
  return comparison;
}

void finish(ComparedRun& run, double test_loss) {
  run.tried = true;
  if (!std::isfinite(test_loss)) {
    run.state = RunState::failed, run.result.code = Exit::not_finite;
    return;
  }
  const std::string dir = run.result.run_dir;
  run.result = run_of(run.choice.text, RunState::done).result;
  run.result.run_dir = dir;
  run.state = RunState::done;
  run.result.test_loss = test_loss;
}

using Loss = double (*)(const ComparedRun&);
// Trains up to `most` runs, as compare does; their names in order.
std::vector<std::string> train(Comparison& comparison, Loss loss, int most = 1000) {
  std::vector<std::string> order;
  extend(comparison);
  for (auto next = next_run(comparison); next && most-- > 0; next = next_run(comparison)) {
    ComparedRun& run = comparison.runs[*next];
    order.push_back(run_name(comparison, run));
    fs::create_directories(run.plan.out);
    finish(run, loss(run));
    extend(comparison);
  }
  return order;
}

double best_at_2e_3(const ComparedRun& run) {
  return 2 + std::abs(std::log(rate_of(run) / 2e-3)) + 0.001 * static_cast<double>(run.plan.seed);
}
// The larger the better, AdamW until .0081, Muon without end.
double best_at_the_edge(const ComparedRun& run) {
  if (run.plan.optimizer == "adamw" && run.plan.lr > 0.0081) return NAN;
  return 2 - std::log(rate_of(run)) + 0.001 * static_cast<double>(run.plan.seed);
}

// AdamW's best is lost by a seed that is reported, once Muon's rates are being tried.
double lost_later(const ComparedRun& run) {
  return run.plan.lr == 2e-3 && run.plan.seed == 2 && run.plan.optimizer == "adamw" ? NAN : best_at_2e_3(run);
}

std::vector<double> rates_tried(const Comparison& comparison, const Arm& arm) {
  std::vector<double> rates;
  for (const size_t i : arm.sweep) rates.push_back(rate_of(comparison.runs[i]));
  return rates;
}

}  // namespace

TEST_CASE("arms: seed 0 tries the rates on the first half, the reported seeds have the best and the second half") {
  const TempDir scratch;
  Comparison comparison = tuned({"adamw"}, {1e-3, 2e-3, 4e-3}, {}, scratch.path);
  CHECK(runs_in_all(comparison) == 12);
  const std::vector<std::string> order = train(comparison, best_at_2e_3);
  REQUIRE(order.size() == 12);
  CHECK(order[0] == "llama lr 0.001 seed 0");
  CHECK(order[5] == "lime lr 0.004 seed 0");
  CHECK(order[6] == "llama lr 0.002 seed 1");
  CHECK(order[11] == "lime lr 0.002 seed 3");
  for (const ComparedRun& run : comparison.runs)
    CHECK(run.plan.data.test_part == (run.plan.seed == 0 ? "first_half" : "second_half"));
  CHECK(seeds_of(comparison) == std::vector<uint64_t>{1, 2, 3});
  const std::vector<Arm> arms = arms_of(comparison);
  CHECK(arms[0].rate == 2e-3);
  CHECK(!arms[0].at_edge);
  CHECK(spread_over(comparison, arms[0], test_loss).n == 3);
  CHECK(spread_over(comparison, arms[0], test_loss).mean == doctest::Approx(2.002));  // without seed 0
  const std::string text = results_markdown(comparison);
  CHECK(has(text, "of seed 0 on the first half of the test set"));
  CHECK(has(text, "| llama | adamw | 0.002 | 0, chooses |"));
  CHECK(!has(text, "too good"));
  comparison.test_size = 101;
  CHECK(test_size_of(comparison, comparison.runs[0]) == 50);
  CHECK(test_size_of(comparison, comparison.runs[arms[0].seeds[0]]) == 51);
}

TEST_CASE("arms: beyond an edge a rate is tried, three at most, and none beyond one that diverged") {
  const TempDir scratch;
  Comparison comparison = tuned({"adamw", "normuon"}, {1e-3, 2e-3}, {0.01, 0.03}, scratch.path);
  const std::vector<std::string> order = train(comparison, best_at_the_edge);
  const std::vector<Arm> arms = arms_of(comparison);
  REQUIRE(arms.size() == 4);
  CHECK(arms[0].name == "llama adamw");
  CHECK(rates_tried(comparison, arms[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3});
  CHECK(arms[0].rate == 8e-3);
  CHECK(!arms[0].at_edge);
  CHECK(arms[1].name == "llama normuon");
  CHECK(rates_tried(comparison, arms[1]) == std::vector<double>{0.01, 0.03, 0.09, 0.27, 0.81});
  CHECK(arms[1].at_edge);
  CHECK(arms[1].settled);
  CHECK(order.size() == 2 * (5 + 3 + 5 + 3));
  CHECK(std::set<std::string>(order.begin(), order.end()).size() == order.size());
  const std::string table = results_table(comparison);
  CHECK(has(table, "diverged at lr 0.016: llama adamw, lime adamw\n"));
  CHECK(has(table, "the best lr is at the edge of all that were tried: llama normuon, lime normuon\n"));
  for (const std::string& line : lines_of(table + results_verdicts(comparison))) CHECK_MESSAGE(line.size() <= 80, line);

  Comparison falling = tuned({"adamw"}, {4e-3, 8e-3, 16e-3}, {}, scratch.file("falling"));
  train(falling, [](const ComparedRun& run) { return rate_of(run); });
  CHECK(rates_tried(falling, arms_of(falling)[0]) == std::vector<double>{5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3});

  Comparison far = tuned({"adamw"}, {1e-3, 1}, {}, scratch.file("far"));
  train(far, [](const ComparedRun& run) { return std::abs(rate_of(run) - 1e-4); });
  CHECK(rates_tried(far, arms_of(far)[0]) == std::vector<double>{1e-5, 1e-4, 1e-3, 1});
}

TEST_CASE("arms: Muon's rates are tried at AdamW's best lr, once that is known") {
  const TempDir scratch;
  Comparison comparison = tuned({"muon", "adamw"}, {1e-3, 2e-3, 4e-3}, {0.01, 0.02}, scratch.path);
  CHECK(arms_of(comparison)[0].waits);
  CHECK(run_name(comparison, comparison.runs[*next_run(comparison)]) == "llama adamw lr 0.001 seed 0");
  const std::vector<std::string> order = train(comparison, [](const ComparedRun& run) {
    return run.plan.optimizer == "adamw" ? best_at_2e_3(run) : 1 + std::abs(run.plan.muon.lr - 0.02);
  });
  for (const ComparedRun& run : comparison.runs)
    if (run.plan.optimizer == "muon") CHECK(run.plan.lr == 2e-3);
  const std::vector<Arm> arms = arms_of(comparison);
  CHECK(arms[0].rate == 0.02);
  CHECK(comparison.runs[arms[0].seeds[0]].directory == "llama-muon-lr-0.002-muon-lr-0.02-seed-1");
  std::set<std::string> directories;
  for (const ComparedRun& run : comparison.runs) directories.insert(run.plan.out);
  CHECK(directories.size() == comparison.runs.size());
  CHECK(has(results_table(comparison), "0.002, muon 0.02"));
  CHECK(first_architecture(arms, arms[0]) == nullptr);
  CHECK(first_architecture(arms, arms[2]) == &arms[0]);  // lime's Muon against llama's
  CHECK(first_optimizer(arms, arms[3]) == &arms[2]);
  const std::string said = results_verdicts(comparison);
  CHECK(has(said, "test loss against llama muon, over 3 seeds"));
  CHECK(has(said, "test loss against lime muon, over 3 seeds"));
  CHECK(has(said, ":\n  lime muon: "));
  CHECK(has(said, ":\n  llama adamw: higher by 1.0"));
  const json arm = known_json(results_json(comparison))["architectures"][3];
  CHECK(arm["difference_from"] == "llama adamw");
  CHECK(arm["optimizer_difference"]["difference_from"] == "lime muon");
  CHECK(arm["optimizer_difference"]["difference_mean"].get<double>() == doctest::Approx(1.002));

  Comparison hopeless = tuned({"adamw", "muon"}, {2e-3, 1e-3}, {0.01, 0.02}, scratch.file("hopeless"));
  train(hopeless, [](const ComparedRun& run) { return run.plan.optimizer == "adamw" ? double{NAN} : 1.0; });
  CHECK(hopeless.runs[arms_of(hopeless)[1].seeds[0]].plan.lr == 1e-3);
  REQUIRE(failures_of(hopeless).size() == 2);
  CHECK(failures_of(hopeless)[0]->plan.optimizer == "adamw");
}

TEST_CASE("arms: a comparison that ends after any run goes on as if it had not") {
  const auto plan = [](const std::string& out) {
    return tuned({"adamw", "muon"}, {1e-3, 2e-3, 4e-3}, {0.01, 0.02}, out);
  };
  for (const auto& [name, loss] : {std::pair<const char*, Loss>{"edge", best_at_the_edge}, {"lost", lost_later}}) {
    const TempDir scratch;
    Comparison whole = plan(scratch.file("whole"));
    const std::vector<std::string> order = train(whole, loss);
    for (const ComparedRun& run : whole.runs)
      if (run.plan.optimizer == "muon") CHECK_MESSAGE(run.plan.lr == (loss == lost_later ? 2e-3 : 8e-3), name);
    for (size_t k = 0; k < order.size(); k += 3) {
      const std::string out = scratch.file(std::to_string(k));
      Comparison begun = plan(out);
      fs::create_directories(out);
      train(begun, loss, static_cast<int>(k));
      write_results(begun);
      Experiment experiment;
      REQUIRE(take_comparison_settings(out, experiment));
      CHECK(experiment.rates == whole.rates);
      CHECK(experiment.muon_rates == whole.muon_rates);
      CHECK(experiment.seeds == std::vector<uint64_t>{1, 2, 3});
      CHECK(experiment.choosing_seed == usual_choosing_seed);
      CHECK(experiment.optimizers == std::vector<std::string>{"adamw", "muon"});
      CHECK(experiment.settings.optimizer == "muon");  // which has all that AdamW's runs say, too
      CHECK(experiment.settings.data.test_part == "all");
      Comparison resumed = plan(out);
      take_up(resumed);
      CHECK(resumed.others.empty());
      CHECK(runs_unfinished(resumed) <= static_cast<int64_t>(order.size() - k));
      const std::vector<std::string> rest = train(resumed, loss);
      CHECK(rest == std::vector<std::string>(order.begin() + static_cast<std::ptrdiff_t>(k), order.end()));
      for (size_t i = 0; i < arms_of(whole).size(); ++i) {
        const Arm was = arms_of(whole)[i], is = arms_of(resumed)[i];
        CHECK(is.rate == was.rate);
        CHECK(rates_tried(resumed, is) == rates_tried(whole, was));
      }
    }
  }
}

TEST_CASE(
    "arms: rates that were found at an edge count when others are added; those that are asked for no more do not") {
  const TempDir scratch;
  const auto plan = [&](const std::vector<double>& rates) {
    return tuned({"adamw", "muon"}, rates, {0.01, 0.02}, scratch.path);
  };
  Comparison before = plan({1e-3, 2e-3});
  train(before, best_at_the_edge);
  write_results(before);
  Comparison more = plan({1e-3, 2e-3, 32e-3});
  take_up(more);
  CHECK(rates_tried(more, arms_of(more)[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3});
  CHECK(train(more, best_at_the_edge) ==
        std::vector<std::string>{"llama adamw lr 0.032 seed 0", "lime adamw lr 0.032 seed 0"});
  CHECK(arms_of(more)[0].rate == 8e-3);
  CHECK(rates_tried(more, arms_of(more)[1]) == rates_tried(before, arms_of(before)[1]));
  CHECK(more.others.empty());
  write_results(more);
  Comparison fewer = plan({1e-3, 2e-3});
  take_up(fewer);
  CHECK(rates_tried(fewer, arms_of(fewer)[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3});
  CHECK(runs_unfinished(fewer) == 0);
  CHECK(fewer.others.size() == 2);
}

TEST_CASE("arms: a comparison of a program before halves goes on by its first seed, on all of the test set") {
  const TempDir scratch;
  Comparison comparison = tuned({"adamw"}, {1e-3, 2e-3}, {}, scratch.path);
  train(comparison, best_at_2e_3);
  write_results(comparison);
  json old = read_json(scratch.file("results.json"));
  for (const char* key : {"choosing_seed", "optimizers", "muon_rates"}) old.erase(key);
  write_text(scratch.file("results.json"), json_text(old));
  Experiment experiment;
  REQUIRE(take_comparison_settings(scratch.path, experiment));
  CHECK(!experiment.choosing_seed);
  CHECK(experiment.optimizers == std::vector<std::string>{"adamw"});
  const auto spoilt = [&](const char* key, const json& value) {
    json changed = old;
    changed[key] = value;
    write_text(scratch.file("results.json"), json_text(changed));
    check_fails(Exit::bad_data, {key, "restore results.json"},
                [&] { take_comparison_settings(scratch.path, experiment); });
  };
  for (const json& value : {json("0"), json(-1), json(0.5)}) spoilt("choosing_seed", value);
  for (const json& value : {json("adamw"), json::array(), json({"sgd"}), json({1})}) spoilt("optimizers", value);
}
