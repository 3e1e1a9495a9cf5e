// Training with --matmul fp8, on a GPU or in its emulator.
#include <cmath>
#include <filesystem>

#include "engine/io/json.h"
#include "kernels/cuda/arithmetic.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

const Counting data(12, 16, 7);

// All linear layers of a block suit eight bits.
TrainPlan options_for(const std::string& arch, const std::string& matmul = "fp8") {
  TrainPlan plan;
  plan.config.arch = arch;
  if (arch == "gpt2") use_gpt2(plan.config);
  plan.config.vocab_size = 7, plan.config.hidden_size = 64, plan.config.intermediate_size = 64;
  plan.config.num_hidden_layers = 2, plan.config.num_attention_heads = plan.config.num_key_value_heads = 4;
  plan.config.head_dim = 16;
  if (arch == "gpt2") plan.config.max_position_embeddings = 16;
  plan.config.check(Exit::usage, "test");
  plan.steps = 12, plan.batch = 2, plan.lr = 3e-3;
  plan.device = gpu, plan.dtype = "bf16", plan.matmul = matmul;
  plan.data.seq_len = 16;
  return plan;
}

std::vector<double> losses_of(Trainer& trainer, int64_t steps) {
  std::vector<double> losses;
  while (trainer.steps_done() < steps) losses.push_back(trainer.step().loss);
  return losses;
}

}  // namespace

TEST_CASE("eight bits: models learn as in bf16, by products of eight bits") {
  if (!available(Backend::cuda)) return;
  const std::vector<std::string> archs = {"lime", "llama", "gpt2"};
  for (const std::string& arch : one_in(is_slow(Backend::cuda) ? 3 : 1, archs)) {
    CAPTURE(arch);
    Trainer eight(options_for(arch), data), plain(options_for(arch, "fp32"), data);
    // Of a layer: what its 4 products' inputs are (LLaMA), and of each weight it and its output's gradient.
    CHECK(eight.model().tape().quantized().size() == (arch == "gpt2" ? 2 * (4 + 2 * 6) : 2 * (4 + 2 * 7)));
    CHECK(plain.model().tape().quantized().empty());
    const std::vector<double> got = losses_of(eight, 12), want = losses_of(plain, 12);
    CHECK(want.back() < 0.93 * want.front());
    CHECK(got.front() - got.back() > 0.8 * (want.front() - want.back()));
    for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == doctest::Approx(want[i]).epsilon(0.05));
    CHECK(got != want);
    const double tested = eight.evaluate(data, 4);
    CHECK(std::isfinite(tested));
  }
}

TEST_CASE("eight bits: a run resumes bit for bit, with what was largest in its tensors") {
  if (!available(Backend::cuda)) return;
  TrainPlan plan = options_for("llama");
  plan.accumulate = 2, plan.steps = 5;
  forget_choices();
  Trainer whole(plan, data);
  const TempDir scratch;
  const std::string dir = scratch.file("step_00000002"), path = dir + "/train_state.json";
  std::vector<double> want;
  for (int64_t i = 0; i < 5; ++i) {
    want.push_back(whole.step().loss);
    if (i == 1) whole.save(dir, Tokenizer());
  }
  want.erase(want.begin(), want.begin() + 2);
  const json state = known_json(read_text(path));
  REQUIRE(state["eight_bits"].size() == 36);
  for (const auto& [name, history] : state["eight_bits"].items()) {
    CAPTURE(name);
    CHECK(history.size() == 3);  // measured before the first step, and two steps
    CHECK(history[0].get<double>() > 0);
    CHECK(history[1].get<double>() > 0);
    // What is measured is a step like the others; of a sum of gradients instead of their mean it is 64 times as large.
    CHECK(history[0].get<double>() < 4 * history[1].get<double>());
    CHECK(history[1].get<double>() < 4 * history[0].get<double>());
  }
  forget_choices();  // a new process
  Trainer resumed(plan, data, dir);
  CHECK(losses_of(resumed, 5) == want);

  json other = state;
  other["eight_bits"]["L0.attn.project.in"][1] = 1e6;  // so coarse that it shows
  write_text(path, json_text(other));
  forget_choices();
  Trainer coarse(plan, data, dir);
  CHECK(losses_of(coarse, 5) != want);
  other.erase("eight_bits");
  write_text(path, json_text(other));
  check_fails(Exit::bad_data, {path, "eight_bits", "L0.attn.project.in"}, [&] { Trainer(plan, data, dir); });
  plan.matmul = "fp32";
  check_fails(Exit::usage, {"--matmul \"fp8\"", "\"fp32\""}, [&] { Trainer(plan, data, dir); });
}

// A weight is infinite, of which rounding makes a number: the loss is one, and only what is largest tells. Of a plain
// step, the first replay of its recording, and a later one.
TEST_CASE("eight bits: an infinite number ends the run, by name, and nothing is updated") {
  if (!available(Backend::cuda)) return;
  for (const int64_t good : {0, 1, 3}) {
    CAPTURE(good);
    Trainer trainer(options_for("llama"), data);
    losses_of(trainer, good);
    ParameterTable& params = trainer.params();
    const Parameter& row = params.at("model.layers.1.mlp.up_proj.weight");
    const uint16_t infinity = 0x7F80;
    trainer.device().copy_in(params.bf16_copy().as<bf16>() + row.offset + 5, &infinity, sizeof infinity);
    const auto values = [&] {
      std::vector<float> host(static_cast<size_t>(params.values().numel()));
      trainer.device().copy_out(host.data(), params.values().data, params.values().bytes());
      return host;
    };
    const std::vector<float> before = values();
    check_fails(Exit::not_finite, {"L1.mlp.up.weight has numbers that are not finite", "No update was made"},
                [&] { trainer.step(); });
    CHECK(values() == before);
    CHECK(std::isfinite(trainer.last.norm));
    CHECK(trainer.steps_done() == good);
  }
}

TEST_CASE("eight bits: what they are not for is refused") {
  const TempDir scratch;
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--dtype", "bf16"}, {"--device", gpu}, {"--device", "reference", "--dtype", "fp32"}}) {
    std::vector<std::string> all = {"--data", "arith:3", "--matmul", "fp8", "--out", scratch.file("run")};
    all.insert(all.end(), flags.begin(), flags.end());
    check_outcome(train(scratch, all), Exit::usage, "--matmul fp8 is for --device cuda --dtype bf16");
  }
  if (!available(Backend::cuda)) return;
  check_outcome(train(scratch, {"--data", "arith:3", "--matmul", "fp8", "--dtype", "bf16", "--device", gpu, "--width",
                                "48", "--ffn", "48", "--layers", "1", "--heads", "1", "--out", scratch.file("run")}),
                Exit::usage, "no linear layer of this model suits it");
  CHECK(!std::filesystem::exists(scratch.file("run")));
}
