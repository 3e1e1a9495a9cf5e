// bench steps: training steps of LLaMA in three sizes and three precisions, beside PyTorch's, each competitor in a
// process of its own: so the peak of its resident memory is its own, too. Of GPT-2 where --models says so; with
// LLMC=DIR, a clone of llm.c, beside its CPU trainer, too, which has no clipping and no bf16.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "cli/format.h"
#include "dev/bench.h"
#include "eval/statistics.h"
#include "kernels/devices.h"
#include "train/run/plan.h"
#include "train/settings/gpus.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

const std::vector<NamedSize>& sizes() {
  static const std::vector<NamedSize> all = {{"i", {192, 6, 3, 1, 768, 32000, 512, 8}},
                                             {"ii", {768, 12, 12, 4, 2048, 32000, 512, 4}},
                                             {"iii", {32, 4, 4, 4, 128, 32, 192, 128}},
                                             {"124m", {768, 12, 12, 12, 2048, 50304, 1024, 32}},
                                             {"1b", {2048, 16, 32, 8, 8192, 50304, 2048, 8}},
                                             {"tiny", {64, 2, 2, 1, 128, 99, 32, 2}},
                                             {"gpt2-64", {768, 12, 12, 12, 3072, 50304, 64, 4, true}},
                                             {"gpt2-256", {768, 12, 12, 12, 3072, 50304, 256, 4, true}}};
  return all;
}

}  // namespace

std::vector<NamedSize> named_sizes(const std::string& list) {
  std::vector<NamedSize> out;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    const auto found = std::find_if(sizes().begin(), sizes().end(), [&](const NamedSize& s) { return s.name == name; });
    if (found == sizes().end())
      fail(Exit::usage, "--models: '", name, "' is none of i, ii, iii, 124m, 1b, tiny, gpt2-64, gpt2-256");
    out.push_back(*found);
  }
  return out;
}

namespace {

struct Competitor {
  std::string name, dtype;  // fp32 and what is compared with it, or bf16
  bool ours;
  std::vector<std::string> command, environment = {};
  std::unique_ptr<Process> process = nullptr;  // none: not started, or it failed
  int64_t steps = 1;                           // of a round
  std::vector<double> seconds = {};            // of a step, in each round
  double memory = 0;                           // MiB

