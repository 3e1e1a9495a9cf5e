#include <omp.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>

#include "cli/program.h"
#include "dev/bench.h"
#include "engine/rng.h"
#include "eval/statistics.h"
#include "kernels/cuda/cuda.h"
#include "kernels/devices.h"
#include "train/step/trainer.h"

namespace crossply {

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

double geometric_mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += std::log(value);
  return std::exp(sum / static_cast<double>(values.size()));
}

std::string name_of_machine(const std::string& device) {
  return backend_of(device) == Backend::cuda ? make_device(device)->describe() : str(omp_get_max_threads(), " threads");
}

double memory_of_machine(const std::string& device) {
  if (backend_of(device) == Backend::cuda) return static_cast<double>(device_memory().bytes);
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

void RandomTokens::read(int64_t index, int32_t* tokens, int32_t* targets) const {
  Random random(7, static_cast<uint64_t>(index));
  for (int64_t t = 0; t < T_; ++t) {
    tokens[t] = static_cast<int32_t>(random.below(vocabulary_));
    targets[t] = static_cast<int32_t>(random.below(vocabulary_));
  }
}

TrainPlan train_options(const ArchChoice& choice, const ModelSize& size, const std::string& dtype,
                        const std::string& matmul, const std::string& device) {
  TrainPlan plan;
  choice.apply(plan.config);
  plan.config.vocab_size = size.vocab;
  if (size.gpt2) use_gpt2(plan.config);
  plan.config.tie_word_embeddings = size.gpt2;  // as PyTorch's side
  plan.config.hidden_size = size.width;
  plan.config.num_hidden_layers = size.layers;
  plan.config.num_attention_heads = size.heads;
  plan.config.num_key_value_heads = size.kv_heads;
  plan.config.intermediate_size = size.ffn;
  plan.data.seq_len = size.seq;
  plan.config.max_position_embeddings = size.gpt2 ? 1024 : size.seq;
  plan.config.check(Exit::usage, "--arch " + choice.text);
  plan.batch = size.batch;
  plan.lr = 1e-4;
  plan.dtype = dtype;
  plan.matmul = matmul;
  plan.device = device;
  return plan;
}

namespace {
struct SizeFlag {
  const char* name;
  int64_t ModelSize::*value;
  const char* help;
};
constexpr SizeFlag size_flags[] = {
    {"--width", &ModelSize::width, "C, model width"},     {"--layers", &ModelSize::layers, "L, number of blocks"},
    {"--heads", &ModelSize::heads, "H, query heads"},     {"--kv-heads", &ModelSize::kv_heads, "K, key/value heads"},
    {"--ffn", &ModelSize::ffn, "F, feed-forward width"},  {"--vocab", &ModelSize::vocab, "V, tokens of the vocabulary"},
    {"--seq", &ModelSize::seq, "T, tokens per sequence"}, {"--batch", &ModelSize::batch, "B, sequences per step"}};
}  // namespace

void add_flags(CLI::App& app, ModelSize& size) {
  for (const SizeFlag& flag : size_flags) add_integer(app, flag.name, size.*flag.value, 1, max_size, flag.help);
}

std::vector<std::string> arguments(const ModelSize& size) {
  std::vector<std::string> words;
  for (const SizeFlag& flag : size_flags) words.insert(words.end(), {flag.name, std::to_string(size.*flag.value)});
  if (size.gpt2) words.push_back("--gpt2");
  return words;
}

namespace {

// Not of getrusage where there is another way: on Linux its figure survives exec, so the process that started this one
// would count.
double peak_resident_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) / 1024;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / (1 << 20);
}

}  // namespace

void serve_steps(const ServeFlags& flags) {
  const RandomTokens data(flags.size);
  Trainer trainer(train_options(flags.size.plain(), flags.size, flags.dtype, flags.matmul, flags.device), data);
  for (int i = 0; i < 2; ++i) trainer.step();
  std::cout << "ready" << std::endl;
  for (int64_t steps = 0; std::cin >> steps;) {
    const double start = now();
    for (int64_t i = 0; i < steps; ++i) trainer.step();
    trainer.device().wait();
    const double mib = backend_of(flags.device) == Backend::cuda ? static_cast<double>(max_device_memory()) / (1 << 20)
                                                                 : peak_resident_mib();
    std::cout << now() - start << ' ' << mib << std::endl;
  }
}

}  // namespace crossply
