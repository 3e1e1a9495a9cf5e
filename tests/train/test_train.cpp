// Whole training runs: resuming, accumulating, stopping before a bad update.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"
#include "models/registry.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"
#include "tests/support/weights.h"
#include "train/settings/resolve.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

TrainPlan tiny_options(const std::string& arch) {
  TrainPlan plan;
  Config& config = plan.config;
  config.arch = arch;
  config.vocab_size = 7, config.hidden_size = 8, config.intermediate_size = 12;
  config.num_hidden_layers = 3, config.num_attention_heads = 2;
  config.check(Exit::usage, "test");
  plan.steps = 12, plan.batch = 3, plan.warmup = 2;
  plan.lr = 1e-2;
  return plan;
}

// A text of which a small model learns something within a few steps.
void write_story(const std::string& path) {
  const std::string who[] = {"the miller", "a sailor", "my sister", "the old king"};
  const std::string does[] = {"sees", "paints", "buys"},
                    what[] = {"a boat", "the river", "two horses", "bread", "the moon"};
  std::ofstream file(path);
  for (size_t i = 0; i < 400; ++i)
    file << who[i * 5 / 3 % 4] << " " << does[i * 7 / 4 % 3] << " " << what[i * 3 / 2 % 5] << ".\n";
}

// A run of one step, saved.
void save_one_step(const TrainPlan& plan, const Source& data, const std::string& dir) {
  Trainer trainer(plan, data);
  trainer.step();
  trainer.save(dir, Tokenizer());
}

// Four layers, so that every architecture reads across depth with its default options.
TrainPlan across_depth(const std::string& arch, const std::string& data) {
  TrainPlan plan;
  const bool text = data.starts_with("text:");
  Config& config = plan.config;
  config.arch = arch;
  config.vocab_size = text ? 256 : 21;
  config.hidden_size = 16, config.intermediate_size = 32, config.num_hidden_layers = 4;
  config.num_attention_heads = 4, config.num_key_value_heads = arch == "gpt2" ? 4 : 2;
  config.check(Exit::usage, "test");
  plan.data.spec = data;
  plan.data.train_samples = 96, plan.data.test_samples = 8;
  if (text) plan.data.seq_len = 24;
  plan.steps = 66, plan.batch = 8, plan.warmup = 4;
  plan.lr = 3e-2;
  return plan;
}

// Models this small are faster on one thread, much faster where other programs keep the cores busy.
struct OneThread {
  int before = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before); }
};

}  // namespace

TEST_CASE("train: every architecture learns, and stopping in the middle changes no bit of it") {
  const OneThread threads;
  const TempDir scratch;
  write_story(scratch.file("text"));
  for (const std::string& spec : one_in(2, std::vector<std::string>{"text:" + scratch.file("text"), "arith:3"})) {
    double start = 0;  // LLaMA's loss at its first step
    std::vector<std::string> names = {"mhc+lime"};
    for (const Architecture& architecture : architectures()) names.insert(names.end() - 1, architecture.name);
    for (const std::string& arch : names) {
      CAPTURE(arch);
      CAPTURE(spec);
      const TrainPlan plan = across_depth(arch, spec);
      const Dataset data = open_dataset(plan.data);
      const std::string dir = scratch.file(arch + "-" + spec.substr(0, 4));

      Trainer whole(plan, *data.train);
      double last = 0;  // the mean of the last four
      for (int64_t i = 0; i < plan.steps; ++i) {
        const double loss = whole.step().loss;
        if (arch == "llama" && i == 0) start = loss;
        if (i >= plan.steps - 4) last += loss / 4;
      }
      CHECK(last < 0.8 * start);

      Trainer before(plan, *data.train);
      for (int64_t i = 0; i < plan.steps / 2 + 1; ++i) before.step();
      before.save(dir + "-half", Tokenizer());
      Trainer after(plan, *data.train, dir + "-half");
      while (after.steps_done() < plan.steps) after.step();
      whole.save(dir + "-whole", Tokenizer());
      after.save(dir + "-resumed", Tokenizer());
      for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
        CAPTURE(file);
        CHECK(read_text(dir + "-whole" + file) == read_text(dir + "-resumed" + file));
      }
    }
  }
}

