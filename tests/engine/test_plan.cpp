// What a run is planned to take of a GPU's memory, against what it then takes.
#include <filesystem>
#include <numeric>
#include <set>

#include "data/arith.h"
#include "eval/answers.h"
#include "kernels/block/matmul.h"
#include "kernels/cuda/cuda.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "train/run/run.h"

using namespace crossply;
using namespace crossply::test;

namespace {

TrainPlan options_for(const Config& config, const std::string& dtype) {
  TrainPlan plan;
  plan.config = config;
  plan.config.check(Exit::usage, "test");
  plan.dtype = dtype, plan.device = gpu;
  plan.steps = 2, plan.batch = 2;
  return plan;
}

Config sized(const Config& like, int64_t V, int64_t C) {
  Config config = like;
  config.vocab_size = V, config.hidden_size = C, config.intermediate_size = 2 * C, config.head_dim = 0;
  config.max_position_embeddings = 64;
  config.check(Exit::usage, "test");
  return config;
}

// The most device memory that a step, an evaluation and, of a task, answers take.
double taken(const TrainPlan& plan, const Source& data) {
  if (!emulated) Trainer(plan, data).step();  // tries out products, each on a copy of the result
  restart_memory_count();
  const size_t before = max_device_memory();
  Trainer trainer(plan, data);
  trainer.step();
  trainer.evaluate(data, 1);
  if (data.task() != nullptr)
    answer_task(trainer.device(), trainer.params(), plan.config, data, plan.answer_samples, answer_rows(plan),
                *one_rank_group());
  return static_cast<double>(max_device_memory() - before);
}

void check_plan(TrainPlan plan, const Source& data) {
  plan.data.seq_len = data.seq_len();
  const double products = emulated ? 0 : matmul_workspace;  // they would hide everything else
  const double planned = plan_training(plan).planned_memory - (emulated ? 0 : cuda_itself) - products;
  const double most = taken(plan, data) - products;
  CAPTURES(planned, most);
  CHECK(planned == doctest::Approx(most).epsilon(0.02));  // of these tiny sizes: what is not counted hardly grows
}

constexpr int64_t rows = TinyModel::B * TinyModel::T;

// By how much what an op plans may be off: head_mix does not count its sums, route counts readers that have no weight.
double uncounted(const Node& node, double planned) {
  const std::string op = node.op();
  return op == "head_mix" ? 32 * rows : op == "route" ? planned / 4 : 0;
}

// The most scratch memory that an op takes, beside what products take.
size_t scratch_taken(Node& node, Device& device) {
  restart_memory_count();
  const size_t before = max_device_memory();
  node.forward(Step{true, 1, 0}, device.stream());
  node.backward(Step{true, 1, 0}, device.stream());
  device.wait();
  const size_t most = max_device_memory() - before, products = emulated ? 0 : matmul_workspace;
  return most - (most < products ? 0 : products);
}

}  // namespace

TEST_CASE("plan: what every architecture takes of a GPU's memory") {
  if (!has_whole_models()) return;
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const Case& c : cases()) {
      if (has_loops(c.config) || !(c.name.ends_with(" grouped heads") || c.name == "gpt2")) continue;
      CAPTURES(c.name, dtype);
      const Config config = sized(c.config, 7, 16);
      check_plan(options_for(config, dtype), Counting(4, 16, 7));
    }
    TrainPlan normuon = options_for(sized(tiny_config("mhc"), 7, 16), dtype);
    normuon.optimizer = "normuon", normuon.muon.lr = 0.02, normuon.muon.normalize_rows = true;
    check_plan(normuon, Counting(4, 16, 7));
  }
}

// Each op for itself, so that none's scratch hides behind another's in the same slot, as it may in a whole run. What is
// not planned is a row of columns and some numbers for each row at most, eight where a product is padded to as many.
TEST_CASE("plan: every op takes the scratch memory that it says") {
  if (!has_whole_models()) return;
  std::set<std::string> planning;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Case& c : cases()) {
      const bool chosen = c.name.ends_with(" grouped heads") || c.name.starts_with("mudd") || c.name == "gpt2";
      if (has_loops(c.config) || !chosen) continue;
      const int64_t C = 40;
      TinyModel model(sized(c.config, 7, C), gpu, PlanMode::distinct, dtype);
      model.step();  // the first tries out products, which takes more
      for (const auto& node : model.tape.nodes()) {
        const auto most = static_cast<double>(scratch_taken(*node, *model.device));
        const ScratchBytes bytes = node->scratch();
        const auto planned = std::accumulate(bytes.begin(), bytes.end(), 0.0);
        CAPTURES(c.name, name_of(dtype), node->name, planned, most);
        const bool streams = node->op() == std::string("gated_read");  // whose products read four at once
        const bool products = streams || node->op() == std::string("linear");
        if (planned > 0) planning.insert(node->op());
        const Shape& of = node->out[0]->shape;  // a norm of heads, or of layers, has more rows than there are tokens
        const int64_t own = node->op() == std::string("rmsnorm") ? of.numel() / of[of.rank - 1] : rows;
        if (planned > 0) CHECK(std::abs(planned - most) <= uncounted(*node, planned));
        else CHECK(most <= 4 * ((products ? 8 : 1) * (streams ? 4 * C : C) + 16 * own));
      }
    }
  CHECK(planning == std::set<std::string>{"attention", "channel_gate", "cross_entropy", "embedding", "engram_gate",
                                          "head_mix", "hyper_read", "mhc_read", "multiway_mix", "query_source",
                                          "route"});
}

TEST_CASE("plan: logits in the GPU's scratch memory, and answers beside the training") {
  if (!available(Backend::cuda)) return;
  for (const std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    check_plan(options_for(sized(tiny_config("llama"), 4001, 8), dtype), Counting(4, 64, 4001));
    ArithSource task({1, 1}, 0);
    TaskSource::Seen seen;
    Random random(1, 1);
    task.fill(4, seen, [&] { return arith_sample({1, 1}, random); });
    TrainPlan plan = options_for(sized(tiny_config("lime"), task.vocab_size(), 8), dtype);
    plan.data.spec = "arith:1", plan.answer_samples = 3;
    check_plan(plan, task);
  }
}

TEST_CASE("plan: a run that is larger than the GPU is refused before it leaves anything behind") {
  if (!available(Backend::cuda)) return;
  const TempDir dir;
  TrainPlan plan = options_for(tiny_config("llama"), "bf16");
  plan.data.seq_len = 64, plan.out = dir.file("run");
  plan.batch = 1'000'000'000;
  try {
    std::shared_ptr<ProcessGroup> job = one_rank_group();
    claim_run_dir(plan, job);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code == Exit::device);
    CHECK(std::string(error.what()).find("TiB (parameters: ") != std::string::npos);
  }
  CHECK(!std::filesystem::exists(plan.out));
}

TEST_CASE("plan: a comparison of which one run is larger than the GPU is refused before the first run") {
  if (!available(Backend::cuda)) return;
  const TempDir scratch;
  const std::string out = scratch.file("runs");
  check_outcome(run_program_inside(scratch, {"compare", "--arch", "llama,lime", "--data", "arith:3", "--device", gpu,
                                             "--batch", "1000000000", "--out", out}),
                Exit::device, "llama needs ");
  CHECK(!std::filesystem::exists(out));
}