  bool measured() const { return !seconds.empty(); }
};

std::vector<Competitor> competitors(const NamedSize& model, const BenchFlags& f, const Torch& torch) {
  const std::vector<std::string> size = arguments(model.size);
  auto with = [](std::vector<std::string> words, std::initializer_list<std::string> more) {
    words.insert(words.end(), more);
    return words;
  };
  const bool gpu = backend_of(f.device) == Backend::cuda;  // where nobody trains in fp32
  std::vector<std::string> own = {f.program, "serve", "--device", f.device};
  own.insert(own.end(), size.begin(), size.end());
  std::vector<Competitor> all;
  if (!gpu) all.push_back({"fp32", "fp32", true, own});
  if (model.size.gpt2 && !gpu && std::getenv("LLMC") != nullptr) {  // in the place of bf16x3: for memory's sake
    all.push_back({"llm.c", "fp32", false, {script_path("bench_llmc.sh")}});
    all.back().command.insert(all.back().command.end(), size.begin(), size.end());
  } else if (!gpu) {
    all.push_back({"bf16x3", "fp32", true, with(own, {"--matmul", "bf16x3"})});
  }
  all.push_back({"bf16", "bf16", true, with(own, {"--dtype", "bf16"})});
  if (!torch.available()) return all;
  std::vector<std::string> theirs = torch.command("bench_torch.py", size), set = Torch::environment();
  if (f.device == "cuda") theirs = with(theirs, {"--gpu"});
  if (!gpu) all.push_back({"PyTorch fp32 eager", "fp32", false, theirs, set});
  if (!gpu) all.push_back({"PyTorch fp32 compile", "fp32", false, with(theirs, {"--compile"}), set});
  all.push_back({"PyTorch bf16 eager", "bf16", false, with(theirs, {"--bf16"}), set});
  all.push_back({"PyTorch bf16 compile", "bf16", false, with(theirs, {"--bf16", "--compile"}), set});
  return all;
}

// Seconds of one step; nothing, and no process any more, if it failed.
std::optional<double> measure(Competitor& c) {
  c.process->ask(std::to_string(c.steps));
  std::istringstream answer(c.process->answer().value_or(""));
  double seconds = 0;
  if (answer >> seconds >> c.memory) return seconds / static_cast<double>(c.steps);
  c.process.reset();
  c.seconds.clear();
  return std::nullopt;
}

// All at once in memory, in turn at work; the one that begins changes from round to round. Two rounds that do not count
// settle how many steps take about two and a half seconds.
void measure_in_turn(const std::vector<Competitor*>& group, int64_t rounds) {
  for (Competitor* c : group) {
    c->process = std::make_unique<Process>(c->command, c->environment);
    if (c->process->answer() != "ready") c->process.reset();
    rest();
  }
  for (int64_t round = -2; round < rounds; ++round) {
    for (size_t k = 0; k < group.size(); ++k) {
      Competitor& c = *group[(static_cast<size_t>(round + 2) + k) % group.size()];
      if (!c.process) continue;
      const std::optional<double> seconds = measure(c);
      if (seconds && round < 0) c.steps = std::clamp<int64_t>(std::lrint(2.5 / *seconds), 1, 10000);
      if (seconds && round >= 0) c.seconds.push_back(*seconds);
      rest();
    }
  }
  for (Competitor* c : group) c->process.reset();
}

// One group if all fit into three quarters of the memory, otherwise one for each precision; on a GPU each alone, which
// is soon known. known(group): called when a group has been measured.
template <class F>
void measure_all(std::vector<Competitor>& all, const NamedSize& model, const BenchFlags& f, F&& known) {
  const bool gpu = backend_of(f.device) == Backend::cuda;
  const TrainPlan plan = train_options(model.size.plain(), model.size, "fp32", "fp32", f.device);
  const double ours = plan_training(plan).planned_memory;
  std::vector<std::pair<std::string, std::vector<Competitor*>>> groups;
  double needed = 0;
  for (const Competitor& c : all) needed += c.ours ? ours : 2 * ours;
  const bool together = !gpu && needed < 0.75 * memory_of_machine(f.device);
  for (Competitor& c : all) {
    const std::string name = together ? "all" : gpu ? c.name : c.dtype;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == name; });
    if (group == groups.end()) group = groups.insert(group, {name, {}});
    group->second.push_back(&c);
  }
  for (const auto& [name, group] : groups) {
    measure_in_turn(group, f.rounds);
    known(group);
  }
}

// The mode of that precision with the smaller median.
const Competitor* best_torch(const std::vector<Competitor>& all, const std::string& dtype) {
  const Competitor* best = nullptr;
  for (const Competitor& c : all)
    if (c.name.starts_with("PyTorch") && c.measured() && c.dtype == dtype &&
        (!best || median(c.seconds) < median(best->seconds)))
      best = &c;
  return best;
}

// None where it is not measured.
const Competitor* llm_c(const std::vector<Competitor>& all, const std::string& dtype) {
  for (const Competitor& c : all)
    if (c.name == "llm.c" && c.measured() && c.dtype == dtype) return &c;
  return nullptr;
}

// Of the rounds' own ratios.
double speed_ratio(const Competitor& own, const Competitor& other) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(own.seconds.size(), other.seconds.size()); ++i)
    ratios.push_back(other.seconds[i] / own.seconds[i]);
  return median(ratios);
}

// What the CPU could do at most, measured: the multiply-adds of f32 vectors; in bf16 those of matrix units, where they
// are, and else twice as many. The best of several short rounds, any of which another program can disturb.
struct Peaks {
  double fp32 = 0, bf16 = 0;
};
Peaks measured_peaks() {
  Peaks peaks;
  for (int round = 0; round < 5; ++round) {
    peaks.fp32 = std::max(peaks.fp32, multiply_add_peak());
    peaks.bf16 = std::max(peaks.bf16, matrix_unit_peak());
  }
  if (peaks.bf16 == 0) peaks.bf16 = 2 * peaks.fp32;
  return peaks;
}

std::vector<std::string> row(const Competitor& c, const NamedSize& model, double flops_per_token) {
  if (!c.measured()) return {c.name, "failed"};
  const double rate = static_cast<double>(model.size.batch * model.size.seq) / median(c.seconds);
  return {
      c.name,
      format_count(std::lrint(rate)),
      format_number("%.0f", 1e-9 * rate * flops_per_token),
      format_number("%.0f", c.memory),
      format_number("%.1f", 1e3 * median(c.seconds)),
      format_number("%.1f", 1e3 * quantile(c.seconds, 0.25)) + format_number("-%.1f", 1e3 * quantile(c.seconds, 0.75))};
}

