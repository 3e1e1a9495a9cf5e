// LIMe, first version: key/value heads projected from mixtures of all residual streams so far.
// train/train_lime_static.cpp and train/train_lime_dynamic.cpp explain it.
//
// rms(X_m) without the gain is the same for all readers, so it is computed once. On the backbone gpt2 it is LayerNorm's
// (x - mean) / spread. The mixtures are K times as large as the streams and are never stored
// (kernels/depth/head_mix.h).
#include <cmath>

#include "models/lime_decay.h"
#include "models/registry.h"

namespace crossply {
namespace {

// Also of lime_dynamic, whose weights each token computes.
class LimeStatic : public Connection {
 public:
  LimeStatic(const Config& config, bool dynamic)
      : dynamic_(dynamic),
        literal_(config.text("kv_init") == "literal"),
        decays_routers_(config.text("decay") == "routers") {
    if (!dynamic) top_p_ = config.number("top_p"), renormalize_ = config.flag("top_p_renormalize");
    if (config.qkv_bias) fail(Exit::usage, config.arch, ": its keys and values have no biases, as a Qwen2's have");
    if (!(top_p_ >= 0 && top_p_ <= 1)) fail(Exit::usage, "lime_static: top_p ", top_p_, " must be in 0..1");
    const auto L = static_cast<double>(config.num_hidden_layers);  // sources at most; the largest weight is >= 1/L
    if (renormalize_ && L > 1 && top_p_ * L < 1)
      fail(Exit::usage, "lime_static: top_p ", top_p_,
           " keeps one weight of each head, which divided by itself is 1: ", "no router could learn. Give at least 1/",
           L, ", or top_p_renormalize false");
  }

  void declare(ParameterTable& params, const Config& c) const override {
    const int64_t K = c.num_key_value_heads, C = c.hidden_size;
    const double fan_in = static_cast<double>(literal_ ? K * c.head_dim * C : C);
    for (int i = 1; i < c.num_hidden_layers; ++i) {
      for (const char* name : {"self_attn.k_proj.weight", "self_attn.v_proj.weight"})
        params.at(layer_name(i, name)).init = Init::uniform(1 / std::sqrt(fan_in));
      // A key's bias changes no weight of attention, and a value's is a part of o_proj's. So is a norm's.
      for (const char* name : {"self_attn.k_proj.bias", "self_attn.v_proj.bias"})
        if (params.contains(layer_name(i, name))) params.remove(layer_name(i, name));
      params.add(layer_name(i, "lime_layernorm.weight"), Shape{C}, Init::constant(1), Role::norm);
      if (dynamic_)
        params.add(router_name(i), Shape{K * (i + 1), C}, Init::normal(c.initializer_range), Role::width_router,
                   {.lr_mul = 10, .wd_mul = 1});
      else
        params.add(router_name(i), Shape{K, i + 1}, Init::normal(0.1), Role::source_router,
                   {.lr_mul = 10, .wd_mul = 0});
    }
  }
  void all_declared(ParameterTable& params) const override {
    if (decays_routers_) decay_routers_alone(params);
  }

  std::string start_as_plain(ParameterTable&, const Config& c) const override {
    fail(Exit::usage, c.arch,
         " multiplies its norms in another order than the plain backbone, so it equals none bit for bit");
  }

  QueryKeyValue project(int layer, Value* x) override {
    const Config& c = build_->config;
    const std::string name = Sublayer{layer, false}.name();
    if (c.num_hidden_layers > 1)
      streams_.push_back(c.gpt2() ? ops::layernorm(build_->tape, name + ".unit", x_, nullptr, nullptr, c.norm_eps)
                                  : ops::rmsnorm(build_->tape, name + ".unit", x_, nullptr, c.norm_eps));
    if (layer == 0) return Connection::project(layer, x);
    auto parameter = [&](const std::string& rest) { return build_->parameter(layer_name(layer, rest)); };
    const HeadMix<Value*> m{streams_, weights(layer, name), parameter("lime_layernorm.weight"),
                            parameter("self_attn.k_proj.weight"), parameter("self_attn.v_proj.weight")};
    const auto heads = ops::head_mix(build_->tape, name, m, c.num_key_value_heads);
    build_->mark("route", layer, m.weight);  // (K, l+1), or (B, T, K, l+1)
    build_->mark("own_key", layer, heads.first);
    build_->mark("own_value", layer, heads.second);
    return {linears(layer, x, {queries(layer)})[0], heads.first, heads.second};
  }

 private:
  std::string router_name(int layer) const {
    return layer_name(layer, dynamic_ ? "self_attn.lime_router.proj.weight" : "self_attn.lime_router.weight");
  }

  // (K, l+1), or (B, T, K, l+1)
  Value* weights(int layer, const std::string& name) const {
    Value* router = build_->parameter(router_name(layer));
    if (dynamic_) {
      const Config& c = build_->config;
      Value* input = backbone_norm(*build_, name + ".router_norm", x_, layer_name(layer, "lime_layernorm"));
      const Shape logits{build_->B, build_->T, c.num_key_value_heads, layer + 1};
      router = ops::linear(build_->tape, name + ".router", input, router, logits);
    }
    return ops::softmax(build_->tape, name + ".route", router, top_p_, renormalize_);
  }

  bool dynamic_, literal_, decays_routers_;
  double top_p_ = 1;
  bool renormalize_ = true;
  std::vector<Value*> streams_;  // rms(X_0), rms(X_1), ...
};

Option kv_init() {
  const char* help = "literal or fan_in: the spread that keys' and values' weights start with";
  return {"kv_init", "literal", help, {"literal", "fan_in"}};
}

}  // namespace

Architecture lime_static_architecture() {
  return {"lime_static",
          "every key/value head reads its own mixture of all earlier outputs",
          {{"top_p", "1.0", "a number in 0..1: weights beyond this sum are pruned (renormalised: >= 1/layers)", {}},
           {"top_p_renormalize", "true", "true or false: what is left is divided by its sum", {}, {{"top_p"}}},
           kv_init(),
           lime_decay()},
          [](const Config& config) { return std::make_unique<LimeStatic>(config, false); }};
}

Architecture lime_dynamic_architecture() {
  return {"lime_dynamic",
          "every key/value head reads its own mixture of all earlier outputs, anew for every token",
          {kv_init(), lime_decay()},
          [](const Config& config) { return std::make_unique<LimeStatic>(config, true); }};
}

}  // namespace crossply
