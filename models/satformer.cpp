// SATFormer: value residuals behind a gate of each token and key/value head. train/train_satformer.cpp explains it.
#include <cmath>

#include "models/registry.h"

namespace crossply {
namespace {

class SatFormer : public Connection {
 public:
  explicit SatFormer(const Config& config)
      : gate_(config.text("gate")),
        L_(config.num_hidden_layers),
        last_k_(config.integer("last_k")),
        uniform_(config.text("gate_init") == "uniform") {}

  void declare(ParameterTable& params, const Config& c) const override {
    for (int n = 1; n < L_; ++n)
      if (consumes(n))
        params.add(gate_name(n), Shape{c.num_key_value_heads, c.hidden_size}, start(c), Role::width_router,
                   {.wd_mul = 1});
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    if (gate_ != "relu" && gate_ != "tanh" && gate_ != "identity")
      fail(Exit::usage, "satformer: gate ", gate_,
           " is never 0; relu, tanh and identity can start as the plain backbone");
    start_at(params, "alpha_proj", Init::constant(0));
    if (gate_ != "relu") return "";
    return "a relu gate has no gradient at 0, so its gates stay shut and it stays the plain backbone; "
           "--gate tanh opens them";
  }

  QueryKeyValue project(int layer, Value* x) override {
    const std::string name = str("L", layer);
    std::vector<ops::Projection> projections = {queries(layer), keys(layer), values(layer)};
    if (consumes(layer)) {  // the gate's columns ride along in the product for Q, K and V
      const Shape gates{build_->B, build_->T, build_->config.num_key_value_heads};
      projections.push_back({name + ".alpha", build_->parameter(gate_name(layer)), gates});
    }
    const auto heads = linears(layer, x, projections);
    if (layer == 0) v1_ = heads[2];
    if (!consumes(layer)) return {heads[0], heads[1], heads[2]};
    Value* alpha = ops::gate(build_->tape, name + ".gate", heads[3], gate_);
    build_->mark("gate", layer, alpha);
    return {heads[0], heads[1], ops::gated_mix(build_->tape, name + ".gated_mix", heads[2], v1_, alpha)};
  }

 private:
  static std::string gate_name(int n) { return layer_name(n, "self_attn.value_residual_mixing.alpha_proj.weight"); }
  Init start(const Config& c) const {
    return uniform_ ? Init::uniform(1 / std::sqrt(static_cast<double>(c.hidden_size)))
                    : Init::normal(c.initializer_range);
  }
  bool consumes(int n) const { return takes_first(n, last_k_, L_); }

  std::string gate_;
  int64_t L_, last_k_;
  bool uniform_;
  Value* v1_ = nullptr;
};

}  // namespace

Architecture satformer_architecture() {
  const std::vector<std::string> gates = {"relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"};
  const std::vector<std::string> starts = {"normal", "uniform"};
  return {"satformer",
          "every token and head decides how much of the first layer's value to add",
          {{"gate", "relu", "relu, sigmoid, softmax, softmax_sigmoid, tanh or identity", gates},
           {"last_k", "0", "an integer: how many last layers do (0: all from the second on)", {}},
           {"gate_init", "normal", "normal (the code's) or uniform (the paper's): how the gates start", starts}},
          [](const Config& config) { return std::make_unique<SatFormer>(config); }};
}

}  // namespace crossply
