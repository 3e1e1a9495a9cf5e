// Whole models that learn from a teacher: of other sizes, depth, architecture and backbone.
#include <filesystem>

#include "data/shards.h"
#include "engine/io/json.h"
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"
#include "tests/support/weights.h"
#include "train/run/inputs.h"
#include "train/run/plan.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

Config gpt2_config(const std::string& arch = "gpt2") {
  Config c;
  c.arch = arch;
  use_gpt2(c);
  c.vocab_size = 7, c.hidden_size = 12, c.intermediate_size = 20, c.num_hidden_layers = 2, c.num_attention_heads = 3;
  c.max_position_embeddings = 25, c.tie_word_embeddings = true, c.initializer_range = 0.3;
  c.check(Exit::usage, "test");
  return c;
}

// A teacher with random weights, in the memory of its own device.
struct TinyTeacher {
  std::unique_ptr<Device> device;
  Teacher teacher;
  TinyTeacher(const Config& config, const Distillation& how, const std::string& device_name = "cpu",
              Dtype real = Dtype::f32)
      : device(make_device(device_name)) {
    teacher.config = config, teacher.how = how;
    declare_model(teacher.params, config);
    teacher.params.allocate(*device, accumulation_type(real), false);
    if (real == Dtype::bf16) teacher.params.allocate_bf16_copy();
    teacher.params.initialise(5);
    refresh_bf16_copy(teacher.params);
  }
};

// A student that has a teacher.
struct Pupil : TinyTeacher, TinyModel {
  Pupil(const Config& own, const Config& of_teacher, const Distillation& how, const std::string& device = "cpu",
        PlanMode mode = PlanMode::reuse, Dtype real = Dtype::f32)
      : TinyTeacher(of_teacher, how, device, real), TinyModel(own, device, mode, real, &teacher) {}
  double objective() {
    tape.forward(Step{true, 1 / scored, 0});
    return sum_losses(*TinyModel::device, graph) / scored;
  }
};

struct Pair {
  std::string name;
  Config student, teacher;
};
std::vector<Pair> pairs() {
  return {{"llama of gpt2", tiny_config("llama"), gpt2_config()},
          {"gpt2 of lime", gpt2_config(), tiny_config("lime", 2, true, false, 6)},
          {"hyper of hyper", tiny_config("hyper"), tiny_config("hyper")},
          {"gpt2 of gpt2", gpt2_config(), gpt2_config()},
          {"llama of mudd", tiny_config("llama"), tiny_config("mudd", 4)},
          {"lime of mudd on gpt2", tiny_config("lime"), gpt2_config("mudd")}};
}

// A directory with a model of these sizes, for --teacher.
void save_teacher(const Config& config, const std::string& dir, const Tokenizer& tokenizer = {}) {
  fs::create_directory(dir);
  const TinyTeacher model(config, {});
  save_config(dir + "/config.json", config);
  save_tensors(dir + "/model.safetensors", model.teacher.params, values_of(model.teacher.params, config));
  tokenizer.save(dir);
}

TrainPlan options_with(const std::string& teacher, const std::string& arch = "llama") {
  TrainPlan plan;
  plan.config = tiny_config(arch);
  plan.steps = 12, plan.batch = 4, plan.lr = 1e-2;
  plan.teacher = teacher;
  plan.teacher_config = load_config(teacher + "/config.json");
  return plan;
}

// The last lines of a run's metrics.
json last_line(const std::string& run) {
  const std::string text = read_text(run + "/metrics.jsonl");
  const size_t end = text.find_last_not_of('\n'), begin = text.rfind('\n', end);
  return known_json(text.substr(begin == std::string::npos ? 0 : begin + 1, end - begin));
}

}  // namespace

