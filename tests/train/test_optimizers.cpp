// Muon and NorMuon over whole parameter tables and in whole runs; AdamW's variants (test_adamw.cpp has its formula).
#include "models/disk/checkpoint.h"
#include "models/registry.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"
#include "tests/support/weights.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A table on its device, with the optimizer of a plan.
struct Table {
  std::unique_ptr<Device> device;
  ParameterTable params;
  std::unique_ptr<Optimizer> optimizer;

  Table(const TrainPlan& plan, const std::string& on, Dtype dtype) : device(make_device(on)) {
    declare(params, plan);
    params.allocate(*device, dtype, true);
    params.initialise(1);
    optimizer = std::make_unique<Optimizer>(params, Buckets(params), plan.adamw, plan.muon);
  }

  // An update by gradients that are the same f32 numbers on every device.
  void step(uint64_t seed, const StepRates& rates) {
    for (const Parameter& row : params.rows()) {
      const auto gradient = random_vector<float>(row.shape.numel(), seed, 1e-3);
      if (params.dtype() == Dtype::f32) device->copy_in(row.grad.data, gradient.data(), row.grad.bytes());
      else device->copy_in(row.grad.data, convert<double>(gradient).data(), row.grad.bytes());
      seed += 100;
    }
    optimizer->begin_step(rates);
    optimizer->update();
  }
};

TrainPlan plan_of(const std::string& arch, const std::string& optimizer) {
  TrainPlan plan;
  plan.config = tiny_config(arch);
  plan.optimizer = optimizer;
  plan.muon.normalize_rows = optimizer == "normuon";
  plan.steps = 12, plan.batch = 3, plan.warmup = 2;
  plan.lr = 1e-2, plan.muon.lr = 2e-2;
  return plan;
}

// Largest difference from float64 over all weights after 7 steps.
void check_table(const TrainPlan& plan, const std::string& device = "cpu") {
  Table exact(plan, "reference", Dtype::f64), fast(plan, device, Dtype::f32);
  for (uint64_t k = 0; k < 7; ++k) {
    const StepRates rates{1e-3, 0.02, 1 - 0.1 * static_cast<double>(k)};
    exact.step(10 * k, rates), fast.step(10 * k, rates);
  }
  for (const Parameter& row : fast.params.rows()) {
    CAPTURE(row.name);
    const auto got = fast.params.read(row.value), want = exact.params.read(exact.params.at(row.name).value);
    for (size_t i = 0; i < got.size(); ++i) REQUIRE(std::abs(double{got[i]} - double{want[i]}) < 2e-6);
  }
}

}  // namespace

// 7 steps of 0.02 whose directions are good to some 1e-6, beside weights of size 1 whose own rounding is 6e-8 a step.
TEST_CASE("optimizers: in f32 every weight stays within 2e-6 of float64 over 7 steps, whatever the options") {
  for (const Architecture& architecture : architectures())
    for (const std::string optimizer : {"muon", "normuon"}) {
      CAPTURES(architecture.name, optimizer);
      check_table(plan_of(architecture.name, optimizer));
    }
  for (const std::string& scale : muon_scales)
    for (const std::string& polynomial : muon_polynomials) {
      CAPTURES(scale, polynomial);
      TrainPlan plan = plan_of("lime", "muon");
      plan.muon.scale = scale, plan.muon.polynomial = polynomial;
      plan.muon.nesterov = scale != "rms", plan.muon.momentum_warmup = 4;
      plan.adamw.cautious = polynomial == "jordan";
      check_table(plan);
    }
  // Their matrices have every orientation, and several are of one shape.
  for (const char* arch : {"gated_streams", "mhc"})
    if (available(Backend::cuda)) check_table(plan_of(arch, "normuon"), gpu);
}

TEST_CASE("optimizers: matrices move by an orthogonal step of the scale's size, all other rows as AdamW moves them") {
  TrainPlan plan = plan_of("lime", "muon");
  plan.adamw.weight_decay = 0;
  Table muon(plan, "cpu", Dtype::f32), start(plan, "cpu", Dtype::f32);
  plan.optimizer = "adamw";
  Table adamw(plan, "cpu", Dtype::f32);
  muon.step(1, {1e-3, 0.02}), adamw.step(1, {1e-3, 0.02});
  int matrices = 0;
  for (const Parameter& row : muon.params.rows()) {
    CAPTURE(row.name);
    const auto now = muon.params.read(row.value), before = start.params.read(start.params.at(row.name).value);
    if (!row.muon) {
      CHECK(now == adamw.params.read(adamw.params.at(row.name).value));
      continue;
    }
    ++matrices;
    double squares = 0;
    for (size_t i = 0; i < now.size(); ++i) squares += std::pow(double{now[i]} - double{before[i]}, 2);
    const double small = std::min(row.shape[0], row.shape[1]), large = std::max(row.shape[0], row.shape[1]);
    // All singular values of the step are those of an orthogonal matrix, to the polynomial's 0.68 to 1.2.
    CHECK(std::sqrt(squares) > 0.6 * 0.02 * 0.2 * std::sqrt(small * large));
    CHECK(std::sqrt(squares) < 1.25 * 0.02 * 0.2 * std::sqrt(small * large));
  }
  CHECK(matrices == 4 * 7);
}

TEST_CASE("optimizers: a run learns, resumes bit for bit, and its checkpoint has no second moments of matrices") {
  const std::vector<std::string> devices = fast_devices();
  for (size_t turn = 0; turn < 4 * devices.size(); ++turn) {
    const std::string optimizer = turn % 2 == 0 ? "muon" : "normuon", dtype = turn / 2 % 2 == 0 ? "fp32" : "bf16";
    CAPTURES(optimizer, dtype, devices[turn / 4]);
    const Counting data(10);
    TrainPlan plan = plan_of("lime", optimizer);
    plan.dtype = dtype, plan.device = devices[turn / 4];
    plan.decay_schedule = "linear", plan.muon.momentum_warmup = 5;
    Trainer whole(plan, data);
    std::vector<double> want, got;
    for (int i = 0; i < 12; ++i) want.push_back(whole.step().loss);
    CHECK(want.back() < want.front());
    const TempDir run;
    {
      Trainer first(plan, data);
      for (int i = 0; i < 5; ++i) got.push_back(first.step().loss);
      first.save(run.file("step_00000005"), Tokenizer());
    }
    Trainer second(plan, data, run.file("step_00000005"));
    for (int i = 5; i < 12; ++i) got.push_back(second.step().loss);
    CHECK(got == want);
    CHECK(weights(second) == weights(whole));
    const std::string moments = read_text(run.file("step_00000005") + "/optimizer.safetensors");
    CHECK(moments.find("\"v.model.embed_tokens.weight\"") != std::string::npos);
    CHECK((moments.find("\"v.model.layers.0.mlp.up_proj.weight\"") != std::string::npos) == (optimizer == "normuon"));
    plan.optimizer = "adamw";
    check_fails(Exit::usage, {"--optimizer"}, [&] { Trainer(plan, data, run.file("step_00000005")); });
  }
}
