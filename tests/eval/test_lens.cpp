// analyze --what lens: what the streams between the blocks say about the next token.
#include "engine/io/json.h"
#include "eval/inside/lens.h"

#include "cli/format.h"
#include "eval/inside/analysis.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = TinyModel::T;

std::vector<TokenWindow> windows_of(const TinyModel& model) {
  std::vector<TokenWindow> windows;
  for (int64_t b = 0; b < TinyModel::B; ++b) {
    const auto part = [&](const std::vector<int32_t>& all) {
      return std::vector<int32_t>(all.begin() + b * T, all.begin() + (b + 1) * T);
    };
    windows.push_back({part(model.tokens), part(model.targets), T});
  }
  return windows;
}

LensStudy study_of(TinyModel& model) {
  Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
  LogitLens lens(*model.device, model.params, model.config, T);
  return study_streams(probe, lens, static_cast<int>(applications_of(model.config).count()), "tiny", windows_of(model),
                       [](int64_t, int64_t) {});
}

// softmax(norm(x) W^T) of one row of C numbers, in double: RMSNorm or LayerNorm as the backbone has it.
std::vector<double> probabilities_of(TinyModel& model, const double* x) {
  const Config& c = model.config;
  const auto row = [&](const std::string& name) {
    const std::vector<float> values = model.params.read(model.params.at(name).value);
    return std::vector<double>(values.begin(), values.end());
  };
  const auto C = static_cast<size_t>(c.hidden_size), V = static_cast<size_t>(c.vocab_size);
  const std::vector<double> gain = row("model.norm.weight");
  const std::vector<double> bias =
      model.params.contains("model.norm.bias") ? row("model.norm.bias") : std::vector<double>(C, 0.0);
  const std::vector<double> W = row(c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
  double mean = 0, squares = 0;
  for (size_t i = 0; i < C && c.gpt2(); ++i) mean += x[i] / static_cast<double>(C);
  for (size_t i = 0; i < C; ++i) squares += std::pow(x[i] - mean, 2) / static_cast<double>(C);
  std::vector<double> P(V);
  double sum = 0;
  for (size_t v = 0; v < V; ++v) {
    double z = 0;
    for (size_t i = 0; i < C; ++i)
      z += ((x[i] - mean) / std::sqrt(squares + c.norm_eps) * gain[i] + bias[i]) * W[v * C + i];
    sum += P[v] = std::exp(z);
  }
  for (double& p : P) p /= sum;
  return P;
}

// The study by plain loops over what the probe keeps.
LensStudy study_by_hand(TinyModel& model) {
  const int L = static_cast<int>(applications_of(model.config).count());
  Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
  LensStudy study = lens_streams(probe, L);
  const auto C = static_cast<size_t>(model.config.hidden_size);
  for (auto* readings : {&study.hidden, &study.mixed})
    for (LensReading& r : *readings) probe.keep(r.value);
  for (const TokenWindow& window : windows_of(model)) {
    probe.run(window.tokens.data());
    for (size_t t = 0; t < static_cast<size_t>(T); ++t) {
      if (window.targets[t] < 0) continue;
      ++study.scored;
      const auto last = probabilities_of(model, &probe.at(str("hidden.", L))[t * C]);
      const auto y = static_cast<size_t>(std::max_element(last.begin(), last.end()) - last.begin());
      for (auto* readings : {&study.hidden, &study.mixed})
        for (LensReading& r : *readings) {
          const auto P = probabilities_of(model, &probe.at(r.value)[t * C]);
          const double truth = P[static_cast<size_t>(window.targets[t])];
          r.loss -= std::log(truth), r.p_truth += truth, r.p_final += P[y];
        }
    }
  }
  const auto n = static_cast<double>(study.scored);
  for (auto* readings : {&study.hidden, &study.mixed})
    for (LensReading& r : *readings) r.loss /= n, r.p_truth /= n, r.p_final /= n;
  return study;
}

}  // namespace

TEST_CASE("lens: its last reading is the model's own loss, bit for bit, in every architecture") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
    LogitLens lens(*model.device, model.params, model.config, T);
    const std::string last = str("hidden.", applications_of(c.config).count());
    probe.keep(last);
    double sum = 0;
    for (const TokenWindow& window : windows_of(model)) {
      probe.run(window.tokens.data(), window.targets.data());
      CHECK(lens.losses(probe.at(last), window.targets.data()) == probe.losses());
      for (const double loss : probe.losses()) sum += loss;
    }
    CHECK(sum / model.scored == doctest::Approx(model.loss()).epsilon(1e-6));  // f32, of two sequences at once
    CHECK(study_of(model).hidden.back().loss == doctest::Approx(sum / model.scored).epsilon(1e-12));
  }
}

TEST_CASE("lens: every reading is a plain softmax in double, with tied and untied heads, biases and both norms") {
  std::vector<Case> list = {{"llama", tiny_config("llama")},
                            {"llama, untied", tiny_config("llama", 2, true, false)},
                            {"gpt2", tiny_gpt2()},
                            {"gpt2, other options", tiny_gpt2(false)}};
  for (const char* choice : {"vertical", "denseformer", "mudd", "satformer", "hyper:rate=2"})
    list.push_back({choice, tiny_with(choice, 2, false)});
  for (const Case& c : list) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    const LensStudy got = study_of(model), want = study_by_hand(model);
    CHECK(got.scored == want.scored);
    CHECK(got.hidden.size() == 5);
    CHECK(got.mixed.size() == (has(c.name, "vertical") || has(c.name, "dense") || has(c.name, "mudd") ? 3 : 0));
    for (const auto part : {&LensStudy::hidden, &LensStudy::mixed})
      for (size_t i = 0; i < (want.*part).size(); ++i) {
        const LensReading &g = (got.*part)[i], &w = (want.*part)[i];
        CAPTURE(w.value);
        CHECK(g.value == w.value);
        // The norm, the product and the exponentials are f32: some 8 roundings of 6e-8 on logits of size 1 to 10.
        CHECK(g.loss == doctest::Approx(w.loss).epsilon(5e-6));
        CHECK(g.p_truth == doctest::Approx(w.p_truth).epsilon(5e-6));
        CHECK(g.p_final == doctest::Approx(w.p_final).epsilon(5e-6));
        CHECK(g.perplexity() == std::exp(g.loss));
      }
  }
}

