// MUDDFormer: the outputs of all layers so far are mixed four times, anew for every token. train/train_mudd.cpp
// explains it.
//
// rms(X_l) without a gain is the same for all readers and is computed once.
#include <cmath>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "models/registry.h"

namespace crossply {
namespace {

enum Way { query, key, value, residual };

class Mudd : public Connection {
 public:
  explicit Mudd(const Config& config)
      : prepost_(config.text("norm") == "prepost"),
        literal_(config.text("w1_init") == "literal"),
        L_(static_cast<int>(config.num_hidden_layers)) {
    for (const auto& width : known_json(config.text("intermediate_sizes"))) {
      if (!width.is_number_integer() || width < 1 || width > (1 << 30))
        fail(Exit::usage, "mudd: intermediate_sizes must be positive integers, has ", excerpt(json_text(width)));
      widths_.push_back(width);
    }
    if (!widths_.empty() && static_cast<int>(widths_.size()) != L_)
      fail(Exit::usage, "mudd: intermediate_sizes has ", widths_.size(), " entries for ", L_,
           " layers; give one for each, or []");
  }

  void declare(ParameterTable& params, const Config& config) const override {
    const int64_t C = config.hidden_size;
    const bool bias = params.contains("model.norm.bias");
    for (int i = 0; i < L_; ++i) remove_module(params, i, "input_layernorm");
    for (int i = 0; i < L_; ++i) {
      for (const char* way : {"q", "k", "v"}) {
        params.add(layer_name(i, str("input_layernorm_", way, ".weight")), Shape{C}, Init::constant(1), Role::norm);
        if (bias)
          params.add(layer_name(i, str("input_layernorm_", way, ".bias")), Shape{C}, Init::constant(0), Role::bias);
      }
      if (!widths_.empty()) set_width(params, i, widths_[static_cast<size_t>(i)], C);
      declare_mixture(params, i, C);
    }
  }

  // Its mixtures start as the plain stream anyway.
  std::string start_as_plain(ParameterTable&, const Config&) const override {
    if (!widths_.empty())
      fail(Exit::usage, "mudd: the plain backbone's feed-forward parts are all alike; leave out intermediate_sizes");
    return "";
  }
  std::string plain_name(const std::string& name) const override {
    const std::string norm = "input_layernorm_";
    const size_t at = name.find(norm);
    return at == std::string::npos ? name : name.substr(0, at) + "input_layernorm" + name.substr(name.rfind('.'));
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    ways_ = {x_, x_, x_, x_};
    add_source(0);
  }

  Value* read(const Sublayer& sublayer) override {
    if (sublayer.mlp) return norm(sublayer, x_);
    x_ = ways_[residual];
    return way_norm(sublayer.layer, query, "q");
  }

  QueryKeyValue project(int layer, Value* x) override {
    return {linears(layer, x, {queries(layer)})[0], linears(layer, way_norm(layer, key, "k"), {keys(layer)})[0],
            linears(layer, way_norm(layer, value, "v"), {values(layer)})[0]};
  }

  void write(const Sublayer& sublayer, Value* y) override {
    Connection::write(sublayer, y);
    if (sublayer.mlp) mix(sublayer.layer);
  }

  Value* finish() override { return ways_[0]; }
  bool has_stream() const override { return false; }

 private:
  static std::string da_name(int layer, const std::string& rest) { return layer_name(layer, "da." + rest); }
  static void set_width(ParameterTable& params, int i, int64_t F, int64_t C) {
    for (const char* name : {"mlp.gate_proj.weight", "mlp.up_proj.weight"})
      if (params.contains(layer_name(i, name))) params.at(layer_name(i, name)).shape = Shape{F, C};
    if (const std::string bias = layer_name(i, "mlp.up_proj.bias"); params.contains(bias))
      params.at(bias).shape = Shape{F};
    params.at(layer_name(i, "mlp.down_proj.weight")).shape = Shape{C, F};
  }
  int ways(int layer) const { return layer + 1 < L_ ? 4 : 1; }

