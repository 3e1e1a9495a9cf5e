// --z-loss and --logit-softcap of whole runs: what is learned, what is shown, what is refused.
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "tests/support/weights.h"
#include "train/run/run_curves.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

constexpr double zeta = 0.2;

TinyModel with_z(const Config& config, const std::string& device = "cpu", Dtype real = Dtype::f32,
                 PlanMode mode = PlanMode::reuse) {
  return TinyModel(config, device, mode, real, nullptr, zeta);
}

// Of the mean over scored tokens, without an update.
double objective(TinyModel& model) {
  model.tape.forward(Step{true, 1 / model.scored, 0});
  double sum = sum_losses(*model.device, model.graph);
  for (const double square : model.values<double>(model.graph.squares->tensor)) sum += zeta * square;
  return sum / model.scored;
}

TrainPlan plan_with(double z_loss, double softcap = 0) {
  TrainPlan plan;
  plan.config = tiny_config("llama");
  plan.config.final_logit_softcapping = softcap;
  plan.steps = 12, plan.batch = 4, plan.lr = 1e-2, plan.z_loss = z_loss;
  return plan;
}

std::vector<double> steps_of(Trainer& trainer, int count) {
  std::vector<double> all;
  for (int i = 0; i < count; ++i) {
    trainer.step();
    for (const double number : {trainer.last.loss, trainer.last.ce, trainer.last.z_loss}) all.push_back(number);
  }
  return all;
}

std::vector<json> lines_of(const std::string& run) {
  std::istringstream in(read_text(run + "/metrics.jsonl"));
  std::vector<json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(known_json(line));
  return lines;
}

}  // namespace

TEST_CASE("z-loss: gradients of every tensor are the derivatives of loss and z-loss, in double") {
  for (const Config& config :
       {tiny_config("llama"), with_cap(tiny_gpt2(false), 1.2), with_cap(tiny_with("lime"), 0.6)}) {
    TinyModel model = with_z(config, "reference", Dtype::f64);
    model.step();
    std::map<std::string, std::vector<double>> gradients;
    for (const Parameter& row : model.params.rows()) gradients[row.name] = model.values<double>(row.grad);
    constexpr double h = 2e-5, rounding = 7.5e-11;  // as in test_models.cpp
    for (Parameter& row : model.params.rows()) {
      double* x = row.value.as<double>();
      std::vector<double> got, want;
      for (int64_t i = 0; i < row.shape.numel(); i += row.shape.numel() / 12 | 1) {
        const double keep = x[i];
        const auto at = [&](double d) {
          x[i] = keep + d;
          return objective(model);
        };
        got.push_back(gradients.at(row.name)[static_cast<size_t>(i)]);
        want.push_back((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
        x[i] = keep;
      }
      if (is_key_bias(row, config)) continue;  // rounding alone
      check_close(str(config.arch, " ", row.name), got, want, 1e-6, rounding);
    }
  }
}

TEST_CASE("z-loss: the losses are those without it, to the bit, and evaluation knows nothing of it") {
  for (const std::string& device : fast_devices())
    for (const Dtype real : {Dtype::f32, Dtype::bf16}) {
      CAPTURES(device, real);
      TinyModel with = with_z(tiny_config("llama"), device, real),
                without(tiny_config("llama"), device, PlanMode::reuse, real);
      CHECK(with.step() == without.step());
      CHECK(with.loss() == without.loss());
      CHECK(with.values<float>(with.params.gradients()) != without.values<float>(without.params.gradients()));
      CHECK(without.graph.squares == nullptr);
      TinyModel exact = with_z(tiny_config("llama"), "reference", Dtype::f64);
      if (real == Dtype::bf16) continue;
      exact.step(), with.step();
      check_close("squares", with.values<float>(with.graph.squares->tensor),
                  exact.values<double>(exact.graph.squares->tensor), 1e-5);
      for (Parameter& row : with.params.rows())
        check_close(row.name, with.values<float>(row.grad), exact.values<double>(exact.params.at(row.name).grad), 1e-3,
                    1e-7);
    }
}

TEST_CASE("z-loss: the three memory plans give the same bits") {
  std::vector<float> gradients;
  for (const PlanMode mode : {PlanMode::reuse, PlanMode::distinct, PlanMode::poison}) {
    TinyModel model = with_z(with_cap(tiny_config("mudd")), "cpu", Dtype::f32, mode);
    model.step();
    model.step();
    const auto got = model.values<float>(model.params.gradients());
    if (mode == PlanMode::reuse) gradients = got;
    CHECK(got == gradients);
  }
}

TEST_CASE("z-loss: it is a number of its own in a step, and micro-steps, resuming and ranks do not change it") {
  const TempDir dir;
  const Counting data(10);
  TrainPlan plan = plan_with(zeta, 3);
  plan.accumulate = 4, plan.sum = "tree";
  Trainer whole(plan, data);
  const std::vector<double> want = steps_of(whole, 6);
  Trainer first(plan, data);
  std::vector<double> got = steps_of(first, 2);
  first.save(dir.file("two"), Tokenizer());
  Trainer second(plan, data, dir.file("two"));
  got = joined(got, steps_of(second, 4));
  CHECK(got == want);
  CHECK(weights(second) == weights(whole));
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(plan, data, "", group);
    CHECK_THAT(steps_of(trainer, 6) == want, "other numbers");
    CHECK_THAT(weights(trainer) == weights(whole), "other weights");
  });
  TrainPlan one = plan;
  one.batch = 16, one.accumulate = 1;
  Trainer large(one, data);
  check_close("steps", steps_of(large, 6), want, 1e-5);  // the same sequences in other sums
  for (size_t i = 0; i < want.size(); i += 3) CHECK((want[i] == want[i + 1] && want[i + 2] > 0));

  plan.z_loss = 0;
  check_fails(Exit::usage, {"--z-loss"}, [&] { Trainer(plan, data, dir.file("two")); });
  Trainer without(plan, data);
  const std::vector<double> other = steps_of(without, 1);
  CHECK((other[0] == want[0] && other[2] == 0));
}

