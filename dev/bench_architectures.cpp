// bench architectures: what a training step of each costs, relative to plain LLaMA.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "cli/format.h"
#include "dev/bench.h"
#include "train/plan.h"
#include "train/trainer.h"

namespace crossply {
namespace {

// One architecture: what it is, and what was measured.
struct Model {
  ArchChoice choice;
  TrainOptions options;
  TrainResult plan;
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
    const TrainOptions options = train_options(choice, f.size, f.dtype, "fp32", f.device);
    models.push_back({choice, options, plan_training(options), 0, {}, {}});
  }
  return models;
}

// Groups that fit into three quarters of the memory, each with LLaMA in front.
std::vector<std::vector<Model*>> groups_that_fit(std::vector<Model>& models, const ArchitectureFlags& f) {
  const double memory = memory_of_machine(f.device);
  std::vector<std::vector<Model*>> groups;
  double used = INFINITY;
  for (size_t i = models.size() > 1 ? 1 : 0; i < models.size(); ++i) {
    used += models[i].plan.planned_memory;
    if (used > 0.75 * memory) {
      groups.push_back({&models[0]});
      used = models[0].plan.planned_memory + models[i].plan.planned_memory;
    }
    if (i > 0) groups.back().push_back(&models[i]);
  }
  return groups;
}

// All models of a group live at once and step in turn; the one that begins changes from round to round. The first
// round, which touches the memory for the first time, does not count.
void measure_steps(const std::vector<Model*>& group, const ArchitectureFlags& f) {
  const RandomTokens data(f.size);
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (Model* model : group) {
    trainers.push_back(std::make_unique<Trainer>(model->options, data));
    model->activations = trainers.back()->model().bytes();
  }
  for (int64_t round = 0; round <= f.rounds; ++round) {
    std::vector<double> seconds(group.size());
    for (size_t k = 0; k < group.size(); ++k) {
      const size_t i = (static_cast<size_t>(round) + k) % group.size();
      const double start = now();
      trainers[i]->step();
      trainers[i]->device().wait();
      seconds[i] = now() - start;
    }
    for (size_t i = 0; i < group.size() && round > 0; ++i) {
      group[i]->seconds.push_back(seconds[i]);
      group[i]->ratio.push_back(seconds[i] / seconds[0]);
    }
  }
}

std::vector<std::string> cells(const Model& model, const Model& llama, const ArchitectureFlags& f) {
  const double bytes = static_cast<double>(model.activations);
  return {model.choice.text,
          format_count(model.plan.parameters - llama.plan.parameters),
          format_number("%.3fx", model.plan.flops_per_token / llama.plan.flops_per_token),
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
  print_text(models.size(), " models, ", name_of_machine(f.device), ", ", f.dtype, "; training steps of ", f.size.batch,
             " x ", f.size.seq, " tokens, in turn, ", f.rounds, " rounds", parts, " after the first\n");
  for (const std::vector<Model*>& group : groups) measure_steps(group, f);
  std::vector<std::vector<std::string>> table = {
      {"architecture", "parameters added", "FLOP/token", "time", "quartiles", "memory", "MiB", "tokens/s"}};
  for (const Model& model : models) table.push_back(cells(model, models[0], f));
  print_table(str("architectures, ", f.size.kv_heads, " of ", f.size.heads, " heads with keys of their own"), table);
  std::printf(
      "x: relative to llama. time: of each round, divided by llama's in that round; median and quartiles.\n"
      "memory, MiB: the planned peak of activations and their gradients.\n");
}

}  // namespace crossply
