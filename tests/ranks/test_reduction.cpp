// A run of several ranks gives what one rank gives.
#include <atomic>
#include <mutex>

#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/temp_dir.h"
#include "train/step/muon_routes.h"
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

// Widths at which matrices are cut by buckets and slices in many ways.
TrainPlan with_muon(TrainPlan plan, const std::string& optimizer) {
  plan.optimizer = optimizer;
  plan.muon.lr = 0.02, plan.muon.normalize_rows = optimizer == "normuon";
  return plan;
}

TEST_CASE("ranks: Muon's matrices have the bits of one rank, every architecture, fp32 and bf16") {
  int turn = 0;
  for (const Case& c : one_in(5, cases()))
    for (const char* dtype : {"fp32", "bf16"}) {
      const std::string optimizer = turn++ / 2 % 2 == 0 ? "muon" : "normuon";
      CAPTURES(c.name, dtype, optimizer);
      TrainPlan plan = with_muon(options_for(c.config, dtype, "tree", 8), optimizer);
      plan.muon.polynomial = turn % 3 == 0 ? "polar_express" : "jordan";
      const Outcome one = train(plan, 1, 3);
      for (const int ranks : {2, 4, 8}) {
        CAPTURE(ranks);
        const Outcome many = train(plan, ranks, 3);
        CHECK(many.losses == one.losses);
        CHECK(many.norms == one.norms);
        CHECK(many.weights == one.weights);
      }
    }
}

TEST_CASE("ranks: combinations have the bits of one rank, with AdamW and with Muon") {
  for (const char* arch : {"mhc+lime", "gemma3n+kv_share", "resformer+depth_attention"})
    for (const char* optimizer : {"adamw", "normuon"}) {
      CAPTURES(arch, optimizer);
      TrainPlan plan = options_for(tiny_with(arch), "bf16", "tree", 4);
      if (has_muon(optimizer)) plan = with_muon(plan, optimizer);
      const Outcome one = train(plan, 1, 3);
      CHECK(train(plan, 2, 3) == one);
      CHECK(train(plan, 4, 3) == one);
    }
}

TEST_CASE("ranks: Muon beside buckets that are exchanged during the backward, three ranks, and other sums") {
  Config config = tiny_with("mhc");  // whose matrices are many sizes
  config.vocab_size = 1500, config.intermediate_size = 700;
  for (const char* dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    TrainPlan plan = with_muon(options_for(config, dtype, "tree", 12), "normuon");
    plan.batch = 1;
    const Outcome one = train(plan, 1, 3);
    CHECK(train(plan, 3, 3) == one);
    plan.sum = "library";
    const Outcome other = train(plan, 2, 3);
    CHECK(other.norms[0] == doctest::Approx(one.norms[0]).epsilon(1e-4));
  }
}

TEST_CASE(
    "ranks: every element of a matrix goes to its owner and back, or is there; owners have about the same to do") {
  TrainPlan plan = with_muon(options_for(tiny_config("mhc"), "fp32", "tree", 8), "muon");
  plan.config.num_hidden_layers = 12, plan.config.hidden_size = 64, plan.config.intermediate_size = 176;
  for (const int ranks : {2, 3, 4, 8}) {
    CAPTURE(ranks);
    ParameterTable params;
    declare(params, plan);
    const Buckets buckets = divide(params, plan, {0, ranks, 0, ranks});
    const std::vector<const Parameter*> matrices = muon_matrices(params);
    const std::vector<int> owners = muon_owners(params, ranks);
    std::vector<int64_t> there(matrices.size());  // elements that their owner has in its own slices
    for (size_t i = 0; i < matrices.size(); ++i)
      for (const OwnPart& part : buckets.parts_of(*matrices[i], owners[i])) there[i] += part.end - part.begin;
    int64_t last = 0;
    for (const RoutedPart& part : routed_parts(params, buckets)) {
      CHECK(part.owner == owners[part.matrix]);
      CHECK(part.holder != part.owner);
      CHECK(part.flat.begin < part.flat.end);
      CHECK((last <= part.flat.begin || part.holder > 0));
      last = part.flat.end;
      there[part.matrix] += part.flat.size();
    }
    std::vector<double> loads(static_cast<size_t>(ranks));
    double all = 0;
    for (size_t i = 0; i < matrices.size(); ++i) {
      CHECK(there[i] == matrices[i]->shape.numel());
      const double flops = newton_schulz_flops(matrices[i]->shape[0], matrices[i]->shape[1], 1);
      loads[static_cast<size_t>(owners[i])] += flops, all += flops;
    }
    CHECK(*std::max_element(loads.begin(), loads.end()) <= 1.05 * all / ranks);
  }
}

TEST_CASE("ranks: Muon's directions are as many bytes as are counted, about 2 e P / W times (W - 1) / W a rank") {
  const Counting data(10);
  for (const char* dtype : {"fp32", "bf16"})
    for (const int ranks : {2, 4}) {
      CAPTURES(dtype, ranks);
      const TrainPlan plan = with_muon(options_for(tiny_with("llama"), dtype, "tree", 4), "muon");
      std::atomic<size_t> routed = 0;
      on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
        Trainer trainer(plan, data, "", group);
        trainer.step(), trainer.step();
        routed += dynamic_cast<const ThreadComm&>(group->comm()).routed;
      });
      ParameterTable params;
      declare(params, plan);
      const Buckets buckets = divide(params, plan, {0, ranks, 0, ranks});
      const double e = plan.dtype == "bf16" ? 2 : 4, W = ranks;
      double counted = 0, numbers = 0;
      for (const RoutedPart& part : routed_parts(params, buckets))
        counted += 2 * e * static_cast<double>(part.flat.size());
      for (const Parameter* row : muon_matrices(params)) numbers += static_cast<double>(row->shape.numel());
      CHECK(static_cast<double>(routed) == 2 * counted);  // of two steps
      CHECK(counted / W == doctest::Approx(2 * e * numbers / W * (W - 1) / W).epsilon(0.25));
    }
}