TEST_CASE("z-loss: it keeps log sum exp near 0") {
  const Counting data(10);
  const auto squares_of = [&](double z_loss) {
    TrainPlan plan = plan_with(z_loss);
    plan.steps = 60, plan.z_loss = z_loss;
    Trainer trainer(plan, data);
    for (int i = 0; i < 60; ++i) trainer.step();
    return trainer.last.z_loss / z_loss;
  };
  CHECK(squares_of(1) < 0.5 * squares_of(1e-9));
}

TEST_CASE("z-loss: a run shows it beside the loss, in metrics and in its lines, and resumes with it") {
  const TempDir dir;
  const std::string run = dir.file("run"), plain = dir.file("plain");
  const std::vector<std::string> flags = split_words("--steps 4 --z-loss 0.25 --logit-softcap 5 --csv --seq 25");
  check_outcome(train(dir, tiny_run(run, flags)), Exit::done, "  z-loss ");
  check_outcome(train(dir, tiny_run(plain, split_words("--steps 4 --logit-softcap 5 --seq 25"))), Exit::done,
                "step 4/4");
  const std::vector<json> with = lines_of(run), without = lines_of(plain);
  CHECK(with[0]["loss"] == without[0]["loss"]);
  CHECK(with[3]["loss"] != without[3]["loss"]);
  for (const json& line : with) CHECK((line["z_loss"] > 0 && !line.contains("ce")));
  for (const json& line : without) CHECK_FALSE(line.contains("z_loss"));
  // Logits of a new model are small: lse is log V.
  CHECK(with[0]["z_loss"].get<double>() == doctest::Approx(0.25 * std::pow(std::log(21), 2)).epsilon(0.05));
  CHECK(read_text(run + "/metrics.csv").find("loss,ce,z_loss,test_loss") != std::string::npos);
  CHECK(known_json(read_text(run + "/flags.json"))["z_loss"] == 0.25);
  CHECK(known_json(read_text(run + "/flags.json"))["config"]["final_logit_softcapping"] == 5);
  check_outcome(train(dir, {"--resume", "--out", run, "--steps", "6"}), Exit::done, "resumed after step 4");
  CHECK(lines_of(run)[5].contains("z_loss"));
  check_outcome(train(dir, {"--resume", "--out", run, "--z-loss", "0.5"}), Exit::usage, "--z-loss");
  check_outcome(train(dir, {"--resume", "--out", run, "--logit-softcap", "6"}), Exit::usage, "final_logit_softcapping");
}