TEST_CASE("teacher: gradients of every tensor are the derivatives of the objective, in double") {
  for (const Pair& c : pairs())
    for (const Distillation& how : {Distillation{0.6, 1, false}, Distillation{0.2, 2.5, true}}) {
      CAPTURE(c.name);
      Pupil model(c.student, c.teacher, how, "reference", PlanMode::reuse, Dtype::f64);
      CHECK(model.step() == model.objective());
      model.step();
      std::map<std::string, std::vector<double>> gradients;
      for (Parameter& row : model.params.rows()) gradients[row.name] = model.values<double>(row.grad);
      constexpr double h = 1e-4;
      for (Parameter& row : model.params.rows()) {
        double* x = row.value.as<double>();
        std::vector<double> got, want;
        for (int64_t i = 0; i < row.shape.numel(); i += 3) {  // a third of them is enough
          const double keep = x[i];
          auto at = [&](double d) {
            x[i] = keep + d;
            return model.objective();
          };
          want.push_back((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
          got.push_back(gradients[row.name][static_cast<size_t>(i)]);
          x[i] = keep;
        }
        check_close(c.name + " " + row.name, got, want, 1e-6, 1e-9);
      }
    }
}

TEST_CASE("teacher: the three memory plans give the same bits, in f32 and bf16") {
  for (const Pair& c : pairs())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      CAPTURES(c.name, dtype == Dtype::bf16);
      double loss = 0;
      std::vector<float> gradients;
      for (PlanMode mode : {PlanMode::reuse, PlanMode::distinct, PlanMode::poison}) {
        Pupil model(c.student, c.teacher, {}, "cpu", mode, dtype);
        model.step();
        const double again = model.step();
        const auto got = model.values<float>(model.params.gradients());
        if (mode == PlanMode::reuse) loss = again, gradients = got;
        CHECK(std::isfinite(again));
        CHECK(again == loss);
        CHECK(std::memcmp(got.data(), gradients.data(), got.size() * sizeof(float)) == 0);
      }
    }
}

TEST_CASE("teacher: the fast kernels are as exact as the plain loops") {
  for (const Pair& c : pairs())
    for (const std::string& device : fast_devices()) {
      CAPTURES(c.name, device);
      Pupil fast(c.student, c.teacher, {}, device);
      Pupil exact(c.student, c.teacher, {}, "reference", PlanMode::reuse, Dtype::f64);
      CHECK(std::abs(fast.step() - exact.step()) < 1e-5);
      for (Parameter& row : fast.params.rows())
        check_close(row.name, fast.values<float>(row.grad), exact.values<double>(exact.params.at(row.name).grad), 1e-3,
                    1e-7);
    }
}

TEST_CASE("teacher: an evaluation is the student's cross entropy, and never meets the teacher") {
  for (const Pair& c : pairs()) {
    CAPTURE(c.name);
    Pupil model(c.student, c.teacher, {});
    TinyModel alone(c.student);
    CHECK(model.loss() == alone.loss());
    CHECK(model.objective() != alone.loss());
    const double ce = model.step() > 0 ? 0.0 : 1.0;
    const std::vector<float> each = model.values<float>(model.graph.ce->tensor);
    CHECK(std::accumulate(each.begin(), each.end(), ce) / model.scored == doctest::Approx(alone.loss()).epsilon(1e-6));
    CHECK(model.tape.forward_flops() == alone.tape.forward_flops());
    const Tensor values = model.teacher.params.values();
    std::fill_n(values.as<float>(), values.numel(), NAN);
    CHECK(model.loss() == alone.loss());
    CHECK(std::isnan(model.objective()));
  }
}

TEST_CASE("teacher: of every architecture, one with the student's weights has its logits to the last bit") {
  for (const Case& c : cases_but_exits())
    for (const PlanMode mode : {PlanMode::reuse, PlanMode::poison}) {
      CAPTURE(c.name);
      Pupil model(c.config, c.config, {0, 1, false}, "cpu", mode);
      for (const Parameter& row : model.teacher.params.rows()) {
        const std::vector<float> own = model.params.read(model.params.at(row.name).value);
        model.teacher.params.write(row, convert<double>(own).data());
      }
      CHECK(model.step() == 0);
      CHECK(model.objective() == 0);
      for (const float g : model.values<float>(model.params.gradients()))
        if (!(g == 0)) FAIL_CHECK("a gradient of ", g);
    }
}

TEST_CASE("teacher: it has no gradients, no backward, and leaves one activation behind") {
  const Config config = tiny_config("lime");
  Pupil model(config, config, {});
  TinyModel alone(config);
  size_t frozen = 0;
  for (const auto& node : model.tape.nodes()) {
    frozen += node->frozen;
    CHECK(node->frozen == node->name.starts_with("teacher."));
    for (const Value* value : node->out)
      if (node->frozen) CHECK((value->grad == nullptr && value->name.starts_with("teacher.")));
  }
  CHECK(frozen + 1 == alone.tape.nodes().size());
  // All but its head's forward, and that.
  const double forward = alone.tape.forward_flops();
  CHECK(model.tape.training_flops() == 4 * forward);
  CHECK(alone.tape.training_flops() == 3 * forward);
  // Its hidden states, its angles and the second result: not its blocks, which were over when the student's began.
  CHECK(model.tape.arena_bytes() <= alone.tape.arena_bytes() + 8 * 256);
  const std::string dump = model.tape.dump();
  CHECK(dump.find("teacher.L3.mlp.residual") < dump.find(" L0.attn.norm"));
  CHECK(dump.find("d:teacher.") == std::string::npos);
}

TEST_CASE("teacher: replicas give the loss and the gradients of one tape") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    constexpr int64_t B = 12, T = 5;
    TinyTeacher t(gpt2_config(), {}, "cpu", dtype);
    TinyModel s(tiny_config("lime"), "cpu", PlanMode::reuse, dtype);
    const Batch batch{B, T, dtype, true, PlanMode::reuse, &t.teacher};
    BatchModel model(*s.device, s.params, s.config, batch);
    REQUIRE(model.layout().replicas > 1);
    std::vector<int32_t> tokens, targets;
    for (int32_t i = 0; i < B * T; ++i) tokens.push_back(i * i % 7), targets.push_back(i % 5 == 2 ? -1 : i % 7);
    const Step step{true, 0.01, 0};
    const Arena arena(*s.device, "sums", static_cast<size_t>(2 * model.layout().replicas) * sizeof(double));
    s.device->fill(arena.data(), 0, arena.bytes());
    s.params.zero_gradients();
    model.run(tokens.data(), targets.data(), step,
              Tensor{arena.data(), Dtype::f64, Shape{2 * model.layout().replicas}});
    const auto replicas = s.values<float>(s.params.gradients());
    const double* sums = reinterpret_cast<const double*>(arena.data());
    const double loss = std::accumulate(sums, sums + model.layout().replicas, 0.0),
                 ce = std::accumulate(sums + model.layout().replicas, sums + 2 * model.layout().replicas, 0.0);
    s.params.zero_gradients();
    Tape tape(dtype);
    const Graph graph = record_batch(tape, s.params, s.config, batch, {B, 1});
    tape.allocate(*s.device);
    load_batch(*s.device, graph, tokens.data(), targets.data());
    tape.run(step);
    CHECK(loss == doctest::Approx(sum_losses(*s.device, graph)).epsilon(1e-6));
    const float* each = graph.ce->tensor.as<float>();
    CHECK(ce == doctest::Approx(std::accumulate(each, each + B * T, 0.0)).epsilon(1e-6));
    check_close("gradients", replicas, convert<double>(s.values<float>(s.params.gradients())), 1e-4);
  }
}

