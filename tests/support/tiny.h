// Tiny whole models for the tests: every size different, so that a mix-up of two of them shows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "data/source.h"
#include "engine/rng.h"
#include "kernels/devices.h"
#include "kernels/optim/clip.h"
#include "kernels/optim/gradient_norm.h"
#include "kernels/optim/optimizer.h"
#include "models/batch/batch_model.h"
#include "models/combined.h"
#include "models/model.h"
#include "tests/support/check.h"
#include "train/settings/arch_list.h"

namespace crossply::test {

// A gpt2 takes tied from these only.
inline Config tiny_config(const std::string& arch, int64_t K = 2, bool qk_norm = false, bool tied = true,
                          int64_t D = 0) {
  if (arch == "gpt2") K = 4, qk_norm = false, D = 0;
  Config config;
  config.arch = arch;
  config.vocab_size = 7;
  config.hidden_size = 8;
  config.intermediate_size = 6;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.num_key_value_heads = K;
  config.head_dim = D;
  config.qk_norm = qk_norm;
  config.tie_word_embeddings = tied;
  config.initializer_range = 0.3;  // large enough that every path matters
  if (arch == "gpt2") config.max_position_embeddings = 11;
  if (arch == "gpt2") config.norm_eps = 1e-5;
  config.check(Exit::usage, "test");
  return config;
}
// A LLaMA as Qwen2's are, with biases of q, k and v. Of yarn's two frequencies one stays and one is divided.
inline Config tiny_qwen2(const std::string& arch = "llama", int64_t K = 2) {
  Config config = tiny_config(arch, K, false, true, 4);
  config.qkv_bias = true;
  config.rope_theta = 100;
  RopeScaling yarn;
  yarn.rope_type = "yarn";
  yarn.factor = 4, yarn.original_max_position_embeddings = 8;
  yarn.beta_fast = 1.2, yarn.beta_slow = 0.2;
  config.rope_scaling = yarn;
  config.check(Exit::usage, "test");
  return config;
}
// A GPT-2 as OpenAI's are, or one with the other choice of every option, as Inheritune's larger ones and more.
inline Config tiny_gpt2(bool plain = true) {
  Config config = tiny_config("gpt2", 4, false, plain);
  config.bias = plain;
  config.scale_attn_by_inverse_layer_idx = !plain;
  if (!plain) config.activation_function = "gelu";
  return config;
}

// A connection with options in place, as in "hyper:rate=2", on the backbone of another model.
inline Config connected(const std::string& choice, Config backbone) {
  const ArchChoice parsed = parse_arch_list(choice)[0];
  parsed.apply(backbone);
  backbone.check(Exit::usage, "test");
  return backbone;
}
// The backbone alone.
inline Config plain_of(const Config& config) { return connected(config.backbone, config); }

inline Config tiny_with(const std::string& choice, int64_t K = 2, bool qk_norm = true) {
  return connected(choice, tiny_config(choice == "gpt2" ? choice : "llama", K, qk_norm));
}

// Of all gradients of the table.
inline double gradient_norm(const ParameterTable& params) {
  std::vector<double> squares(static_cast<size_t>(leaves_of(params.flat_size())));
  const Arena sums(params.device(), "sums", squares.size() * sizeof(double));
  const Tensor to{sums.data(), Dtype::f64, Shape{leaves_of(params.flat_size())}};
  leaf_squares(to, params.gradients(), params.device().stream());
  params.device().copy_out(squares.data(), sums.data(), sums.bytes());
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

// An update by the gradients times `scale`, whose norm is then as it says.
inline void update(Optimizer& optimizer, Device& device, double lr, double norm, double clip, double scale = 1) {
  const Arena sums(device, "squares", sizeof(double));
  const double squares = norm / scale * (norm / scale);
  device.copy_in(sums.data(), &squares, sizeof squares);
  optimizer.begin_step(lr, scale);
  clip_factor(optimizer.factor(), optimizer.scale(), Tensor{sums.data(), Dtype::f64, Shape{1}}, {}, clip,
              device.stream());
  optimizer.update();
}

// Sequences that a model can learn a little from: counting with a step that depends on the sample. Some tokens do not
// count.
class Counting : public Source {
 public:
  explicit Counting(int64_t samples = 10, int64_t T = 6, int64_t V = 7) : samples_(samples), T_(T), V_(V) {}
  int64_t size() const override { return samples_; }
  int64_t seq_len() const override { return T_; }
  int64_t vocab_size() const override { return V_; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    for (int64_t t = 0; t < T_; ++t) {
      tokens[t] = static_cast<int32_t>((index + t * (1 + index % 3)) % V_);
      targets[t] = t < index % 3 ? -1 : static_cast<int32_t>((index + (t + 1) * (1 + index % 3)) % V_);
    }
  }

 private:
  int64_t samples_, T_, V_;
};

// A GPT-2's key bias, or that of a norm which only keys read, moves all logits of a query alike, which softmax does not
// see: its gradient is 0 but for rounding. A LLaMA's is rotated, so it moves them by the distance; attention over depth
// compares keys of several layers, each with its bias.
inline bool is_key_bias(const Parameter& row, const Config& config) {
  const auto parts = parts_of(config.arch);
  const bool over_depth = std::ranges::count(parts, "depth_attention") + std::ranges::count(parts, "moda") > 0;
  return config.gpt2() && !over_depth &&
         (row.name.ends_with("k_proj.bias") || row.name.ends_with("input_layernorm_k.bias"));
}

// A model recorded for training with fixed tokens, some of them not scored. On the reference device in f64 or in f32.
struct TinyModel {
  static constexpr int64_t B = 2, T = 5;

  explicit TinyModel(const Config& c, const std::string& device_name = "cpu", PlanMode mode = PlanMode::reuse,
                     Dtype real = Dtype::f32, Teacher* teacher = nullptr, double z_loss = 0)
      : config(c), device(make_device(device_name)), tape(real) {
    constexpr uint64_t seed = 1;
    declare_model(params, config);
    params.allocate(*device, accumulation_type(tape.dtype()), true);
    if (real == Dtype::bf16) params.allocate_bf16_copy();
    params.initialise(seed);
    for (Parameter& row : params.rows()) move_from_neutral(row);
    refresh_bf16_copy(params);
    graph = record_model(tape, params, config, B, T, {teacher, z_loss});
    tape.differentiate();
    tape.plan(mode);
    const Tensor gradients = params.gradients();
    tape.allocate(*device, &gradients);
    Random random(seed, 99);
    std::vector<int32_t> inputs, labels;
    for (int64_t i = 0; i < B * T; ++i) {
      inputs.push_back(static_cast<int32_t>(random.below(config.vocab_size)));
      labels.push_back(i % 4 == 1 ? -1 : static_cast<int32_t>(random.below(config.vocab_size)));
    }
    use(inputs, labels);
  }

  // Other sequences (B, T) than the random ones.
  void use(const std::vector<int32_t>& inputs, const std::vector<int32_t>& labels) {
    tokens = inputs;
    targets = labels;
    scored = static_cast<double>(std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; }));
    load_batch(*device, graph, tokens.data(), targets.data());
  }
  // Element i of a row becomes value(i).
  void fill(const std::string& name, const std::function<double(int64_t)>& value) {
    Parameter& row = params.at(name);
    std::vector<double> host;
    for (int64_t i = 0; i < row.shape.numel(); ++i) host.push_back(value(i));
    params.write(row, host.data());
  }
  // All parameters that the other model has, too.
  void take(TinyModel& other) {
    for (Parameter& row : params.rows()) {
      if (!other.params.contains(row.name)) continue;
      const std::vector<float> from = other.values<float>(other.params.at(row.name).value);
      fill(row.name, [&](int64_t i) { return static_cast<double>(from[static_cast<size_t>(i)]); });
    }
  }

