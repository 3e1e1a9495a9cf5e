// Embedding shortcuts: every layer takes in the embedding again, some layers' values come from tables, and the output
// loses a part of the middle. train/train_shortcuts.cpp explains them.
#include <algorithm>
#include <cmath>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "models/registry.h"

namespace crossply {
namespace {

class Shortcuts : public Connection {
 public:
  explicit Shortcuts(const Config& config)
      : L_(config.num_hidden_layers),
        gate_channels_(config.integer("gate_channels")),
        gate_scale_(config.number("gate_scale")),
        resid_(config.flag("resid")),
        from_start_(config.flag("x0")),
        backout_(config.flag("backout")),
        embed_norm_(config.flag("embed_norm")) {
    if (gate_channels_ < 0 || gate_channels_ > config.hidden_size)
      fail(Exit::usage, "shortcuts: gate_channels ", gate_channels_, " must be in 1..", config.hidden_size,
           ", the width, or 0");
    if (gate_channels_ == 0) gate_channels_ = std::min<int64_t>(12, config.hidden_size);
    if (!(gate_scale_ > 0)) fail(Exit::usage, "shortcuts: gate_scale ", gate_scale_, " must be more than 0");
    const std::string which = config.text("value_embeds");
    for (int64_t i = 0; i < L_; ++i) has_table_.push_back(which == "alternate" && i % 2 == (L_ - 1) % 2);
    if (which == "list") read_layers(config.text("value_layers"));
  }

  void declare(ParameterTable& params, const Config& c) const override {
    auto lambdas = [&](const char* name, int64_t n, const Init& start, double wd_mul) {
      params.add(name, Shape{n}, start, Role::source_router, {.lr_mul = 5, .wd_mul = wd_mul});
    };
    if (resid_) lambdas("model.resid_lambdas", L_, falling(1.15, 1.05), 0.5);
    if (from_start_) lambdas("model.x0_lambdas", L_, falling(0.2, 0.05), 0);
    const int64_t K = c.num_key_value_heads, width = K * c.head_dim;
    const double bound = std::sqrt(3.0 / static_cast<double>(c.hidden_size));
    for (int i = 0; i < L_; ++i) {
      if (!has_table(i)) continue;
      params.add(table_name(i), Shape{c.vocab_size, width}, Init::uniform(bound), Role::table, {.wd_mul = 0.1});
      params.add(gate_name(i), Shape{K, gate_channels_}, small_gates(), Role::width_router, {.wd_mul = 1});
    }
    if (backout_) lambdas("model.backout_lambda", 1, Init::constant(0.2), 0);
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    if (embed_norm_) fail(Exit::usage, "shortcuts: the plain backbone does not normalise its embeddings");
    start_at(params, "model.resid_lambdas", Init::constant(1));
    for (const char* name : {"model.x0_lambdas", "model.backout_lambda", "model.value_embeds."})
      start_at(params, name, Init::constant(0));
    return "";
  }

  std::string remark(const Config& config) const override {
    const bool none = std::find(has_table_.begin(), has_table_.end(), true) == has_table_.end();
    return none && config.text("value_embeds") == "list"
               ? "note: value_embeds list without value_layers: no layer has a value table"
               : "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    if (embed_norm_) x_ = ops::rmsnorm(build.tape, "embed_norm", embeddings, nullptr, build.config.norm_eps);
    x0_ = x_;
    one_ = build.tape.constant("one", Shape{1}, {1});
    zero_ = build.tape.constant("zero", Shape{1}, {0});
  }

  Value* read(const Sublayer& sublayer) override {
    if (!sublayer.mlp && (resid_ || from_start_)) {
      const ops::Scalar own =
          resid_ ? ops::Scalar{build_->parameter("model.resid_lambdas"), sublayer.layer} : ops::Scalar{one_, 0};
      const ops::Scalar first =
          from_start_ ? ops::Scalar{build_->parameter("model.x0_lambdas"), sublayer.layer} : ops::Scalar{zero_, 0};
      // The mixture may write over it, and others may have it: the start, or who has asked for the stream.
      Value* x = sublayer.layer == 0 || x_ == lent_ ? copied(sublayer.name() + ".stream", x_) : x_;
      x_ = ops::value_mix(build_->tape, sublayer.name() + ".lambdas", x, x0_, own, first);
    }
    return norm(sublayer, x_);
  }

