// Whole models with bf16 activations, against the plain bf16 computation: the reference loops in f32 with every
// activation, and every gradient of one, rounded to bf16 after the op that wrote it.
#include <cmath>

#include "tests/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Rounds what a bf16 tape would store narrowly.
void round_as(const Value* narrow, const Tensor& tensor) {
  if (narrow->dtype != Dtype::bf16 || tensor.data == nullptr) return;
  float* x = tensor.as<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) x[i] = bf16(x[i]);
}

// Parameters that bf16 holds exactly, so that only activations are rounded.
void round_parameters(TinyModel& model) {
  for (Parameter& row : model.params.rows()) {
    const bool wide = model.params.dtype() == Dtype::f64;
    std::vector<double> host;
    for (int64_t i = 0; i < row.shape.numel(); ++i) {
      const double x = wide ? row.value.as<double>()[i] : static_cast<double>(row.value.as<float>()[i]);
      host.push_back(static_cast<double>(static_cast<float>(bf16(static_cast<float>(x)))));
    }
    model.params.write(row, host.data());
  }
  model.params.refresh_narrow();
}

double plain_step(TinyModel& plain, const TinyModel& shadow) {
  plain.tape.watch([&](size_t n, bool backward) {
    const Node &node = *plain.tape.nodes()[n], &narrow = *shadow.tape.nodes()[n];
    const auto& values = backward ? node.in : node.out;
    for (size_t i = 0; i < values.size(); ++i) {
      const Value* value = backward ? values[i]->grad : values[i];
      const Value* as = (backward ? narrow.in : narrow.out)[i];
      if (value != nullptr && values[i]->parameter == nullptr) round_as(as, value->tensor);
    }
  });
  return plain.step();
}

double distance(const std::vector<float>& got, const std::vector<double>& want) {
  double sum = 0;
  for (size_t i = 0; i < want.size(); ++i) sum += std::pow(static_cast<double>(got[i]) - want[i], 2);
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("bf16 models: at most twice as far from the exact gradients as the plain bf16 computation") {
  double all_fast = 0, all_plain = 0;
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel fast(c.config, "cpu", PlanMode::reuse, Dtype::bf16), plain(c.config, "reference", PlanMode::distinct);
    TinyModel exact(c.config, "reference", PlanMode::reuse, Dtype::f64);
    for (TinyModel* model : {&fast, &plain, &exact}) round_parameters(*model);
    const double want = exact.step(), fast_off = std::abs(fast.step() - want);
    const double plain_off = std::abs(plain_step(plain, fast) - want);
    CHECK(fast_off <= 2 * plain_off + 0.02 * want);  // one number: its two draws of rounding say little
    // Relative errors of all tensors, the size of a tensor being at least a hundredth of the mean: what nearly cancels
    // is lost in bf16 either way.
    double mean = 0, sum_fast = 0, sum_plain = 0;
    for (Parameter& row : exact.params.rows())
      mean += distance(std::vector<float>(static_cast<size_t>(row.shape.numel()), 0.f), exact.values<double>(row.grad));
    mean /= static_cast<double>(exact.params.rows().size());
    for (Parameter& row : exact.params.rows()) {
      const auto gradient = exact.values<double>(row.grad);
      const double size = std::max(distance(std::vector<float>(gradient.size(), 0.f), gradient), 0.01 * mean);
      const double off = distance(fast.values<float>(fast.params.at(row.name).grad), gradient) / size;
      CHECK_MESSAGE(std::isfinite(off), row.name);
      sum_fast += off;
      sum_plain += distance(plain.values<float>(plain.params.at(row.name).grad), gradient) / size;
    }
    CHECK(sum_plain > 0);
    CHECK_MESSAGE(sum_fast <= 2 * sum_plain, "errors " << sum_fast << " and, plain, " << sum_plain);
    all_fast += sum_fast, all_plain += sum_plain;
  }
  MESSAGE("errors of all models: " << all_fast << ", plain bf16 " << all_plain);
  CHECK(all_fast <= 1.2 * all_plain);  // over 74 models the draws even out
}

TEST_CASE("bf16 models: the three memory plans give the same bits, and activations take about half the memory") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    std::vector<std::vector<float>> gradients;
    for (PlanMode mode : {PlanMode::reuse, PlanMode::distinct, PlanMode::poison}) {
      TinyModel model(c.config, "cpu", mode, Dtype::bf16);
      model.step();
      CHECK(std::isfinite(model.step()));
      gradients.push_back(model.values<float>(model.params.gradients()));
    }
    for (size_t other : {1, 2})
      CHECK(std::memcmp(gradients[0].data(), gradients[other].data(), gradients[0].size() * sizeof(float)) == 0);
  }
  const auto arena = [](const std::string& arch, Dtype dtype) {
    Config config = tiny_config(arch);
    config.hidden_size = 128, config.head_dim = 32, config.intermediate_size = 256;
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