  void declare_mixture(ParameterTable& params, int i, int64_t C) const {
    const int64_t sources = i + 2, all = ways(i) * sources;
    params.add(da_name(i, "w1.weight"), Shape{all, C},
               Init::normal(literal_ ? 1 / static_cast<double>(C) : 1 / std::sqrt(static_cast<double>(C))),
               Role::width_router, {.wd_mul = 1});
    params.add(da_name(i, "w2.weight"), Shape{all, all}, Init::constant(0), Role::source_router, {.wd_mul = 1});
    const Init own_one{"0 .. 0 1",
                       [sources](uint64_t, uint64_t, int64_t j) { return j % sources == sources - 1 ? 1.0 : 0.0; }};
    params.add(da_name(i, "static_weight"), Shape{ways(i), sources}, prepost_ ? Init::constant(0) : own_one,
               Role::source_router, {.wd_mul = 0});
    if (!prepost_) return;
    for (int l = 0; l < sources; ++l)
      params.add(da_name(i, str("pre_da_norms.", l, ".weight")), Shape{C}, Init::constant(1), Role::norm);
    for (int c = 0; c < ways(i); ++c)
      params.add(da_name(i, str("post_da_norms.", c, ".weight")), Shape{C}, Init::constant(1e-3), Role::norm);
  }

  Value* way_norm(int layer, int way, const char* suffix) const {
    return backbone_norm(*build_, str("L", layer, ".attn.norm_", suffix), ways_[static_cast<size_t>(way)],
                         layer_name(layer, str("input_layernorm_", suffix)));
  }

  // The stream x_ = X_n becomes a source, and its gain-free norm the input of the weights.
  void add_source(int n) {
    const double eps = build_->config.norm_eps;
    if (prepost_ || n > 0) unit_ = ops::rmsnorm(build_->tape, str("X", n, ".unit"), x_, nullptr, eps);
    sources_.push_back(prepost_ ? unit_ : x_);
  }

  void mix(int layer) {
    add_source(layer + 1);
    const std::string name = str("L", layer, ".da");
    const int64_t all = ways(layer) * (layer + 2);
    const Shape shape{build_->B, build_->T, all};
    auto parameter = [&](const std::string& rest) { return build_->parameter(da_name(layer, rest)); };
    Value* hidden = ops::linear(build_->tape, name + ".w1", unit_, parameter("w1.weight"), shape);
    hidden = ops::gelu(build_->tape, name + ".gelu", hidden);
    MultiwayMix<Value*> m{.sources = sources_,
                          .weight = ops::linear(build_->tape, name + ".w2", hidden, parameter("w2.weight"), shape),
                          .base = parameter("static_weight"),
                          .skip = prepost_ ? x_ : nullptr};
    for (int l = 0; l < layer + 2 && prepost_; ++l) m.gains.push_back(parameter(str("pre_da_norms.", l, ".weight")));
    for (int c = 0; c < ways(layer) && prepost_; ++c) m.post.push_back(parameter(str("post_da_norms.", c, ".weight")));
    ways_ = ops::multiway_mix(build_->tape, name, m, build_->config.norm_eps);
    build_->mark("route", layer, m.weight);  // (B, T, ways * (layer + 2)), without the static weights
    if (layer + 1 < L_) build_->mark("mixed", layer + 1, ways_[residual]);
  }

  bool prepost_, literal_;
  int L_;
  std::vector<int64_t> widths_;
  std::vector<Value*> sources_, ways_;
  Value* unit_ = nullptr;
};

}  // namespace

Architecture mudd_architecture() {
  const char* spread = "fan_in (spread 1/sqrt(C)) or literal (1/C, as SATFormer's code has it)";
  return {"mudd",
          "queries, keys, values and stream each read their own token-wise mixture of all earlier outputs",
          {{"norm", "prepost", "prepost or none: norms around the mixtures", {"prepost", "none"}},
           {.key = "intermediate_sizes",
            .default_value = "[]",
            .help = "a list like [96,128]: every layer's feed-forward width ([]: all alike)",
            .choices = {},
            .instead_of = "--ffn"},
           {"w1_init", "fan_in", spread, {"fan_in", "literal"}}},
          [](const Config& config) { return std::make_unique<Mudd>(config); }};
}

}  // namespace crossply
