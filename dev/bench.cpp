// bench matmul: the machine's fp32 multiply-add peak, then the matrix products as fractions of it.
// bench architectures: what a training step of each costs, relative to plain LLaMA.
// Both measure in turns, so that a clock that drifts hits all alike.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "engine/rng.h"
#include "kernels/matmul.h"
#include "train/arch_list.h"
#include "train/program.h"
#include "train/progress.h"
#include "train/trainer.h"

using namespace crossply;

namespace {

using Vector = float __attribute__((vector_size(64)));

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// GFLOP/s of independent multiply-adds in registers, all threads. Ten chains hide the latency of each.
double measure_peak() {
  constexpr int64_t rounds = 40'000'000;  // about as long as a measurement of a product
  double checksum = 0;
  const double start = now();
#pragma omp parallel reduction(+ : checksum)
  {
    const Vector b = Vector{} + 0.999f, c = Vector{} + 0.001f;
    // Ten different starts: the compiler merges equal chains into one.
    Vector a0 = b, a1 = b * 2, a2 = b * 3, a3 = b * 4, a4 = b * 5, a5 = b * 6, a6 = b * 7, a7 = b * 8, a8 = b * 9,
           a9 = b * 10;
    for (int64_t i = 0; i < rounds; ++i) {
      a0 = a0 * b + c, a1 = a1 * b + c, a2 = a2 * b + c, a3 = a3 * b + c, a4 = a4 * b + c;
      a5 = a5 * b + c, a6 = a6 * b + c, a7 = a7 * b + c, a8 = a8 * b + c, a9 = a9 * b + c;
    }
    const Vector sum = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9;
    for (int i = 0; i < 16; ++i) checksum += static_cast<double>(sum[i]);
  }
  const double seconds = now() - start;
  if (checksum == 0) std::printf("impossible\n");  // keeps the loop from being removed
  return 2.0 * 16 * 10 * static_cast<double>(rounds) * omp_get_max_threads() / seconds * 1e-9;
}

// GFLOP/s of calling body, repeated for at least 50 ms.
template <class F>
double measure(double flops, F&& body) {
  const double start = now();
  int64_t calls = 0;
  for (; now() - start < 0.05; ++calls) body();
  return flops * static_cast<double>(calls) / (now() - start) * 1e-9;
}

// The value with that fraction of the others below it.
double quantile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(std::lrint(fraction * static_cast<double>(values.size() - 1)))];
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

struct Size {
  int64_t rows, in, out;
};

void bench_matmul(const Size& s) {
  const std::vector<float> x(static_cast<size_t>(s.rows * s.in), 0.5f), w(static_cast<size_t>(s.out * s.in), 0.25f);
  std::vector<float> y(static_cast<size_t>(s.rows * s.out)), dx(x.size()), dw(w.size());
  const Tensor inp = view(x.data(), {s.rows, s.in}), weight = view(w.data(), {s.out, s.in});
  const Tensor out = view(y.data(), {s.rows, s.out}), dinp = view(dx.data(), inp.shape),
               dweight = view(dw.data(), weight.shape);
  const double flops = 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.in) * static_cast<double>(s.out);
  std::vector<double> peak, rate[3], fraction[3];
  for (int round = 0; round < 7; ++round) {
    peak.push_back(measure_peak());
    rate[0].push_back(measure(flops, [&] { matmul_forward({out}, inp, {weight}, Stream{}); }));
    rate[1].push_back(measure(flops, [&] { matmul_backward_input(dinp, {out}, {weight}, false, Stream{}); }));
    rate[2].push_back(measure(flops, [&] { matmul_backward_weight(dweight, out, inp, Stream{}); }));
    for (int form = 0; form < 3; ++form) fraction[form].push_back(rate[form].back() / peak.back());
  }
  std::printf("%6lld %6lld %6lld %8.0f", static_cast<long long>(s.rows), static_cast<long long>(s.in),
              static_cast<long long>(s.out), median(peak));
  for (int form = 0; form < 3; ++form)
    std::printf("  %6.0f (%2.0f%%)", median(rate[form]), 100 * median(fraction[form]));
  std::printf("\n");
}

