// What a run costs by each definition, and what it has read.
#include <set>

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"
#include "tests/support/cases.h"
#include "tests/support/check.h"
#include "tests/support/comparison_cases.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "train/run/plan.h"
#include "train/run/run_dir.h"
#include "train/settings/gpus.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

Accounting account_of(const Config& config, const std::string& optimizer = "muon") {
  TrainPlan plan;
  plan.config = config;
  plan.optimizer = optimizer;
  plan.batch = 2, plan.data.seq_len = 9;
  return plan_training(plan).accounting;
}

}  // namespace

TEST_CASE("accounting: of plain models exact FLOPs are 6 for each matrix parameter and 6 H D (T + 1) a layer") {
  for (const bool tied : {false, true}) {
    for (Config config : {tiny_config("llama", 2, true, tied), tiny_gpt2(), tiny_gpt2(false)}) {
      config.tie_word_embeddings = tied;
      CAPTURE(config.arch);
      CAPTURE(tied);
      const Config& c = config;
      const int64_t C = c.hidden_size, F = c.intermediate_size, V = c.vocab_size, L = c.num_hidden_layers;
      const int64_t heads = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
      const int64_t blocks = L * (2 * C * heads + 2 * C * kv + (c.gpt2() ? 2 : 3) * C * F);
      const int64_t positions = c.gpt2() ? c.max_position_embeddings * C : 0;
      const Accounting a = account_of(config);
      CHECK(a.matrix == blocks + V * C);
      CHECK(a.non_embedding == a.parameters - V * C - positions);
      CHECK(a.muon_parameters == blocks);
      CHECK(a.muon_matrices == L * (c.gpt2() ? 6 : 7));
      CHECK(a.flops_per_token == doctest::Approx(6.0 * a.matrix + 6.0 * L * heads * 10).epsilon(1e-12));
      CHECK(a.six_n() == 6.0 * a.non_embedding);
      CHECK(a.palm() == a.six_n() + 12.0 * L * heads * 9);
    }
  }
}

TEST_CASE("accounting: a loop's core is stored once, and costs what the unrolled model costs") {
  for (const Case& c : loop_cases()) {
    if (!has_anchor(c.config) || !c.config.loop.tied) continue;
    CAPTURE(c.name);
    Config deep = applied(c.config);
    deep.loop.tied = false;
    const Accounting loop = account_of(c.config), unrolled = account_of(deep);
    CHECK(loop.flops_per_token == unrolled.flops_per_token);
    CHECK(loop.six_n() == unrolled.six_n());
    CHECK(loop.palm() == unrolled.palm());
    CHECK(unrolled.applied == unrolled.non_embedding);
    CHECK((loop.parameters < unrolled.parameters || c.config.loop.passes == 1));
    CHECK(loop.applied - loop.non_embedding == unrolled.parameters - loop.parameters);
  }
}

TEST_CASE("accounting: a stack is stored once and costs its passes, with an exit gate the head of each") {
  const Config llama = tiny_config("llama", 2, false, false);  // whose head is a row of its own
  Config stack = llama, gated = llama;
  stack.loop.kind = gated.loop.kind = "stack", stack.loop.passes = gated.loop.passes = 3, gated.loop.exit_gate = true;
  const Accounting one = account_of(llama), three = account_of(stack), exits = account_of(gated);
  const auto head = static_cast<double>(llama.vocab_size * llama.hidden_size);
  const auto gate = static_cast<double>(llama.hidden_size);
  CHECK(three.parameters == one.parameters);
  CHECK(three.flops_per_token == doctest::Approx(3 * one.flops_per_token - 2 * 6 * head).epsilon(1e-12));
  CHECK(three.six_n() == doctest::Approx(3 * one.six_n() - 2 * 6 * head).epsilon(1e-12));
  CHECK(exits.flops_per_token == doctest::Approx(3 * one.flops_per_token + 2 * 6 * gate).epsilon(1e-12));
  CHECK(exits.parameters == one.parameters + llama.hidden_size + 1);
}

