#include "engine/io/json.h"
#include "train/lab/comparison.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "engine/io/json_file.h"
#include "tests/support/comparison_cases.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tier.h"
#include "train/lab/side_by_side.h"

using namespace crossply;
using namespace crossply::test;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A baseline that is done, one with other numbers, and one of each other state.
Comparison example(const std::string& out = "nowhere") {
  Comparison comparison{"arith:4", out, {run_of("llama", RunState::done), run_of("lime", RunState::done)}};
  comparison.runs[1].result.tokens_per_second = 200020;
  comparison.runs[1].result.memory = 1060;
  comparison.runs.push_back(run_of("hyper:rate=2", RunState::failed));
  comparison.runs[2].error = "step 4: loss nan";
  comparison.runs[2].result.code = Exit::not_finite;
  comparison.runs.push_back(run_of("mudd", RunState::stopped));
  comparison.runs[3].result.code = Exit::stopped;
  comparison.runs.push_back(run_of("vertical", RunState::waiting));
  return comparison;
}

}  // namespace

TEST_CASE("comparison: the table has sensible digits, the last numbers of what is not done, and fits a terminal") {
  const std::string table = results_table(example());
  const std::vector<std::string> lines = lines_of(table);
  CHECK(lines[0] == "architecture  parameters  tokens/s  memory  test loss  answers  valid");
  CHECK(lines[1] == "llama             66,496   400,040   1.00x     0.0741   13.7 %  2.3 %");
  CHECK(lines[2] == "lime              66,496   200,020   1.06x     0.0741   13.7 %  2.3 %");
  CHECK(lines[3] == "hyper:rate=2      66,496         -   1.00x   2.100 @2        -      -");
  CHECK(lines[4] == "mudd              66,496    90,000   1.00x   2.100 @2        -      -");
  CHECK(lines[5] == "vertical          66,496         -   1.00x          -        -      -");
  CHECK(has(table, "\nhyper:rate=2: failed after step 3 of 6000: step 4: loss nan\n"));
  CHECK(has(table, "\nmudd: stopped after step 3 of 6000\n"));
  CHECK(has(table, "\nvertical: not started\n"));
  for (const std::string& line : lines) CHECK_MESSAGE(line.size() <= 80, line);
}

TEST_CASE("comparison: a rate or a loss that nobody knows is a dash and null, never 0") {
  Comparison comparison = example();
  comparison.runs[1].result.tokens_per_second = 0;
  comparison.runs[1].result.test_loss = NAN;
  CHECK(lines_of(results_table(comparison))[2] ==
        "lime              66,496         -   1.06x          -   13.7 %  2.3 %");
  const json lime = known_json(results_json(comparison))["runs"][1];
  for (const char* key : {"tokens_per_second", "relative_time", "test_loss", "test_loss_step"})
    CHECK_MESSAGE(lime[key].is_null(), key);
}

TEST_CASE("comparison: the notes say of how many samples, what guessing gets, and how large the sampling error is") {
  Comparison comparison = example();
  comparison.test_size = 1000;
  comparison.runs[1].result.answers = 0.5;  // 2 sqrt(0.5 * 0.5 / 256) = 0.0625
  const std::string text = results_markdown(comparison);
  CHECK(has(text, "\ntest loss: over all 1,000 test sequences; before the last step over 512, evenly spread.\n"));
  CHECK(has(text,
            "\nanswers: to the first 256 of 1,000 test prompts; guessing gets 9.1 %;\n"
            "sampling error (two standard errors) up to 6.2 points.\n"));
  CHECK(has(text, "one seed"));
  CHECK(has(text, "one after the other"));
  CHECK(has(text, "| ~2.0x |"));
  comparison.runs[0].plan.eval_rule = "spread";
  CHECK(has(results_markdown(comparison), "over 512 of 1,000 test sequences, evenly spread.\n"));
  comparison.runs[0].plan.eval_rule = "first";
  CHECK(has(results_markdown(comparison), "over the first 512 of 1,000 test sequences.\n"));
  comparison.test_size = 50;
  CHECK(has(results_markdown(comparison), "over all 50 test sequences"));
  comparison.data = "prosqa";
  CHECK(has(results_markdown(comparison), "guessing gets 50.0 %"));
  comparison.data = "text:x";
  CHECK(!has(results_markdown(comparison), "guessing"));
}