TEST_CASE("train: resuming twice gives the losses and weights of the uninterrupted run, bit for bit") {
  struct Case {
    std::string arch, dtype, matmul;
    int64_t batch, accumulate;
  };
  // 10 samples in batches of 3 and of 5: checkpoints inside an epoch, and exactly at the end of one.
  for (const Case& c : std::vector<Case>{{"llama", "fp32", "fp32", 3, 1},
                                         {"lime", "fp32", "fp32", 3, 2},
                                         {"lime", "fp32", "fp32", 5, 1},
                                         {"llama", "fp32", "fp32", 5, 2},
                                         {"lime", "fp32", "bf16x3", 3, 1},
                                         {"lime", "bf16", "fp32", 3, 1},
                                         {"llama", "bf16", "fp32", 5, 2}}) {
    INFO(c.arch, " ", c.dtype, " ", c.matmul, ", batch ", c.batch);
    const Counting data(10);
    TrainPlan plan = tiny_options(c.arch);
    plan.dtype = c.dtype, plan.matmul = c.matmul;
    plan.batch = c.batch, plan.accumulate = c.accumulate;
    Trainer whole(plan, data);
    std::vector<double> want, got;
    for (int i = 0; i < 12; ++i) want.push_back(whole.step().loss);

    TempDir run;
    for (int part = 0, step = 0; part < 3; ++part) {
      Trainer trainer(plan, data, newest_valid_checkpoint(run.path));
      CHECK(trainer.steps_done() == step);
      for (const int end = std::vector<int>{4, 7, 12}[static_cast<size_t>(part)]; step < end; ++step)
        got.push_back(trainer.step().loss);
      trainer.save(run.file("step_0000000" + std::to_string(part)), Tokenizer());
      if (part < 2) continue;
      const std::vector<float> a = weights(whole), b = weights(trainer);
      CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    }
    CHECK(want == got);
    CHECK(want.back() < want.front());
  }
}

TEST_CASE("train: every architecture learns in bf16 about what it learns in fp32") {
  const OneThread threads;
  const TempDir scratch;
  write_story(scratch.file("text"));
  for (const Architecture& architecture : one_in(4, architectures())) {
    CAPTURE(architecture.name);
    TrainPlan plan = across_depth(architecture.name, "text:" + scratch.file("text"));
    const Dataset data = open_dataset(plan.data);
    double last[2] = {};
    for (const bool in_bf16 : {false, true}) {
      plan.dtype = in_bf16 ? "bf16" : "fp32";
      Trainer trainer(plan, *data.train);
      for (int64_t i = 0; i < plan.steps; ++i) {
        const double loss = trainer.step().loss;
        if (i >= plan.steps - 10) last[in_bf16] += loss / 10;
      }
    }
    CHECK(std::abs(last[1] - last[0]) < 0.1 * last[0]);  // runs part, as they do with another seed
  }
}

TEST_CASE("train: the profile counts every step and every op, with replicas and with one tape") {
  const Counting data(64);
  for (const int64_t batch : {1, 8}) {
    TrainPlan plan = tiny_options("lime");
    plan.batch = batch;
    Trainer silent(plan, data);
    silent.step();
    CHECK(silent.profile().empty());
    plan.profile = true;
    Trainer trainer(plan, data);
    for (int i = 0; i < 3; ++i) trainer.step();
    const std::string table = trainer.profile();
    for (const char* op : {"linear", "linear backward", "attention backward", "route", "cross_entropy", "adamw", "all"})
      CHECK_MESSAGE(table.find(std::string("\n") + op + " ") != std::string::npos, op << " in\n" << table);
  }
}

TEST_CASE("train: resuming on data of which a part changed is refused, an older checkpoint knows only samples of it") {
  const TempDir scratch;
  const std::string path = scratch.file("text"), dir = scratch.file("step_00000001");
  write_story(path);
  TrainPlan plan = across_depth("llama", "text:" + path);
  plan.data.train_samples = plan.data.test_samples = 0;
  save_one_step(plan, *open_dataset(plan.data).train, dir);
  CHECK(Trainer(plan, *open_dataset(plan.data).train, dir).steps_done() == 1);
  const std::string text = read_text(path);
  std::string other = text;
  other[40] ^= 1;  // between the first and the second of the sampled windows
  write_text(path, other);
  check_fails(Exit::bad_data, {}, [&] { Trainer(plan, *open_dataset(plan.data).train, dir); });
  write_text(path, text);
  json state = known_json(read_text(dir + "/train_state.json"));
  CHECK(state.erase("data_digest") == 1);
  write_text(dir + "/train_state.json", json_text(state));
  CHECK(Trainer(plan, *open_dataset(plan.data).train, dir).steps_done() == 1);
}

