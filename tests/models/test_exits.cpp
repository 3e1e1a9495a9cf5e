// Stacks, models that run several times, and their exit gates. That a stack's gradients are the derivatives and that
// generation sees what training sees is checked with all models (tests/support/cases.h).
#include "models/disk/config_json.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/twin.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Config stacked(Config config, int64_t passes, bool gate = false, double beta = 0.05) {
  config.loop.kind = "stack", config.loop.passes = passes, config.loop.exit_gate = gate, config.loop.exit_beta = beta;
  config.check(Exit::usage, "test");
  return config;
}

// The mean objective of the model as it is, without an update.
double objective(TinyModel& model) {
  model.tape.forward(Step{true});
  return sum_losses(*model.device, model.graph) / model.scored;
}

}  // namespace

TEST_CASE("exits: gradients of all tensors are the derivatives of the objective, in double") {
  const std::vector<Config> configs = {stacked(tiny_config("llama"), 2, true), stacked(tiny_gpt2(false), 3, true, 0.4),
                                       stacked(tiny_with("mhc:hc_mult=2"), 2, true, 0),
                                       stacked(tiny_config("vertical"), 2, true)};
  for (const Config& config : configs) {
    TinyModel model(config, "reference", PlanMode::reuse, Dtype::f64);
    model.step();
    constexpr double h = 2e-5, rounding = 7.5e-11;         // as in test_models.cpp
    std::map<std::string, std::vector<double>> gradients;  // to which a head adds in every forward of training
    for (const Parameter& row : model.params.rows()) gradients[row.name] = model.values<double>(row.grad);
    for (Parameter& row : model.params.rows()) {
      const std::vector<double>& all = gradients.at(row.name);
      double* x = row.value.as<double>();
      std::vector<double> got, want;
      for (int64_t i = 0; i < row.shape.numel(); i += row.shape.numel() / 12 | 1) {
        const double keep = x[i];
        const auto at = [&](double d) {
          x[i] = keep + d;
          return objective(model);
        };
        got.push_back(all[static_cast<size_t>(i)]);
        want.push_back((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
        x[i] = keep;
      }
      if (is_key_bias(row, config)) continue;  // rounding alone
      check_close(str(config.arch, " ", row.name), got, want, 1e-6, rounding);
    }
  }
}

TEST_CASE("exits: training reports the last exit's cross entropy, which is what evaluation tells") {
  for (const std::string& device : fast_devices())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      CAPTURES(device, dtype);
      TinyModel model(stacked(tiny_config("llama"), 3, true), device, PlanMode::reuse, dtype);
      objective(model);
      double last = 0;
      for (const float ce : model.values<float>(model.graph.ce->tensor)) last += static_cast<double>(ce);
      CHECK(last / model.scored == doctest::Approx(model.loss()).epsilon(1e-6));
    }
}

TEST_CASE("exits: one pass is the model without a stack, to the bit, and a sure gate the loss of its exit") {
  for (const std::string arch : {"llama", "lime", "attnres", "hyper"}) {
    TinyModel plain(tiny_config(arch), "cpu"), once(stacked(tiny_config(arch), 1), "cpu");
    CHECK(plain.step() == once.step());
    CHECK(plain.values<float>(plain.params.gradients()) == once.values<float>(once.params.gradients()));
  }
  for (const Architecture& architecture : architectures()) {  // of which some take over the memory of what they read
    const std::string& arch = architecture.name;
    if (arch == "gemma3n") continue;  // no stack
    CAPTURE(arch);
    TinyModel first(tiny_config(arch), "cpu"), gated(stacked(tiny_config(arch), 2, true), "cpu");
    gated.take(first);
    gated.fill("model.early_exit_gate.weight", [](int64_t) { return 0; });
    gated.fill("model.early_exit_gate.bias", [](int64_t) { return 60; });  // all leave at once
    CHECK(objective(gated) == doctest::Approx(first.loss()).epsilon(1e-6));
    gated.fill("model.early_exit_gate.bias", [](int64_t) { return -60; });
    CHECK(objective(gated) == doctest::Approx(gated.loss()).epsilon(1e-6));
  }
}

TEST_CASE("exits: what contradicts itself is refused") {
  const auto refused = [](const Config& base, const LoopOptions& loop, const char* says) {
    Config config = base;
    config.loop = loop;
    check_fails(Exit::usage, {"test", says}, [&] { config.check(Exit::usage, "test"); });
  };
  const Config llama = tiny_config("llama");
  LoopOptions gate{"stack", 1};
  gate.exit_gate = true;
  refused(llama, gate, "2 to 16 passes");
  gate.passes = 17;
  refused(llama, gate, "2 to 16 passes");
  gate.kind = "anchor", gate.passes = 2;
  refused(llama, gate, "exit_gate needs loop stack");
  gate.kind = "stack", gate.exit_beta = -1;
  refused(llama, gate, "exit_beta must be 0 or more");
  refused(llama, {"stack", 2, "[1,2,1]"}, "a stack has passes");
  refused(llama, {"stack", 2, "[]", true, "passes", 0.5}, "a stack has passes");
  refused(tiny_config("gemma3n"), {"stack", 2}, "try loop anchor");
  LoopOptions beta{"stack", 2};
  beta.exit_beta = 0.1;
  refused(llama, beta, "without exit_gate");
}

TEST_CASE("exits: config.json has what is not as usual, and is read back; rows are stored once") {
  const Config config = stacked(tiny_config("lime"), 3, true, 0.1);
  const nlohmann::json json = to_json(config)["crossply"];
  CHECK((json["loop"] == "stack" && json["loop_passes"] == 3 && json["exit_gate"] == true && json["exit_beta"] == 0.1));
  CHECK(parse_config(to_json(config), "test").loop == config.loop);
  ParameterTable plain, gated;
  declare_model(plain, tiny_config("lime"));
  declare_model(gated, config);
  CHECK(gated.count() == plain.count() + config.hidden_size + 1);
}

TEST_CASE("exits: training stops and goes on without a changed bit; a teacher is refused") {
  const TempDir dir;
  const auto start = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.end(),
                {"--preset", "arith-quick", "--data", "arith:3", "--layers", "2", "--batch", "4", "--loop", "stack",
                 "--loop-passes", "2", "--exit-gate", "true", "--schedule", "constant", "--out", dir.file(out)});
    return train(dir, more, "llama");
  };
  check_outcome(start("whole", {"--steps", "6"}), Exit::done, "test loss");
  check_outcome(start("parts", {"--steps", "3"}), Exit::done, "test loss");
  check_outcome(train(dir, {"--resume", "--steps", "6", "--out", dir.file("parts")}, "llama"), Exit::done, "test loss");
  for (const std::string name : {"model.safetensors", "optimizer.safetensors"})
    CHECK(read_text(dir.file("whole/step_00000006/" + name)) == read_text(dir.file("parts/step_00000006/" + name)));
  const std::string metrics = read_text(dir.file("whole/metrics.jsonl"));
  CHECK(metrics.find("\"ce\":") != std::string::npos);
  check_outcome(start("taught", {"--steps", "2", "--teacher", dir.file("whole")}), Exit::usage, "exit gate");
}
