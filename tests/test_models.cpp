// Whole models: gradients against finite differences, the three memory plans, identities, parameter counts, generation.
#include <map>

#include "eval/decode.h"
#include "models/registry.h"
#include "tests/tiny.h"
#include "train/options.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Case {
  std::string name;
  Config config;
};

// Every architecture and every option that changes what is computed.
std::vector<Case> cases() {
  std::vector<Case> list;
  for (const std::string arch : {"llama", "lime"}) {
    list.push_back({arch + " grouped heads", tiny_config(arch, 2)});
    list.push_back({arch + " full heads, q/k norm", tiny_config(arch, 4, true)});
    list.push_back({arch + " one key head, untied, H*D != C", tiny_config(arch, 1, true, false, 6)});
  }
  for (const std::string routing : {"average", "last", "first"}) {
    Config config = tiny_config("lime", 2);
    config.options["routing"] = routing;
    config.options["window"] = "2";
    list.push_back({"lime " + routing, config});
  }
  return list;
}

}  // namespace

TEST_CASE("models: every registered architecture is among the tested ones") {
  std::map<std::string, int> tested;
  for (const Case& c : cases()) ++tested[c.config.arch];
  for (const Architecture& architecture : architectures()) CHECK_MESSAGE(tested[architecture.name] >= 2, architecture.name);
}

TEST_CASE("models: gradients of every tensor are the derivatives of the loss, in double") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config, "reference", PlanMode::reuse, Dtype::f64);
    const double loss = model.step();
    CHECK(loss == model.loss());
    constexpr double h = 1e-4;  // five-point formula: error of order h^4 times the fifth derivative
    for (Parameter& row : model.params.rows()) {
      CAPTURE(row.name);
      double* x = row.value.as<double>();
      const std::vector<double> got = model.values<double>(row.grad);
      std::vector<double> want;
      for (int64_t i = 0; i < row.shape.numel(); ++i) {
        const double keep = x[i];
        auto at = [&](double d) {
          x[i] = keep + d;
          return model.loss();
        };
        const double slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
        x[i] = keep;
        want.push_back(slope);
      }
      check_close(c.name + " " + row.name, got, want, 1e-6);
    }
  }
}

TEST_CASE("models: the three memory plans give the same bits, and reuse needs the least memory") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    std::vector<std::vector<float>> gradients;
    std::vector<double> losses;
    std::vector<size_t> bytes;
    for (PlanMode mode : {PlanMode::reuse, PlanMode::distinct, PlanMode::poison}) {
      TinyModel model(c.config, "cpu", mode);
      model.step();
      losses.push_back(model.step());  // the second replay meets what the first one left behind
      gradients.push_back(model.values<float>(model.params.gradients()));
      bytes.push_back(model.tape.arena_bytes());
    }
    CHECK(std::isfinite(losses[0]));
    for (size_t other : {1, 2}) {
      CHECK(losses[0] == losses[other]);
      CHECK(std::memcmp(gradients[0].data(), gradients[other].data(), gradients[0].size() * sizeof(float)) == 0);
    }
    CHECK(bytes[0] < bytes[1]);
  }
}

TEST_CASE("models: poisoning dead memory touches nothing else, also where a parameter is larger than all activations") {
  Config config = tiny_config("lime");
  config.vocab_size = 5000;
  TinyModel model(config, "cpu", PlanMode::poison);
  CHECK(model.params.at("model.embed_tokens.weight").value.bytes() > model.tape.arena_bytes());
  const double loss = model.step();
  CHECK(std::isfinite(loss));
  CHECK(loss == model.step());
}

TEST_CASE("models: the fast CPU kernels are as exact as the plain loops in f32") {
  // How far f32 is from f64 depends on the model (the q/k norms of a single small head amplify rounding a hundredfold),
  // so the plain f32 loops on the same model are the yardstick.
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel fast(c.config, "cpu"), plain(c.config, "reference");
    TinyModel exact(c.config, "reference", PlanMode::reuse, Dtype::f64);
    CHECK(std::abs(fast.step() - exact.step()) < 1e-5);
    plain.step();
    auto error = [&](const std::vector<float>& got, const std::vector<double>& want) {
      double sum = 0;
      for (size_t i = 0; i < want.size(); ++i) sum += std::pow(static_cast<double>(got[i]) - want[i], 2);
      return std::sqrt(sum);
    };
    double worst_fast = 0, sum_fast = 0, sum_plain = 0;  // of the tensors' errors, relative to their size
    for (Parameter& row : fast.params.rows()) {
      const auto want = exact.values<double>(exact.params.at(row.name).grad);
      const double size = error(std::vector<float>(want.size(), 0.f), want);
      const double relative = error(fast.values<float>(row.grad), want) / size;
      CHECK_MESSAGE(std::isfinite(relative), row.name);
      worst_fast = std::max(worst_fast, relative);
      sum_fast += relative;
      sum_plain += error(plain.values<float>(plain.params.at(row.name).grad), want) / size;
    }
    CHECK(sum_fast <= 6 * sum_plain);  // one draw of rounding errors each, correlated over the tensors
    CHECK(worst_fast < 1e-4);
  }
}

