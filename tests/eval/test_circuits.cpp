// Circuits: which tokens a dynamic router's rows look for.
#include "engine/io/json.h"
#include "eval/inside/routing/routing.h"
#include "tests/support/inside.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// What the router's rows are multiplied with for a list of circuits.json.
RoutingRows read_as(const std::string& metric, RoutingRows embeddings, const std::vector<float>& final_gain,
                    bool centred) {
  for (std::vector<double>& e : embeddings) {
    const auto C = static_cast<double>(e.size());
    for (size_t c = 0; c < e.size() && metric == "published"; ++c) e[c] /= static_cast<double>(final_gain[c]);
    const double mean = centred ? std::accumulate(e.begin(), e.end(), 0.0) / C : 0;
    double squares = 0;
    for (const double x : e) squares += (x - mean) * (x - mean);
    for (double& x : e) x = metric == "raw" ? x : (x - mean) / std::sqrt(squares / C);
  }
  return embeddings;
}

double product_of(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The mean cosine of all pairs, each vector less the mean of all.
double mean_cosine(RoutingRows all) {
  for (size_t c = 0; c < all[0].size(); ++c) {
    double mean = 0;
    for (const auto& e : all) mean += e[c] / static_cast<double>(all.size());
    for (auto& e : all) e[c] -= mean;
  }
  double sum = 0, pairs = 0;
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j, ++pairs)
      sum += product_of(all[i], all[j]) / std::sqrt(product_of(all[i], all[i]) * product_of(all[j], all[j]));
  return sum / pairs;
}

void check_circuits(const nlohmann::json& found, TinyModel& model) {
  const auto numbers = [&](const std::string& name) { return model.params.read(model.params.at(name).value); };
  const std::vector<float> E = numbers("model.embed_tokens.weight");
  RoutingRows embeddings;
  for (size_t v = 0; v < 7; ++v)
    embeddings.emplace_back(E.begin() + static_cast<int64_t>(v * 8), E.begin() + static_cast<int64_t>(v * 8 + 8));
  for (const nlohmann::json& circuit : found["circuits"]) {
    const size_t l = circuit["layer"], row = circuit["head"].get<size_t>() * (l + 1) + circuit["stream"].get<size_t>();
    const std::vector<float> gain = numbers(str("model.layers.", l, ".lime_layernorm.weight"));
    const std::vector<float> router = numbers(str("model.layers.", l, ".self_attn.lime_router.proj.weight"));
    std::vector<double> u;
    for (size_t c = 0; c < 8; ++c) u.push_back(static_cast<double>(gain[c]) * static_cast<double>(router[row * 8 + c]));
    for (const char* metric : {"unit", "raw", "published"}) {
      CAPTURE(metric);
      const RoutingRows read = read_as(metric, embeddings, numbers("model.norm.weight"), model.config.gpt2());
      const nlohmann::json& nearest = circuit[metric];
      REQUIRE(nearest["ids"].size() == 7);  // all that there are
      for (size_t i = 0; i < 7; ++i) {
        const double want = product_of(read[nearest["ids"][i].get<size_t>()], u);
        CHECK(nearest["scores"][i].get<double>() == doctest::Approx(want).epsilon(1e-6));
        if (i > 0) CHECK(nearest["scores"][i] <= nearest["scores"][i - 1]);
      }
    }
    CHECK(circuit["norm"].get<double>() == doctest::Approx(std::sqrt(product_of(u, u))).epsilon(1e-6));
    CHECK(circuit["consistency"].get<double>() == doctest::Approx(mean_cosine(embeddings)).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("circuits: the tokens nearest to the rows of a dynamic router") {
  const TempDir scratch;
  for (const Config& config : {tiny_config("lime_dynamic"), connected("lime_dynamic", tiny_gpt2())}) {
    CAPTURE(config.backbone);
    TinyModel model(config);
    const Outcome got = analyze(scratch, "circuits", {saved(scratch, model, "dynamic")});
    check_outcome(got, Exit::done, " rows of routers; the model has no tokenizer that is read here, so ids");
    check_width(got, scratch);
    const nlohmann::json found = out_json(scratch, "circuits")["models"][0];
    CHECK(found["tokenizer"] == false);
    const auto rows = static_cast<size_t>(config.num_key_value_heads * (2 + 3 + 4));
    REQUIRE(found["circuits"].size() == rows);
    check_circuits(found, model);
    const std::string csv = out_text(scratch, "circuits.csv");
    CHECK(static_cast<size_t>(std::count(csv.begin(), csv.end(), '\n')) == 1 + rows * 3 * 7);
    CHECK(has(csv, json_text(found["circuits"][0]["norm"]) + ","));  // the same digits
  }
  check_outcome(analyze(scratch, "circuits", {saved(scratch, TinyModel(tiny_config("mudd")), "mudd")}), Exit::usage,
                "try --what routing");
  check_outcome(analyze(scratch, "circuits", {saved(scratch, TinyModel(tiny_config("llama")), "llama")}), Exit::usage,
                "try --what attention");
}

TEST_CASE("circuits: tokens are told as text, in one line") {
  const TempDir scratch;
  check_outcome(train(scratch,
                      {"--width", "8", "--ffn", "8", "--layers", "2", "--heads", "2", "--steps", "1", "--data",
                       "arith:3", "--out", scratch.file("run")},
                      "lime_dynamic"),
                Exit::done, "step 1/1");
  const Outcome got = run_program_inside(
      scratch, {"analyze", "--model", scratch.file("run"), "--data", "arith:3", "--what", "circuits"});
  check_outcome(got, Exit::done, "4 rows of routers\n");
  check_width(got, scratch);
}