TEST_CASE("comparison: what does not fit a terminal is left out, least important first; the file has everything") {
  Comparison comparison = example();
  comparison.runs[1].choice.text = "mudd:norm=none:intermediate_sizes=[64,96,128,160]";
  comparison.runs[1].result.accounting.parameters = 1076081088;
  const std::string narrow = lines_of(results_table(comparison))[0], wide = lines_of(results_table(comparison, 200))[0];
  CHECK(narrow.size() <= 80);
  CHECK(has(narrow, "test loss"));
  CHECK(!has(narrow, "tokens/s"));
  for (const char* name : {"FLOP/token", "tokens/s", "train loss", "valid"}) CHECK_MESSAGE(has(wide, name), name);
  CHECK(has(results_table(comparison, 200), " 1.076G "));
  for (Comparison c : {example(), comparison}) {
    const std::string file = results_markdown(c);
    CHECK(has(file, "| FLOP/token | tokens/s |"));
    CHECK(has(file, "| 0.3691 | 0.0741 | 13.7 % | 2.3 % | done |"));
    CHECK(has(file, "| failed after step 3 of 6000: step 4: loss nan |"));
    size_t rows = 0;
    for (const std::string& line : lines_of(file)) {
      if (!line.starts_with("|")) continue;
      CHECK(std::count(line.begin(), line.end(), '|') == 14);
      ++rows;
    }
    CHECK(rows == 7);
  }
  CHECK(has(results_markdown(comparison), "| 1,076,081,088 |"));
}

TEST_CASE("comparison: Markdown and JSON survive any bytes in names and messages") {
  Comparison comparison = example();
  comparison.data = "text:a|b<svg>\n\x1b\xFF";
  comparison.runs[2].error = "cannot read a|b\n\xFF\"";
  const std::string file = results_markdown(comparison);
  CHECK(has(file, "# text:a\\|b&lt;svg> \\x1b\\xff\n"));
  CHECK(has(file, ": cannot read a\\|b \\xff\" |\n"));
  CHECK(known_json(results_json(comparison))["data"] == "text:a|b<svg>\n\x1b\xEF\xBF\xBD");
}

TEST_CASE("comparison: results.json has every number, every setting and the way to the curves") {
  const json all = known_json(results_json(example())), &lime = all["runs"][1], &failed = all["runs"][2];
  const auto check_has = [](const json& object, const json& want) {
    for (const auto& [key, value] : want.items()) CHECK_MESSAGE(object.at(key) == value, key);
  };
  check_has(all, {{"version", 1}, {"baseline", "llama"}, {"data", "arith:4"}});
  REQUIRE(all["runs"].size() == 5);
  check_has(lime, R"({"name": "lime", "state": "done", "exit_code": 0, "seed": 42, "parameters": 66496,
                      "train_loss": 0.36912, "answers": 0.13672, "relative_time": 2.0, "relative_memory": 1.06,
                      "metrics": "lime/metrics.jsonl", "test_loss_step": 6000})"_json);
  CHECK(lime["flags"]["steps"] == 6000);
  const RunCurves curves = example().runs[1].result.curves;
  REQUIRE(!curves.test_loss.empty());
  // Not in what the process of a run tells its parent through a pipe, which holds 64 KiB.
  const Comparison comparison = example();
  CHECK(!to_json(comparison, comparison.runs[1]).contains("evaluations"));
  check_has(lime["evaluations"], {{"step", curves.test_step}, {"test_loss", curves.test_loss}});
  CHECK(lime["flags"]["config"].contains("hidden_size"));
  check_has(failed, R"({"state": "failed", "exit_code": 77, "error": "step 4: loss nan", "steps_done": 3,
                        "test_loss": 2.1, "test_loss_step": 2, "train_loss": 0.4, "train_loss_step": 3,
                        "answers": null, "relative_time": null, "metrics": "hyper-rate-2/metrics.jsonl"})"_json);
  CHECK(failed["options"]["rate"] == "2");
  CHECK(all["runs"][3]["exit_code"] == 75);
  check_has(all["runs"][4], {{"state", "not started"}, {"exit_code", nullptr}, {"metrics", nullptr}});
}

