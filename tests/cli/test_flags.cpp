// What a user types: numbers are read strictly and once, misspelt flags are recognised, --help fits a terminal.
#include "cli/flags.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "engine/io/json_file.h"
#include "engine/numbers.h"
#include "models/disk/config_json.h"
#include "models/registry.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"
#include "train/run/inputs.h"
#include "train/settings/resolve.h"
#include "train/settings/settings.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Parses the words as the flags of a trainer; returns the message of the error, "" if there is none.
std::string parse(Settings& settings, std::vector<std::string> words) {
  CLI::App app("", "train");
  settings.config.arch = "lime";
  add_train_flags(app, settings);
  add_architecture_flags(app, settings);
  std::reverse(words.begin(), words.end());
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = unknown_flag(app);
    return unknown.empty() ? error.what() : unknown;
  }
  return "";
}

}  // namespace

TEST_CASE("numbers: decimal, whole, finite and within range, or nothing") {
  CHECK(parse_integer("010") == 10);
  CHECK(parse_integer("-7") == -7);
  CHECK(parse_integer("9223372036854775807") == std::numeric_limits<int64_t>::max());
  for (const char* bad : {"", " 1", "1 ", "+1", "1.0", "1e3", "0x10", "9223372036854775808", "1_000", "--1"})
    CHECK_MESSAGE(!parse_integer(bad), bad);
  CHECK(parse_number("1e-5") == 1e-5);
  CHECK(parse_number("007.5") == 7.5);
  CHECK(parse_number("1e-310") == 1e-310);
  for (const char* zero : {"0", "-0.0", "0e7", "00.00e-999"}) CHECK(parse_number(zero) == 0.0);
  for (const char* bad :
       {"", "nan", "inf", "-inf", "infinity", "1e400", "1e-400", "-0.1e-400", "1,5", "0x1p3", "1 ", " 1", "1e"})
    CHECK_MESSAGE(!parse_number(bad), bad);
  CHECK(parse_truth("true") == true);
  CHECK(parse_truth("false") == false);
  for (const char* bad : {"7", "1", "yes", "TRUE", ""}) CHECK(!parse_truth(bad));
}

TEST_CASE("flags: what was checked is what is used") {
  Settings settings;
  CHECK(parse(settings, {"--steps", "010", "--lr", "01e-3", "--tie", "false", "--keep", "08"}) == "");
  CHECK(settings.steps == 10);
  CHECK(settings.lr == 1e-3);
  CHECK(settings.config.tie_word_embeddings == false);
  CHECK(settings.keep == 8);
  for (const std::string flag : {"--norm-eps inf", "--norm-eps nan", "--rope-theta inf", "--rope-theta 1e400",
                                 "--tie 7", "--steps 0x10", "--steps 1e3", "--lr-floor 2"}) {
    CAPTURE(flag);
    const std::vector<std::string> bad = split_words(flag);
    CHECK(has(parse(settings, bad), bad[0] + ": '" + bad[1] + "' is n"));
  }
  CHECK(settings.steps == 10);
}

TEST_CASE("flags: a size that is too large is refused with the largest that works") {
  Settings settings;
  for (const char* flag : {"--seq", "--batch", "--accumulate", "--width", "--keep"})
    for (const char* size : {"9223372036854775807", "9223372036854775808", "4294967297", "40000000000"})
      CHECK(has(parse(settings, {flag, size}), "to 1073741824"));
  CHECK(has(parse(settings, {"--train-samples", "9223372036854775807"}), "to 1099511627776"));
  check_fails(Exit::usage, {"the most is 1073741824 sequences"}, [] { check_batch(max_size, 1024, 1024); });
  CHECK_NOTHROW(check_batch(max_size, 1, 1024));
  DataOptions data;
  data.spec = "arith:3";
  data.train_samples = max_count;
  check_fails(Exit::usage, {"at most 134217728"}, [&] { open_dataset(data); });
}

TEST_CASE("flags: a connection's options are read by the same rules") {
  Config config;
  config.arch = "lime";
  config.vocab_size = config.hidden_size = config.intermediate_size = 16;
  config.num_hidden_layers = config.num_attention_heads = 2;
  auto with = [&](const char* value) {
    Config c = config;
    c.options = {{"routing", "last"}, {"window", value}};
    c.check(Exit::usage, "flags");
    return c.integer("window");
  };
  CHECK(with("02") == 2);
  for (const char* bad : {"1e30", "2.0", "inf", "1e0", "9223372036854775808", "true"}) {
    CAPTURE(bad);
    check_fails(Exit::usage, {"\"window\" is "}, [&] { with(bad); });
  }
}