TEST_CASE("train: resuming with other flags is refused by name") {
  const Counting data(10);
  TrainPlan plan = tiny_options("lime");
  TempDir run;
  save_one_step(plan, data, run.file("step_00000001"));
  const auto resume = [&] { Trainer(plan, data, newest_valid_checkpoint(run.path)); };
  resume();
  const TrainPlan same = plan;
  plan.lr = 2e-2;
  check_fails(Exit::usage, {"lr"}, resume);
  plan = same;
  plan.config.intermediate_size = 16;
  check_fails(Exit::usage, {"config.json"}, resume);
  plan = same;
  const Counting longer(11);
  CHECK_THROWS_AS(Trainer(plan, longer, newest_valid_checkpoint(run.path)), Error);
}

TEST_CASE("train: a checkpoint resumes whose schedule has the name that older builds gave it") {
  const Counting data(10);
  TrainPlan plan = tiny_options("llama");
  plan.schedule = "cosine_to_floor";
  const TempDir run;
  const std::string dir = run.file("step_00000001"), path = dir + "/train_state.json";
  save_one_step(plan, data, dir);
  auto state = known_json(read_text(path));
  REQUIRE(state["trajectory"]["schedule"] == "cosine_to_floor");
  state["trajectory"]["schedule"] = "cosine1";
  write_text(path, json_text(state));
  CHECK(Trainer(plan, data, dir).steps_done() == 1);
  plan.schedule = "cosine";
  check_fails(Exit::usage, {"--schedule", "cosine_to_floor"}, [&] { Trainer(plan, data, dir); });
}

TEST_CASE("train: a checkpoint's state of wrong types or sizes is refused") {
  const Counting data(10);
  const TrainPlan plan = tiny_options("llama");
  const TempDir run;
  save_one_step(plan, data, run.file("step_00000001"));
  const std::string path = run.file("step_00000001/train_state.json");
  const auto good = known_json(read_text(path));
  auto code = [&](const std::string& text) {
    write_text(path, text);
    return error_of([&] { Trainer(plan, data, run.file("step_00000001")); }).code;
  };
  CHECK(code(json_text(good)) == Exit::done);
  const json spoilt_values = R"({"step": [-5, 2, "1", 1.5, null, 18446744073709551615],
      "position": [-3, 4, 1e30, 9223372036854775807], "seconds": ["long", null, -1],
      "data": [7, null], "trajectory": [3, "steps", []]})"_json;
  for (const auto& [key, values] : spoilt_values.items())
    for (const json& value : values) {
      json spoilt = good;
      spoilt[key] = value;
      CAPTURE(json_text(spoilt));
      CHECK(code(json_text(spoilt)) == Exit::bad_data);
    }
  for (const std::string text : {"", "{", "[]", "7", "{\"step\":1e999}"}) CHECK(code(text) == Exit::bad_data);
}

TEST_CASE("train: accumulating two half batches is the whole batch") {
  const Counting data(11);
  TrainPlan plan = tiny_options("lime");
  plan.batch = 4;
  Trainer whole(plan, data);
  plan.batch = 2, plan.accumulate = 2;
  Trainer halves(plan, data);
  for (int i = 0; i < 5; ++i) {
    const StepResult a = whole.step(), b = halves.step();
    CHECK(a.scored == b.scored);
    // Same samples, same normalisation; only the order of fp32 sums differs, by a few units in the last place a step.
    CHECK(b.loss == doctest::Approx(a.loss).epsilon(2e-6));
    CHECK(b.norm == doctest::Approx(a.norm).epsilon(2e-5));
  }
}

TEST_CASE("train: loss, norm and update are of the mean over the tokens that are scored") {
  const Counting data(3);
  TrainPlan plan = tiny_options("lime");
  plan.batch = 3, plan.warmup = 0;
  plan.adamw.eps = 1;  // so that the update depends on the size of the gradient
  plan.adamw.clip = 0.5;
  Trainer trainer(plan, data), same(plan, data);
  const StepResult got = trainer.step();

  std::vector<int32_t> tokens(18), targets(18);
  for (size_t i = 0; i < 3; ++i) data.read(static_cast<int64_t>(i), &tokens[6 * i], &targets[6 * i]);
  const auto scored = std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; });
  BatchModel model(same.device(), same.params(), plan.config, {3, 6});
  model.run(tokens.data(), targets.data(), Step{true, 1.0 / static_cast<double>(scored), 0});
  Optimizer optimizer(same.params(), Buckets(same.params()), plan.adamw);
  const double norm = gradient_norm(same.params());
  CHECK(got.scored == scored);
  CHECK(got.scored < 18);
  CHECK(got.loss == doctest::Approx(model.take_losses() / static_cast<double>(scored)).epsilon(1e-6));
  CHECK(got.norm == doctest::Approx(norm).epsilon(1e-5));
  CHECK(norm > plan.adamw.clip);
  CHECK(got.lr > 0);
  update(optimizer, same.device(), got.lr, norm, plan.adamw.clip);
  check_close("weights", weights(trainer), convert<double>(weights(same)), 1e-6);
}

