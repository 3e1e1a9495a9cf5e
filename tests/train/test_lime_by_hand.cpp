// train/lime_by_hand.cpp against the tape: the same weights and tokens give the same loss, gradients and updates, in
// double. Its samples against the task's own evaluator.
#define LIME_BY_HAND_TEST
#include "train/lime_by_hand.cpp"

#include <set>

#include "data/arith.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The rows of the file's parameters (or gradients) as a vector.
std::vector<double> part(const std::vector<double>& flat, const by_hand::Row& row) {
  return {flat.begin() + row.begin, flat.begin() + row.begin + row.count};
}

}  // namespace

TEST_CASE("lime_by_hand: loss, gradients and updates are those of the tape") {
  for (const std::string arch : {"lime", "llama"}) {
    for (const int64_t K : {2, 4}) {
      CAPTURE(arch);
      CAPTURE(K);
      TinyModel tape(tiny_config(arch, K), "reference", PlanMode::reuse, Dtype::f64);
      const Config& config = tape.config;
      by_hand::Config c{TinyModel::B,
                        TinyModel::T,
                        config.hidden_size,
                        config.vocab_size,
                        config.num_hidden_layers,
                        config.num_attention_heads,
                        K,
                        config.head_dim,
                        config.intermediate_size,
                        arch == "lime"};
      by_hand::Model model(c);
      REQUIRE(model.table.size() == tape.params.rows().size());
      for (const by_hand::Row& row : model.table) {
        const auto from = tape.values<double>(tape.params.at(row.name).value);
        REQUIRE_MESSAGE(static_cast<int64_t>(from.size()) == row.count, row.name);
        std::copy(from.begin(), from.end(), model.parameters.begin() + row.begin);
      }
      AdamwOptions options{by_hand::beta1, by_hand::beta2, by_hand::adam_eps, by_hand::weight_decay, by_hand::clip};
      Optimizer optimizer(tape.params, Buckets(tape.params), options);
      for (int step = 0; step < 3; ++step) {  // the second one meets what the first one left behind
        CAPTURE(step);
        const double want = tape.step();
        CHECK(std::abs(by_hand::forward_backward(model, tape.tokens.data(), tape.targets.data()) - want) < 1e-13);
        for (const by_hand::Row& row : model.table)
          check_close(row.name, part(model.gradients, row), tape.values<double>(tape.params.at(row.name).grad), 1e-12);
        const double norm = gradient_norm(tape.params);
        CHECK(norm > by_hand::clip / 4);
        update(optimizer, *tape.device, 0.01, norm, options.clip);
        by_hand::update(model, 0.01);
        for (const by_hand::Row& row : model.table)
          check_close(row.name, part(model.parameters, row), tape.values<double>(tape.params.at(row.name).value),
                      1e-12);
      }
    }
  }
}

TEST_CASE("lime_by_hand: it starts as the tape's models do") {
  for (const std::string arch : {"lime", "llama"}) {
    Config config = tiny_config(arch);
    config.initializer_range = 0.02;
    const auto device = make_device("reference");
    ParameterTable params;
    declare_model(params, config);
    params.allocate(*device, Dtype::f64, true);
    params.initialise(1);
    by_hand::Model model({1, 2, config.hidden_size, config.vocab_size, config.num_hidden_layers,
                          config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                          config.intermediate_size, arch == "lime"});
    by_hand::initialise(model, 1);
    for (const by_hand::Row& row : model.table) {
      const double* want = params.at(row.name).value.as<double>();
      check_close(row.name, part(model.parameters, row), std::vector<double>(want, want + row.count), 1e-12);
    }
  }
}

TEST_CASE("lime_by_hand: every state of a solution has the same value, and no prompt is in both splits") {
  by_hand::Config c;
  CHECK(static_cast<int64_t>(by_hand::letters.size()) == arith::vocab_size);
  CHECK(c.V == arith::vocab_size);
  std::set<std::string> prompts[2];
  by_hand::Random random{3, 4};
  for (const bool held_out : {false, true}) {
    for (int i = 0; i < 500; ++i) {
      const std::string text = by_hand::draw_solution(random, held_out);
      REQUIRE_MESSAGE(static_cast<int64_t>(text.size()) == c.T + 1, text);
      REQUIRE(text.back() == ';');
      const auto answer = static_cast<int32_t>(by_hand::digits.find(text[text.size() - 2]));
      for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
        end = text.find_first_of("=;", begin);
        std::vector<int32_t> state;
        for (size_t j = begin; j < end; ++j) state.push_back(static_cast<int32_t>(by_hand::letters.find(text[j])));
        CHECK_MESSAGE(arith_evaluate(state) == answer, text);
      }
      prompts[held_out].insert(text.substr(0, text.find('=')));
    }
  }
  for (const std::string& prompt : prompts[0]) CHECK_MESSAGE(prompts[1].count(prompt) == 0, prompt);
}