TEST_CASE("z-loss: neither it nor a cap changes FLOPs or parameters of a plan") {
  const TempDir dir;
  const auto plan = [&](const std::string& more) {
    const Outcome outcome = train(dir, tiny_run(dir.file("none"), split_words("--dry-run " + more)));
    check_outcome(outcome, Exit::done, "FLOPs");
    return outcome.output.substr(0, outcome.output.find("memory"));
  };
  CHECK(plan("") == plan("--z-loss 1e-4 --logit-softcap 15"));
}

TEST_CASE("z-loss: what makes no sense is refused by name") {
  const TempDir dir;
  const auto refused = [&](const std::string& flags, const std::string& says) {
    check_outcome(train(dir, tiny_run(dir.file("run"), split_words(flags))), Exit::usage, says);
    CHECK(!path_exists(dir.file("run")));
  };
  for (const std::string wrong : {"-1e-4", "nan", "inf", "x"}) {
    refused("--steps 4 --z-loss " + wrong, "--z-loss");
    refused("--steps 4 --logit-softcap " + wrong, "--logit-softcap");
  }
  refused("--steps 4 --logit-softcap 1e-4", "final_logit_softcapping must be in 0.001..1e6, or 0 for none, is 0.0001");
  refused("--steps 4 --z-loss 1e-4 --loop stack --loop-passes 2 --exit-gate true",
          "--z-loss 0.0001 with an exit gate: the losses of several exits have no z-loss");
  const std::string model = dir.file("model");
  check_outcome(train(dir, tiny_run(model, split_words("--steps 0 --logit-softcap 5"))), Exit::done, "initialised");
  refused("--steps 4 --z-loss 1e-4 --seq 25 --teacher " + model, "--z-loss 0.0001 with --teacher: distillation has no");
  check_outcome(train(dir, split_words("--data arith:3 --steps 2 --logit-softcap 7 --init " + model + " --out " +
                                       dir.file("run"))),
                Exit::usage, "leave out --logit-softcap");
  const auto compare = [&](const std::string& more) {
    return run_program_inside(dir, joined(std::vector<std::string>{"compare"},
                                          tiny_run(dir.file("run"), split_words("--dry-run --steps 4 " + more))));
  };
  check_outcome(compare("--arch llama,llama:logit_softcap=15"), Exit::done, "llama:logit_softcap=15");
  check_outcome(compare("--arch llama --logit-softcap 15"), Exit::usage, "--logit-softcap is for the trainers");
  check_outcome(compare("--arch llama:logit_softcap=x"), Exit::usage, "logit_softcap cannot be 'x'");
}

TEST_CASE("z-loss: a model with a cap teaches one without, and the other way round") {
  const TempDir dir;
  const std::string capped = dir.file("capped"), plain = dir.file("plain");
  check_outcome(train(dir, tiny_run(capped, split_words("--steps 0 --logit-softcap 0.5"))), Exit::done, "initialised");
  check_outcome(train(dir, tiny_run(plain, {"--steps", "0"})), Exit::done, "initialised");
  const auto loss_after = [&](const std::string& teacher, const std::string& flags) {
    const std::string run = dir.file("run" + std::to_string(std::hash<std::string>()(teacher + flags)));
    const Outcome done = train(dir, tiny_run(run, split_words("--steps 2 --seq 25 --teacher " + teacher + flags)));
    check_outcome(done, Exit::done, "step 2/2");
    return lines_of(run).back()["loss"].get<double>();
  };
  const double none = loss_after(plain, ""), own = loss_after(plain, " --logit-softcap 0.5"),
               theirs = loss_after(capped, "");
  CHECK((none != own && none != theirs && own != theirs));
}
