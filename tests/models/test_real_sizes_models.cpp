// Whole models at the sizes of training, on the GPU: as exact as on the CPU, and the same bits each time.
#include "kernels/optim/optimizer.h"
#include "tests/support/cases.h"
#include "tests/support/real_sizes.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t context = sized(1024, 9);
constexpr double draws = sized(2.0, 4.0);  // times the CPU's error: of few elements one draw of rounding may be lucky

Config real_config(const std::string& arch) {
  Config config = tiny_config(arch);
  config.initializer_range = 0.02;
  config.vocab_size = 1000;
  config.hidden_size = 768;
  config.intermediate_size = 2048;
  config.num_attention_heads = 12;
  config.num_key_value_heads = arch == "gpt2" ? 12 : 4;
  if (arch == "gpt2") config.head_dim = 0;
  config.check(Exit::usage, "test");
  return emulated ? tiny_config(arch) : config;
}

struct Model {
  Config config;
  std::unique_ptr<Device> device;
  ParameterTable params;
  Tape tape;
  Graph graph;
  double scored = 0;

  Model(const Config& c, const std::string& device_name, Dtype dtype, int64_t T = context, int64_t B = 1)
      : config(c), device(make_device(device_name)), tape(dtype) {
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, true);
    if (dtype == Dtype::bf16) params.allocate_bf16_copy();
    graph = record_model(tape, params, config, B, T);
    tape.differentiate();
    tape.plan(PlanMode::reuse);
    tape.allocate(*device);
    Random random(1, 99);
    std::vector<int32_t> inputs, labels;
    for (int64_t i = 0; i < B * T; ++i) {
      inputs.push_back(static_cast<int32_t>(random.below(config.vocab_size)));
      labels.push_back(i % 4 == 1 ? -1 : static_cast<int32_t>(random.below(config.vocab_size)));
      scored += labels.back() >= 0;
    }
    load_batch(*device, graph, inputs.data(), labels.data());
  }
  // The values of draw(), which takes seconds, drawn once for an architecture.
  void initialise() {
    static std::map<std::string, std::vector<float>> drawn;
    std::vector<float>& values = drawn[config.arch];
    if (values.empty()) draw(), values = all(params.values());
    device->copy_in(params.values().data, values.data(), params.values().bytes());
    refresh_bf16_copy(params);
  }
  // Random, and moved away from the neutral values, so that every path matters.
  void draw() {
    params.initialise(1);
    for (Parameter& row : params.rows()) {
      const bool drawn = row.init.rule.starts_with("normal") || row.init.rule.starts_with("uniform");
      if (drawn || row.name.ends_with("lime_router.weight")) continue;
      const uint64_t stream = stream_of(row.name);
      std::vector<double> host;
      for (int64_t i = 0; i < row.shape.numel(); ++i)
        host.push_back(row.init.at(1, stream, i) + 0.1 * random_normal(2, stream, static_cast<uint64_t>(i)));
      params.write(row, host.data());
    }
  }
  std::vector<float> all(const Tensor& flat) {
    std::vector<float> host(static_cast<size_t>(flat.numel()));
    device->copy_out(host.data(), flat.data, flat.bytes());
    return host;
  }
  // Loss and gradients, from the second call on a GPU's recording.
  double step() {
    params.zero_gradients();
    tape.run(Step{true, 1 / scored, 0});
    return sum_losses(*device, graph) / scored;
  }
  std::vector<float> gradients() {
    step();
    return all(params.gradients());
  }
};

// How far the row's gradients are apart.
double distance_of(const Parameter& row, Model& a, Model& b) {
  return distance(a.params.read(row.grad), convert<double>(b.params.read(b.params.at(row.name).grad)));
}

}  // namespace

