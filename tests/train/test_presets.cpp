// The Inheritune paper's presets: sizes to the last parameter, tokens a step, rates; and that they are of one backbone.
#include <nlohmann/json.hpp>

#include "engine/io/json_file.h"
#include "engine/params.h"
#include "models/model.h"
#include "tests/support/program.h"
#include "train/settings/settings.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Settings gpt2_options(const std::string& preset) {
  Settings settings;
  settings.config.arch = "gpt2";
  use_gpt2(settings.config);
  apply_preset(preset, settings);
  return settings;
}

int64_t parameters(Settings settings, int64_t layers) {
  settings.config.num_hidden_layers = layers;
  settings.config.check(Exit::usage, "test");
  ParameterTable params;
  declare_model(params, settings.config);
  return params.count();
}

// Of the update after k finished ones.
double rate(const Settings& settings, int64_t k) {
  return settings.lr *
         Schedule{schedule_kind(settings.schedule), settings.warmup, settings.steps, settings.lr_floor}.at(k);
}

}  // namespace

TEST_CASE("presets: the Inheritune paper's sizes, tokens a step and rates") {
  struct Row {
    const char* preset;
    int64_t layers, parameters, fewer_layers, fewer, tokens, steps;
    double lr, least, beta2;
    int64_t max_ranks;
  };
  const Row rows[] = {
      {"gpt2-small", 12, 124373760, 4, 67738368, 393216, 100000, 6e-4, 3e-5, 0.95, 8},
      {"gpt2-medium", 24, 354599936, 16, 253920256, 393216, 100000, 3e-4, 1e-5, 0.95, 8},
      {"gpt2-large", 36, 773582080, 18, 419641600, 131072, 100000, 2e-4, 1e-5, 0.95, 8},
      {"gpt2-xl", 48, 1556840000, 24, 819483200, 131072, 100000, 1.5e-4, 1e-5, 0.95, 8},
      {"gpt2-medium-fineweb", 24, 354599936, 16, 253920256, 61440, 100000, 2e-4, 1e-5, 0.999, 4},
      {"gpt2-large-fineweb", 32, 694928640, 16, 380314880, 61440, 100000, 2e-4, 1e-5, 0.999, 4},
      {"gpt2-medium-kd", 16, 253920256, 12, 203580416, 393216, 50000, 3e-4, 3e-5, 0.95, 8},
      {"gpt2-medium-50k", 24, 354599936, 18, 279090176, 49152, 100000, 3e-4, 1e-5, 0.95, 8},
  };
  for (const Row& row : rows) {
    CAPTURE(row.preset);
    const Settings settings = gpt2_options(row.preset);
    CHECK(settings.config.num_hidden_layers == row.layers);
    CHECK(parameters(settings, row.layers) == row.parameters);
    CHECK(parameters(settings, row.fewer_layers) == row.fewer);
    CHECK(settings.config.scale_attn_by_inverse_layer_idx == (settings.preset != "gpt2-small"));
    CHECK(!settings.config.bias);
    CHECK(settings.batch * settings.accumulate * settings.data.seq_len == row.tokens);
    for (int64_t ranks = 1; ranks <= row.max_ranks; ranks *= 2) CHECK(settings.accumulate % ranks == 0);
    CHECK(settings.steps == row.steps);
    CHECK(settings.warmup == 2000);
    CHECK(rate(settings, 0) == 0);
    CHECK(rate(settings, 2000) == doctest::Approx(row.lr));
    CHECK(rate(settings, settings.steps) == doctest::Approx(row.least));
    CHECK((settings.adamw.beta1 == 0.9 && settings.adamw.beta2 == row.beta2 && settings.adamw.weight_decay == 0.1 &&
           settings.adamw.clip == 1));
  }
}

