// Arms of a comparison: which rates are tried, by which seed and on which half of the test set, what they choose, and
// which seeds follow.
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

struct Asked {
  std::vector<std::string> optimizers = {"adamw"};
  std::vector<double> rates = {1e-3, 2e-3, 4e-3};
  std::vector<double> muon_rates = {};
  std::vector<std::string> archs = {"llama", "lime"};
  std::vector<uint64_t> seeds = {1, 2, 3};
  Rules rules = {};
};

// As compare plans it: nothing done yet.
Comparison tuned(const Asked& asked, const std::string& out) {
  Comparison comparison{"text:x", out, {}};
  comparison.rates = asked.rates, comparison.muon_rates = asked.muon_rates;
  if (!asked.rules.every_rate) comparison.choosing_seed = usual_choosing_seed;
  comparison.rules = asked.rules, comparison.weight_decay = 0.1;
  for (const std::string& arch : asked.archs)
    for (const std::string& optimizer : asked.optimizers) {
      ComparedRun run = run_of(arch.substr(0, arch.find('@')), RunState::waiting);
      run.choice = parse_arch(arch);
      run.plan.freeze_routers = run.choice.frozen;
      run.plan.optimizer = optimizer, run.plan.lr = asked.rates[0], run.plan.muon.lr = 1;
      choose_muon(run.plan);
      add_arm(comparison, run, asked.seeds);
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
  run.result = run_of("llama", RunState::done).result;
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

double of_seed(const ComparedRun& run) { return 0.001 * static_cast<double>(run.plan.seed % 7); }
double parabola(double rate, double best) { return std::pow(std::log(rate / best), 2); }

double best_between(const ComparedRun& run) { return 2 + parabola(rate_of(run), 2.5e-3) + of_seed(run); }
// The larger the better, AdamW until .0081, Muon's own without end.
double best_at_the_edge(const ComparedRun& run) {
  const bool muon = run.plan.optimizer != "adamw";
  if (!muon && run.plan.lr > 0.0081) return NAN;
  return 2 - std::log(rate_of(run)) + (muon ? parabola(run.plan.lr, 1e-3) : 0) + of_seed(run);
}
// Muon's rates are best at .03 and .001.
double both_rates(const ComparedRun& run) {
  return 2 + parabola(run.plan.muon.lr, 0.03) + parabola(run.plan.lr, 1e-3) + of_seed(run);
}

std::vector<double> rates_tried(const Comparison& comparison, const RateAxis& axis) {
  std::vector<double> rates;
  for (const size_t i : axis.tried) {
    const TrainPlan& plan = comparison.runs[i].plan;
    rates.push_back(axis.muon ? plan.muon.lr : plan.lr);
  }
  return rates;
}

}  // namespace

TEST_CASE(
    "arms: seed 0 tries the rates on the first half, the reported seeds have the parabola's and the second half") {
  const TempDir scratch;
  Comparison comparison = tuned({}, scratch.path);
  CHECK(runs_in_all(comparison) == 12);
  const std::vector<std::string> order = train(comparison, best_between);
  REQUIRE(order.size() == 12);
  CHECK(order[0] == "llama lr 0.001 seed 0");
  CHECK(order[5] == "lime lr 0.004 seed 0");
  CHECK(order[6] == "llama lr 0.0025 seed 1");
  CHECK(order[11] == "lime lr 0.0025 seed 3");
  for (const ComparedRun& run : comparison.runs)
    CHECK(run.plan.data.test_part == (run.plan.seed == 0 ? "first_half" : "second_half"));
  CHECK(seeds_of(comparison) == std::vector<uint64_t>{1, 2, 3});
  const std::vector<Arm> arms = arms_of(comparison);
  CHECK(arms[0].lr == 2.5e-3);
  CHECK(!arms[0].at_edge);
  CHECK(arms[0].axes[0].choice.best == 2e-3);
  CHECK(arms[0].axes[0].choice.basin == doctest::Approx(std::exp(0.1)));
  CHECK(spread_over(comparison, arms[0], test_loss).n == 3);
  CHECK(spread_over(comparison, arms[0], test_loss).mean == doctest::Approx(2.002));  // without seed 0
  const std::string text = results_markdown(comparison);
  CHECK(has(text, "of seed 0 on the first half of the test set"));
  CHECK(has(text, "| llama | adamw | 0.002 | 0, chooses |"));
  CHECK(has(text, "| 0.0025 | x1.1 | 3 | 3 |"));
  comparison.test_size = 101;
  CHECK(test_size_of(comparison, comparison.runs[arms[0].sweep[0]]) == 50);
  CHECK(test_size_of(comparison, comparison.runs[arms[0].seeds[0]]) == 51);
}

TEST_CASE("arms: at every rate all seeds are trained and tested on all of the test set; none is chosen or judged") {
  const TempDir scratch;
  Asked asked{{"adamw", "muon"}, {1e-3, 2e-3, 4e-3}, {0.01, 0.03}, {"llama", "lime@frozen"}, {1, 2}};
  asked.rules.every_rate = true;
  Comparison comparison = tuned(asked, scratch.path);
  CHECK(runs_in_all(comparison) == 20);
  const std::vector<std::string> order = train(comparison, best_between);
  REQUIRE(order.size() == 20);
  CHECK(order[0] == "llama adamw lr 0.001 seed 1");
  CHECK(order[4] == "llama muon muon-lr 0.03 seed 1");
  CHECK(order[19] == "lime@frozen muon muon-lr 0.03 seed 2");
  const std::vector<Arm> arms = arms_of(comparison);
  REQUIRE(arms.size() == 10);
  CHECK(arms[3].name == "llama muon muon-lr 0.01");
  CHECK(arms[3].muon_lr == 0.01);
  CHECK(arms[3].lr == 2e-3);  // the middle one
  for (const Arm& arm : arms) {
    CAPTURE(arm.name);
    CHECK(arm.seeds.size() == 2);
    CHECK(arm.has_rate());
    CHECK(!arm.at_edge);
  }
  std::set<std::string> directories;
  for (const ComparedRun& run : comparison.runs) {
    CHECK(run.plan.data.test_part == "all");
    directories.insert(run.directory);
  }
  CHECK(directories.size() == 20);
  for (const auto& families : {families_of_architectures(comparison, arms), families_of_controls(comparison, arms),
                               families_of_optimizers(comparison, arms)})
    CHECK(families.empty());
  CHECK(has(results_markdown(comparison), "| llama adamw lr 0.004 |"));
  // With one seed, too, each run has a directory of its own; and the same goes on from what was written.
  asked.seeds = {1};
  Comparison one = tuned(asked, scratch.path);
  CHECK(one.runs[0].directory == "llama-adamw-lr-0.001-seed-1");
  train(one, best_between);
  write_results(one);
  Experiment experiment;
  CHECK(take_comparison_settings(scratch.path, experiment));
  CHECK(experiment.rules.every_rate);
  CHECK(!experiment.choosing_seed);
  CHECK(experiment.rates == asked.rates);
  Comparison again = tuned(asked, scratch.path);
  take_up(again);
  CHECK(runs_unfinished(again) == 0);
}

TEST_CASE("arms: beyond an edge a rate is tried, three at most, and none beyond one that diverged") {
  const TempDir scratch;
  Comparison comparison = tuned({{"adamw", "normuon"}, {1e-3, 2e-3}, {0.01, 0.03}}, scratch.path);
  const std::vector<std::string> order = train(comparison, best_at_the_edge);
  const std::vector<Arm> arms = arms_of(comparison);
  REQUIRE(arms.size() == 4);
  CHECK(arms[0].name == "llama adamw");
  CHECK(rates_tried(comparison, arms[0].axes[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3});
  CHECK(arms[0].lr == 8e-3);  // beside one that diverged there is no parabola
  CHECK(!arms[0].at_edge);
  CHECK(arms[1].name == "llama normuon");
  CHECK(rates_tried(comparison, arms[1].axes[0]) == std::vector<double>{0.01, 0.03, 0.09, 0.27, 0.81});
  CHECK(arms[1].muon_lr == 0.81);
  CHECK(arms[1].at_edge);
  CHECK(arms[1].settled);
  CHECK(order.size() == 2 * (5 + 3 + 5 + 2 + 3));
  CHECK(std::set<std::string>(order.begin(), order.end()).size() == order.size() - 2 * 2);  // names have muon-lr alone
  const std::string table = results_table(comparison);
  CHECK(has(table, "diverged at lr 0.016: llama adamw, lime adamw\n"));
  CHECK(has(table, "the best lr is at the edge of all that were tried: llama normuon, lime normuon\n"));
  for (const std::string& line : lines_of(table + results_verdicts(comparison))) CHECK_MESSAGE(line.size() <= 80, line);
}

TEST_CASE("arms: Muon's own rate is tried at the middle lr, and at the best of them half of that lr and twice") {
  const TempDir scratch;
  Comparison comparison = tuned({{"adamw", "muon"}, {1e-3, 2e-3, 4e-3}, {0.01, 0.02, 0.04}}, scratch.path);
  const std::vector<std::string> order = train(comparison, both_rates);
  const Arm arm = arms_of(comparison)[1];
  REQUIRE(arm.axes.size() == 2);
  CHECK(arm.axes[0].choice.best == 0.04);  // a little nearer to .03 than .02 is
  CHECK(rates_tried(comparison, arm.axes[1]) == std::vector<double>{5e-4, 1e-3, 2e-3, 4e-3});
  CHECK(arm.muon_lr == 0.03);
  CHECK(arm.lr == 1e-3);
  CHECK(rates_tried(comparison, arm.axes[0]) == std::vector<double>{0.01, 0.02, 0.04, 0.08});
  for (const size_t i : arm.axes[0].tried) CHECK(comparison.runs[i].plan.lr == 2e-3);
  for (const size_t i : arm.axes[1].tried) CHECK(comparison.runs[i].plan.muon.lr == 0.04);
  for (const size_t i : arm.seeds) {
    CHECK(comparison.runs[i].plan.lr == arm.lr);
    CHECK(comparison.runs[i].plan.muon.lr == arm.muon_lr);
  }
  std::set<std::string> directories;
  for (const ComparedRun& run : comparison.runs) directories.insert(run.plan.out);
  CHECK(directories.size() == comparison.runs.size());
  const std::vector<Arm> arms = arms_of(comparison);
  CHECK(first_architecture(arms, arms[0]) == nullptr);
  CHECK(first_architecture(arms, arms[3]) == &arms[1]);  // lime's Muon against llama's
  CHECK(first_optimizer(arms, arms[3]) == &arms[2]);
  const std::string said = results_verdicts(comparison);
  CHECK(has(said, "test loss against llama muon, over 3 seeds"));
  CHECK(has(said, "test loss against lime adamw, over 3 seeds"));
  const json found = known_json(results_json(comparison))["architectures"][3];
  CHECK(found["difference_from"] == "llama muon");
  CHECK(found["optimizer_difference"]["difference_from"] == "lime adamw");
  CHECK(found["basins"]["lr"].is_number());

  Comparison hopeless = tuned({{"adamw", "muon"}, {2e-3, 1e-3}, {0.01, 0.02}}, scratch.file("hopeless"));
  train(hopeless, [](const ComparedRun& run) { return run.plan.optimizer == "adamw" ? double{NAN} : 1.0; });
  REQUIRE(failures_of(hopeless).size() == 2);
  CHECK(failures_of(hopeless)[0]->plan.optimizer == "adamw");
}

TEST_CASE("arms: a seed that diverges at the chosen rate is a result: its arm is not judged, and nothing has failed") {
  const TempDir scratch;
  Comparison comparison = tuned({}, scratch.path);
  train(comparison, [](const ComparedRun& run) {
    return run.choice.text == "lime" && run.plan.seed == 2 ? double{NAN} : best_between(run);
  });
  CHECK(failures_of(comparison).empty());
  CHECK(has(results_table(comparison), "  2 of 3  "));
  CHECK(has(results_verdicts(comparison), "a seed of lime diverged: not judged"));
  Comparison lost = tuned({}, scratch.file("lost"));
  train(lost, [](const ComparedRun& run) {
    return run.choice.text == "lime" && run.plan.seed > 0 ? double{NAN} : best_between(run);
  });
  REQUIRE(failures_of(lost).size() == 1);
  CHECK(failures_of(lost)[0]->choice.text == "lime");
}

TEST_CASE("arms: a control and a twin have the rates of the arm before the @, the twin other seeds") {
  const TempDir scratch;
  Asked asked;
  asked.archs = {"llama", "lime", "lime@frozen", "llama@again2"};
  asked.rules.backbone_seeds = {1, 2, 3, 4, 5, 6, 7, 8};
  asked.rules.hold_decay = true;
  Comparison comparison = tuned(asked, scratch.path);
  const std::vector<std::string> order = train(comparison, best_between);
  CHECK(order.size() == 3 + 3 + 8 + 3 + 3 + 3);
  const std::vector<Arm> arms = arms_of(comparison);
  REQUIRE(arms.size() == 4);
  CHECK(arms[0].seeds.size() == 8);
  CHECK(seeds_of(comparison) == std::vector<uint64_t>{1, 2, 3});
  CHECK(arms[2].sweep.empty());
  CHECK(arms[2].lr == arms[1].lr);
  CHECK(comparison.runs[arms[2].seeds[0]].plan.freeze_routers);
  CHECK(comparison.runs[arms[2].seeds[0]].plan.lr == 2.5e-3);
  CHECK(comparison.runs[arms[3].seeds[0]].plan.seed == 201);
  CHECK(comparison.runs[arms[3].seeds[0]].directory == "llama-again2-lr-0.0025-seed-201");
  for (const ComparedRun& run : comparison.runs)
    CHECK(run.plan.lr * run.plan.adamw.weight_decay == doctest::Approx(0.1 * 2e-3));
  CHECK(first_architecture(arms, arms[2]) == nullptr);
  CHECK(control_of(arms, arms[1]) == &arms[2]);
  const std::vector<Family> controls = families_of_controls(comparison, arms);
  REQUIRE(controls.size() == 1);
  CHECK(controls[0].baseline == &arms[2]);
  CHECK(controls[0].of(arms[1]).difference == doctest::Approx(0));
  CHECK(has(results_verdicts(comparison), "test loss against llama, over 3 seeds and 8 of llama"));
  CHECK(has(results_verdicts(comparison), "test loss against lime@frozen, over 3 seeds"));
  const std::vector<Family> families = families_of_architectures(comparison, arms);
  CHECK(families[0].arms.size() == 2);
  CHECK(families[0].verdict.backbone_degrees == 7);
  CHECK(!families[0].verdict.blocks);
}

TEST_CASE("arms: the best three get three more seeds, which change no verdict; an unlike spread's seeds count") {
  const TempDir scratch;
  Asked asked;
  asked.archs = {"llama", "lime", "relay", "sla", "mudd", "hyper", "vertical", "ala"};
  asked.rules.more_seeds = true;
  Comparison comparison = tuned(asked, scratch.path);
  train(comparison, [](const ComparedRun& run) {
    const double noise = 1e-3 * std::sin(static_cast<double>(run.plan.seed) * 1.7 + run.choice.text[0]);
    const double unlike = run.choice.text == "hyper" ? 1000 : 1;
    return 2 + parabola(rate_of(run), 2.5e-3) + unlike * noise + (run.choice.text == "vertical" ? -0.5 : 0) +
           (run.choice.text == "llama" ? -1 : 0);
  });
  std::map<std::string, size_t> more;
  for (const Arm& arm : arms_of(comparison)) more[arm.arch] = arm.more.size();
  CHECK(more["llama"] == 0);
  CHECK(more["vertical"] == 3);
  CHECK(more["hyper"] == 3);
  CHECK(more["lime"] + more["relay"] + more["sla"] + more["mudd"] + more["ala"] >= 3);
  const std::vector<Arm> arms = arms_of(comparison);
  const Family family = families_of_architectures(comparison, arms)[0];
  for (const Arm& arm : arms) {
    if (arm.arch == "llama") continue;
    CHECK(family.of(arm).welch == (arm.arch == "hyper"));
    for (const size_t i : arm.more) CHECK(comparison.runs[i].plan.seed > 3);
  }
  CHECK(has(results_markdown(comparison), "three fresh seeds"));
}

TEST_CASE("arms: on several machines each has its part of the arms, and the first arm's check") {
  const TempDir scratch;
  Asked asked;
  asked.archs = {"llama", "lime", "relay", "sla", "lime@frozen", "llama@again"};
  asked.rules.backbone_seeds = {1, 2, 3, 4, 5};
  std::multiset<std::string> trained;
  for (int64_t number = 1; number <= 3; ++number) {
    Comparison comparison = tuned(asked, scratch.file(std::to_string(number)));
    comparison.part = {number, 3};
    for (const std::string& name : train(comparison, best_between)) trained.insert(name);
  }
  Comparison whole = tuned(asked, scratch.file("whole"));
  for (const std::string& name : train(whole, best_between)) {
    const bool check = name.starts_with("llama lr") && !name.ends_with("seed 4") && !name.ends_with("seed 5");
    CHECK_MESSAGE(trained.count(name) == (check ? 3 : 1), name);
  }
  Comparison row = tuned(asked, scratch.file("row"));
  row.only = {"sla"};
  for (const std::string& name : train(row, best_between))
    CHECK_MESSAGE((name.starts_with("sla ") || name.starts_with("llama lr")), name);
}

TEST_CASE("arms: a comparison that ends after any run goes on as if it had not") {
  const auto plan = [](const std::string& out) {
    Asked asked{{"adamw", "muon"}, {1e-3, 2e-3, 4e-3}, {0.01, 0.02}};
    asked.archs.push_back("lime@frozen");
    asked.rules = {{1, 2, 3, 4}, true, true, ""};
    return tuned(asked, out);
  };
  for (const auto& [name, loss] : {std::pair<const char*, Loss>{"edge", best_at_the_edge}, {"both", both_rates}}) {
    const TempDir scratch;
    Comparison whole = plan(scratch.file("whole"));
    const std::vector<std::string> order = train(whole, loss);
    for (size_t k = 0; k < order.size(); k += 5) {
      const std::string out = scratch.file(std::to_string(k));
      Comparison begun = plan(out);
      fs::create_directories(out);
      train(begun, loss, static_cast<int>(k));
      write_results(begun);
      Experiment experiment;
      REQUIRE(take_comparison_settings(out, experiment));
      CHECK(experiment.archs == "llama,lime,lime@frozen");
      CHECK(experiment.rates == whole.rates);
      CHECK(experiment.muon_rates == whole.muon_rates);
      CHECK(experiment.seeds == std::vector<uint64_t>{1, 2, 3});
      CHECK(experiment.rules == whole.rules);
      CHECK(experiment.settings.adamw.weight_decay == 0.1);
      CHECK(!experiment.settings.freeze_routers);
      CHECK(experiment.choosing_seed == usual_choosing_seed);
      CHECK(experiment.optimizers == std::vector<std::string>{"adamw", "muon"});
      CHECK(experiment.settings.optimizer == "muon");  // which has all that AdamW's runs say, too
      CHECK(experiment.settings.data.test_part == "all");
      Comparison resumed = plan(out);
      take_up(resumed);
      CHECK(resumed.others.empty());
      CHECK(runs_unfinished(resumed) <= static_cast<int64_t>(order.size() - k));
      const std::vector<std::string> rest = train(resumed, loss);
      CHECK_MESSAGE(rest == std::vector<std::string>(order.begin() + static_cast<std::ptrdiff_t>(k), order.end()),
                    name);
      for (size_t i = 0; i < arms_of(whole).size(); ++i) {
        const Arm was = arms_of(whole)[i], is = arms_of(resumed)[i];
        CHECK(is.lr == was.lr);
        CHECK((is.muon_lr == was.muon_lr || std::isnan(was.muon_lr)));
        CHECK(is.sweep.size() == was.sweep.size());
      }
    }
  }
}

TEST_CASE("arms: rates that were found count when others are added; those that are asked for no more do not") {
  const TempDir scratch;
  const auto plan = [&](const std::vector<double>& rates) { return tuned({{"adamw"}, rates}, scratch.path); };
  Comparison before = plan({1e-3, 2e-3});
  train(before, best_at_the_edge);
  write_results(before);
  Comparison more = plan({1e-3, 2e-3, 32e-3});
  take_up(more);
  CHECK(rates_tried(more, arms_of(more)[0].axes[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3});
  CHECK(train(more, best_at_the_edge) == std::vector<std::string>{"llama lr 0.032 seed 0", "lime lr 0.032 seed 0"});
  CHECK(arms_of(more)[0].lr == 8e-3);
  CHECK(more.others.empty());
  write_results(more);
  Comparison fewer = plan({1e-3, 2e-3});
  take_up(fewer);
  CHECK(rates_tried(fewer, arms_of(fewer)[0].axes[0]) == std::vector<double>{1e-3, 2e-3, 4e-3, 8e-3, 16e-3});
  CHECK(runs_unfinished(fewer) == 0);
  CHECK(fewer.others.size() == 2);
}

TEST_CASE("arms: rates are settled when their runs are done or diverged; what failed otherwise is tried again") {
  const TempDir scratch;
  Comparison comparison = tuned({{"adamw"}, {1e-3, 2e-3}}, scratch.path);
  extend(comparison);
  for (int i = 0; i < 4; ++i) comparison.runs[*next_run(comparison)].state = RunState::running;
  CHECK(!next_run(comparison));  // side by side, seeds wait for all rates
  CHECK(runs_left(comparison) == 10);
  const std::vector<size_t> sweep = arms_of(comparison)[1].sweep;
  finish(comparison.runs[sweep[0]], 1);
  ComparedRun& killed = comparison.runs[sweep[1]];
  killed.state = RunState::failed, killed.result.code = Exit::device, killed.tried = true;
  extend(comparison);
  CHECK(!next_run(comparison));
  REQUIRE(failures_of(comparison).size() == 1);
  CHECK(failures_of(comparison)[0]->result.code == Exit::device);
  const json lime = known_json(results_json(comparison))["architectures"][1];
  CHECK(lime["lr_settled"] == false);
  CHECK(lime["lr_at_edge"] == false);
  CHECK(lime["difference_mean"].is_null());
  CHECK(has(results_verdicts(comparison), "  lime: a best rate is not known yet: cannot be told\n"));
}

TEST_CASE("arms: a comparison of a program in which the first seed chose among rates cannot go on") {
  const TempDir scratch;
  Comparison comparison = tuned({{"adamw"}, {1e-3, 2e-3}}, scratch.path);
  train(comparison, best_between);
  write_results(comparison);
  const json now = read_json(scratch.file("results.json"));
  Experiment experiment;
  json old = now;
  for (const char* key : {"choosing_seed", "optimizers", "muon_rates"}) old.erase(key);
  write_text(scratch.file("results.json"), json_text(old));
  check_fails(Exit::bad_data, {"first seed chose", "restore results.json"},
              [&] { take_comparison_settings(scratch.path, experiment); });
  const auto spoilt = [&](const char* key, const json& value) {
    json changed = now;
    changed[key] = value;
    write_text(scratch.file("results.json"), json_text(changed));
    check_fails(Exit::bad_data, {key, "restore results.json"},
                [&] { take_comparison_settings(scratch.path, experiment); });
  };
  for (const json& value : {json("0"), json(-1), json(0.5)}) spoilt("choosing_seed", value);
  for (const json& value : {json("adamw"), json::array(), json({"sgd"}), json({1})}) spoilt("optimizers", value);
  for (const json& value : {json("x"), json(1), json({-1})}) spoilt("backbone_seeds", value);
  for (const char* key : {"hold_decay", "more_seeds", "every_rate"}) spoilt(key, "yes");
  spoilt("pairs", 3);
}