void bench_products() {
  std::printf("fp32, %d threads; GFLOP/s, medians of 7 rounds, and the fraction of the round's multiply-add peak\n",
              omp_get_max_threads());
  std::printf("  rows     in    out     peak      forward        dinput       dweight\n");
  for (const Size& size : std::vector<Size>{{2048, 768, 768}, {2048, 768, 2048}, {2048, 2048, 768}, {2048, 768, 3072},
                                            {2048, 3072, 768}, {2048, 192, 192}, {4096, 32, 32}, {4096, 32, 128},
                                            {4096, 128, 32}})
    bench_matmul(size);
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr int64_t vocabulary = 256;

class RandomTokens : public Source {
 public:
  explicit RandomTokens(int64_t T) : T_(T) {}
  int64_t size() const override { return 1 << 20; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return vocabulary; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    Random random(7, static_cast<uint64_t>(index));
    for (int64_t t = 0; t < T_; ++t) {
      tokens[t] = static_cast<int32_t>(random.below(vocabulary));
      targets[t] = static_cast<int32_t>(random.below(vocabulary));
    }
  }

 private:
  int64_t T_;
};

struct ArchitectureFlags {
  std::string archs = "all";
  int64_t width = 256, layers = 12, heads = 8, kv_heads = 4, ffn = 768, seq = 512, batch = 4, rounds = 7;
};

// One architecture: what it is, and what was measured.
struct Model {
  ArchChoice choice;
  TrainOptions options;
  TrainResult plan;
  size_t activations = 0;              // bytes
  std::vector<double> seconds, ratio;  // of a step: in each round, and divided by LLaMA's in that round
};

TrainOptions train_options(const ArchChoice& choice, const ArchitectureFlags& f) {
  TrainOptions o;
  o.config.arch = choice.arch;
  o.config.options = choice.options;
  o.config.vocab_size = vocabulary;
  o.config.hidden_size = f.width;
  o.config.num_hidden_layers = f.layers;
  o.config.num_attention_heads = f.heads;
  o.config.num_key_value_heads = f.kv_heads;
  o.config.intermediate_size = f.ffn;
  o.config.max_position_embeddings = o.data.seq_len = f.seq;
  o.config.check(Exit::usage, "--arch " + choice.text);
  o.batch = f.batch;
  o.lr = 1e-4;
  return o;
}

// LLaMA first, whether it was named or not.
std::vector<Model> models_of(const ArchitectureFlags& f) {
  std::vector<ArchChoice> choices = parse_arch_list(f.archs);
  std::erase_if(choices, [](const ArchChoice& choice) { return choice.text == "llama"; });
  choices.insert(choices.begin(), ArchChoice{"llama", "llama", {}});
  std::vector<Model> models;
  for (const ArchChoice& choice : choices) {
    const TrainOptions options = train_options(choice, f);
    models.push_back({choice, options, plan_training(options), 0, {}, {}});
  }
  return models;
}

// Groups that fit into three quarters of the memory, each with LLaMA in front.
std::vector<std::vector<Model*>> groups_that_fit(std::vector<Model>& models) {
  const double pages = static_cast<double>(sysconf(_SC_PHYS_PAGES)), page = static_cast<double>(sysconf(_SC_PAGESIZE));
  std::vector<std::vector<Model*>> groups;
  double used = INFINITY;
  for (size_t i = models.size() > 1 ? 1 : 0; i < models.size(); ++i) {
    used += static_cast<double>(models[i].plan.memory);
    if (used > 0.75 * pages * page) {
      groups.push_back({&models[0]});
      used = static_cast<double>(models[0].plan.memory + models[i].plan.memory);
    }
    if (i > 0) groups.back().push_back(&models[i]);
  }
  return groups;
}

// All models of a group live at once and step in turn; the one that begins changes from round to round. The first
// round, which touches the memory for the first time, does not count.
void measure_steps(const std::vector<Model*>& group, const ArchitectureFlags& f) {
  const RandomTokens data(f.seq);
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (Model* model : group) {
    trainers.push_back(std::make_unique<Trainer>(model->options, data));
    model->activations = trainers.back()->replicas().bytes();
  }
  for (int64_t round = 0; round <= f.rounds; ++round) {
    std::vector<double> seconds(group.size());
    for (size_t k = 0; k < group.size(); ++k) {
      const size_t i = (static_cast<size_t>(round) + k) % group.size();
      const double before = trainers[i]->seconds;
      trainers[i]->step();
      seconds[i] = trainers[i]->seconds - before;
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
          format_count(static_cast<int64_t>(static_cast<double>(f.batch * f.seq) / median(model.seconds)))};
}

void bench_architectures(const ArchitectureFlags& f) {
  std::vector<Model> models = models_of(f);
  const auto groups = groups_that_fit(models);
  const std::string parts = groups.size() > 1 ? str(" of each of ", groups.size(), " groups") : "";
  std::printf("%zu models, %d threads; training steps of %lld x %lld tokens, in turn, %lld rounds%s after the first\n",
              models.size(), omp_get_max_threads(), static_cast<long long>(f.batch), static_cast<long long>(f.seq),
              static_cast<long long>(f.rounds), parts.c_str());
  std::fflush(stdout);
  for (const std::vector<Model*>& group : groups) measure_steps(group, f);
  std::vector<std::vector<std::string>> table = {
      {"architecture", "parameters added", "FLOP/token", "time", "quartiles", "memory", "MiB", "tokens/s"}};
  for (const Model& model : models) table.push_back(cells(model, models[0], f));
  std::printf("%s", format_table(table).c_str());
  std::printf("x: relative to llama. time: of each round, divided by llama's in that round; median and quartiles.\n"
              "memory, MiB: the planned peak of activations and their gradients.\n");
}

void add_flags(CLI::App& app, ArchitectureFlags& f) {
  app.add_option("--arch", f.archs, "besides llama: " + arch_list_help())->capture_default_str();
  auto flag = [&](const char* name, int64_t& variable, const char* help) {
    app.add_option(name, variable, help)->capture_default_str()->check(integer_from(1));
  };
  flag("--width", f.width, "C, model width");
  flag("--layers", f.layers, "L, number of blocks");
  flag("--heads", f.heads, "H, query heads");
  flag("--kv-heads", f.kv_heads, "K, key/value heads");
  flag("--ffn", f.ffn, "F, feed-forward width");
  flag("--seq", f.seq, "T, tokens per sequence");
  flag("--batch", f.batch, "B, sequences per step");
  flag("--rounds", f.rounds, "steps of every model, besides a first one that does not count");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures this machine and crossply on it.", "bench");
  ArchitectureFlags f;
  CLI::App* architectures = nullptr;
  auto flags = [&] {
    app.require_subcommand(0, 1);
    app.add_subcommand("matmul", "the matrix products as fractions of the multiply-add peak (the default)");
    architectures = app.add_subcommand("architectures", "what a training step of each costs, relative to LLaMA");
    architectures->footer(exit_code_help());
    add_flags(*architectures, f);
  };
  return run_program(app, argc, argv, flags, [&] {
    if (architectures->parsed()) bench_architectures(f);
    else bench_products();
    return Exit::done;
  });
}
