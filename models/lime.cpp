// LIMe, key/value routing: attention reads key and value heads mixed from all layers so far. train/train_lime.cpp
// explains it; kernels/depth/route.h is the mixture.
//
// Every layer writes its key and value heads into two slabs (L, B*T, K, D). RoPE is the same rotation in every layer,
// so mixing rotated keys equals rotating mixed ones: keys are rotated once, when they are written. Generation caches
// the mixed heads, an ordinary key/value cache; the slabs then hold one token. With routing last and first the matrices
// keep their full shape: entries of layers that are not read are 0 and get no gradient.
#include <algorithm>
#include <cmath>
#include <optional>

#include "models/lime_decay.h"
#include "models/registry.h"

namespace crossply {
namespace {

class Lime : public Connection {
 public:
  explicit Lime(const Config& config)
      : routing_(config.text("routing")),
        window_(config.integer("window")),
        routed_(routing_ != "own" && routing_ != "average"),
        uniform_(config.text("kv_init") == "uniform"),
        random_(config.text("router_init") == "random"),
        literal_(config.text("router_bound") == "literal"),
        decays_routers_(config.text("decay") == "routers") {
    const bool windowed = routing_ == "last" || routing_ == "first";
    if (windowed && window_ < 1) fail(Exit::usage, "lime: routing ", routing_, " needs a window of at least 1 layer");
  }

  void declare(ParameterTable& params, const Config& config) const override {
    const int64_t K = config.num_key_value_heads;
    const double bound = 1 / std::sqrt(static_cast<double>(config.hidden_size));
    for (int i = 0; i < config.num_hidden_layers; ++i) {
      for (const char* heads : {"self_attn.k_proj.weight", "self_attn.v_proj.weight"})
        if (uniform_) params.at(layer_name(i, heads)).init = Init::uniform(bound);
      if (i > 0 && routed_)
        params.add(router_name(i), Shape{K, (i + 1) * K}, router_init(i, K), Role::source_router,
                   {.lr_mul = 10, .wd_mul = 0});
    }
  }
  void all_declared(ParameterTable& params) const override {
    if (decays_routers_) decay_routers_alone(params);
  }

  std::string start_as_plain(ParameterTable& params, const Config& config) const override {
    if (routing_ == "average")
      fail(Exit::usage, "lime: routing average mixes all layers from the start, so it starts as no plain backbone");
    if (random_ || literal_)
      fail(Exit::usage, "lime: from a plain backbone all routers start as [0 | I]; leave out router_init random and ",
           "router_bound literal");
    const int64_t K = config.num_key_value_heads;
    for (int i = 1; i < config.num_hidden_layers && routed_; ++i)
      params.at(router_name(i)).init = {"[0 | I]", [=](uint64_t, uint64_t, int64_t j) {
                                          return j % ((i + 1) * K) == i * K + j / ((i + 1) * K) ? 1.0 : 0.0;
                                        }};
    return "";
  }

  KeyValue kv(int layer, KeyValue own) override {
    if (routing_ == "own") return own;
    const Config& config = build_->config;
    if (layer == 0) {
      keys_.emplace(build_->tape, "lime.keys", config.num_hidden_layers, own.k->shape);
      values_.emplace(build_->tape, "lime.values", config.num_hidden_layers, own.v->shape);
    }
    Value* weight = layer > 0 && routed_ ? build_->parameter(router_name(layer)) : nullptr;
    const std::string name = "L" + std::to_string(layer) + ".route";
    return {keys_->route(name + ".k", layer, own.k, weight, sources(layer)),
            values_->route(name + ".v", layer, own.v, weight, sources(layer))};
  }

 private:
  static std::string router_name(int layer) { return layer_name(layer, "self_attn.lime_router.weight"); }

  // The layers whose heads `layer` reads, ascending, itself included.
  std::vector<int> sources(int layer) const {
    std::vector<int> list;
    for (int s = 0; s <= layer; ++s) {
      const bool windowed = routing_ == "last" ? s > layer - window_ : routing_ == "first" ? s < window_ : true;
      if (windowed || s == layer) list.push_back(s);
    }
    return list;
  }

  // The own block starts as the identity, every other readable entry uniform with variance 1 / (entries read). Options
  // make the own block random, too, or the bound K times as large.
  Init router_init(int layer, int64_t K) const {
    const std::vector<int> read = sources(layer);
    const double entries = static_cast<double>(static_cast<int64_t>(read.size()) * K);
    const double bound = std::sqrt(3.0 / entries) * (literal_ ? static_cast<double>(K) : 1);
    const bool identity = !random_;
    const Init uniform = Init::uniform(bound);
    auto at = [=](uint64_t seed, uint64_t stream, int64_t i) {
      const int64_t row = i / ((layer + 1) * K), column = i % ((layer + 1) * K), source = column / K;
      if (identity && source == layer) return column % K == row ? 1.0 : 0.0;
      return std::find(read.begin(), read.end(), source) == read.end() ? 0.0 : uniform.at(seed, stream, i);
    };
    return {str("[u(", std::round(bound * 1e4) / 1e4, identity ? ") | I]" : ")]"), at};
  }

  std::string routing_;
  int64_t window_;
  bool routed_, uniform_;  // routed: by matrices that learn
  bool random_, literal_, decays_routers_;
  std::optional<ops::DepthRouter> keys_, values_;
};

}  // namespace

Architecture lime_architecture() {
  const std::vector<std::string> starts = {"uniform", "normal"}, routers = {"identity", "random"};
  const std::vector<OptionNeed> learned = {{"routing", {"full", "last", "first"}}};
  Option decay = lime_decay();
  decay.needs = learned;
  return {
      "lime",
      "attention over key/value heads mixed from all layers so far",
      {{"routing", "full", "full, average, last, first or own", {"full", "average", "last", "first", "own"}},
       {"window", "0", "an integer: how many layers routing last or first reads", {}, {{"routing", {"last", "first"}}}},
       {"kv_init", "uniform", "uniform (the code's) or normal (the backbone's): how keys and values start", starts},
       {"router_init", "identity", "identity or random: the own layer's block of a new router", routers, learned},
       {"router_bound",
        "fan_in",
        "fan_in (the code's) or literal (the pseudocode's): of a new router's random entries",
        {"fan_in", "literal"},
        learned},
       decay},
      [](const Config& config) { return std::make_unique<Lime>(config); }};
}

}  // namespace crossply
