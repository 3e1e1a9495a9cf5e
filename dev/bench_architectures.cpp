// bench architectures: what a training step of each costs, relative to plain LLaMA.
#include <algorithm>
#include <memory>

#include "cli/format.h"
#include "dev/bench.h"
#include "eval/statistics.h"
#include "kernels/devices.h"
#include "train/run/plan.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

// One architecture: what it is, and what was measured.
struct Model {
  ArchChoice choice;
  TrainPlan plan;
  TrainResult planned;
  size_t activations = 0;              // bytes
  std::vector<double> seconds, ratio;  // of a step: in each round, and divided by LLaMA's in that round
};

// LLaMA first, whether it was named or not.
std::vector<Model> models_of(const ArchitectureFlags& f) {
  std::vector<ArchChoice> choices = parse_arch_list(f.archs);
  std::erase_if(choices, [](const ArchChoice& choice) { return choice.text == "llama"; });
  choices.insert(choices.begin(), ArchChoice{"llama", "llama", {}});
  std::vector<Model> models;
  for (const ArchChoice& choice : choices) {
    if (!choice.leader.empty()) fail(Exit::usage, "--arch ", choice.text, ": as ", choice.leader, ", in time");
    const TrainPlan plan = train_options(choice, f.size, f.dtype, "fp32", f.device);
    models.push_back({choice, plan, plan_training(plan), 0, {}, {}});
  }
  return models;
}

// Groups that fit into three quarters of the memory, each with LLaMA in front.
std::vector<std::vector<Model*>> groups_that_fit(std::vector<Model>& models, const ArchitectureFlags& f) {
  const double memory = memory_of_machine(f.device);
  std::vector<std::vector<Model*>> groups;
  double used = INFINITY;
  for (size_t i = models.size() > 1 ? 1 : 0; i < models.size(); ++i) {
    used += models[i].planned.planned_memory;
    if (used > 0.75 * memory) {
      groups.push_back({&models[0]});
      used = models[0].planned.planned_memory + models[i].planned.planned_memory;
    }
    if (i > 0) groups.back().push_back(&models[i]);
  }
  return groups;
}

// A model of a group at work; no trainer: it failed.
struct Runner {
  Model* model;
  std::unique_ptr<Trainer> trainer = nullptr;

  // Where the work fails that is so noted, and the model has no numbers.
  template <class F>
  void attempt_to(F&& work) {
    const std::string said = attempt(model->choice.text, [&] { return work(), ""; });
    if (!said.empty()) trainer.reset(), model->seconds.clear(), model->ratio.clear();
  }
};

// Seconds of each one's step; 0 for those that failed.
std::vector<double> step_in_turn(std::vector<Runner>& runners, int64_t round) {
  std::vector<double> seconds(runners.size());
  for (size_t k = 0; k < runners.size(); ++k) {
    const size_t i = (static_cast<size_t>(round) + k) % runners.size();
    if (!runners[i].trainer) continue;
    runners[i].attempt_to([&] {
      const double start = now();
      runners[i].trainer->step();
      runners[i].trainer->device().wait();
      seconds[i] = now() - start;
    });
  }
  return seconds;
}

// All models of a group live at once and step in turn; the one that begins changes from round to round. The first
// rounds, which touch the memory for the first time and, on a GPU, record the step, do not count.
void measure_steps(const std::vector<Model*>& group, const ArchitectureFlags& f) {
  const RandomTokens data(f.size);
  std::vector<Runner> runners;
  for (Model* model : group) {
    Runner& runner = runners.emplace_back(Runner{model});
    runner.attempt_to([&] {
      runner.trainer = std::make_unique<Trainer>(model->plan, data);
      model->activations = runner.trainer->model().bytes();
    });
  }
  const int64_t first = backend_of(f.device) == Backend::cuda ? -2 : 0;
  for (int64_t round = first; round <= f.rounds; ++round) {
    const std::vector<double> seconds = step_in_turn(runners, round - first);
    for (size_t i = 0; i < group.size() && round > 0; ++i) {
      if (seconds[i] > 0) group[i]->seconds.push_back(seconds[i]);
      if (seconds[i] > 0 && seconds[0] > 0) group[i]->ratio.push_back(seconds[i] / seconds[0]);
    }
  }
}

std::vector<std::string> cells(const Model& model, const Model& llama, const ArchitectureFlags& f) {
  const double bytes = static_cast<double>(model.activations);
  if (model.ratio.empty()) return {model.choice.text, "failed"};
  return {model.choice.text,
          format_count(model.planned.accounting.parameters - llama.planned.accounting.parameters),
          format_number("%.3fx", model.planned.accounting.flops_per_token / llama.planned.accounting.flops_per_token),
          format_number("%.3fx", median(model.ratio)),
          format_number("%.3f", quantile(model.ratio, 0.25)) + format_number("-%.3f", quantile(model.ratio, 0.75)),
          format_number("%.3fx", bytes / static_cast<double>(llama.activations)),
          format_number("%.1f", bytes / (1 << 20)),
          format_count(static_cast<int64_t>(static_cast<double>(f.size.batch * f.size.seq) / median(model.seconds)))};
}

}  // namespace

void bench_architectures(const ArchitectureFlags& f) {
  std::vector<Model> models = models_of(f);
  const auto groups = groups_that_fit(models, f);
  const std::string parts = groups.size() > 1 ? str(" of each of ", groups.size(), " groups") : "";
  const ModelSize& z = f.size;
  print_text("\n", models.size(), " models, ", name_of_machine(f.device), ", ", f.dtype, "; C=", z.width,
             " L=", z.layers, " H=", z.heads, " K=", z.kv_heads, " F=", z.ffn, " V=", z.vocab, ", LLaMA ",
             format_count(models[0].planned.accounting.parameters), " parameters;\ntraining steps of ", z.batch, " x ",
             z.seq, " tokens, in turn, ", f.rounds, " rounds", parts, " after the first\n",
             "x: relative to llama. time: of each round, divided by llama's in that round; median and quartiles.\n"
             "memory, MiB: the planned peak of activations and their gradients.\n");
  GrowingTable table(
      str("architectures, ", z.kv_heads, " of ", z.heads, " heads with keys of their own"),
      {"architecture", "parameters added", "FLOP/token", "time", "  quartiles", "memory", "MiB", "tokens/s"}, 14);
  for (const std::vector<Model*>& group : groups) {
    measure_steps(group, f);
    for (const Model* model : group)
      if (model != &models[0] || &group == &groups[0]) table.add(cells(*model, models[0], f));
  }
}

}  // namespace crossply