TEST_CASE("teacher: resuming twice gives the losses and weights of the uninterrupted run, bit for bit") {
  const TempDir run;
  save_teacher(gpt2_config(), run.file("teacher"));
  for (const std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    const Counting data(10);
    TrainPlan plan = options_with(run.file("teacher"));
    plan.dtype = dtype, plan.accumulate = dtype == "bf16" ? 2 : 1, plan.kd.tau = 2;
    Trainer whole(plan, data);
    std::vector<double> want, got;
    for (int i = 0; i < 12; ++i) whole.step(), want.push_back(whole.last.loss), want.push_back(whole.last.ce);
    for (int part = 0, step = 0; part < 3; ++part) {
      Trainer trainer(plan, data, part > 0 ? run.file(dtype + std::to_string(part - 1)) : "");
      for (const int end = std::vector<int>{4, 7, 12}[static_cast<size_t>(part)]; step < end; ++step)
        trainer.step(), got.push_back(trainer.last.loss), got.push_back(trainer.last.ce);
      trainer.save(run.file(dtype + std::to_string(part)), Tokenizer());
      if (part == 2) CHECK(weights(whole) == weights(trainer));
    }
    CHECK(want == got);
    CHECK(want[22] < want[0]);
    CHECK(want[0] != want[1]);
  }
  // The same place, other weights.
  const std::string teacher = run.file("teacher") + "/model.safetensors";
  std::string bytes = read_text(teacher);
  bytes[bytes.size() - 2] ^= 1;
  write_text(teacher, bytes);
  TrainPlan plan = options_with(run.file("teacher"));
  plan.kd.tau = 2;
  check_fails(Exit::bad_data, {"--teacher", "other weights"}, [&] { Trainer(plan, Counting(10), run.file("fp320")); });
  plan.kd.tau = 1;
  check_fails(Exit::usage, {"--kd-tau"}, [&] { Trainer(plan, Counting(10), run.file("fp320")); });
  plan.teacher.clear();
  check_fails(Exit::usage, {"--teacher"}, [&] { Trainer(plan, Counting(10), run.file("fp320")); });
}

