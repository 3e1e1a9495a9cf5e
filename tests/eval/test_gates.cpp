// analyze --what gates: what is counted, and what a model computes when its gates are set to something else.
#include "engine/io/json.h"
#include "eval/inside/gates.h"

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/svg.h"
#include "models/disk/config_json.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = TinyModel::T;

// The first sequence of a tiny model through a probe. change: of these gates, if any.
std::vector<double> losses_of(TinyModel& model, const std::string& gates = "",
                              const std::function<void(std::vector<double>&)>& change = nullptr) {
  Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
  if (!gates.empty()) probe.change(gates, change);
  probe.run(model.tokens.data(), model.targets.data());
  return probe.losses();
}

std::function<void(std::vector<double>&)> set_to(double gate) {
  return [gate](std::vector<double>& gates) { std::ranges::fill(gates, gate); };
}

std::string gate_row(int layer) { return layer_name(layer, "self_attn.value_residual_mixing.alpha_proj.weight"); }

// Both sequences of a tiny model, and more of its vocabulary.
std::vector<TokenWindow> windows_for(const TinyModel& model, size_t count) {
  std::vector<TokenWindow> windows;
  for (size_t i = 0; i < count; ++i) {
    TokenWindow window{{}, {}, T - static_cast<int64_t>(i % 2)};
    for (int64_t t = 0; t < T; ++t) {
      const int64_t at = static_cast<int64_t>(i) * T + t;
      window.tokens.push_back(static_cast<int32_t>(random_bits(3, 0, static_cast<uint64_t>(at)) %
                                                   static_cast<uint64_t>(model.config.vocab_size)));
      window.targets.push_back(t >= window.length ? -1 : static_cast<int32_t>(at % model.config.vocab_size));
    }
    windows.push_back(window);
  }
  return windows;
}

const char* const gate_kinds[] = {"relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"};

}  // namespace

TEST_CASE("gates: means, exact zeros and the variation of heads, of tokens without the padding") {
  GateMoments moments;
  moments.add({0, 1, -0.0, 2, 0.5, 3, 7, 7}, 2, 3);  // the last token is padding
  moments.add({0.5, 4}, 2, 1);
  CHECK(moments.tokens() == 4);
  CHECK(moments.head_mean(0) == 0.25);
  CHECK(moments.head_mean(1) == 2.5);
  CHECK(moments.mean() == 1.375);
  CHECK(moments.head_zeros(0) == 0.5);
  CHECK(moments.zeros() == 0.25);
  CHECK(moments.head_variation() == doctest::Approx(1.125 / 1.375).epsilon(1e-15));  // population: (2.5 - 0.25) / 2
  GateMoments shut, negative;
  shut.add({0, 0}, 2, 1);
  CHECK(std::isnan(shut.head_variation()));
  negative.add({-1, -3}, 2, 1);
  CHECK(negative.head_variation() == 0.5);
}

TEST_CASE("gates: the error of a paired difference is that of its windows") {
  // Of equal windows: the standard deviation of the windows' mean differences, 1, 2 and 6, over the root of 3.
  CHECK(paired_error({12, 24, 52}, {10, 20, 40}, {2, 2, 2}) == doctest::Approx(std::sqrt(7.0 / 3)).epsilon(1e-14));
  // A difference that is the same at every position has none, however long the windows are.
  CHECK(paired_error({11, 13, 17}, {10, 11, 12}, {1, 2, 5}) == doctest::Approx(0));
  CHECK(std::isnan(paired_error({1}, {2}, {3})));
  CHECK(GateStudy::change_error(2, 0.5) == 0.5 * std::exp(2.0));
}

TEST_CASE("gates: set to what they are they change nothing, bit for bit") {
  for (const std::string kind : gate_kinds) {
    CAPTURE(kind);
    TinyModel model(tiny_with("satformer:gate=" + kind, 2, false));
    Probe plain(*model.device, model.params, model.config, 1, T, "tiny"),
        touched(*model.device, model.params, model.config, 1, T, "tiny");
    CHECK(gated_layers(plain) == std::vector<int>{1, 2, 3});
    for (const std::string& name : plain.names()) plain.keep(name), touched.keep(name);
    plain.run(model.tokens.data(), model.targets.data());
    for (const int layer : gated_layers(plain)) {
      const std::string gate = str("gate.", layer);
      touched.change(gate, [&plain, gate](std::vector<double>& gates) { gates = plain.at(gate); });
    }
    touched.run(model.tokens.data(), model.targets.data());
    CHECK(plain.losses() == touched.losses());
    for (const std::string& name : plain.names()) {
      CAPTURE(name);
      CHECK(plain.at(name) == touched.at(name));
    }
  }
}

