// What a run is planned to take of a GPU's memory, against what it then takes.
#include <filesystem>

#include "data/arith.h"
#include "eval/answers.h"
#include "kernels/cuda/cuda.h"
#include "tests/backends.h"
#include "tests/cases.h"
#include "tests/temp_dir.h"
#include "train/run.h"

using namespace crossply;
using namespace crossply::test;

namespace {

TrainOptions options_for(const Config& config, const std::string& dtype) {
  TrainOptions o;
  o.config = config;
  o.config.check(Exit::usage, "test");
  o.dtype = dtype, o.device = gpu;
  o.steps = 2, o.batch = 2;
  return o;
}

Config sized(const Config& like, int64_t V, int64_t C) {
  Config config = like;
  config.vocab_size = V, config.hidden_size = C, config.intermediate_size = 2 * C, config.head_dim = 0;
  return config;
}

// The most device memory that a step, an evaluation and, of a task, answers take.
double taken(const TrainOptions& o, const Source& data) {
  restart_memory_count();
  const size_t before = most_device_memory();
  Trainer trainer(o, data);
  trainer.step();
  trainer.evaluate(data, 1);
  if (data.task() != nullptr)
    answer_task(trainer.device(), trainer.params(), o.config, data, o.answer_samples, answer_rows(o));
  return static_cast<double>(most_device_memory() - before);
}

void check_plan(TrainOptions o, const Source& data) {
  o.data.seq_len = data.seq_len();
  const double planned = plan_training(o).planned_memory - (emulated ? 0 : cuda_itself), most = taken(o, data);
  CAPTURES(planned, most);
  CHECK(planned == doctest::Approx(most).epsilon(0.02));  // of these tiny sizes: what is not counted hardly grows
}

// Tokens that count, of any vocabulary.
class Counting : public Source {
 public:
  Counting(int64_t V, int64_t T) : V_(V), T_(T) {}
  int64_t size() const override { return 4; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return V_; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    for (int64_t t = 0; t < T_; ++t)
      tokens[t] = static_cast<int32_t>((index + t) % V_), targets[t] = static_cast<int32_t>((index + t + 1) % V_);
  }

 private:
  int64_t V_, T_;
};

}  // namespace

TEST_CASE("plan: what every architecture takes of a GPU's memory") {
  if (!available(Backend::cuda)) return;
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const Case& c : cases()) {
      if (has_loops(c.config) || !c.name.ends_with(" grouped heads")) continue;
      CAPTURES(c.name, dtype);
      const Config config = sized(c.config, 7, 16);
      check_plan(options_for(config, dtype), Counting(7, 16));
    }
  }
}

TEST_CASE("plan: logits in the GPU's scratch memory, and answers beside the training") {
  if (!available(Backend::cuda)) return;
  for (const std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    check_plan(options_for(sized(tiny_config("llama"), 4001, 8), dtype), Counting(4001, 64));
    ArithSource task(1, 0);
    TaskSource::Seen seen;
    Random random(1, 1);
    task.fill(4, seen, [&] { return arith_sample(1, random); });
    TrainOptions o = options_for(sized(tiny_config("lime"), task.vocab_size(), 8), dtype);
    o.data.spec = "arith:1", o.answer_samples = 3;
    check_plan(o, task);
  }
}

TEST_CASE("plan: a run that is larger than the GPU is refused before it leaves anything behind") {
  if (!available(Backend::cuda)) return;
  const TempDir dir;
  TrainOptions o = options_for(tiny_config("llama"), "bf16");
  o.data.seq_len = 64, o.out = dir.file("run");
  o.batch = 1'000'000'000;
  try {
    claim_run_dir(o);
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code == Exit::device);
    CHECK(std::string(error.what()).find("TiB (parameters: ") != std::string::npos);
  }
  CHECK(!std::filesystem::exists(o.out));
}