TEST_CASE("train: a frozen row never moves, whatever the flags of decay and routers, and its twin does") {
  const Counting data(10);
  for (const std::string scale : {"learned", "frozen"}) {
    CAPTURE(scale);
    TrainPlan plan = tiny_options("resformer");
    plan.config.options["lambda_scale"] = scale, plan.config.options["lambda2"] = scale;
    plan.config.check(Exit::usage, "test");
    plan.router_lr = 0.5, plan.decay_all = true;
    Trainer trainer(plan, data);
    for (int i = 0; i < 3; ++i) trainer.step();
    const Parameter& row = trainer.params().at("model.lambda_manager.lambda_scale");
    const float moved = trainer.params().read(row.value)[0] - 3;
    CHECK((moved == 0) == (scale == "frozen"));
    const Parameter& own = trainer.params().at(layer_name(1, "self_attn.value_residual_mixing.lambda2"));
    CHECK((trainer.params().read(own.value)[0] == 0.5F) == (scale == "frozen"));
  }
}

TEST_CASE("train: with frozen routers, routers and scalars stay what they start with, and everything else learns") {
  const Counting data(10);
  for (const char* arch : {"lime", "hyper", "mhc", "denseformer", "satformer", "mudd"})
    for (const char* optimizer : {"adamw", "muon"}) {
      CAPTURES(arch, optimizer);
      TrainPlan plan = tiny_options(arch);
      plan.freeze_routers = true, plan.decay_all = true, plan.optimizer = optimizer;
      choose_muon(plan);
      Trainer trainer(plan, data);
      std::map<std::string, std::vector<float>> before;
      for (const Parameter& row : trainer.params().rows()) before[row.name] = trainer.params().read(row.value);
      for (int i = 0; i < 3; ++i) trainer.step();
      bool any = false;
      for (const Parameter& row : trainer.params().rows()) {
        CAPTURE(row.name);
        const bool stays = trainer.params().read(row.value) == before[row.name];
        any |= row.weighs();
        if (row.weighs()) CHECK(stays);
        else if (row.role == Role::input_projection || row.role == Role::output_projection) CHECK(!stays);
      }
      CHECK(any);
    }
}

// Found out by the device: of a GPU in a plain run, in the first replay of the recording, or in a later one.
TEST_CASE("train: a loss that is not finite changes nothing, and says where") {
  const Counting data(10);
  for (const std::string& device : fast_devices()) {
    for (const int good : {1, 0, 4}) {
      CAPTURES(device, good);
      TrainPlan plan = tiny_options("llama");
      plan.device = device;
      Trainer trainer(plan, data);
      for (int i = 0; i < good; ++i) trainer.step();
      const float nan = std::numeric_limits<float>::quiet_NaN();
      trainer.device().copy_in(trainer.params().values().as<float>() + 3, &nan, sizeof nan);
      std::vector<float> before;
      int64_t steps = 0;
      check_fails(Exit::not_finite, {"samples", "No update was made"}, [&] {
        for (int i = 0; i < 10; ++i) {  // the spoilt embedding row need not be in the first batch
          before = weights(trainer);
          steps = trainer.steps_done();
          trainer.step();
        }
      });
      const std::vector<float> after = weights(trainer);
      CHECK(trainer.steps_done() == steps);
      CHECK(std::memcmp(before.data(), after.data(), after.size() * sizeof(float)) == 0);
    }
  }
}

// The profile runs plainly, and waits in between.
TEST_CASE("train: a recorded step has the bits of a plain one, at every rate and with and without clipping") {
  if (!has_whole_models()) return;
  const Counting data(12);
  for (const std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    TrainPlan plan = tiny_options("lime");
    plan.dtype = dtype, plan.device = gpu, plan.warmup = 4, plan.accumulate = 2;
    std::vector<double> norms;
    for (Trainer probe(plan, data); norms.size() < 7;) norms.push_back(probe.step().norm);
    std::nth_element(norms.begin(), norms.begin() + 3, norms.end());
    plan.adamw.clip = norms[3];
    Trainer recorded(plan, data);
    plan.profile = true;
    Trainer plain(plan, data);
    bool clipped = false, unclipped = false;
    for (int step = 0; step < 7; ++step) {
      const StepResult a = recorded.step(), b = plain.step();
      CHECK(a.loss == b.loss);
      CHECK(a.norm == b.norm);
      CHECK(a.lr == b.lr);
      (a.norm > plan.adamw.clip ? clipped : unclipped) = true;
    }
    CHECK(clipped);
    CHECK(unclipped);
    CHECK(weights(recorded) == weights(plain));
  }
}

