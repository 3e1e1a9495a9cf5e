// What is predicted of many ranks, against numbers that were worked out by hand.
#include <cmath>
#include <mutex>
#include <sstream>

#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"
#include "train/run/plan.h"
#include "train/run/planned_run.h"
#include "train/run/scaling.h"
#include "train/settings/gpus.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Models of bf16 on nodes of 8 H100: two levels, both transfers beside the computing, buckets of max(64 MB, W 256 KB).
struct Model {
  const char* name;
  double P, LC, T, tokens, mfu;
};

ScalingInput input_for(const Model& c, int64_t W) {
  const Gpu& gpu = find_gpu("h100");
  ScalingInput in;
  in.W = W;
  in.t_c = (6 * c.P + 6 * c.LC * c.T) * c.tokens / (c.mfu * gpu.bf16);
  in.gradients = 4 * c.P, in.weights = 2 * c.P;
  in.nb = std::lround(std::ceil(4 * c.P / std::max(64e6, static_cast<double>(W) * 256e3)));
  in.tail = 1 / static_cast<double>(in.nb);
  in.swept = 34 * c.P / static_cast<double>(W), in.b_hbm = gpu.b_hbm;
  in.reduce = in.gather = Route::two_levels, in.gather_beside = true;
  in.links = {gpu.b_nv, gpu.b_ib, 8};
  return in;
}

const Model small{"124M", 124e6, 12 * 768, 1024, 64 * 1024, 0.40}, middle{"1B", 1e9, 22 * 2048, 2048, 16 * 2048, 0.45},
    large{"7B", 6.7e9, 32 * 4096, 4096, 4 * 4096, 0.50};

double percent(const Scaling& s) { return 100 * s.efficiency(); }

}  // namespace

// Weak scaling: t_c, t_rs and t_ag at 8 and 64 in ms, efficiency at 8, 64, 1024, and at 1024 with NCCL's ring.
TEST_CASE("scaling: the table of three models") {
  struct Row {
    Model model;
    double t_c, rs_8, ag_8, rs_64, ag_64, at_8, at_64, at_1024, ring;
  };
  for (const Row& row : {Row{small, 133, 1.5, 0.9, 1.7, 1.1, 98, 97, 93, 87},
                         {middle, 483, 12, 7, 14, 9, 98, 97, 94, 92},
                         {large, 1439, 80, 46, 93, 60, 97, 97, 94, 88}}) {
    CAPTURES(row.model.name);
    const auto near = [](double got, double want) {
      const double unit = want < 5 ? 0.1 : 1;  // as it is rounded
      CAPTURES(got, want);
      CHECK(std::abs(got - want) <= 0.5 * unit + 0.05 * unit);
    };
    const Scaling at_8 = predict(input_for(row.model, 8)), at_64 = predict(input_for(row.model, 64));
    near(1e3 * at_8.t_c, row.t_c);
    near(1e3 * at_8.t_rs, row.rs_8), near(1e3 * at_8.t_ag, row.ag_8);
    near(1e3 * at_64.t_rs, row.rs_64), near(1e3 * at_64.t_ag, row.ag_64);
    near(percent(at_8), row.at_8), near(percent(at_64), row.at_64);
    ScalingInput many = input_for(row.model, 1024);
    near(percent(predict(many)), row.at_1024);
    many.reduce = many.gather = Route::ring;
    CHECK(std::abs(percent(predict(many)) - row.ring) < 1);  // 87.7 of the first: the vote's time is not in it
  }
}

TEST_CASE("scaling: what is sent adds up, whichever way it goes") {
  const double bytes = 1024;
  for (const int64_t W : {2, 8, 16, 64})
    for (const int64_t g : {1, 4, 8}) {
      CAPTURES(W, g);
      const double least = bytes * static_cast<double>(W - 1) / static_cast<double>(W);
      for (const Route route : {Route::flat, Route::ring}) {
        const Sent s = sent(bytes, route, W, g);
        CHECK(s.inside + s.outside == doctest::Approx(least));
        CHECK((s.outside > 0) == (W > g));
      }
      // g times less leaves the node
      CHECK(sent(bytes, Route::two_levels, W, g).outside * static_cast<double>(std::min(g, W)) ==
            doctest::Approx(sent(bytes, Route::flat, W, g).outside));
      CHECK(sent(bytes, Route::two_levels, W, g).inside >= sent(bytes, Route::flat, W, g).inside);
    }
}