TEST_CASE("presets: the SATFormer paper's text beside its files") {
  struct Row {
    const char* preset;
    double of_files, of_text;
    int64_t steps, warmup;
  };
  for (const Row& row :
       {Row{"130m", 2e-3, 1e-3, 9536, 95}, {"340m", 1.5e-3, 1.5e-3, 19073, 190}, {"760m", 1e-3, 2e-3, 38146, 381}})
    for (const bool text : {false, true}) {
      CAPTURE(row.preset);
      CAPTURE(text);
      const auto options = [&](const std::string& arch) {
        Settings settings;
        settings.config.arch = arch;
        apply_preset(row.preset + std::string(text ? "-text" : ""), settings);
        add_preset_options(settings.preset, settings.config);
        settings.config.check(Exit::usage, "test");
        return settings;
      };
      const Settings settings = options("denseformer");
      CHECK((settings.lr == (text ? row.of_text : row.of_files) && settings.steps == row.steps &&
             settings.warmup == row.warmup));
      CHECK((settings.batch * settings.accumulate * settings.data.seq_len == 524288 &&
             settings.schedule == "cosine_to_floor" && settings.lr_floor == 0.1));
      CHECK(settings.config.text("dilation") == (text ? "4" : "1"));
      CHECK(settings.config.text("period") == (text ? "5" : "1"));
      CHECK(options("resformer").config.text("lambda2") == (text ? "frozen" : "learned"));
      CHECK(options("satformer").config.text("gate_init") == (text ? "uniform" : "normal"));
      CHECK(options("hyper").config.text("rate") == "2");
      // What it sets for a connection is for that in a combination, too.
      CHECK(options("hyper+lime").config.text("prenorm") == "rmsnorm");
      CHECK(options("lime+denseformer").config.text("dilation") == (text ? "4" : "1"));
    }
}

TEST_CASE("presets: those of the backbone gpt2 are for every architecture on it, and for no other") {
  const TempDir dir;
  const std::vector<std::string> dry = {"--preset", "gpt2-medium", "--layers", "2", "--dry-run"};
  check_outcome(train(dir, dry, "gpt2"), Exit::done, "parameters: 77,730,816\n");
  std::vector<std::string> on_gpt2 = dry;
  on_gpt2.insert(on_gpt2.end(), {"--backbone", "gpt2"});
  check_outcome(train(dir, on_gpt2, "lime"), Exit::done, "parameters: ");
  for (const char* says : {"gpt2-medium", "train_gpt2", "--backbone gpt2"})
    for (const char* arch : {"llama", "lime"}) check_outcome(train(dir, dry, arch), Exit::usage, says);
}

TEST_CASE("presets: that of students asks for a teacher") {
  const TempDir dir;
  check_outcome(train(dir, {"--preset", "gpt2-medium-kd", "--layers", "2", "--dry-run"}, "gpt2"), Exit::usage,
                "--preset gpt2-medium-kd is for a model that learns from another one; give --teacher DIR");
}

TEST_CASE("presets: beside --init the sizes are the model's, the optimiser's settings the preset's") {
  const TempDir dir;
  const std::string text = dir.file("text"), model = dir.file("model"), run = dir.file("run");
  write_text(text, std::string(400, 'x'));
  const auto start = [&](const std::string& arch, std::vector<std::string> more) {
    more.insert(more.end(), {"--data", "text:" + text, "--seq", "5", "--batch", "2", "--accumulate", "1"});
    return train(dir, more, arch);
  };
  check_outcome(start("gpt2", {"--steps", "0", "--width", "8", "--heads", "2", "--layers", "3", "--out", model}),
                Exit::done, "initialised");
  const std::vector<std::string> from = {"--init", model, "--preset", "gpt2-medium", "--layers", "2", "--steps", "2"};
  const auto with = [&](std::initializer_list<std::string> more) {
    std::vector<std::string> all = from;
    all.insert(all.end(), more);
    return all;
  };
  check_outcome(start("gpt2", with({"--out", run})), Exit::done, "the first 2 of its 3 blocks");
  const nlohmann::json flags = read_json(run + "/flags.json"), config = flags["config"];
  CHECK((config["n_embd"] == 8 && config["n_layer"] == 2 && config["vocab_size"] == 256 && config["n_head"] == 2));
  CHECK((flags["lr"] == 3e-4 && flags["schedule"] == "cosine_from_zero" && flags["warmup"] == 2000));
  CHECK(flags["lr_floor"] == 1e-5 / 3e-4);
  CHECK(read_text(run + "/metrics.jsonl").find("\"lr\":0.0,") != std::string::npos);  // of the first step
  check_outcome(start("lime", with({"--backbone", "gpt2", "--out", dir.file("lime")})), Exit::done, "step 2/2");
  check_outcome(start("lime", {"--init", model, "--backbone", "llama", "--out", dir.file("x")}), Exit::usage,
                "leave out --backbone");
  check_outcome(start("gpt2", with({"--width", "16", "--out", dir.file("x")})), Exit::usage, "leave out --width");
}
