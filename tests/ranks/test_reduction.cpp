// A run of several ranks gives what one rank gives.
#include <mutex>

#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/temp_dir.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> weights;
  bool operator==(const Outcome&) const = default;
};

TrainPlan options_for(const Config& config, const std::string& dtype, const std::string& sum, int64_t accumulate) {
  TrainPlan plan;
  plan.config = config;
  plan.batch = 2, plan.accumulate = accumulate, plan.steps = 100, plan.warmup = 2, plan.lr = 0.01;
  plan.dtype = dtype, plan.sum = sum;
  plan.bucket_bytes = 40000;  // several buckets, also of a tiny model
  return plan;
}

Outcome train(TrainPlan plan, int ranks, int64_t steps) {
  const Counting data(10);
  Outcome outcome;
  std::mutex mutex;
  on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(plan, data, "", group);
    std::vector<double> losses, norms;
    for (int64_t step = 0; step < steps; ++step) {
      const StepResult result = trainer.step();
      losses.push_back(result.loss), norms.push_back(result.norm);
      if (step == 0) trainer.gather_values();  // as for a checkpoint; the next step must not see it
    }
    losses.push_back(trainer.evaluate(data, 7));
    const auto read_all = [&] {
      for (const Parameter& row : trainer.params().rows()) trainer.params().read(row.value);
    };
    if (trainer.params().lends()) CHECK_THROWS_AS(read_all(), Error);
    trainer.gather_values();
    const std::lock_guard lock(mutex);
    const bool first = outcome.losses.empty();
    if (first) outcome.losses = losses, outcome.norms = norms;
    CHECK(losses == outcome.losses);  // every rank knows the same
    for (const Parameter& row : trainer.params().rows()) {
      const std::vector<float> values = trainer.params().read(row.value);
      if (first) outcome.weights[row.name] = values;
      CHECK(values == outcome.weights[row.name]);
    }
  });
  return outcome;
}

}  // namespace

TEST_CASE("ranks: after the node that the tape names as the last, nobody adds to a parameter's gradient") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Case& c : cases()) {
      CAPTURE(c.name);
      TinyModel model(c.config, "cpu", PlanMode::reuse, dtype);
      std::map<const Parameter*, std::vector<float>> final;
      model.tape.watch([&](size_t n, bool backward) {
        if (!backward) return;
        for (const Parameter& row : model.params.rows())
          if (model.tape.last_to_add(row) == n) final[&row] = model.params.read(row.grad);
      });
      model.step();
      for (const Parameter& row : model.params.rows()) {
        const std::vector<float> end = model.params.read(row.grad);
        if (final.contains(&row)) CHECK_MESSAGE(final[&row] == end, row.name);
        else CHECK_MESSAGE(end == std::vector<float>(end.size(), 0.f), row.name);  // nobody reads it
      }
    }
}

// One tape, whose backward the exchange of four buckets or more runs beside.
TEST_CASE("ranks: the same where buckets are exchanged during the backward") {
  for (const char* arch : {"llama", "lime", "hyper", "mudd", "denseformer", "resformer:variant=svformer"})
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(arch, dtype);
      Config config = tiny_with(arch);
      config.vocab_size = 1500, config.intermediate_size = 700;
      TrainPlan plan = options_for(config, dtype, "tree", 4);
      plan.batch = 1;
      ParameterTable params;
      declare(params, plan);
      CHECK(Buckets(params, 0, 2, plan.bucket_bytes).list().size() >= 4);
      const Outcome one = train(plan, 1, 3);
      for (const int ranks : {2, 4}) {
        const Outcome many = train(plan, ranks, 3);
        CHECK(many.losses == one.losses);
        CHECK(many.norms == one.norms);
        CHECK(many.weights == one.weights);
      }
      // Other sums: the same up to rounding, and at every rank the same.
      for (const char* sum : {"running", "library"}) {
        plan.sum = sum;
        const Outcome other = train(plan, 2, 3);
        CHECK(other.losses.back() == doctest::Approx(one.losses.back()).epsilon(1e-3));
        CHECK(other.norms[0] == doctest::Approx(one.norms[0]).epsilon(1e-4));
      }
    }
}

TEST_CASE("ranks: micro-steps that are no power of two, and three ranks") {
  TrainPlan plan = options_for(tiny_with("lime"), "fp32", "tree", 12);
  const Outcome one = train(plan, 1, 3);
  CHECK(train(plan, 3, 3) == one);  // four each
  plan.accumulate = 5;
  CHECK(std::isfinite(train(plan, 1, 2).losses.back()));
  plan.sum = "running";
  plan.accumulate = 3;
  const Outcome together = train(plan, 3, 2);
  plan.sum = "tree";
  CHECK(train(plan, 3, 2) == together);  // with one micro-step each there is nothing to park
  CHECK(train(plan, 1, 2) == together);
}

TEST_CASE("ranks: --sum tree gives the bits of one rank, every architecture, fp32 and bf16") {
  for (const Case& c : one_in(5, cases()))
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(c.name, dtype);
      const TrainPlan plan = options_for(c.config, dtype, "tree", 8);
      const Outcome one = train(plan, 1, 3);
      for (const int ranks : {2, 4}) {
        CAPTURE(ranks);
        const Outcome many = train(plan, ranks, 3);
        CHECK(many.losses == one.losses);
        CHECK(many.norms == one.norms);
        CHECK(many.weights == one.weights);
      }
    }
}