TEST_CASE("scaling: what the backward hides, and what it does not") {
  ScalingInput in;
  in.W = 4, in.t_c = 3, in.gradients = 4e9, in.weights = 0, in.nb = 4, in.tail = 0.25;
  in.links = {1e9, 1e9, 4};
  const double t_rs = predict(in).t_rs;  // 3 GB leave each rank at 1 GB/s
  CHECK(t_rs == doctest::Approx(3 + 4 * 30e-6));
  CHECK(predict(in).rs_exposed == doctest::Approx(t_rs - 0.9 * 2));
  in.A = 10;  // the last micro-step hides a tenth
  CHECK(predict(in).rs_exposed == doctest::Approx(t_rs - 0.9 * 0.2));
  in.A = 1, in.t_c = 300;
  CHECK(predict(in).rs_exposed == doctest::Approx(t_rs / 4));
  in.tail = 0.75;
  CHECK(predict(in).rs_exposed == doctest::Approx(t_rs * 3 / 4));
  in.reduce_beside = false;
  CHECK(predict(in).rs_exposed == doctest::Approx(t_rs));
  in.W = 1;
  CHECK(predict(in).t == 300);
}

// A step of 32k tokens of 124M in fp32 on two CPUs over 10 GbE: 0.9 s, and 70 s of computing.
TEST_CASE("scaling: two CPUs") {
  ScalingInput in;
  in.W = 2, in.t_c = 32768 / 466., in.gradients = in.weights = 4 * 124e6, in.nb = 8;
  in.gather = Route::flat, in.links = {1.1e9, 1.1e9, 1, true};
  const Scaling two = predict(in);
  CHECK(two.t_c == doctest::Approx(70.3).epsilon(0.01));
  CHECK(two.t_rs + two.t_ag == doctest::Approx(0.45).epsilon(0.01));  // each sends half of what there is
}

TEST_CASE("scaling: Muon's directions and its busiest owner come on top") {
  ScalingInput in;
  in.W = 4, in.t_c = 1, in.gradients = in.weights = 1e9, in.links = {100e9, 10e9, 2};
  const double before = predict(in).t;
  in.newton_schulz = 0.5, in.directions = {3e9, 2e9};
  const Scaling with = predict(in);
  CHECK(with.t_muon == doctest::Approx(0.5 + 0.2 + 2 * latency(Route::flat, 4, in.links)));  // links work side by side
  CHECK(with.t == doctest::Approx(before + with.t_muon));
  in.directions = {};
  CHECK(predict(in).t_muon == 0.5);
}

// -----------------------------------------------------------------------------------------------------------------
// What a dry run plans of memory, and prints

TEST_CASE("plan of many ranks: the memory that each rank's trainer takes") {
  const Counting data(10);
  const char* const optimizers[] = {"adamw", "muon", "normuon"};
  int turn = 0;
  for (const char* dtype : {"fp32", "bf16"})
    for (const char* sum : {"running", "tree", "library"})
      for (const int ranks : {1, 2, 4}) {
        const char* optimizer = optimizers[turn % 3];
        turn += ranks == 4 ? 2 : 1;
        CAPTURES(dtype, sum, ranks, optimizer);
        TrainPlan o;
        o.optimizer = optimizer, o.muon.normalize_rows = o.optimizer == "normuon";
        o.config = tiny_config("lime");
        o.batch = 2, o.accumulate = 8, o.steps = 2, o.data.seq_len = data.seq_len();
        o.dtype = dtype, o.sum = sum, o.bucket_bytes = 40000;
        std::mutex mutex;
        on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
          const Trainer trainer(o, data, "", group);
          const TrainResult plan = plan_training(o, ranks);
          const std::lock_guard lock(mutex);
          // Of Muon's moments each rank has about as many, and the plan is rank 0's.
          if (o.optimizer == "adamw" || group->world.leads()) CHECK(plan.memory == trainer.memory());
        });
      }
}