TEST_CASE("lens: a last block that adds nothing leaves its reading as it was") {
  for (const Config& config : {tiny_config("llama"), tiny_gpt2()}) {
    TinyModel model(config);
    for (const char* part : {"layers.3.self_attn.o_proj", "layers.3.mlp.down_proj"}) set(model, part, 0);
    const LensStudy study = study_of(model);
    CHECK(study.hidden[3].loss == study.hidden[4].loss);
    CHECK(study.hidden[3].p_final == study.hidden[4].p_final);
    CHECK(study.hidden[2].loss != study.hidden[3].loss);
  }
}

// Of a vocabulary so large that the logits come in tiles, which overlap at the end.
TEST_CASE("lens: predictions tile by tile are the largest logits of each row, of equals the first") {
  Config config = tiny_config("llama");
  config.vocab_size = 3 << 20, config.hidden_size = 4, config.head_dim = 0, config.num_attention_heads = 2;
  config.num_hidden_layers = 1;
  config.check(Exit::usage, "test");
  Weights weights(config);
  std::vector<double> table(static_cast<size_t>(config.vocab_size) * 4, 0.0);
  for (const auto& [token, dimension] : {std::pair{5, 0}, {7, 1}, {2000000, 2}, {2999999, 1}})
    table[static_cast<size_t>(token * 4 + dimension)] = 1;
  weights.params.write(weights.params.at("model.embed_tokens.weight"), table.data());
  LogitLens lens(*weights.device, weights.params, config, 3);
  CHECK(lens.predictions({0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0}) == std::vector<int32_t>{7, 5, 2000000});
}

TEST_CASE("lens: the program's table, JSON, CSV and picture; what it refuses") {
  const TempDir scratch;
  const std::string data = letters_file(scratch);
  const std::string vertical = untrained(scratch, "vertical", 3, data), llama = untrained(scratch, "llama", 2, data);
  const Outcome got = analyze(scratch, {vertical, llama}, data, "--what lens --sequences 4 --length 24");
  check_outcome(got, Exit::done, "4 windows of 24 tokens, seed 42, 96 positions scored");
  check_width(got, scratch);
  const nlohmann::json json = out_json(scratch, "lens");
  CHECK(json["models"][0]["hidden"].size() == 4);
  CHECK(json["models"][0]["mixed"].size() == 2);  // the first block reads the embeddings themselves
  CHECK(json["models"][1]["hidden"].size() == 3);
  CHECK(json["models"][1]["mixed"].empty());
  const std::string csv = out_text(scratch, "lens.csv");
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 4 + 2 + 3);
  for (const nlohmann::json& model : json["models"])
    for (const nlohmann::json& r : model["hidden"]) {
      CHECK(r["perplexity"].get<double>() == std::exp(r["loss"].get<double>()));
      CHECK(
          has(csv, str(",", r["value"].get<std::string>(), ",", json_text(r["layer"]), ",", json_text(r["loss"]), ",",
                       json_text(r["perplexity"]), ",", json_text(r["p_final"]), ",", json_text(r["p_truth"]), "\n")));
      check_has(got.output, {format_number("%.6g", r["perplexity"]), format_number("%.5f", r["p_final"])});
    }
  const std::string svg = out_text(scratch, "lens.svg");
  check_has(svg, {"perplexity", "vertical3, next reads", "llama2", "blocks passed"});
  // A task's answers come late; before them nothing is scored.
  const std::string task = untrained(scratch, "lime", 2, "arith:3");
  check_outcome(analyze(scratch, {task}, "arith:3", "--what lens --sequences 3 --length 2"), Exit::usage,
                "no position of these windows is scored; give more --sequences or a larger --length");
}

TEST_CASE("lens: weights that are not finite are told, and where") {
  for (const auto& [row, says] : {std::pair{"layers.1.mlp.down_proj", "hidden.2 is not finite"},
                                  std::pair{"model.norm.weight", "what the head makes of hidden.0 is not finite"}}) {
    TinyModel model(tiny_config("llama"));
    set(model, row, NAN);
    check_fails(Exit::not_finite, {"tiny", says}, [&] { study_of(model); });
  }
}

TEST_CASE("analyze: models' names in pictures are told from each other") {
  using Names = std::vector<std::string>;
  CHECK(short_names({"/a/b/c/"}) == Names{"c"});
  CHECK(short_names({"a/b/one", "a/b/two"}) == Names{"one", "two"});
  CHECK(short_names({"a/x/one", "a/y/one"}) == Names{"x/one", "y/one"});
  CHECK(short_names({"one", "a/two"}) == Names{"one", "a/two"});
  CHECK(short_names({"/x/one", "/y/two"}) == Names{"x/one", "y/two"});
  CHECK(short_names({"a/b", "a/b"}) == Names{"b", "b"});
  CHECK(short_names({"a/b", "a/b/c"}) == Names{"b", "b/c"});
}
