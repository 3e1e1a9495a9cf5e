// Gated residual streams: E residual streams with a norm each, read channel by channel through gates.
// train/train_gated_streams.cpp explains them; kernels/depth/streams/gated_streams.h is the arithmetic.
//
// Names are those of transformers' qwen4_exp, whose q/k norms are 1 + w, too; ours keep the plain gain.
#include <algorithm>

#include "models/registry.h"

namespace crossply {
namespace {

class GatedStreams : public Connection {
 public:
  explicit GatedStreams(const Config& config) : E_(config.integer("hc_count")), R_(config.integer("hc_lowrank")) {
    const int64_t C = config.hidden_size;
    if (E_ < 1 || E_ > 8) fail(Exit::usage, "gated_streams: hc_count ", E_, " must be in 1..8");
    if (R_ < 0 || R_ > E_ * C)
      fail(Exit::usage, "gated_streams: hc_lowrank ", R_, " must be in 0..", E_ * C, ", which is hc_count times ", C);
    if (R_ == 0) R_ = std::max<int64_t>(1, C / 32);
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
      for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) remove_module(params, layer, norm);
      for (const bool mlp : {false, true}) declare_read(params, rows({layer, mlp}), config, true);
    }
    params.remove("model.norm.weight");
    if (params.contains("model.norm.bias")) params.remove("model.norm.bias");
    declare_read(params, last, config, false);
  }

  std::string start_as_plain(ParameterTable&, const Config&) const override {
    fail(
        Exit::usage,
        "gated_streams computes the plain backbone where its matrices are 0 and its norms' w is twice the gain less 1, "
        "but for the rounding of both, not bit for bit; train it from scratch");
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    x_ = ops::streams_expand(build.tape, "streams", embeddings, E_);
  }

  Value* read(const Sublayer& sublayer) override {
    build_->mark(sublayer.mlp ? "mlp_streams" : "attn_streams", sublayer.layer, x_);  // (B, T, E, C)
    const ops::GatedReadOutputs in = gated_read(sublayer.name() + ".read", rows(sublayer));
    inject_ = in.inject;
    build_->mark(sublayer.mlp ? "mlp_inject" : "attn_inject", sublayer.layer, inject_);  // (B, T, E)
    build_->mark(sublayer.mlp ? "mlp_read" : "attn_read", sublayer.layer, in.x);         // with its norm
    return in.x;
  }

  void write(const Sublayer& sublayer, Value* y) override {
    build_->mark(sublayer.mlp ? "mlp_output" : "attn_output", sublayer.layer, y);
    x_ = ops::gated_inject(build_->tape, sublayer.name() + ".write", x_, inject_, y);
  }

  Value* finish() override {
    build_->mark("last_streams", 0, x_);
    return gated_read("streams.read", last).x;
  }
  int64_t streams() const override { return E_; }
  // What the head would read if the model ended here.
  Value* hidden() override { return gated_read("streams.seen", last).x; }

 private:
  static constexpr const char* last = "model.hyper_connection_mixer.";
  static std::string rows(const Sublayer& sublayer) {
    return layer_name(sublayer.layer, sublayer.mlp ? "mlp_hyper_connection." : "attn_hyper_connection.");
  }

  void declare_read(ParameterTable& params, const std::string& rows, const Config& config, bool writes) const {
    const int64_t width = E_ * config.hidden_size;
    const Init normal = Init::normal(config.initializer_range);
    const Learning map{.wd_mul = 1, .matrix = true};
    params.add(rows + "hc_norm.weight", Shape{width}, Init::constant(0), writes ? Role::norm : Role::final_norm);
    params.add(rows + "input_mix_weight_down.weight", Shape{R_, width}, normal, Role::width_router, map);
    params.add(rows + "input_mix_weight_up.weight", Shape{width, R_}, normal, Role::width_router, map);
    if (writes)
      params.add(rows + "block_inject_weight.weight", Shape{E_, width}, normal, Role::width_router, {.wd_mul = 1});
  }

  ops::GatedReadOutputs gated_read(const std::string& name, const std::string& rows) const {
    return ops::gated_read(
        build_->tape, name, x_,
        {build_->parameter(rows + "hc_norm.weight"), build_->parameter(rows + "input_mix_weight_down.weight"),
         build_->parameter(rows + "input_mix_weight_up.weight"), build_->find(rows + "block_inject_weight.weight")},
        build_->config.norm_eps);
  }

  int64_t E_, R_;
  Value* inject_ = nullptr;  // of the sublayer in progress
};

}  // namespace

Architecture gated_streams_architecture() {
  return {"gated_streams",
          "several residual streams, gated channel by channel",
          {{"hc_count", "4", "an integer in 1..8: how many streams", {}},
           {"hc_lowrank", "0", "an integer: hidden width of the network that computes the gates; 0: width / 32", {}}},
          [](const Config& config) { return std::make_unique<GatedStreams>(config); }};
}

}  // namespace crossply