TEST_CASE("accounting: what every architecture adds to Muon's rows, to matrices and to what is no table") {
  struct Added {
    int64_t muon_matrices, muon_parameters, matrix, non_embedding;
  };
  struct Golden {
    const char* choice;
    Added to_llama, to_gpt2;
  };
  const std::vector<Golden> all = {
      {"lime", {0, 0, 0, 36}, {0, 0, 0, 144}},
      {"lime_static", {0, 0, 0, 42}, {0, 0, 0, 12}},
      {"lime_dynamic", {0, 0, 144, 168}, {0, 0, 288, 264}},
      {"hyper", {0, 0, 384, 528}, {0, 0, 384, 464}},
      {"vertical", {0, 0, 0, 10}, {0, 0, 0, 10}},
      {"sla", {0, 0, 0, 0}, {0, 0, 0, 0}},
      {"ala", {0, 0, 0, 0}, {0, 0, 0, 0}},
      {"resformer", {0, 0, 0, 7}, {0, 0, 0, 7}},
      {"satformer", {0, 0, 48, 48}, {0, 0, 96, 96}},
      {"denseformer", {0, 0, 0, 14}, {0, 0, 0, 14}},
      {"mudd", {0, 0, 328, 1138}, {0, 0, 328, 1202}},
      {"attnres", {0, 0, 72, 144}, {0, 0, 72, 144}},
      {"kv_share", {-4, -128, -128, -128}, {-4, -256, -256, -288}},
      {"mhc", {8, 6144, 6272, 6493}, {8, 6144, 6272, 6493}},
      {"shortcuts", {0, 0, 32, 41}, {0, 0, 64, 73}},
      {"gated_streams", {0, 0, 1600, 1816}, {0, 0, 1600, 1744}},
      {"gated_streams:hc_lowrank=2", {18, 1152, 2176, 2392}, {18, 1152, 2176, 2320}},
      {"depth_attention", {0, 0, 0, 0}, {0, 0, 0, 0}},
      {"moda", {6, 192, 192, 192}, {6, 384, 384, 384}},
      {"gemma3n", {17, 28672, 28672, 28992}, {17, 28672, 28672, 28992}},
      {"relay", {0, 0, 48, 48}, {0, 0, 96, 96}},
  };
  std::set<std::string> found = {"llama", "gpt2"};
  for (const auto& [choice, to_llama, to_gpt2] : all) {
    CAPTURE(choice);
    for (const bool llama : {true, false}) {
      CAPTURE(llama);
      const Config backbone = llama ? tiny_config("llama") : tiny_gpt2(), config = connected(choice, backbone);
      const Accounting plain = account_of(backbone), a = account_of(config);
      const Added& want = llama ? to_llama : to_gpt2;
      CHECK(a.muon_matrices - plain.muon_matrices == want.muon_matrices);
      CHECK(a.muon_parameters - plain.muon_parameters == want.muon_parameters);
      CHECK(a.matrix - plain.matrix == want.matrix);
      CHECK(a.non_embedding - plain.non_embedding == want.non_embedding);
      found.insert(config.arch);
    }
  }
  for (const Architecture& arch : architectures())
    if (!arch.draft) CHECK_MESSAGE(found.contains(arch.name), arch.name);
  CHECK(account_of(tiny_config("llama"), "adamw").muon_matrices == 0);
  CHECK(account_of(tiny_config("llama"), "adamw").newton_schulz == 0);
}

TEST_CASE("accounting: a run counts tokens, scored ones and epochs over all its parts") {
  const Scratch scratch;
  const std::string whole = scratch.file("whole"), parts = scratch.file("parts");
  const auto state = [](const std::string& run, int64_t step) {
    return known_json(read_text(step_dir(run, step) + "/train_state.json"));
  };
  const auto started = [](const std::string& run) {
    const std::string text = read_text(run + "/environment.jsonl");
    return known_json(text.substr(text.rfind('\n', text.size() - 2) + 1));
  };
  check_outcome(train(scratch, tiny_run(whole, {"--steps", "6"})), Exit::done, "of them scored, 0.24 epochs");
  check_outcome(train(scratch, tiny_run(parts, {"--steps", "2"})), Exit::done, "epochs");
  CHECK(started(parts)["scored_tokens_done"] == 0);
  const json first = state(parts, 2);
  check_outcome(train(scratch, {"--resume", "--steps", "6", "--out", parts}), Exit::done, "0.24 epochs");
  const json line = started(parts);
  CHECK(line["scored_tokens_done"] == first["scored_tokens"]);
  CHECK(line["epochs_done"] == 0.08);
  CHECK(line["flops_per_token"] > line["flops_per_token_6n"]);
  CHECK(line["peak_flops_per_second"].is_null());
  const int64_t scored = state(whole, 6)["scored_tokens"];
  CHECK(state(parts, 6)["scored_tokens"] == scored);
  CHECK(scored > first["scored_tokens"].get<int64_t>());
  CHECK(scored < line["tokens_done"].get<int64_t>() * 3);  // the prompts are not

  SUBCASE("the checkpoint of an older version does not say") {
    json old = state(parts, 6);
    old.erase("scored_tokens");
    replace_files(step_dir(parts, 6), {{"train_state.json", json_text(old)}});
    check_outcome(train(scratch, {"--resume", "--steps", "8", "--out", parts}), Exit::done, " tokens, 0.32 epochs");
    CHECK(started(parts)["scored_tokens_done"].is_null());
    CHECK(state(parts, 8)["scored_tokens"].is_null());
    check_outcome(train(scratch, {"--resume", "--steps", "9", "--out", parts}), Exit::done, " tokens, 0.36 epochs");
  }
}

TEST_CASE("accounting: MFU is of the dense peak of the GPU's own kind") {
  CHECK(peak_flops("NVIDIA H100 80GB HBM3, cc 9.0", Dtype::bf16) == 989e12);
  CHECK(peak_flops("NVIDIA H100 PCIe", Dtype::bf16) == 756e12);
  CHECK(peak_flops("NVIDIA H200", Dtype::f32) == 67e12);
  CHECK(peak_flops("NVIDIA A100-SXM4-80GB", Dtype::bf16) == 312e12);
  CHECK(peak_flops("NVIDIA RTX A1000", Dtype::bf16) == 0);
  CHECK(peak_flops("an H1000", Dtype::bf16) == 0);
  Comparison comparison{"text:x", "nowhere", {run_of("llama", RunState::done), run_of("lime", RunState::done)}};
  comparison.runs[0].result.peak = 1e12;
  const json known = to_json(comparison, comparison.runs[0]), unknown = to_json(comparison, comparison.runs[1]);
  CHECK(known["mfu"].get<double>() == doctest::Approx(381234.56 * 400040 / 1e12).epsilon(1e-12));
  CHECK(unknown["mfu"].is_null());
  CHECK(unknown["flops_per_second"] == known["flops_per_second"]);
  CHECK(known["flops"].get<double>() == doctest::Approx(known["tokens"].get<double>() * 381234.56).epsilon(1e-12));
}