TEST_CASE("gates: set to 0 they are those of a block that mixes nothing in") {
  for (const std::string kind : {"relu", "tanh", "identity"}) {
    CAPTURE(kind);
    const Config config = tiny_with("satformer:gate=" + kind, 2, false);
    for (const int layer : {1, 2, 3}) {
      TinyModel model(config), without(config);
      const std::vector<double> zeroed = losses_of(model, str("gate.", layer), set_to(0));
      without.fill(gate_row(layer), [](int64_t) { return 0.0; });
      CHECK(zeroed == losses_of(without));
      CHECK(zeroed != losses_of(model));
      // The only block that mixes: without it, the model is a LLaMA.
      for (const int other : {1, 2, 3})
        if (other != layer) model.fill(gate_row(other), [](int64_t) { return 0.0; });
      TinyModel llama(plain_of(config));
      llama.take(model);
      CHECK(losses_of(model, str("gate.", layer), set_to(0)) == losses_of(llama));
    }
  }
}

// Then they are one scale of the first layer's values, as a ResFormer has it.
TEST_CASE("gates: set to a constant they are a ResFormer's scale") {
  TinyModel model(tiny_with("satformer", 2, false)), scaled(tiny_with("resformer:variant=learnable", 2, false));
  const int layer = 2;
  for (const int other : {1, 3}) model.fill(gate_row(other), [](int64_t) { return 0.0; });
  scaled.take(model);
  for (const int n : {1, 2, 3}) {
    const std::string scale = layer_name(n, "self_attn.value_residual_mixing.lambda");
    scaled.fill(scale + "1", [&](int64_t) { return n == layer ? 0.375 : 0.0; });
    scaled.fill(scale + "2", [](int64_t) { return 1.0; });
  }
  const std::vector<double> got = losses_of(model, "gate.2", set_to(0.375)), want = losses_of(scaled);
  for (size_t t = 0; t < got.size(); ++t) CHECK(got[t] == doctest::Approx(want[t]).epsilon(1e-6));
  CHECK(got != losses_of(model));
}

TEST_CASE("gates: a study is what its parts are, computed one by one; relay's gates too") {
  for (const std::string choice : {"satformer", "satformer:gate=identity", "satformer:last_k=2", "relay"}) {
    CAPTURE(choice);
    TinyModel model(tiny_with(choice, 2, false));
    const std::vector<TokenWindow> windows = windows_for(model, 5);
    Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
    int64_t told = 0, all = 0;
    const GateStudy study = study_gates(probe, "tiny", windows, 2, [&](int64_t done, int64_t of) {
      CHECK(done == ++told);
      all = of;
    });
    CHECK(told == all);
    CHECK(study.scored == 5 + 4 + 5);
    CHECK(std::ssize(study.blocks) == (choice == "satformer:last_k=2" ? 2 : 3));
    for (const GatedBlock& block : study.blocks) {
      const std::string gate = str("gate.", block.layer);
      // Sums by hand, over the calibration windows and over the others.
      Probe own(*model.device, model.params, model.config, 1, T, "tiny");
      own.keep(gate);
      std::vector<double> heads(2, 0.0);
      double sum = 0, zeros = 0, base = 0;
      for (size_t i = 0; i < windows.size(); ++i) {
        own.run(windows[i].tokens.data(), windows[i].targets.data());
        const std::vector<double> losses = own.losses();
        for (size_t t = 0; t < static_cast<size_t>(windows[i].length); ++t) {
          for (size_t j = 0; j < 2; ++j) {
            const double value = own.at(gate)[t * 2 + j];
            if (i < 2) heads[j] += value / (5 + 4);
            else sum += value / (2 * 14), zeros += value == 0 ? 1.0 / (2 * 14) : 0;
          }
          if (i >= 2) base += losses[t] / 14;
        }
      }
      CHECK(block.gates.mean() == doctest::Approx(sum).epsilon(1e-12));
      CHECK(block.gates.zeros() == doctest::Approx(zeros).epsilon(1e-12));
      CHECK(study.loss == doctest::Approx(base).epsilon(1e-12));
      for (size_t j = 0; j < 2; ++j) CHECK(block.means.head_mean(j) == doctest::Approx(heads[j]).epsilon(1e-12));
      const double mean = (heads[0] + heads[1]) / 2;
      const std::pair<std::vector<double>, double> interventions[] = {
          {{0, 0}, block.zero.loss}, {{mean, mean}, block.mean.loss}, {heads, block.heads.loss}};
      for (const auto& [constants, loss] : interventions) {
        own.change(gate, [&, to = constants](std::vector<double>& gates) {
          for (size_t at = 0; at < gates.size(); ++at) gates[at] = to[at % 2];
        });
        double want = 0;
        for (size_t i = 2; i < windows.size(); ++i) {
          own.run(windows[i].tokens.data(), windows[i].targets.data());
          for (const double one : own.losses()) want += one / 14;
        }
        // The means of the study are sums in another order, so that a constant may be off by its last bit in float.
        CHECK(loss == doctest::Approx(want).epsilon(1e-6));
        CHECK(study.change(loss) == doctest::Approx(std::exp(want) - std::exp(base)).epsilon(1e-4));
      }
      own.change(gate, nullptr);
    }
  }
}