TEST_CASE("comparison: the picture names what did not end well, and has answers only of a task") {
  const TempDir scratch;
  Comparison comparison = example(scratch.path);
  comparison.runs[0].result.curves.answer_step = {2, 3};
  comparison.runs[0].result.curves.answers = {0, 0.5};
  const auto picture = [&] {
    write_results(comparison);
    return read_text(scratch.file("compare.svg"));
  };
  const std::string svg = picture();
  for (const char* text :
       {">llama<", ">hyper:rate=2 (failed)<", ">mudd (stopped)<", "marks: test loss", "test prompts<"})
    CHECK_MESSAGE(has(svg, text), text);
  CHECK(!has(svg, "vertical"));
  CHECK(fs::file_size(scratch.file("results.json")) > 1000);
  CHECK(fs::file_size(scratch.file("results.md")) > 500);
  comparison.runs[0].result.curves.answers.clear();
  comparison.runs[0].result.curves.answer_step.clear();
  CHECK(!has(picture(), "test prompts<"));
}

TEST_CASE("comparison: parameters that differ by more than a tenth are said in one line") {
  Comparison comparison = example();
  CHECK(parameter_warning(comparison) == "");
  comparison.runs[1].result.accounting.parameters = 66496 * 11 / 10;
  CHECK(parameter_warning(comparison) == "");
  comparison.runs[2].result.accounting.parameters = 83120;
  comparison.runs[3].result.accounting.parameters = 50000;
  CHECK(parameter_warning(comparison) == "warning: not as many parameters as llama: hyper:rate=2 +25 %, mudd -25 %");
}

TEST_CASE("comparison: resuming refuses a directory that is no comparison, or one whose results would be lost") {
  const TempDir scratch;
  Comparison comparison = example(scratch.path);
  const auto code = [&] {
    Comparison copy = comparison;
    return error_of([&] { take_up(copy); }).code;
  };
  CHECK(code() == Exit::done);  // nothing there yet
  write_text(scratch.file("diary.txt"), "mine");
  CHECK(code() == Exit::usage);
  fs::create_directory(scratch.file("lime"));  // killed before there were results
  CHECK(code() == Exit::done);
  write_results(comparison);
  CHECK(code() == Exit::done);
  const ComparedRun lime = comparison.runs[1];
  comparison.runs.erase(comparison.runs.begin() + 1);
  CHECK(code() == Exit::done);  // of fewer, the others are kept
  comparison.runs.push_back(lime);
  comparison.runs.push_back(run_of("sla", RunState::waiting));  // more is no loss
  CHECK(code() == Exit::done);
  comparison.runs[0].plan.lr = 0.5;
  Comparison other = comparison;
  CHECK(has(error_of([&] { take_up(other); }).what(), "has --lr 0.001, the flags say 0.5"));
  comparison.runs[0].plan.lr = 1e-3;
  CHECK(code() == Exit::done);
  const json all = read_json(scratch.file("results.json"));
  for (const json& damaged : {json(3), json(), json(1e300), json("75")}) {
    json changed = all;
    changed["runs"][0]["exit_code"] = damaged;
    write_text(scratch.file("results.json"), json_text(changed));
    CHECK_MESSAGE(code() == Exit::bad_data, json_text(damaged));
  }
  write_text(scratch.file("results.json"), "{\"runs\": [3]}");
  CHECK(code() == Exit::bad_data);
}