TEST_CASE("teacher: two ranks do what one does, and the cross entropy is of all of them") {
  const TempDir dir;
  save_teacher(gpt2_config(), dir.file("teacher"));
  TrainPlan plan = options_with(dir.file("teacher"), "lime");
  plan.accumulate = 4, plan.sum = "tree";
  const Counting data(10);
  Trainer alone(plan, data);
  std::vector<double> want;
  for (int i = 0; i < 3; ++i) alone.step(), want.push_back(alone.last.loss), want.push_back(alone.last.ce);
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(plan, data, "", group);
    std::vector<double> got;
    for (int i = 0; i < 3; ++i) trainer.step(), got.push_back(trainer.last.loss), got.push_back(trainer.last.ce);
    CHECK_THAT(got == want, "other losses");
    CHECK_THAT(weights(trainer) == weights(alone), "other weights");
  });
}

TEST_CASE("teacher: a run tells objective and cross entropy apart, is planned with its teacher, and resumes alone") {
  const TempDir dir;
  Config config = gpt2_config();
  config.vocab_size = 21;
  save_teacher(config, dir.file("teacher"));
  const std::vector<std::string> flags = split_words(
      "--data arith:3 --train-samples 64 --test-samples 8 --width 16 --ffn 24 --layers 2 --heads 2 --batch 4 "
      "--answer-samples 2 --steps 4 --seq 25");
  const auto start = [&](const std::vector<std::string>& more) { return train(dir, joined(flags, more)); };
  const std::string teacher = dir.file("teacher"), out = dir.file("run");
  check_outcome(start({"--teacher", teacher, "--out", out, "--kd-alpha", "0.25"}), Exit::done,
                "loss = 0.25 CE + 0.75 KL");
  check_outcome(start({"--teacher", teacher, "--dry-run"}), Exit::done,
                "has no tokenizer: the ids of arith:3 are taken");
  const json line = last_line(out);
  CHECK(line["ce"].get<double>() > 0);
  CHECK(line["ce"] != line["loss"]);
  check_outcome(train(dir, {"--resume", "--out", out, "--steps", "6"}), Exit::done, "resumed after step 4");
  CHECK(last_line(out)["step"] == 6);
  CHECK(last_line(out).contains("ce"));
  check_outcome(train(dir, {"--resume", "--out", out, "--kd-alpha", "0.5"}), Exit::usage, "--kd-alpha");
  const Outcome plan = start({"--teacher", teacher, "--dry-run"});
  for (const char* says : {"teacher: ", "FLOPs per token", "  teacher "}) check_outcome(plan, Exit::done, says);
  check_outcome(start({"--teacher", teacher, "--dump-tape"}), Exit::done, "teacher.L1.mlp.residual");
  check_outcome(start({"--teacher", teacher, "--out", dir.file("t"), "--dump-tensors", "teacher.norm", "loss*"}),
                Exit::done, "wrote");
  check_outcome(start({"--teacher", teacher, "--out", dir.file("p"), "--profile"}), Exit::done, "distill");
}