  QueryKeyValue project(int layer, Value* x) override {
    QueryKeyValue own = Connection::project(layer, x);
    if (!has_table(layer)) return own;
    const std::string name = str("L", layer, ".value_embed");
    Value* gate = ops::channel_gate(build_->tape, name + ".gate", x, build_->parameter(gate_name(layer)), gate_scale_);
    Value* rows =
        ops::embedding(build_->tape, name, build_->tokens, build_->parameter(table_name(layer)), own.v->shape);
    build_->mark("gate", layer, gate);
    build_->mark("value_embed", layer, rows);
    own.v = ops::gated_mix(build_->tape, name + ".mix", own.v, rows, gate);
    return own;
  }

  void write(const Sublayer& sublayer, Value* y) override {
    Connection::write(sublayer, y);
    if (!backout_ || !sublayer.mlp || sublayer.layer != L_ / 2) return;
    // The output's sum takes the stream over, and so do the layers', but where they learn their factor of it.
    const bool learned = resid_ && build_->parameter("model.resid_lambdas")->needs_grad;
    const bool taken = sublayer.layer + 1 == L_ || ((resid_ || from_start_) && !learned);
    middle_ = taken ? copied("middle", x_) : x_;
  }

  Value* stream() override { return lent_ = x_; }

  Value* finish() override {
    if (!backout_) return x_;
    Value* minus_one = build_->tape.constant("minus_one", Shape{1}, {-1});
    Value* factor = ops::scale(build_->tape, "backout.factor", build_->parameter("model.backout_lambda"), minus_one);
    return ops::value_mix(build_->tape, "backout", x_, middle_, {one_, 0}, {factor, 0});
  }

 private:
  static std::string table_name(int i) { return str("model.value_embeds.", i, ".weight"); }
  static std::string gate_name(int i) { return layer_name(i, "self_attn.ve_gate.weight"); }
  bool has_table(int i) const { return has_table_[static_cast<size_t>(i)]; }

  // From `first` in the first layer to `last` in the last.
  Init falling(double first, double last) const {
    return {str(first, " to ", last),
            [=, steps = static_cast<double>(std::max<int64_t>(L_ - 1, 1))](uint64_t, uint64_t, int64_t i) {
              return first + (last - first) * static_cast<double>(i) / steps;
            }};
  }
  static Init small_gates() {
    const Init even = Init::uniform(0.01);
    return {"uniform(0, 0.02)",
            [even](uint64_t seed, uint64_t stream, int64_t i) { return 0.01 + even.at(seed, stream, i); }};
  }

  // A mixture takes no value twice, and may write over its first one.
  Value* copied(const std::string& name, Value* x) const {
    const int64_t T = x->shape[1];
    Value* ones = build_->tape.constant(name + ".ones", Shape{T}, std::vector<double>(static_cast<size_t>(T), 1));
    return ops::head_scale(build_->tape, name + ".copy", x, ones);
  }

  void read_layers(const std::string& text) {
    int64_t last = -1;
    for (const auto& layer : known_json(text)) {
      if (!layer.is_number_integer() || layer <= last || layer >= L_)
        fail(Exit::usage, "shortcuts: value_layers ", excerpt(text), " must be layers below ", L_,
             ", ascending, as in [1,3]");
      last = layer;
      has_table_[static_cast<size_t>(last)] = true;
    }
  }

  int64_t L_, gate_channels_;
  double gate_scale_;
  bool resid_, from_start_, backout_, embed_norm_;
  std::vector<bool> has_table_;  // by layer
  Value *x0_ = nullptr, *lent_ = nullptr, *middle_ = nullptr, *one_ = nullptr, *zero_ = nullptr;
};

}  // namespace

Architecture shortcuts_architecture() {
  return {"shortcuts",
          "layers take in the embedding again, and values from tables of their own",
          {{"value_embeds",
            "alternate",
            "alternate, none or list: which layers have tables of values",
            {"alternate", "none", "list"},
            {{.key = "value_layers", .only_for = "list"}}},
           {"value_layers",
            "[]",
            "a list like [1,3], for the list: the layers that have one",
            {},
            {{"value_embeds", {"list"}}}},
           {"gate_channels",
            "0",
            "an integer: so many channels decide about a table's gates (0: 12, or the width)",
            {},
            {{"value_embeds", {"alternate", "list"}}}},
           {"gate_scale", "3.0", "a number above 0: the largest gate", {}, {{"value_embeds", {"alternate", "list"}}}},
           {"resid", "true", "true or false: the stream is scaled before every layer", {}},
           {"x0", "true", "true or false: and takes in the embedding", {}},
           {"backout", "true", "true or false: the output loses a part of the middle layer's", {}},
           {"embed_norm", "false", "true or false: the embedding is normalised", {}}},
          [](const Config& config) { return std::make_unique<Shortcuts>(config); }};
}

}  // namespace crossply
