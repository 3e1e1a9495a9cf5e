// analyze --what exits: where tokens leave a model with an exit gate.
#include "eval/inside/exits.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = TinyModel::T, exits = 3;

Config gated() {
  Config config = tiny_config("llama");
  config.loop.kind = "stack", config.loop.passes = exits, config.loop.exit_gate = true;
  config.check(Exit::usage, "test");
  return config;
}

ExitStudy study_of(TinyModel& model) {
  std::vector<TokenWindow> windows;
  for (int64_t b = 0; b < TinyModel::B; ++b) {
    const auto part = [&](const std::vector<int32_t>& all) {
      return std::vector<int32_t>(all.begin() + b * T, all.begin() + (b + 1) * T);
    };
    windows.push_back({part(model.tokens), part(model.targets), T});
  }
  Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
  return study_exits(probe, exits, "tiny", windows, [](int64_t, int64_t) {});
}

}  // namespace

TEST_CASE("exit study: weights add up to 1, and the last exit's loss is the model's") {
  TinyModel model(gated(), "cpu");
  const ExitStudy study = study_of(model);
  double weights = 0, likeliest = 0;
  for (const ExitReading& exit : study.exits) weights += exit.weight, likeliest += exit.likeliest;
  CHECK((study.exits.size() == 3 && study.scored == model.scored));
  CHECK((weights == doctest::Approx(1) && likeliest == doctest::Approx(1)));
  CHECK(study.exits.back().loss == doctest::Approx(model.loss()).epsilon(1e-5));
  CHECK(study.passes == doctest::Approx(study.exits[0].weight + 2 * study.exits[1].weight + 3 * study.exits[2].weight));
}

TEST_CASE("exit study: a gate that is sure, and one that never lets go") {
  TinyModel model(gated(), "cpu");
  model.fill("model.early_exit_gate.weight", [](int64_t) { return 0; });
  model.fill("model.early_exit_gate.bias", [](int64_t) { return 40; });
  const ExitStudy first = study_of(model);
  CHECK((first.exits[0].likeliest == 1 && first.passes == doctest::Approx(1) && first.early_passes == 1));
  CHECK(first.early_loss == doctest::Approx(first.exits[0].loss));
  model.fill("model.early_exit_gate.bias", [](int64_t) { return -40; });
  const ExitStudy last = study_of(model);
  CHECK((last.exits[2].likeliest == 1 && last.passes == doctest::Approx(3) && last.early_passes == 3));
  model.fill("model.early_exit_gate.bias", [](int64_t) { return std::log(2.0); });  // 2/3, 2/9, 1/9
  const ExitStudy most = study_of(model);
  CHECK((most.exits[1].weight == doctest::Approx(2.0 / 9) && most.passes == doctest::Approx(13.0 / 9)));
  double parts = 0;
  for (const double passes : most.by_part) parts += std::isfinite(passes) ? 1 : 0;
  CHECK((std::ssize(most.by_part) == exit_parts && parts > 0));
}

TEST_CASE("exit study: the program draws it, and refuses a model with one exit") {
  const TempDir scratch;
  Config config = gated();
  config.vocab_size = 7;
  Weights(config).save(scratch.file("gated"));
  save_tiny(scratch.file("plain"), "llama");
  const std::string flags = "--what exits --sequences 3 --length 6";
  check_outcome(analyze(scratch, {"gated"}, tiny_shard(scratch), flags), Exit::done, "exit, after pass");
  const nlohmann::json found = out_json(scratch, "exits")["models"][0];
  CHECK((found["exits"].size() == 3 && found["passes"] > 1 && found["scored"] > 0));
  CHECK(has(out_text(scratch, "exits.svg"), "Where tokens leave"));
  check_outcome(analyze(scratch, {"plain"}, tiny_shard(scratch), flags), Exit::usage,
                "has one exit; models trained with --exit-gate true");
}