TEST_CASE("gates: what rises over depth is drawn whole, and pictures stand below each other") {
  Panel panel{"", "", {{"gates", {1, 2, 3}, {0.5, 1, 4}}}};
  CHECK(has(curve_svg("", "", {panel}), "<clipPath"));  // as a loss that diverges
  panel.whole = true;
  CHECK(!has(curve_svg("", "", {panel}), "<clipPath"));
  const std::string both =
      svg::below_each_other("both", {svg::document(300, 50, "a", "<!--a-->"), svg::document(400, 60, "b", "<!--b-->")});
  CHECK(both.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 400 110\""));
  CHECK(has(both, "<svg x=\"0\" y=\"50.0\" width=\"400.0\" height=\"60.0\" xmlns"));
  CHECK(both.find("<!--a-->") < both.find("<!--b-->"));
}

TEST_CASE("gates: the program's table, JSON, CSV and picture; what it refuses") {
  const TempDir scratch;
  const std::string data = letters_file(scratch);
  const auto gates_of = [&](const std::vector<std::string>& models, const std::string& flags = "") {
    return analyze(scratch, models, data, "--what gates " + flags);
  };
  const std::string three = untrained(scratch, "satformer", 3, data), two = untrained(scratch, "relay", 2, data);
  const Outcome got = gates_of({three, two}, "--sequences 8 --length 24");
  check_outcome(got, Exit::done, "8 windows of 24 tokens, seed 42: 2 for the means to set gates to");
  check_outcome(got, Exit::done, "the others scored: 144 positions");
  check_width(got, scratch);
  const nlohmann::json json = out_json(scratch, "gates");
  CHECK(json["same_windows"] == true);
  CHECK(json["models"].size() == 2);
  const nlohmann::json& model = json["models"][0];
  CHECK(model["calibration_windows"] == 2);
  CHECK(model["blocks"].size() == 2);
  const nlohmann::json& block = model["blocks"][1];
  CHECK(block["layer"] == 2);
  CHECK(block["head_means"].size() == 2);
  const double change = block["zero"]["delta_perplexity"], base = model["perplexity"];
  CHECK(change == doctest::Approx(std::exp(block["zero"]["loss"].get<double>()) - base).epsilon(1e-12));
  const std::string csv = out_text(scratch, "gates.csv");
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + (2 + 1) * 3);
  CHECK(has(csv, str(",2,all,", json_text(block["mean"]), ",", json_text(block["sparsity"]), ",",
                     json_text(block["head_variation"]), ",", json_text(block["zero"]["delta_perplexity"]), ",",
                     json_text(block["zero"]["delta_perplexity_error"]), ",")));
  CHECK(has(csv, str(",2,1,", json_text(block["head_means"][1]), ",")));
  CHECK(has(got.output, format_number("%+.4g", change)));
  CHECK(block["zero"]["delta_perplexity_error"].get<double>() > 0);
  CHECK(has(got.output, format_number("%.4f", block["mean"])));
  const std::string svg = out_text(scratch, "gates.svg");
  check_has(svg, {"key/value head", "mean gate", "satformer3", "relay2", "set to 0"});
  check_has_none(svg, {"nan", "inf"});
  // Where there are none.
  check_outcome(gates_of({untrained(scratch, "llama", 1, data)}), Exit::usage,
                "a llama has no gates on values: its layers read");
  check_outcome(gates_of({untrained(scratch, "resformer", 2, data)}), Exit::usage,
                "one scale for each layer; try --what routing");
  check_outcome(gates_of({untrained(scratch, "hyper", 2, data)}), Exit::usage,
                "mixtures of earlier ones; try --what routing");
  check_outcome(gates_of({untrained(scratch, "satformer", 1, data)}), Exit::usage, "has only one layer");
  check_outcome(gates_of({three}, "--sequences 1"), Exit::usage, "gates need 2 windows at least");
  // Weights so large that what they make is not finite.
  for (const auto& [row, says] : {std::pair{"layers.2.self_attn.v_proj", "is not finite; the weights are too large"},
                                  std::pair{"layers.0.self_attn.v_proj", "gate.1 is not finite"}}) {
    Weights huge(load_config(three + "/config.json"));
    huge.fill(row, 3e38);
    huge.save(scratch.file("huge"));
    check_outcome(gates_of({"huge"}, "--sequences 2 --length 8"), Exit::not_finite, says);
  }
}
