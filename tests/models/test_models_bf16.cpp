// Whole models with bf16 activations, against the plain bf16 computation: the reference loops in f32 with every
// activation, and every gradient of one, rounded to bf16 after the op that wrote it.
#include <algorithm>
#include <numeric>

#include "tests/support/backends.h"
#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Rounds what a bf16 tape would store in bf16.
void round_as(const Value* value, const Tensor& tensor) {
  if (value->dtype != Dtype::bf16 || tensor.data == nullptr) return;
  float* x = tensor.as<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) x[i] = bf16(x[i]);
}

// Parameters that bf16 holds exactly, so that only activations are rounded.
void round_parameters(TinyModel& model) {
  for (Parameter& row : model.params.rows()) {
    const bool in_f64 = model.params.dtype() == Dtype::f64;
    std::vector<double> host;
    if (in_f64) host = model.values<double>(row.value);
    else host = convert<double>(model.values<float>(row.value));
    for (double& x : host) x = static_cast<double>(static_cast<float>(bf16(static_cast<float>(x))));
    model.params.write(row, host.data());
  }
  refresh_bf16_copy(model.params);
}

double plain_step(TinyModel& plain, const TinyModel& shadow) {
  std::map<std::string, const Value*> bf16_values;
  for (const Value& value : shadow.tape.values()) bf16_values[value.name] = &value;
  plain.tape.watch([&](size_t n, bool backward) {
    const Node& node = *plain.tape.nodes()[n];
    for (const Value* value : backward ? node.in : node.out) {
      const Value* to_round = backward ? value->grad : value;
      if (to_round != nullptr && value->parameter == nullptr) round_as(bf16_values.at(value->name), to_round->tensor);
    }
  });
  return plain.step();
}

// Other random sequences, the same for every model.
void use_sequences(TinyModel& model, uint64_t seed) {
  Random random(seed, 98);
  std::vector<int32_t> inputs, labels;
  for (int64_t i = 0; i < TinyModel::B * TinyModel::T; ++i) {
    inputs.push_back(static_cast<int32_t>(random.below(model.config.vocab_size)));
    labels.push_back(static_cast<int32_t>(random.below(model.config.vocab_size)));
  }
  model.use(inputs, labels);
}

}  // namespace

// The errors of all gradients, relative to their size, which is taken to be at least a hundredth of the mean: what
// nearly cancels is lost in bf16 either way.
double sum_of_errors(TinyModel& got, TinyModel& exact) {
  double mean = 0, sum = 0;
  const auto size_of_gradient = [&](const Parameter& row) { return size_of(exact.values<double>(row.grad)); };
  for (const Parameter& row : exact.params.rows()) mean += size_of_gradient(row);
  mean /= static_cast<double>(exact.params.rows().size());
  for (const Parameter& row : exact.params.rows()) {
    const double off = distance(got.values<float>(got.params.at(row.name).grad), exact.values<double>(row.grad));
    CHECK_MESSAGE(std::isfinite(off), row.name);
    sum += off / std::max(size_of_gradient(row), 0.01 * mean);
  }
  return sum;
}

double sum_of(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }
double median_times_count(std::vector<double> x) {
  std::sort(x.begin(), x.end());  // a NaN has been found by then
  return x[x.size() / 2] * static_cast<double>(x.size());
}