TEST_CASE("comparison: resuming refuses other test samples beside runs that are done, and other data") {
  const TempDir scratch;
  Comparison before = example(scratch.path);
  before.data_digest = "abc";
  write_results(before);
  for (const ComparedRun& run : before.runs) fs::create_directory(scratch.file(run_directory(run)));
  Comparison other = before;
  other.data_digest = "abd";
  CHECK(error_of([&] { take_up(other); }).code == Exit::bad_data);
  for (const auto& [samples, flag] : {std::pair{&Settings::eval_samples, "--eval-samples 512, the flags say 7"},
                                      std::pair{&Settings::answer_samples, "--answer-samples 256, the flags say 7"}}) {
    Comparison changed = before;
    for (ComparedRun& run : changed.runs) run.plan.*samples = 7;
    CHECK(has(error_of([&] { take_up(changed); }).what(), flag));
  }
  Comparison changed = before;  // by one rule, or by the other
  for (ComparedRun& run : changed.runs) run.plan.eval_rule = "first";
  CHECK(has(error_of([&] { take_up(changed); }).what(), "was tested by the rule \"spread_then_all\""));
}

TEST_CASE("comparison: the table of nineteen architectures and its footnotes leave a screen of 80 x 24 whole") {
  Comparison comparison = example();
  while (comparison.runs.size() < 19) {
    comparison.runs.push_back(comparison.runs[0]);
    comparison.runs.back().choice.text = str("arch_", comparison.runs.size());
  }
  const std::vector<std::string> lines = lines_of(results_table(comparison));
  CHECK(lines.size() < 24);
  for (const std::string& line : lines) CHECK_MESSAGE(line.size() <= 80, line);
}

TEST_CASE("comparison: resuming takes up every number that was there before") {
  const TempDir scratch;
  Comparison before = example(scratch.path);
  write_results(before);
  for (const char* run : {"llama", "lime"}) fs::create_directory(scratch.file(run));
  write_text(scratch.file("lime/metrics.jsonl"), R"({"step":1,"loss":3.0}
{"step":2,"loss":2.0,"test_loss":2.1}
{"step":3,"loss":0.4})");
  Comparison after = example(scratch.path);
  for (ComparedRun& run : after.runs) {
    const ComparedRun waiting = run_of(run.choice.text, RunState::waiting);
    run.result = waiting.result;
    run.state = waiting.state;
    run.error.clear();
  }
  take_up(after);
  CHECK(after.runs[1].result.curves.loss == before.runs[1].result.curves.loss);
  CHECK(after.runs[1].result.curves.test_loss == before.runs[1].result.curves.test_loss);
  CHECK(after.runs[0].first_losses == std::vector<double>{3, 2, 0.4});  // where the run has no file
  for (ComparedRun& run : before.runs) run.result.curves = {};
  for (ComparedRun& run : after.runs) run.result.curves = {}, run.first_losses.clear();
  CHECK(results_json(after) == results_json(before));
}

TEST_CASE("comparison: resuming needs no flags: architectures and settings are read back, leftovers removed") {
  const TempDir scratch;
  Comparison before = example(scratch.path);
  for (ComparedRun& run : before.runs) run.plan.lr = 0.125;
  before.rates = {0.125};
  write_results(before);
  Experiment experiment;
  CHECK(!take_comparison_settings(scratch.file("nowhere"), experiment));
  REQUIRE(take_comparison_settings(scratch.path, experiment));
  const Settings& settings = experiment.settings;
  CHECK(experiment.rates == std::vector<double>{0.125});
  CHECK(experiment.seeds == std::vector<uint64_t>{42});
  CHECK(experiment.archs == "llama,lime,hyper:rate=2,mudd,vertical");
  CHECK(settings.lr == 0.125);
  CHECK(settings.steps == 6000);
  CHECK(settings.config.arch == "llama");
  const std::string leftover = scratch.file(".tmp-results.json-999999999");
  write_text(leftover, "{");
  Comparison after = before;
  take_up(after);
  CHECK(!fs::exists(leftover));
}