TEST_CASE("plan of many ranks: one rank has no more than it had, unless it asks for the tree") {
  TrainPlan plan;
  plan.config = tiny_config("llama");
  plan.batch = 2, plan.accumulate = 8, plan.data.seq_len = 16;
  PlannedRun planned(plan, 1);
  const double flat = 4 * static_cast<double>(planned.params.flat_size());
  CHECK(planned.params.flat_size() - planned.params.rows_size() < leaf);  // what the norm's sum rounds up
  std::vector<MemoryPart> parts = memory_parts(plan, planned);
  const char* const names[] = {"parameters", "gradients", "moments", "activations"};
  for (size_t i = 0; i < 4; ++i) CHECK(parts[i].name == names[i]);
  for (size_t i = 0; i < 3; ++i) CHECK(parts[i].bytes == (i == 2 ? 2 : 1) * flat);
  plan.sum = "tree";
  parts = memory_parts(plan, planned);
  CHECK(parts[2].name == "parked gradients (--sum tree)");
  CHECK(parts[2].bytes == 3 * flat);  // log2 of 8
}

TEST_CASE("plan of many ranks: the printed plan fits 80 columns and says what it is") {
  const TempDir scratch;
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--preset", "1b", "--dry-run", "--world"});
    const Outcome got = train(scratch, more, "lime");
    CHECK_MESSAGE(got.code == 0, got.output);
    std::istringstream lines(got.output);
    for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= 80, line);
    return got;
  };
  for (const char* ranks : {"1", "2", "8", "64", "256"})
    for (const char* dtype : {"fp32", "bf16"}) plan({ranks, "--device", "cuda", "--dtype", dtype});
  check_outcome(plan({"1024", "--device", "cuda", "--batch", "1", "--accumulate", "1024", "--gpu", "b200"}), Exit::done,
                "bits: those of one rank with --sum tree");
  check_outcome(plan({"4", "--device", "cuda", "--batch", "64"}), Exit::done, "and the h100 has 74.5 GiB");
  check_outcome(plan({"4"}), Exit::done, "no times: give --rank-rate");
  check_outcome(plan({"4", "--optimizer", "muon"}), Exit::done, "  Muon's directions, to owners and back");
  check_outcome(plan({"4", "--optimizer", "muon", "--rank-rate", "100", "--net", "1.1"}), Exit::done, " + t_muon");
  check_outcome(plan({"4", "--rank-rate", "100", "--net", "1.1"}), Exit::done, "a rank sends 1.1 GB/s (--net)");
}

TEST_CASE("plan of many ranks: what cannot be, and what can instead") {
  const TempDir scratch;
  const auto refused = [&](const std::vector<std::string>& arguments, const std::string& says) {
    std::vector<std::string> all = {"--preset", "150m", "--device", "cuda"};  // 256 micro-steps of 4 sequences
    all.insert(all.end(), arguments.begin(), arguments.end());
    check_outcome(train(scratch, all), Exit::usage, says);
  };
  refused({"--dry-run", "--world", "48"}, "Possible are 32 or 64 ranks; --accumulate 240 or 288 (another step)");
  refused({"--dry-run", "--world", "512"}, "with --batch 2 --accumulate 512 (the same step) 512 ranks");
  refused({"--dry-run", "--world", "2000"}, "--batch 1 --accumulate 1024 up to 1024 ranks");
  refused({"--dry-run", "--net", "10"}, "--net has no effect without --world");
  refused({"--dry-run", "--world", "2", "--device", "cpu", "--gpu", "h100"}, "--gpu");
  refused({"--data", "arith:3", "--out", scratch.file("run"), "--world", "2"}, "--world has no effect without");
  check_outcome(run_program_inside(scratch, {"compare", "--dry-run", "--world", "2"}), Exit::usage, "for the trainers");
}

TEST_CASE("plan of many ranks: --dump-tape tells where each bucket is final") {
  const TempDir scratch;
  const Outcome got =
      train(scratch, {"--preset", "150m", "--seq", "64", "--batch", "1", "--dump-tape", "--world", "2"});
  REQUIRE(got.code == 0);
  size_t at = 0;
  for (int k = 0; k < 10; ++k) {
    at = got.output.find(str("bucket ", k, " is final, "), at);
    CHECK(at != std::string::npos);
  }
  CHECK(got.output.find("time 293: bucket 9 is final, 3.3 MiB: embed_tokens") == got.output.find("time 293: bucket 9"));
}