TEST_CASE("bf16 models: at most twice as far from the exact gradients as the plain bf16 computation") {
  for (const std::string& device : fast_devices()) {
    double all_fast = 0, all_plain = 0;
    for (const Case& c : one_in(3, cases())) {
      if (device == gpu && has_loops(c.config)) continue;
      // Its gates are ReLUs, and some lie within rounding of zero: there a gradient jumps. In 24 batches two to five
      // did so in bf16 and one in the plain loops; the other batches had ratios like those of other models.
      if (c.name == "relay biases, yarn") continue;
      CAPTURE(c.name);
      CAPTURE(device);
      TinyModel fast(c.config, device, PlanMode::reuse, Dtype::bf16), plain(c.config, "reference", PlanMode::distinct);
      TinyModel exact(c.config, "reference", PlanMode::reuse, Dtype::f64);
      for (TinyModel* model : {&fast, &plain, &exact}) round_parameters(*model);
      // The errors of one batch are one draw each of rounding, correlated over the tensors; hence several batches: of
      // two, both may happen to be close in plain bf16. A few batches of some models are off by ten times as much as
      // the others, in one way or in both, and would decide a sum: where a sum is too large, more batches are taken,
      // and the median stands for each. What is off in every batch is off in the median, too.
      std::vector<double> errors_fast, errors_plain;
      double loss_fast = 0, loss_plain = 0;
      const auto add_batches = [&](uint64_t until) {
        for (uint64_t seed = errors_fast.size() + 1; seed <= until; ++seed) {
          for (TinyModel* model : {&fast, &plain, &exact}) use_sequences(*model, seed);
          const double want = exact.step();
          loss_fast += std::abs(fast.step() - want);
          loss_plain += std::abs(plain_step(plain, fast) - want);
          errors_fast.push_back(sum_of_errors(fast, exact));
          errors_plain.push_back(sum_of_errors(plain, exact));
        }
      };
      add_batches(device == "emulator" ? 4 : 6);
      double sum_fast = sum_of(errors_fast), sum_plain = sum_of(errors_plain);
      if (sum_fast > 2 * sum_plain) {
        add_batches(24);
        sum_fast = median_times_count(errors_fast), sum_plain = median_times_count(errors_plain);
      }
      CHECK(sum_plain > 0);
      CHECK_MESSAGE(sum_fast <= 2 * sum_plain, "gradients off by " << sum_fast << "; plain, " << sum_plain);
      // The loss head rounds its logits, too, which inside the one op the plain loops do not: 2^-9 of logits around 1.
      CHECK_MESSAGE(loss_fast <= 2 * loss_plain + static_cast<double>(errors_fast.size()) * 0x1p-9,
                    "losses off by " << loss_fast << "; plain, " << loss_plain);
      all_fast += sum_fast, all_plain += sum_plain;
    }
    MESSAGE(device << ": errors of all models: " << all_fast << ", plain bf16 " << all_plain);
    CHECK(all_fast <= 1.2 * all_plain);  // over so many models the draws even out
  }
}

TEST_CASE("bf16 models: a GPT-2 whose products do its gelu") {
  Config config = tiny_config("gpt2");
  config.intermediate_size = 16;  // of 6 columns they do not
  REQUIRE(config.activation_function == "gelu_new");
  for (const std::string& device : fast_devices()) {
    TinyModel exact(config, "reference", PlanMode::reuse, Dtype::f64);
    round_parameters(exact);
    std::vector<double> losses, errors;
    for (const bool hopper : {false, true}) {
      if (hopper && device != "emulator") continue;  // a GPU is what it is
      CAPTURES(device, hopper);
      std::optional<WithHopper> with;
      if (hopper) with.emplace();
      TinyModel model(config, device, PlanMode::reuse, Dtype::bf16);
      round_parameters(model);
      CHECK(std::count_if(model.tape.nodes().begin(), model.tape.nodes().end(), [](const auto& node) {
              return !node->reads.empty() && node->op() == std::string("linear");
            }) == config.num_hidden_layers);
      // The mean of eight draws of rounding: of 29 seen on a CPU the mean is 0.0021 and the largest 0.0067.
      double off = 0;
      losses.push_back(0), errors.push_back(0);
      for (uint64_t seed = 1; seed <= 8; ++seed) {
        use_sequences(exact, seed), use_sequences(model, seed);
        const double want = exact.step(), loss = model.step();
        off += std::abs(loss - want) / 8, losses.back() += loss;
        errors.back() += sum_of_errors(model, exact);
      }
      CHECK(off < 0x1p-8);
    }
    if (errors.size() < 2) continue;
    CHECK(losses[0] != losses[1]);  // in the product what goes into gelu is not rounded
    CHECK(errors[1] < 1.5 * errors[0]);
  }
}

TEST_CASE("bf16 models: activations take about half the memory") {
  const auto arena = [](const std::string& arch, Dtype dtype) {
    Config config = tiny_config(arch);
    config.hidden_size = 128, config.head_dim = 32, config.intermediate_size = 256;
    config.max_position_embeddings = 64;
    ParameterTable params;
    declare_model(params, config);
    Tape tape(dtype);
    record_model(tape, params, config, 4, 64);
    tape.differentiate();
    tape.plan(PlanMode::reuse);
    return static_cast<double>(tape.arena_bytes());
  };
  for (const Architecture& architecture : architectures()) {
    CAPTURE(architecture.name);
    CHECK(arena(architecture.name, Dtype::bf16) < 0.6 * arena(architecture.name, Dtype::f32));
  }
}