TEST_CASE("comparison: the time left counts only the runs that have steps to do") {
  const TempDir scratch;
  Comparison comparison = example(scratch.path);
  for (const ComparedRun& run : comparison.runs) fs::create_directory(scratch.file(run_directory(run)));
  CHECK(runs_left(comparison) == 2);  // one that diverged would diverge again
  CHECK(runs_in_all(comparison) == 5);
  CHECK(next_run(comparison) == 3);
  comparison.runs[2].result.code = Exit::io;  // anything else may have passed
  CHECK(runs_left(comparison) == 3);
  comparison.runs[2].tried = true;
  CHECK(runs_left(comparison) == 2);
  write_results(comparison);
  Comparison longer = example(scratch.path);
  take_up(longer);
  CHECK(runs_left(longer) == 3);
  for (ComparedRun& run : longer.runs) run.plan.steps = 7000;
  take_up(longer);
  CHECK(runs_left(longer) == 5);
  fs::remove_all(scratch.file("lime"));
  Comparison again = example(scratch.path);
  take_up(again);
  CHECK(again.runs[1].state == RunState::waiting);  // what was removed is trained again
}

TEST_CASE("comparison: what has a record is done, in another directory and without its files") {
  const TempDir scratch;
  Comparison comparison = example(scratch.file("here"));
  for (const ComparedRun& run : comparison.runs) fs::create_directories(scratch.file("here/" + run_directory(run)));
  RunCurves& curves = comparison.runs[0].result.curves;
  curves.answer_step = {2, 4}, curves.answers = {0.5, 0.6}, curves.steps_valid = {0.1, 0.2};
  curves.hard_answers = {0.25, NAN};
  comparison.runs[0].environment = R"({"machine": {"cores": 2}})";
  comparison.runs[0].result.curves.seconds = {1, 2, 77};
  CHECK(write_records(comparison).empty());
  CHECK(fs::exists(scratch.file("here/records/llama.json")));
  CHECK(!fs::exists(scratch.file("here/records/mudd.json")));  // stopped: it goes on
  fs::create_directories(scratch.file("there"));
  fs::copy(scratch.file("here/records"), scratch.file("there/records"));
  Comparison there = example(scratch.file("there"));
  for (ComparedRun& run : there.runs) run.state = RunState::waiting, run.result.curves = {};
  take_up(there);
  CHECK(is_done(there.runs[0]));
  CHECK(is_done(there.runs[1]));
  CHECK(diverged(there.runs[2]));
  CHECK(there.runs[3].state == RunState::waiting);
  CHECK(there.runs[0].result.test_loss == comparison.runs[0].result.test_loss);
  CHECK(there.runs[0].result.curves.test_loss == comparison.runs[0].result.curves.test_loss);
  CHECK(there.runs[0].result.curves.hard_answers[0] == 0.25);
  CHECK(std::isnan(there.runs[0].result.curves.hard_answers[1]));
  const json written = known_json(results_json(there))["runs"][0];
  CHECK(written["environment"]["machine"]["cores"] == 2);
  CHECK(written["training_seconds"] == 77);
  CHECK(write_records(there).empty());  // nothing is new

  there.runs[0].result.test_loss = 0.0625;  // of more steps, by this program
  there.runs[0].tried = true;
  CHECK(write_records(there).empty());
  CHECK(read_json(scratch.file("there/records/llama.json"))["test_loss"] == 0.0625);

  Comparison other = example(scratch.file("there"));
  other.data_digest = "of others";
  CHECK_THROWS_WITH_AS(take_up(other), doctest::Contains("trained on other data"), Error);
  std::ofstream(scratch.file("there/records/lime.json")) << "{}";
  CHECK_THROWS_WITH_AS(take_up(there), doctest::Contains("lime.json: this is no record of a run; remove it"), Error);
}

TEST_CASE("comparison: a run that was stopped is not among those that have ended") {
  Comparison comparison = example();
  comparison.runs[3].tried = true;
  CHECK(comparison.runs[3].state == RunState::stopped);
  CHECK(runs_left(comparison) == 1);  // the one that waits
  CHECK(runs_in_all(comparison) == 5);
  CHECK(runs_ended(comparison) == 3);  // two are done, one failed
}

