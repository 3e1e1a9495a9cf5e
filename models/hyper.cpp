// Hyper-connections: E residual streams instead of one. train/train_hyper.cpp explains them and the options of each
// code; kernels/depth/streams/hyper.h reads and writes the streams.
//
// On the backbone gpt2, prenorm rmsnorm is its own norm, a LayerNorm.
#include <cmath>

#include "models/registry.h"

namespace crossply {
namespace {

class Hyper : public Connection {
 public:
  explicit Hyper(const Config& config)
      : E_(config.integer("rate")),
        dynamic_(config.flag("dynamic")),
        norm_(config.text("norm")),
        eps_(config.number("dynamic_norm_eps")),
        gains_(config.text("prenorm") == "rmsnorm"),
        by_sublayer_(config.text("layer_index") == "sublayer"),
        scale_outputs_(config.flag("output_init_scale")) {
    if (E_ < 1 || E_ > 8) fail(Exit::usage, "hyper: rate ", E_, " must be in 1..8");
    if (!(eps_ >= 0 && eps_ <= 1)) fail(Exit::usage, "hyper: dynamic_norm_eps ", eps_, " must be in 0..1");
    if (eps_ == 0) eps_ = norm_ == "rmsnorm" ? 1e-6 : 1e-5;
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
      if (!gains_)
        for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) remove_module(params, layer, norm);
      if (scale_outputs_)
        for (const char* output : {"self_attn.o_proj.weight", "mlp.down_proj.weight"})
          params.at(layer_name(layer, output)).init =
              Init::normal(output_spread(config) / std::sqrt(static_cast<double>(E_)));
      for (const bool mlp : {false, true}) declare_site(params, {layer, mlp}, config.hidden_size);
    }
  }

  std::string start_as_plain(ParameterTable&, const Config& config) const override {
    if (E_ != 1 || !gains_)
      fail(
          Exit::usage, "hyper: rate ", E_, " with prenorm ", gains_ ? "rmsnorm" : "layernorm_no_affine",
          " cannot start as the plain backbone bit for bit: only one stream sums up to its stream, and the sublayers' ",
          "norms need their gains; --rate 1 --prenorm rmsnorm can");
    return config.gpt2() && config.bias
               ? "equal up to rounding: a bias is added to its product here, to product and stream together there"
               : "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    x_ = ops::streams_expand(build.tape, "streams", embeddings, E_);
  }

  Value* read(const Sublayer& sublayer) override {
    auto parameter = [&](const char* rest) { return build_->find(name_of(sublayer, rest)); };
    const ops::HyperParameters p{parameter("static_alpha"),        parameter("static_beta"),
                                 parameter("dynamic_alpha_proj"),  parameter("dynamic_beta_proj"),
                                 parameter("dynamic_alpha_scale"), parameter("dynamic_beta_scale"),
                                 parameter("norm.weight"),         parameter("norm.bias")};
    const ops::HyperRead in = ops::hyper_read(build_->tape, sublayer.name() + ".read", x_, p, norm_, eps_);
    coef_ = in.coef;
    build_->mark(sublayer.mlp ? "mlp_mixing" : "attn_mixing", sublayer.layer, coef_);  // (B, T, E, E+2): A, then b
    build_->mark(sublayer.mlp ? "mlp_read" : "attn_read", sublayer.layer, in.x);
    return gains_ ? norm(sublayer, in.x)
                  : ops::layernorm(build_->tape, sublayer.name() + ".norm", in.x, nullptr, nullptr, 1e-5);
  }

  void write(const Sublayer& sublayer, Value* y) override {
    build_->mark(sublayer.mlp ? "mlp_output" : "attn_output", sublayer.layer, y);
    x_ = ops::hyper_write(build_->tape, sublayer.name() + ".write", x_, coef_, y);
  }

  Value* finish() override { return ops::streams_sum(build_->tape, "streams.sum", x_); }
  int64_t streams() const override { return E_; }
  Value* hidden() override { return ops::streams_sum(build_->tape, "streams.seen", x_); }

 private:
  static std::string name_of(const Sublayer& sublayer, const std::string& rest) {
    return layer_name(sublayer.layer, std::string(sublayer.mlp ? "mlp_hc." : "attn_hc.") + rest);
  }

  void declare_site(ParameterTable& params, const Sublayer& sublayer, int64_t C) const {
    auto add = [&](const char* rest, Shape shape, Init init, Role role, const Learning& learning = {}) {
      params.add(name_of(sublayer, rest), shape, std::move(init), role, learning);
    };
    const int64_t row = (by_sublayer_ ? 2 * sublayer.layer + sublayer.mlp : sublayer.layer) % E_;
    auto start = [row, columns = E_ + 1](uint64_t, uint64_t, int64_t i) {
      const int64_t j = i % columns;
      return j == 0 ? i / columns == row : j - 1 == i / columns;
    };
    add("static_alpha", Shape{E_, E_ + 1}, Init{str("[e", row, " | I]"), start}, Role::source_router, {.wd_mul = 0});
    add("static_beta", Shape{E_}, Init::constant(1), Role::source_router, {.wd_mul = 0});
    if (!dynamic_) return;
    add("dynamic_alpha_proj", Shape{C, E_ + 1}, Init::constant(0), Role::width_router, {.wd_mul = 1});
    add("dynamic_beta_proj", Shape{C}, Init::constant(0), Role::width_router, {.wd_mul = 1});
    add("dynamic_alpha_scale", Shape{1}, Init::constant(0.01), Role::scalar, {.wd_mul = 1});
    add("dynamic_beta_scale", Shape{1}, Init::constant(0.01), Role::scalar, {.wd_mul = 1});
    if (norm_ != "layernorm_no_affine") add("norm.weight", Shape{C}, Init::constant(1), Role::norm);
    if (norm_ == "layernorm") add("norm.bias", Shape{C}, Init::constant(0), Role::bias);
  }

  int64_t E_;
  bool dynamic_;
  std::string norm_;
  double eps_;
  bool gains_, by_sublayer_, scale_outputs_;
  Value* coef_ = nullptr;  // of the sublayer in progress
};

}  // namespace

Architecture hyper_architecture() {
  const std::vector<std::string> norms = {"layernorm_no_affine", "layernorm", "rmsnorm"};
  const std::vector<std::string> prenorms = {"layernorm_no_affine", "rmsnorm"}, indices = {"layer", "sublayer"};
  return {
      "hyper",
      "several residual streams, mixed before and after every sublayer",
      {{"rate", "4", "an integer in 1..8: how many streams", {}},
       {"dynamic", "true", "true or false: every token adds a term of its own to the mixtures", {}},
       {"norm",
        "layernorm_no_affine",
        "layernorm_no_affine, layernorm or rmsnorm: in front of that term",
        norms,
        {{"dynamic", {"true"}}}},
       {"dynamic_norm_eps",
        "0.0",
        "a number in 0..1: that norm's epsilon (0: rmsnorm 1e-6, the others 1e-5)",
        {},
        {{"dynamic", {"true"}}}},
       {"prenorm", "layernorm_no_affine", "layernorm_no_affine or rmsnorm: in front of the sublayers", prenorms},
       {"layer_index", "layer", "layer or sublayer: what counts the stream that a sublayer reads first", indices},
       {"output_init_scale", "false", "true or false: output projections start divided by the root of the rate", {}}},
      [](const Config& config) { return std::make_unique<Hyper>(config); }};
}

}  // namespace crossply