  // Gains, scalars and what starts at a neutral value move away from it, so that every path matters.
  void move_from_neutral(const Parameter& row) {
    const bool drawn = row.init.rule.starts_with("normal") || row.init.rule.starts_with("uniform");
    if (drawn || row.name.ends_with("lime_router.weight")) return;
    const uint64_t stream = stream_of(row.name);
    fill(row.name, [&](int64_t i) {
      return row.init.at(1, stream, i) + 0.3 * random_normal(2, stream, static_cast<uint64_t>(i));
    });
  }

  double loss() {
    tape.forward(Step{});
    return sum_losses(*device, graph) / scored;
  }
  // Loss and gradients by the tape.
  double step() {
    params.zero_gradients();
    const Step step{true, 1 / scored, 0};
    tape.forward(step);
    const double sum = sum_losses(*device, graph);
    tape.backward(step);
    return sum / scored;
  }
  template <class Real>
  std::vector<Real> values(const Tensor& tensor) {
    std::vector<Real> host(static_cast<size_t>(tensor.numel()));
    device->copy_out(host.data(), tensor.as<Real>(), tensor.bytes());
    return host;
  }

  Config config;
  std::unique_ptr<Device> device;
  ParameterTable params;
  Tape tape;
  Graph graph;
  std::vector<int32_t> tokens, targets;
  double scored = 0;
};

// Sets every parameter whose name contains `part`.
inline void set(TinyModel& model, const std::string& part,
                const std::function<double(const Parameter&, int64_t)>& value) {
  for (Parameter& row : model.params.rows())
    if (row.name.find(part) != std::string::npos) model.fill(row.name, [&](int64_t i) { return value(row, i); });
}
inline void set(TinyModel& model, const std::string& part, double value) {
  set(model, part, [value](const Parameter&, int64_t) { return value; });
}

}  // namespace crossply::test