TEST_CASE("comparison: any value of any type in results.json is taken or refused as bad data, with what to do") {
  const TempDir scratch;
  const auto two_runs = [&] {
    Comparison comparison = example(scratch.path);
    comparison.runs.resize(2, comparison.runs[0]);
    comparison.runs[1].plan.seed = 7;
    return comparison;
  };
  write_results(two_runs());
  const json all = read_json(scratch.file("results.json")).flatten();
  const json others[] = {json(), 3, -1, 1e300, 0.5, "x", "", true, json::array(), json::object(), json::array({3})};
  size_t refused = 0, keys = 0;
  for (const auto& [key, value] : all.items()) {
    if (!everything() && keys++ % 5 != 0) continue;
    for (size_t i = 0; i <= std::size(others); ++i) {
      json changed = all.unflatten();
      const json::json_pointer place(key);
      if (i < std::size(others)) changed[place] = others[i];
      else if (changed[place.parent_pointer()].is_object()) changed[place.parent_pointer()].erase(place.back());
      write_text(scratch.file("results.json"), json_text(changed));
      Experiment experiment;
      Comparison again = two_runs();
      const Error first = error_of([&] { take_comparison_settings(scratch.path, experiment); });
      const Error second = error_of([&] { take_up(again); });
      const std::string what = key + " " + (i < std::size(others) ? json_text(others[i]) : "erased");
      CHECK_MESSAGE((first.code == Exit::done || first.code == Exit::bad_data), what << ": " << first.what());
      CHECK_MESSAGE((second.code == Exit::done || second.code == Exit::bad_data || second.code == Exit::usage),
                    what << ": " << second.what());
      for (const Error& error : {first, second}) {
        if (error.code != Exit::bad_data) continue;
        ++refused;
        CHECK_MESSAGE(has(error.what(), "; restore results.json from a copy, or start a new comparison"), error.what());
      }
    }
  }
  CHECK(refused > 100);
}

TEST_CASE("comparison: runs that shared the machine have no tokens/s that could be compared") {
  Comparison comparison = example();
  comparison.runs[1].side_by_side = 2;
  CHECK(!has(results_table(comparison, 200), "tokens/s"));
  CHECK(has(results_markdown(comparison), "side by side, so there are no tokens/s"));
  CHECK(known_json(results_json(comparison))["runs"][1]["relative_time"].is_null());
}

TEST_CASE("comparison: means are taken at the steps that all curves have, wherever they stand in the lists") {
  const Curve mean = mean_of({{{2, 4, 6}, {20, 40, 60}, {3, 5, 7}}, {{4, 5, 6}, {44, 55, 66}, {1, 9, NAN}}}).curve;
  CHECK(mean.x == std::vector<double>{42});
  CHECK(mean.y == std::vector<double>{3});
  CHECK(mean.low[0] == doctest::Approx(3 - std::sqrt(8)));
  CHECK(mean.high[0] == doctest::Approx(3 + std::sqrt(8)));
  CHECK(mean_of({{{1}, {1}, {2}}}).curve.low.empty());
}

TEST_CASE("comparison: curves are read from whatever a run left") {
  const TempDir scratch;
  const std::string path = scratch.file("metrics.jsonl");
  CHECK(read_curves(path).step.empty());
  write_text(path, R"({"step":1,"loss":3.5}
not json

{"step":2,"loss":"three","test_loss":3.25,"answers_correct":0.5,"steps_valid":0.25}
{"step":"x","loss":1}
[1]
{"step":3,"loss":3.0,"test_lo)");
  const RunCurves curves = read_curves(path);
  CHECK(curves.step == std::vector<double>{1, 2});
  CHECK(curves.loss[0] == 3.5);
  CHECK(std::isnan(curves.loss[1]));
  CHECK(curves.test_step == std::vector<double>{2});
  CHECK(curves.test_loss == std::vector<double>{3.25});
  CHECK(curves.answers == std::vector<double>{0.5});
  CHECK(curves.steps_valid == std::vector<double>{0.25});
}

TEST_CASE("comparison: one run per architecture has the machine for itself unless --jobs says otherwise") {
  CHECK(choose_jobs(example(), 0).count == 1);
  CHECK(choose_jobs(example(), 4).count == 2);  // no more than there is to do
}