TEST_CASE("teacher: one that does not fit is refused with a line that says why") {
  const TempDir dir;
  const std::string out = dir.file("run");
  const auto refused = [&](Exit code, const std::string& says, const std::vector<std::string>& flags,
                           const std::string& data = "arith:3") {
    check_outcome(train(dir, joined(split_words("--train-samples 64 --test-samples 8 --width 16 --ffn 24 --layers 2 "
                                                "--heads 2 --batch 4 --steps 4 --out " +
                                                out),
                                    std::vector<std::string>{"--data", data}, flags)),
                  code, says);
    CHECK(!fs::exists(out));
  };
  const std::string teacher = dir.file("teacher");
  save_teacher(gpt2_config(), teacher);
  refused(Exit::usage, "has a vocabulary of 7, the model's is 21", {"--teacher", teacher});
  // Of ids that mean other tokens no larger --vocab makes the same ones; of token shards it does.
  const std::string bytes = dir.file("text");
  write_text(bytes, std::string(8000, 'x'));
  Config large = gpt2_config();
  large.vocab_size = 300;
  save_teacher(large, dir.file("large"));
  for (const std::string& vocab : std::vector<std::string>{"", " --vocab 300"}) {
    const auto flags = split_words("--seq 25 --teacher " + dir.file("large") + vocab);
    refused(Exit::usage, "has no tokenizer and a vocabulary of 300, text:", flags, "text:" + bytes);
  }
  large.vocab_size = 256;
  save_teacher(large, dir.file("of_text"), Tokenizer::bytes());
  refused(Exit::usage, "has the tokenizer ", {"--teacher", dir.file("of_text")});
  write_shard(dir.file("train.bin"), std::vector<uint32_t>(8000, 7), ShardFormat::uint16);
  refused(Exit::usage, "the model's is 20; a teacher needs the same one: give --vocab 300",
          split_words("--vocab 20 --seq 25 --val-data " + dir.file("train.bin") + " --teacher " + dir.file("large")),
          dir.file("train.bin"));
  Config words = gpt2_config();
  words.vocab_size = 21;
  save_teacher(words, dir.file("bytes"), Tokenizer::bytes());
  refused(Exit::usage, "bytes", {"--teacher", dir.file("bytes")});
  words.max_position_embeddings = 3;
  save_teacher(words, dir.file("short"));
  refused(Exit::usage, "has 3 positions", {"--teacher", dir.file("short")});
  refused(Exit::no_input, "nowhere", {"--teacher", dir.file("nowhere")});
  refused(Exit::usage, "--kd-alpha", {"--teacher", teacher, "--kd-alpha", "1.5"});
  for (const char* tau : {"0", "1e-30", "0.0099", "100.1", "1e30"})
    refused(Exit::usage, "--kd-tau: '" + std::string(tau) + "' is not a number from 0.01 to 100",
            {"--teacher", teacher, "--kd-tau", tau});
  refused(Exit::usage, "--kd-reduction", {"--teacher", teacher, "--kd-reduction", "sum"});
  refused(Exit::usage, "--kd-alpha has no effect without --teacher", {"--kd-alpha", "0.6"});
  check_outcome(run_program_inside(dir, {"compare", "--teacher", teacher, "--out", out}), Exit::usage,
                "a comparison trains without a teacher");
  check_outcome(run_program_inside(dir, {"compare", "--kd-alpha", "0.6", "--out", out}), Exit::usage,
                "--kd-alpha has no effect without --teacher");
  check_outcome(run_program_inside(dir, {"compare", "--kd-reduction", "sum", "--out", out}), Exit::usage,
                "--kd-reduction: 'sum' is not one of: token element");
  CHECK(!fs::exists(out));
}

TEST_CASE("teacher: a run that is resumed takes one under another name where it has the same weights") {
  const TempDir dir;
  Config config = gpt2_config();
  config.vocab_size = 21;
  save_teacher(config, dir.file("teacher"));
  const std::string out = dir.file("run"), moved = dir.file("elsewhere");
  const auto start = [&](const std::string& to, const std::string& steps) {
    return train(dir, split_words("--data arith:3 --train-samples 64 --test-samples 8 --width 16 --ffn 24 --layers 2 "
                                  "--heads 2 --batch 4 --answer-samples 2 --seq 25 --teacher " +
                                  dir.file("teacher") + " --steps " + steps + " --out " + to));
  };
  check_outcome(start(dir.file("whole"), "4"), Exit::done, "step 4/4");
  setenv("CROSSPLY_FAULT", "0:3:exit=75", 1);
  check_outcome(start(out, "4"), Exit::stopped, "CROSSPLY_FAULT");
  unsetenv("CROSSPLY_FAULT");
  std::filesystem::copy(dir.file("teacher"), dir.file("other"));
  std::string bytes = read_text(dir.file("other/model.safetensors"));
  bytes[bytes.size() - 2] ^= 1;
  write_text(dir.file("other/model.safetensors"), bytes);
  check_outcome(train(dir, {"--resume", "--out", out, "--teacher", dir.file("other")}), Exit::usage,
                "only a directory with the same weights can take its place");
  std::filesystem::rename(dir.file("teacher"), moved);
  check_outcome(train(dir, {"--resume", "--out", out}), Exit::no_input,
                "if it has moved, say with --teacher where it is now");
  check_outcome(train(dir, {"--resume", "--out", out, "--teacher", moved}), Exit::done, "resumed after step 2");
  CHECK(read_text(out + "/step_00000004/model.safetensors") ==
        read_text(dir.file("whole/step_00000004/model.safetensors")));
  check_outcome(train(dir, {"--resume", "--out", out, "--steps", "5"}), Exit::done, "step 5/5");  // the name is kept
}
