// Replicas against one tape for the whole batch.
#include "eval/mean_loss.h"
#include "models/batch/batch_model.h"

#include "tests/support/threads.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = 5;

struct Setup {
  Config config;
  std::unique_ptr<Device> device = make_device("cpu");
  ParameterTable params;
  std::vector<int32_t> tokens, targets;

  Setup(const std::string& arch, int64_t B, Dtype dtype = Dtype::f32) : config(tiny_config(arch)) {
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, true);
    if (dtype == Dtype::bf16) params.allocate_bf16_copy();
    params.initialise(3);
    refresh_bf16_copy(params);
    Random random(5, 6);
    for (int64_t i = 0; i < B * T; ++i) {
      tokens.push_back(static_cast<int32_t>(random.below(config.vocab_size)));
      targets.push_back(i % 7 == 2 ? -1 : static_cast<int32_t>(random.below(config.vocab_size)));
    }
  }
  std::vector<float> gradients() const {
    const float* g = params.gradients().as<float>();
    return {g, g + params.flat_size()};
  }
};

class Source3 : public Source {  // three sequences
 public:
  explicit Source3(const Setup& s) : s_(s) {}
  int64_t size() const override { return 3; }
  int64_t seq_len() const override { return T; }
  int64_t vocab_size() const override { return 7; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    std::copy_n(&s_.tokens[static_cast<size_t>(index * T)], T, tokens);
    std::copy_n(&s_.targets[static_cast<size_t>(index * T)], T, targets);
  }

 private:
  const Setup& s_;
};

}  // namespace

TEST_CASE("batch model: replicas give the loss and the gradients of one tape") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const int64_t B : {2, 7, 48}) {
      CAPTURE(B);
      Setup s("lime", B, dtype);
      BatchModel model(*s.device, s.params, s.config, {B, T, dtype});
      CHECK(model.layout().replicas > 1);
      const Step step{true, 0.01, 0};
      model.run(s.tokens.data(), s.targets.data(), step);
      const double loss = model.take_losses();
      const std::vector<float> replicas = s.gradients();
      s.params.zero_gradients();
      Tape tape(dtype);
      const Graph graph = record_batch(tape, s.params, s.config, {B, T, dtype}, {B, 1});
      tape.allocate(*s.device);
      load_batch(*s.device, graph, s.tokens.data(), s.targets.data());
      tape.forward(step);
      CHECK(loss == doctest::Approx(sum_losses(*s.device, graph)).epsilon(1e-6));
      tape.backward(step);
      // A token's activations and their gradients are the same bits either way, also in bf16: only the sums over tokens
      // are taken in another order.
      check_close("gradients", replicas, convert<double>(s.gradients()), 1e-4);  // some sums nearly cancel
    }
  }
}

TEST_CASE("batch model: replicas add to what is there, and give the same bits on any number of threads") {
  Setup s("lime", 24);
  BatchModel model(*s.device, s.params, s.config, {24, T});
  check_same_bits_on_any_threads<float>([&] {
    s.params.zero_gradients();
    model.run(s.tokens.data(), s.targets.data(), Step{true, 1, 0});
    return s.gradients();
  });
  const std::vector<float> once = s.gradients();
  model.run(s.tokens.data(), s.targets.data(), Step{true, 1, 0});
  const std::vector<float> twice = s.gradients();
  for (size_t i = 0; i < once.size(); ++i) CHECK(twice[i] == doctest::Approx(2 * once[i]).epsilon(1e-6));
}

TEST_CASE("batch model: large models keep one tape, and the memory plan does not change the form") {
  Config config = tiny_config("llama");
  ParameterTable small;
  declare_model(small, config);
  CHECK(choose_layout(small, config, {64, T}, Backend::cuda).replicas == 1);
  CHECK(choose_layout(small, config, {1, T}, Backend::cpu).replicas == 1);
  CHECK(choose_layout(small, config, {64, T}, Backend::cpu).replicas == 16);
  CHECK(choose_layout(small, config, {64, T}, Backend::cpu).sequences == 4);
  CHECK(choose_layout(small, config, {64, 20000}, Backend::cpu).replicas == 1);
  const Layout poison = choose_layout(small, config, {64, T, Dtype::f32, true, PlanMode::poison}, Backend::cpu);
  CHECK(poison.sequences == 4);
  config.vocab_size = 100000;
  ParameterTable large;
  declare_model(large, config);
  CHECK(choose_layout(large, config, {64, T}, Backend::cpu).replicas == 1);
}

TEST_CASE("batch model: what a kernel throws on some thread reaches the caller") {
  Setup s("llama", 8);
  BatchModel model(*s.device, s.params, s.config, {8, T});
  s.targets[6 * T] = 1000;
  CHECK_THROWS_AS(model.run(s.tokens.data(), s.targets.data(), Step{}), Error);
  s.targets[6 * T] = 1;
  model.take_losses();
  model.run(s.tokens.data(), s.targets.data(), Step{});
  CHECK(std::isfinite(model.take_losses()));
}

TEST_CASE("batch model: the mean loss counts every sequence once, also where the last batch is not full") {
  Setup s("llama", 3);
  const Source3 source(s);
  BatchModel two(*s.device, s.params, s.config, {2, T, Dtype::f32, false}),
      three(*s.device, s.params, s.config, {3, T});
  const MeanLoss mean = mean_loss(two, source, 100, *one_rank_group()),
                 same = mean_loss(three, source, 3, *one_rank_group());
  CHECK(mean.sequences == 3);
  CHECK(mean.scored == same.scored);
  CHECK(mean.loss == doctest::Approx(same.loss).epsilon(1e-6));
}
