// Gemma's small connections: embeddings of each token for every layer, and a low-rank branch beside attention.
// train/train_gemma3n.cpp explains them.
#include <cmath>

#include "models/registry.h"

namespace crossply {
namespace {

class Gemma3n : public Connection {
 public:
  explicit Gemma3n(const Config& config)
      : W_(config.integer("hidden_size_per_layer_input")),
        R_(config.integer("laurel_rank")),
        gemma_(config.text("laurel_form") == "gemma"),
        scaled_(config.text("embed_scale") == "sqrt") {}

  void declare(ParameterTable& params, const Config& c) const override {
    const int64_t C = c.hidden_size, A = c.num_hidden_layers;
    const Init normal = Init::normal(c.initializer_range);
    const auto reads = [&](const std::string& name, int64_t out) {
      params.add(name + ".weight", Shape{out, C}, normal, Role::input_projection);
    };
    const auto writes = [&](const std::string& name, int64_t in, const Init& start) {
      params.add(name + ".weight", Shape{C, in}, start, Role::output_projection);
    };
    const auto gain = [&](const std::string& name, int64_t width, double start) {
      params.add(name + ".weight", Shape{width}, Init::constant(start), Role::norm);
    };
    if (W_ > 0) {
      params.add(table, Shape{c.vocab_size, A * W_}, normal, Role::table, {.lr_mul = 5, .wd_mul = 0});
      reads("model.per_layer_model_projection", A * W_);
      gain("model.per_layer_projection_norm", W_, 1);
    }
    for (int i = 0; i < A; ++i) {
      if (R_ > 0) {
        reads(layer_name(i, "laurel.linear_left"), R_);
        writes(layer_name(i, "laurel.linear_right"), R_, gemma_ ? normal : Init::constant(0));
        if (gemma_) gain(layer_name(i, "laurel.post_laurel_norm"), C, 0);
      }
      if (W_ == 0) continue;
      reads(layer_name(i, "per_layer_input_gate"), W_);
      writes(layer_name(i, "per_layer_projection"), W_, normal);
      gain(layer_name(i, "post_per_layer_input_norm"), C, 0);
    }
  }

  // What per-layer embeddings add starts at 0 anyway, and so does the paper's branch.
  std::string start_as_plain(ParameterTable&, const Config&) const override {
    if (scaled_) fail(Exit::usage, "gemma3n: the plain backbone does not scale its embeddings; give embed_scale none");
    if (R_ > 0 && gemma_)
      fail(Exit::usage,
           "gemma3n: laurel_form gemma adds attention's input to the stream; give laurel_form paper, or "
           "laurel_rank 0");
    return "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    const Config& c = build.config;
    if (scaled_) x_ = ops::scaled(build.tape, "embed_scale", embeddings, std::sqrt(static_cast<double>(c.hidden_size)));
    if (W_ == 0) return;
    // The product is divided by sqrt(C) before its norm: the same as a larger epsilon.
    const Shape by_layer{build.B, build.T, c.num_hidden_layers, W_};
    Value* context = ops::linear(build.tape, "per_layer.context", x_,
                                 build.parameter("model.per_layer_model_projection.weight"), by_layer);
    context =
        ops::rmsnorm(build.tape, "per_layer.norm", context, build.parameter("model.per_layer_projection_norm.weight"),
                     c.norm_eps * static_cast<double>(c.hidden_size));
    Value* rows = ops::embedding(build.tape, "per_layer.table", build.tokens, build.parameter(table), by_layer);
    inputs_ = ops::add_scaled(build.tape, "per_layer.inputs", context, rows, std::sqrt(static_cast<double>(W_)));
  }

  Value* read(const Sublayer& sublayer) override { return read_ = Connection::read(sublayer); }

  void write(const Sublayer& sublayer, Value* y) override {
    Connection::write(sublayer, y);
    if (!sublayer.mlp && R_ > 0) add_laurel(sublayer);
    if (sublayer.mlp && W_ > 0) add_input(sublayer);
  }

 private:
  static constexpr const char* table = "model.embed_tokens_per_layer.weight";

  Value* linear(const std::string& name, int layer, const std::string& rows, Value* x, int64_t width) const {
    return ops::linear(build_->tape, name, x, build_->parameter(layer_name(layer, rows + ".weight")),
                       Shape{build_->B, build_->T, width});
  }

  // x + y + Wb Wa xh, or (x + y + xh + norm(Wb Wa xh)) / sqrt(2), where attention has read xh.
  void add_laurel(const Sublayer& sublayer) {
    Tape& tape = build_->tape;
    const std::string name = sublayer.name() + ".laurel";
    Value* low = linear(name + ".left", sublayer.layer, "laurel.linear_left", read_, R_);
    Value* branch = linear(name + ".right", sublayer.layer, "laurel.linear_right", low, build_->config.hidden_size);
    if (!gemma_) {
      x_ = ops::add(tape, name, x_, branch);
      return;
    }
    Value* gain = build_->parameter(layer_name(sublayer.layer, "laurel.post_laurel_norm.weight"));
    branch = ops::rmsnorm(tape, name + ".norm", branch, gain, build_->config.norm_eps);
    Value* both = ops::add(tape, name + ".both", branch, read_);
    x_ = ops::scaled(tape, name + ".scaled", ops::add(tape, name, x_, both), std::sqrt(0.5));
  }

  // x + norm(Wo (gelu(Wg x) p / sqrt(2))) with the layer's slice p of inputs_. The root is in the norm's epsilon.
  void add_input(const Sublayer& sublayer) {
    Tape& tape = build_->tape;
    const std::string name = str("L", sublayer.layer, ".per_layer");
    Value* own = ops::select_heads(tape, name + ".input", {inputs_}, {{0, sublayer.layer}});
    Value* gate = linear(name + ".gate", sublayer.layer, "per_layer_input_gate", x_, W_);
    gate = ops::gelu(tape, name + ".gelu", gate, GeluKind::tanh);
    Value* y = linear(name + ".out", sublayer.layer, "per_layer_projection",
                      ops::multiply(tape, name + ".gated", gate, own), build_->config.hidden_size);
    Value* gain = build_->parameter(layer_name(sublayer.layer, "post_per_layer_input_norm.weight"));
    y = ops::rmsnorm(tape, name + ".norm", y, gain, 2 * build_->config.norm_eps);
    x_ = ops::add(tape, name, x_, y);
  }

  int64_t W_, R_;
  bool gemma_, scaled_;
  Value *inputs_ = nullptr, *read_ = nullptr;  // (B, T, A, W), times sqrt(2); what the sublayer in progress reads
};

}  // namespace

Architecture gemma3n_architecture() {
  return {
      "gemma3n",
      "each layer adds an embedding of its own of the token, and a low-rank branch beside attention",
      {{"hidden_size_per_layer_input", "256", "an integer: the width of a layer's own embeddings (0: none)", {}},
       {"laurel_rank", "64", "an integer: the rank of the branch (0: none)", {}},
       {"laurel_form", "gemma", "gemma or paper: normalised, beside attention's input; or alone", {"gemma", "paper"}},
       {"embed_scale",
        "sqrt",
        "sqrt or none: the embeddings are multiplied by the root of the width",
        {"sqrt", "none"}}},
      [](const Config& config) { return std::make_unique<Gemma3n>(config); }};
}

}  // namespace crossply