TEST_CASE("models: LIMe with routers [0 | I] is LLaMA, bit for bit, losses and gradients") {
  for (int64_t K : {1, 2, 4}) {
    TinyModel llama(tiny_config("llama", K, true), "cpu"), lime(tiny_config("lime", K, true), "cpu");
    for (Parameter& row : lime.params.rows()) {
      std::vector<double> host(static_cast<size_t>(row.shape.numel()), 0.0);
      if (llama.params.contains(row.name)) {
        const std::vector<float> same = llama.values<float>(llama.params.at(row.name).value);
        host.assign(same.begin(), same.end());
      } else {
        const int64_t width = row.shape[1];
        for (int64_t h = 0; h < K; ++h) host[static_cast<size_t>(h * width + width - K + h)] = 1;
      }
      lime.params.write(row, host.data());
    }
    CHECK(llama.step() == lime.step());
    for (Parameter& row : llama.params.rows()) {
      CAPTURE(row.name);
      const auto want = llama.values<float>(row.grad), got = lime.values<float>(lime.params.at(row.name).grad);
      CHECK(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("models: constrained routers keep unread entries at zero, without a gradient") {
  for (const std::string routing : {"last", "first"}) {
    Config config = tiny_config("lime", 2);
    config.options["routing"] = routing;
    config.options["window"] = "1";
    TinyModel model(config, "reference", PlanMode::reuse, Dtype::f64);
    model.step();
    const Parameter& router = model.params.at("model.layers.3.self_attn.lime_router.weight");
    const auto value = model.values<double>(router.value), grad = model.values<double>(router.grad);
    for (int64_t i = 0; i < router.shape.numel(); ++i) {
      const int64_t source = i % 8 / 2;
      const bool read = source == 3 || (routing == "first" && source == 0);
      CHECK((grad[static_cast<size_t>(i)] != 0) == read);
      if (!read) CHECK(value[static_cast<size_t>(i)] == 0);
    }
  }
}

TEST_CASE("models: LIMe starts with the identity on its own layer and the stated spread elsewhere") {
  Config config = tiny_config("lime", 4, false, true, 2);
  config.num_attention_heads = config.num_key_value_heads = 32;
  ParameterTable params;
  declare_model(params, config);
  const Parameter& router = params.at("model.layers.3.self_attn.lime_router.weight");
  CHECK(router.shape == Shape{32, 128});
  CHECK(router.lr_mul == 10);
  CHECK(router.wd_mul == 0);
  double square = 0;
  for (int64_t i = 0; i < router.shape.numel(); ++i) {
    const double w = router.init.at(1, 2, i);
    const int64_t row = i / 128, column = i % 128;
    if (column >= 96) CHECK(w == (column - 96 == row ? 1.0 : 0.0));
    else square += w * w;
    CHECK(std::abs(w) <= 1);
  }
  CHECK(std::sqrt(square / (32 * 96)) == doctest::Approx(1 / std::sqrt(128.0)).epsilon(0.05));
  CHECK(!params.contains("model.layers.0.self_attn.lime_router.weight"));
}

TEST_CASE("models: parameter counts of the papers, to the last digit") {
  const std::map<std::string, std::pair<int64_t, int64_t>> want = {
      {"arith", {66496, 66640}},           {"150m", {151862784, 151873872}},   {"1b", {1076072448, 1076081088}},
      {"1.2b", {1176735744, 1176873984}},  {"deep32", {159982592, 160016320}}, {"deep64", {294233088, 294366144}},
      {"deep128", {562734080, 563262400}},
  };
  for (const auto& entry : want) {
    const std::string& name = entry.first;
    const auto& counts = entry.second;
    for (const std::string arch : {"llama", "lime"}) {
      TrainOptions options;
      apply_preset(name, options);
      options.config.arch = arch;
      if (options.config.vocab_size == 0) options.config.vocab_size = 21;
      options.config.check(Exit::usage, "test");
      ParameterTable params;
      declare_model(params, options.config);
      CHECK_MESSAGE(params.count() == (arch == "llama" ? counts.first : counts.second), name << " " << arch);
    }
  }
}

TEST_CASE("models: generating token by token sees what training sees") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config, "cpu");
    model.loss();
    const std::vector<float> losses = model.values<float>(model.graph.losses->tensor);
    Decoder decoder(*model.device, model.params, model.config, TinyModel::B, TinyModel::T);
    for (int round = 0; round < 2; ++round) {  // the second one meets a used cache
      decoder.reset();
      for (int64_t t = 0; t < TinyModel::T; ++t) {
        std::vector<int32_t> next;
        for (int64_t b = 0; b < TinyModel::B; ++b) next.push_back(model.tokens[static_cast<size_t>(b * TinyModel::T + t)]);
        const std::vector<float>& logits = decoder.feed(next);
        for (int64_t b = 0; b < TinyModel::B; ++b) {
          const size_t i = static_cast<size_t>(b * TinyModel::T + t);
          if (model.targets[i] < 0) continue;
          const float* z = logits.data() + b * 7;
          double sum = 0;
          for (int v = 0; v < 7; ++v) sum += std::exp(static_cast<double>(z[v]));
          const double loss = std::log(sum) - static_cast<double>(z[model.targets[i]]);
          CHECK(std::abs(loss - static_cast<double>(losses[i])) < 1e-5);  // tens of ulps: other kernels, other sums
        }
      }
    }
  }
}