TEST_CASE("flags: numbers in JSON that a size or an epsilon cannot hold are refused") {
  using nlohmann::json;
  const json plain = R"({"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                         "num_attention_heads": 2})"_json;
  auto refused = [&](const char* key, const json& value) {
    json object = plain;
    object[key] = value;
    check_fails(Exit::bad_data, {key}, [&] { parse_config(object, "config.json"); });
  };
  CHECK_NOTHROW(parse_config(plain, "config.json"));
  refused("hidden_size", 1e30);
  refused("num_key_value_heads", std::numeric_limits<uint64_t>::max());
  refused("rms_norm_eps", std::numeric_limits<double>::infinity());
  refused("rope_theta", std::nan(""));
  refused("initializer_range", std::numeric_limits<double>::infinity());
  refused("tie_word_embeddings", 7);
}

TEST_CASE("flags: a misspelt flag is answered with the nearest one") {
  Settings settings;
  CHECK(parse(settings, {"--stpes", "3"}) == "unknown flag --stpes; did you mean --steps?");
  CHECK(parse(settings, {"--warm=3"}) == "unknown flag --warm; did you mean --warmup?");
  CHECK(parse(settings, {"--stepwidth", "1"}) == "unknown flag --stepwidth");
  CHECK(parse(settings, {"--learning-rate", "1"}) == "unknown flag --learning-rate; here it is --lr");
  CHECK(parse(settings, {"--batch_size=5"}) == "unknown flag --batch_size; here it is --batch");
  CHECK(parse(settings, {"--hidden-size", "5"}) == "unknown flag --hidden-size; here it is --width");
  CHECK(parse(settings, {"--block-size", "5"}) == "unknown flag --block-size; here it is --seq");
  CHECK(has(parse(settings, {"--epochs", "5"}), "here it is --steps (one epoch is as many steps"));
  CHECK(parse(settings, {"--train_samples", "5"}) == "unknown flag --train_samples; did you mean --train-samples?");
}

TEST_CASE("flags: behind a subcommand its own flags are suggested, not those in front of it") {
  CLI::App app("", "bench");
  std::string json, arch;
  app.add_option("--json", json);
  app.add_subcommand("architectures")->add_option("--archs", arch);
  CHECK_THROWS_AS(app.parse("architectures --json x"), CLI::ParseError);
  CHECK(unknown_flag(app) == "unknown flag --json");
  CHECK_THROWS_AS(app.parse("architectures --arch x"), CLI::ParseError);
  CHECK(unknown_flag(app) == "unknown flag --arch; did you mean --archs?");
}

TEST_CASE("flags: --help has groups, types and at most 80 columns") {
  Settings settings;
  CLI::App app("About.", "train_mudd");
  set_help(app);
  settings.config.arch = "mudd";
  add_train_flags(app, settings);
  add_architecture_flags(app, settings);
  const std::string help = app.help();
  size_t at = 0;
  for (const char* part : {"Options:", "\nData:", "\nModel:", "\nOptimiser:", "\nOutput:", "\nMachine:", "\nmudd:"}) {
    CAPTURE(part);
    CHECK(has(help, part));
    CHECK(help.find(part) >= at);
    at = help.find(part);
  }
  check_has(help, {"--steps INT", "--lr FLOAT", "--out DIR", "--tie BOOL", "--intermediate-sizes LIST"});
  check_has_none(help, {"TEXT", "--plan"});
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 80);

  set_short_help(app, {{"--data"}, {"--steps", "--lr"}, {"train_mudd --data text:my.txt"}});
  app.set_help_all_flag("--help-all", "");
  const std::string brief = app.help();
  check_has(brief, {"\nNeeded:\n  --data", "--lr FLOAT", "\nExamples:\n  train_mudd --data", "--help-all lists all"});
  CHECK(!has(brief, "--beta1"));
  CHECK(has(app.help("", CLI::AppFormatMode::All), "--beta1"));
}

TEST_CASE("defaults on files: two epochs, at most 20 tokens a parameter; the rates of our trials and of the papers") {
  CHECK(usual_seq_len(100'000) == 64);
  CHECK(usual_seq_len(1'000'000) == 128);
  CHECK(usual_seq_len(100'000'000) == 256);
  CHECK(usual_seq_len(1'000'000'000) == 512);
  CHECK(usual_steps_of(1000, 64, 16, 1'000'000) == 125);
  CHECK(usual_steps_of(100'000'000, 64, 16, 1024) == 20);
  CHECK(usual_steps_of(3, 64, 16, 1'000'000) == 1);
  CHECK(usual_lr_of(66'000) == 0.003);
  CHECK(usual_lr_of(10'000'000) == 0.003);
  CHECK(usual_lr_of(130'000'000) == 0.001);
  CHECK(usual_lr_of(1'300'000'000) == 0.0004);
}

TEST_CASE("report: the data line counts tokens, sequences and epochs") {
  TrainPlan plan;
  plan.data.spec = "arith:3";
  plan.data.train_samples = 400, plan.data.test_samples = 50;
  plan.steps = 10, plan.batch = 8, plan.accumulate = 2;
  const Dataset data = open_dataset(plan.data);
  CHECK(describe_data(plan, data) == str("data: ", 400 * data.train->seq_len() / 1000,
                                         ",000 training tokens in 400 sequences of ", data.train->seq_len(),
                                         "; 10 steps x 16 sequences = 0.4 epochs; test set 50 sequences"));
}