#if !CROSSPLY_CUDA
TEST_CASE("train: steps that the GPU refuses to record have the bits of recorded ones, and one line says so") {
  if (!has_whole_models()) return;
  const TempDir scratch;
  const Counting data(12);
  TrainPlan plan = tiny_options("lime");
  plan.device = gpu, plan.accumulate = 2;
  const std::vector<std::string> smallest = {
      "--data",       "arith:3", "--width",  "8", "--ffn",          "8", "--layers",         "1", "--heads", "1",
      "--accumulate", "2",       "--device", gpu, "--eval-samples", "1", "--answer-samples", "0"};
  Trainer recorded(plan, data);
  for (int step = 0; step < 4; ++step) recorded.step();
  for (const emulator::Refused at : {emulator::Refused::begin, emulator::Refused::end}) {
    const RefusedCaptures refused(at);
    Trainer plain(plan, data);
    for (int step = 0; step < 4; ++step) plain.step();
    CHECK(weights(recorded) == weights(plain));
    const std::string out = scratch.file(at == emulator::Refused::end ? "end" : "begin");
    const Outcome run = train(scratch, joined(smallest, std::vector<std::string>{"--steps", "4", "--out", out}));
    const std::string note = "note: a step may take longer, because CUDA does not record it: the emulator refuses to ";
    check_outcome(run, Exit::done, note);
    CHECK_MESSAGE(run.output.find(note) == run.output.rfind(note), run.output);
  }
}
#endif

TEST_CASE("train: the same seed gives the same run, another seed another") {
  const Counting data(10);
  TrainPlan plan = tiny_options("lime");
  Trainer a(plan, data), b(plan, data);
  plan.seed = 7;
  Trainer c(plan, data);
  CHECK(a.step().loss == b.step().loss);
  CHECK(a.evaluate(data, 100) == b.evaluate(data, 100));
  const double second = a.step().loss;
  CHECK(second == b.step().loss);
  c.step();
  CHECK(second != c.step().loss);
}

TEST_CASE("train: no step waits for all of the GPU's work, however many micro-steps it has") {
  if (!available(Backend::cuda)) return;
  for (const std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    const Counting data(12);
    TrainPlan plan = tiny_options("lime");
    plan.dtype = dtype, plan.device = gpu, plan.accumulate = 2;
    Trainer trainer(plan, data);
    for (int step = 0; step < 4; ++step) {  // at first plain runs, then recordings
      const int64_t before = device_waits();
      trainer.step();
      CHECK(device_waits() == before);
    }
    const int64_t before = device_waits();
    trainer.evaluate(data, 12);  // four batches
    CHECK(device_waits() - before == 1);
  }
}

TEST_CASE("train: a GPU's losses follow the CPU's; two runs, and one with a pause, have the same bits") {
  if (!has_whole_models()) return;
  struct Case {
    std::string dtype;
    int64_t steps;
    double near, apart;  // relative differences of the first losses, which rounding alone explains, and of the last
  };
  for (const Case& c : {Case{"fp32", emulated ? 40 : 100, 1e-5, 1e-3}, Case{"bf16", emulated ? 20 : 100, 1e-2, 0.1}}) {
    CAPTURE(c.dtype);
    const Counting data(10);
    TrainPlan plan = tiny_options("lime");
    plan.dtype = c.dtype;
    plan.steps = c.steps;
    Trainer cpu(plan, data);
    plan.device = gpu;
    Trainer first(plan, data), second(plan, data);
    double want_last = 0, last = 0;  // means over the last ten
    std::vector<double> losses;
    for (int64_t i = 0; i < c.steps; ++i) {
      const double want = cpu.step().loss, got = first.step().loss;
      losses.push_back(got);
      if (i < 10) CHECK(got == doctest::Approx(want).epsilon(c.near));
      if (i >= c.steps - 10) want_last += want / 10, last += got / 10;
    }
    CHECK(last < losses.front());
    CHECK(last == doctest::Approx(want_last).epsilon(c.apart));

    const TempDir run;
    const int64_t pause = c.steps / 3;
    for (int64_t i = 0; i < pause; ++i) CHECK(second.step().loss == losses[static_cast<size_t>(i)]);
    second.save(run.file("step_00000001"), Tokenizer());
    Trainer third(plan, data, newest_valid_checkpoint(run.path));
    for (int64_t i = pause; i < c.steps; ++i) CHECK(third.step().loss == losses[static_cast<size_t>(i)]);
    const std::vector<float> a = weights(first), b = weights(third);
    CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }
}
