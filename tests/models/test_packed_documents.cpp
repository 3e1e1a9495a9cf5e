// Documents packed into rows (models/packed_documents.h): each computes what it would alone, and nothing reaches
// another.
#include "models/packed_documents.h"

#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Rows = std::vector<std::vector<int32_t>>;
constexpr int32_t eot = 6;

struct Reading {
  std::vector<double> losses, gradients;  // of tokens, in order; of all parameters
};

// One training pass over rows of equal length. Each token's target is the next number of its own row, in a circle, so
// that it does not depend on what stands beside the row.
Reading read(TinyModel& model, const Rows& rows, const DocumentMark& mark, const std::vector<int32_t>& labels) {
  const auto B = std::ssize(rows), T = std::ssize(rows[0]);
  Tape tape(model.params.dtype());
  const Graph graph = record_model(tape, model.params, model.config, B, T, {.documents = mark});
  tape.differentiate();
  tape.plan(PlanMode::reuse);
  const Tensor gradients = model.params.gradients();
  tape.allocate(*model.device, &gradients);
  std::vector<int32_t> tokens;
  for (const auto& row : rows) tokens.insert(tokens.end(), row.begin(), row.end());
  load_batch(*model.device, graph, tokens.data(), labels.data());
  model.params.zero_gradients();
  const Step step{true, 1, 0};
  tape.forward(step);
  Reading got;
  with_real(model.params.dtype(), [&]<class Real>(Real) {
    got.losses = convert<double>(model.values<Real>(graph.losses->tensor));
    tape.backward(step);
    got.gradients = convert<double>(model.values<Real>(gradients));
  });
  return got;
}

// Two rows of three documents against six of one, by the same parameters.
void check_packed(const Config& config, const std::string& device, Dtype dtype, double tolerance, bool before) {
  const std::vector<int32_t> first = {1, 4, 2}, second = {5}, third = {3, 0, 4, 1};
  std::vector<Rows> documents = {{first, second, third}, {third, first, second}};
  Rows packed;
  for (Rows& row : documents) {
    packed.emplace_back();
    for (auto& document : row) {
      (before ? document.front() : document.back()) = eot;
      packed.back().insert(packed.back().end(), document.begin(), document.end());
    }
  }
  const std::vector<int32_t> labels = {0, 3, 5, -1, 2, 6, 1, 4, 5, 5, 0, 2, -1, 3, 6, 1};
  TinyModel model(config, device, PlanMode::reuse, dtype);
  const Reading together = read(model, packed, {eot, before}, labels);
  Reading apart;
  size_t at = 0;
  for (const Rows& row : documents)
    for (const auto& document : row) {
      const Reading one = read(model, {document}, {}, {labels.begin() + at, labels.begin() + at + document.size()});
      apart.losses.insert(apart.losses.end(), one.losses.begin(), one.losses.end());
      apart.gradients.resize(one.gradients.size());
      for (size_t i = 0; i < one.gradients.size(); ++i) apart.gradients[i] += one.gradients[i];
      at += document.size();
    }
  check_close("losses", together.losses, apart.losses, tolerance);
  check_close("gradients", together.gradients, apart.gradients, 10 * tolerance);  // longer sums, in another order
  CHECK(distance(read(model, packed, {}, labels).losses, apart.losses) > 100 * tolerance);  // it makes a difference
}

}  // namespace

TEST_CASE("documents: their bounds, whichever side the token between them is on") {
  const std::vector<int32_t> row = {1, 9, 9, 2, 3, 9};
  const auto bounds = [&](const DocumentMark& mark) {
    std::vector<int32_t> got(12, -5);
    find_bounds(got.data(), row.data(), 6, mark);
    return got;
  };
  CHECK(bounds({9, false}) == std::vector<int32_t>{0, 2, 0, 2, 2, 3, 3, 6, 3, 6, 3, 6});
  CHECK(bounds({9, true}) == std::vector<int32_t>{0, 1, 1, 2, 2, 5, 2, 5, 2, 5, 5, 6});
  CHECK(bounds({7, true}) == std::vector<int32_t>{0, 6, 0, 6, 0, 6, 0, 6, 0, 6, 0, 6});
}

TEST_CASE("documents: packed ones compute in double what they compute alone, in every model") {
  bool before = false;
  for (const Case& c : cases()) {
    if (has_loops(c.config, /*per_sequence=*/true)) continue;  // a draft that mixes neighbouring tokens
    CAPTURE(c.name);
    check_packed(c.config, "reference", Dtype::f64, 1e-12, before = !before);
  }
}

TEST_CASE("documents: packed ones compute in float what they compute alone, but for rounding") {
  for (const std::string& device : fast_devices())
    for (const Config& config :
         {tiny_config("llama"), tiny_with("mhc"), tiny_gpt2(), with_engram(tiny_config("lime"))}) {
      CAPTURES(device, config.arch);
      check_packed(config, device, Dtype::f32, 2e-5, true);
    }
}

TEST_CASE("documents: where no token begins one, no bit changes") {
  for (const std::string& device : fast_devices())
    for (const Config& config : {tiny_with("lime"), tiny_gpt2(), with_engram(tiny_config("llama"))}) {
      CAPTURES(device, config.arch);
      TinyModel model(config, device);
      const Rows rows = {{1, 4, 2, 5, 3}, {0, 0, 2, 1, 4}};
      const std::vector<int32_t> labels = {0, 3, 5, -1, 2, 6, 1, 4, 5, 5};
      const Reading plain = read(model, rows, {}, labels), marked = read(model, rows, {eot, false}, labels);
      CHECK(plain.losses == marked.losses);
      // A GPT-2's positions are added up in another order.
      if (config.gpt2()) check_close("gradients", marked.gradients, plain.gradients, 1e-6);
      else CHECK(plain.gradients == marked.gradients);
    }
}
