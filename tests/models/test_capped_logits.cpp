// Models whose logits are capped: their files, and that whatever reads logits sees the capped ones. That gradients are
// derivatives, and generation and minimal pairs what training sees, is checked with all models (tests/support/cases.h).
#include "engine/io/json.h"
#include "eval/decode.h"
#include "eval/inside/lens.h"
#include "eval/pair_scorer.h"
#include "eval/scorer.h"
#include "models/disk/config_json.h"
#include "models/disk/modelling_file.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

// The logits (V) that generation gives after these tokens.
std::vector<double> logits_after(TinyModel& model, const std::vector<int32_t>& tokens) {
  Decoder decoder(*model.device, model.params, model.config, 1, 8);
  std::vector<float> logits;
  for (const int32_t token : tokens) logits = decoder.feed({token});
  return convert<double>(logits);
}

double log_sum_exp(const std::vector<double>& logits) {
  double sum = 0;
  for (const double z : logits) sum += std::exp(z);
  return std::log(sum);
}

// The same weights under a cap.
struct Both {
  TinyModel plain, capped;
  explicit Both(const Config& config, double cap, const std::string& device = "cpu")
      : plain(config, device), capped(with_cap(config, cap), device) {
    capped.take(plain);
    refresh_bf16_copy(capped.params);
  }
};

}  // namespace

TEST_CASE("capped logits: generation gives the capped logits") {
  for (const std::string& device : fast_devices())
    for (const Config& config : {tiny_config("llama"), tiny_gpt2(), tiny_with("mhc")}) {
      CAPTURES(device, config.arch);
      Both both(config, 0.5, device);
      const std::vector<double> plain = logits_after(both.plain, {3, 1, 4}),
                                capped = logits_after(both.capped, {3, 1, 4});
      double bent = 0;
      for (size_t v = 0; v < plain.size(); ++v) {
        CHECK(std::abs(capped[v] - 0.5 * std::tanh(plain[v] / 0.5)) < 1e-6);
        bent = std::max(bent, std::abs(capped[v] - plain[v]));
      }
      CHECK(bent > 0.05);
    }
}

TEST_CASE("capped logits: scores and minimal pairs are those of the logits that generation gives") {
  TinyModel model(with_cap(tiny_config("lime"), 0.5));
  model.config.max_position_embeddings = 11;
  const std::vector<int32_t> good = {3, 1, 4, 1, 5}, bad = {3, 1, 2, 6};
  const auto by_token = [&](const std::vector<int32_t>& text) {
    double sum = 0;
    for (size_t t = 1; t < text.size(); ++t) {
      const std::vector<double> z = logits_after(model, {text.begin(), text.begin() + static_cast<ptrdiff_t>(t)});
      sum += z[static_cast<size_t>(text[t])] - log_sum_exp(z);
    }
    return sum;
  };
  const Score score = Scorer(*model.device, model.params, model.config, 64).score({{good, 1}})[0];
  CHECK(std::abs(score.logprob - by_token(good)) < 1e-5);
  const PairScore pair = PairScorer(*model.device, model.params, model.config, 64).score({{good, bad}})[0];
  CHECK(std::abs(pair.good - by_token(good)) < 1e-5);
  CHECK(std::abs(pair.bad - by_token(bad)) < 1e-5);
  // What is greedy does not depend on the cap.
  const std::vector<double> z = logits_after(model, {3, 1});
  const auto most = static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
  CHECK(Scorer(*model.device, model.params, model.config, 64).score({{{3, 1, most}, 2}})[0].greedy);
}

TEST_CASE("capped logits: the lens sees the model's own loss at the end of the stack") {
  TinyModel model(with_cap(tiny_config("llama"), 0.5));
  constexpr int64_t T = TinyModel::T;
  Tape tape(Dtype::f32);
  tape.enable_probes();
  const Graph graph = record_model(tape, model.params, model.config, 1, T);
  tape.plan(PlanMode::distinct);
  tape.allocate(*model.device);
  load_batch(*model.device, graph, model.tokens.data(), model.targets.data());
  tape.forward(Step{});
  const auto found = std::ranges::find(tape.marks(), std::string("hidden.4"), &std::pair<std::string, Value*>::first);
  REQUIRE(found != tape.marks().end());
  LogitLens lens(*model.device, model.params, model.config, T);
  const std::vector<double> stream = convert<double>(model.values<float>(found->second->tensor));
  const std::vector<double> losses = lens.losses(stream, model.targets.data());
  check_close("losses", losses, convert<double>(model.values<float>(graph.losses->tensor)), 1e-6);
}

TEST_CASE("capped logits: config.json has Gemma 2's key, and is read back") {
  for (const Config& config : {tiny_config("llama"), tiny_gpt2(), tiny_with("mhc+lime"), tiny_gpt2(false)}) {
    const json saved = to_json(with_cap(config, 15));
    CAPTURE(saved.dump());
    CHECK(saved["final_logit_softcapping"] == 15);
    CHECK((saved.contains("crossply") && saved["model_type"] == library_name(config.arch)));
    CHECK(saved.contains("auto_map") == without_modelling_file(config).empty());
    CHECK(parse_config(saved, "test").final_logit_softcapping == 15);
    CHECK_FALSE(to_json(config).contains("final_logit_softcapping"));
    for (const json& none : {json(), json(0), json(0.0)}) {
      json plain = to_json(config);
      plain["final_logit_softcapping"] = none;
      CHECK(parse_config(plain, "test").final_logit_softcapping == 0);
      CHECK(to_json(parse_config(plain, "test")) == to_json(config));
    }
    for (const json& wrong : {json(-1), json(1e-4), json(1e7), json("15"), json::array()}) {
      json bad = saved;
      bad["final_logit_softcapping"] = wrong;
      check_fails(Exit::bad_data, {"final_logit_softcapping"}, [&] { parse_config(bad, "test"); });
    }
  }
  Config config = tiny_config("llama");
  config.final_logit_softcapping = NAN;
  check_fails(Exit::usage, {"final_logit_softcapping must be in 0.001..1e6, or 0 for none, is nan"},
              [&] { config.check(Exit::usage, "test"); });
  check_fails(Exit::bad_data, {"logit_softcap"}, [&] {
    json own = to_json(with_cap(tiny_config("llama")));
    own["crossply"]["logit_softcap"] = 15;
    parse_config(own, "test");
  });
}