TEST_CASE("real sizes: the gradients of every architecture are as exact as on the CPU") {
  if (!available(Backend::cuda)) return;
  for (const Architecture& architecture : architectures()) {
    const Config config = real_config(architecture.name);
    if (has_loops(config)) continue;
    CAPTURE(config.arch);
    Model cpu(config, "cpu", Dtype::f32), cpu_bf16(config, "cpu", Dtype::bf16);
    Model fast(config, gpu, Dtype::f32), fast_bf16(config, gpu, Dtype::bf16);
    for (Model* model : {&cpu, &cpu_bf16, &fast, &fast_bf16}) model->initialise();
    const double loss = cpu.step(), rounding = std::abs(cpu_bf16.step() - loss);
    CHECK(std::abs(fast.step() - loss) <= 1e-5);
    // Each rounding is a draw; and logits of size 1 have units of 2^-8, of which means over few tokens keep more.
    CHECK(std::abs(fast_bf16.step() - loss) <= 2 * rounding + sized(0x1p-9, 0x1p-7));

    // What bf16 costs on the CPU is the baseline, of each tensor and of the mean. f32 rounds 2^15 times less, but also
    // in sums, whose errors grow like the root of some 1000 terms: a thousandth, and six deviations of it.
    double mean = 0, sum = 0, sum_fast = 0;
    const std::vector<double> zero;
    std::map<std::string, double> size;
    for (const Parameter& row : cpu.params.rows())
      mean += size[row.name] = size_of(convert<double>(cpu.params.read(row.grad)));
    mean /= static_cast<double>(size.size());
    for (const Parameter& row : cpu.params.rows()) {
      CAPTURE(row.name);
      const double whole = std::max(size[row.name], 0.01 * mean);  // what nearly cancels is lost in bf16 either way
      const double plain = distance_of(row, cpu_bf16, cpu) / whole;
      const double of_bf16 = distance_of(row, fast_bf16, cpu) / whole, of_f32 = distance_of(row, fast, cpu) / whole;
      CHECK(of_bf16 <= draws * plain + 0.05);
      CHECK(of_f32 <= 0.006 * plain + 2e-5);
      sum += plain, sum_fast += of_bf16;
    }
    CHECK(sum_fast <= draws * sum);
    const double norm = gradient_norm(cpu.params);
    CHECK(gradient_norm(fast.params) == doctest::Approx(norm).epsilon(1e-4));
    MESSAGE(config.arch << ": bf16 gradients off by " << sum_fast << ", the CPU's by " << sum);
  }
}

TEST_CASE("real sizes: training steps have the same bits each time, also from a recording") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const std::string arch : {"llama", "lime", "hyper", "mudd"}) {
      CAPTURES(name_of(dtype), arch);
      Model first(real_config(arch), gpu, dtype), second(real_config(arch), gpu, dtype);
      first.initialise(), second.initialise();
      const std::vector<float> plain = first.gradients();
      for (int again = 0; again < 3; ++again) CHECK(first.gradients() == plain);
      for (const float g : plain) REQUIRE(std::isfinite(g));
      Optimizer of_first(first.params, Buckets(first.params), {}), of_second(second.params, Buckets(second.params), {});
      for (int i = 0; i < 3; ++i) {
        CHECK(first.step() == second.step());
        update(of_first, *first.device, 1e-3, gradient_norm(first.params), 1);
        update(of_second, *second.device, 1e-3, gradient_norm(second.params), 1);
      }
      CHECK(first.all(first.params.values()) == second.all(second.params.values()));
    }
}

TEST_CASE("real sizes: models take turns, each with recordings, while scratch memory grows") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    CAPTURES(name_of(dtype));
    std::vector<std::unique_ptr<Model>> models;
    std::vector<std::vector<float>> want;
    const std::vector<std::string> names{"llama", "lime", "mudd"};
    for (size_t i = 0; i < names.size(); ++i) {  // the largest last
      const int64_t B = i == 2 ? 4 : 1, T = i == 0 ? context / 2 : context;
      models.push_back(std::make_unique<Model>(real_config(names[i]), gpu, dtype, T, B));
      models[i]->initialise();
      want.push_back(models[i]->gradients());
      for (int turn = 0; turn < 3; ++turn)
        for (size_t j = 0; j <= i; ++j) CHECK(models[j]->gradients() == want[j]);
    }
  }
}