// The share of a peak that the model's own operations take.
double mfu(const Competitor& c, const NamedSize& model, const TrainResult& plan, double peak) {
  return static_cast<double>(model.size.batch * model.size.seq) * plan.accounting.flops_per_token / median(c.seconds) /
         peak;
}

Ratios bench_model(const NamedSize& model, const BenchFlags& f, const Torch& torch) {
  const ModelSize& s = model.size;
  const TrainResult plan = plan_training(train_options(s.plain(), s, "fp32", "fp32"));
  print_text("\n(", model.name, ") C=", s.width, " L=", s.layers, " H=", s.heads, " K=", s.kv_heads, " F=", s.ffn,
             " V=", s.vocab, ", ", s.batch, " x ", s.seq, " tokens: ", format_count(plan.accounting.parameters),
             " parameters, ", format_number("%.4g", plan.accounting.flops_per_token), " FLOP/token\n");
  std::vector<Competitor> all = competitors(model, f, torch);
  const double peak = peak_flops(name_of_machine(f.device), Dtype::bf16);
  std::vector<std::string> titles = {"", "tokens/s", "GFLOP/s", "peak MiB", "ms/step", "quartiles"};
  const bool gpu = backend_of(f.device) == Backend::cuda;
  if (!gpu || peak > 0) titles.push_back(gpu ? "MFU" : "of peak");
  GrowingTable table(str("steps (", model.name, ")", torch.available() ? " beside PyTorch" : ""), titles, 20);
  const Peaks peaks = gpu ? Peaks{peak, peak} : measured_peaks();  // before a competitor takes memory and cores
  measure_all(all, model, f, [&](const std::vector<Competitor*>& group) {
    for (const Competitor* c : group) {
      std::vector<std::string> cells = row(*c, model, plan.accounting.flops_per_token);
      const double attainable = c->dtype == "fp32" ? peaks.fp32 : peaks.bf16;
      if (attainable > 0 && c->measured())
        cells.push_back(format_number("%.1f%%", 100 * mfu(*c, model, plan, attainable)));
      table.add(cells);
      if (!c->measured()) note_failure(str("(", model.name, ") ", c->name), "see its messages", Exit::device);
    }
  });
  Ratios ratios;
  for (const Competitor& c : all) {
    if (!c.ours || !c.measured()) continue;
    for (const Competitor* other : {best_torch(all, c.dtype), llm_c(all, c.dtype)}) {
      if (other == nullptr) continue;
      const std::string what = str("(", model.name, ") ", c.name, " over ", other->name, ": ");
      ratios.push_back({what + "tokens/s", speed_ratio(c, *other)});
      ratios.push_back({what + "peak memory", c.memory / other->memory});
    }
  }
  return ratios;
}

}  // namespace

Ratios bench_steps(const BenchFlags& f) {
  const std::vector<NamedSize> models = named_sizes(f.models);
  const std::string machine = name_of_machine(f.device);
  const bool gpu = backend_of(f.device) == Backend::cuda;
  print_text("\ntraining steps, ", machine, "; medians of ", f.rounds,
             " rounds of about 2.5 s each,\nafter two that do not count, ",
             gpu ? "one after the other\n" : "in turn where all fit into the memory\n");
  if (const double peak = peak_flops(machine, Dtype::bf16); peak > 0)
    print_text("MFU: tokens/s times FLOP/token over ", 1e-12 * peak,
               " TFLOP/s, the dense bf16 peak by the data sheet. "
               "FLOP/token: 3 times the forward's, 2\na multiply-add of products and of the half of the attention that "
               "is not masked; norms and other ops count nothing\n");
  const Torch torch(f);
  Ratios ratios;
  if (f.need_torch && !torch.available()) {
    note_failure("PyTorch", "there is none; --no-torch leaves this part out", Exit::device);
    return ratios;
  }
  for (const NamedSize& model : models) {
    const Ratios of_model = bench_model(model, f, torch);
    if (gpu) print(str("ratios of (", model.name, ")"), of_model);
    else ratios.insert(ratios.end(), of_model.begin(), of_model.end());
  }
  return ratios;
}

}  // namespace crossply
