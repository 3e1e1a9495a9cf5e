// Embedding shortcuts: every layer takes in the embedding again, some layers' values come from tables, and the output
// loses a part of the middle. And what later speed runs added: skips as in a U-Net, two lanes, attention that reads a
// saved stream, mixtures at the end. train/train_shortcuts.cpp explains them.
#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

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
        lanes_from_(config.integer("lanes_from")),
        attn_saved_(config.integer("attn_saved")),
        mudd_width_(config.integer("mudd_width")),
        gate_scale_(config.number("gate_scale")),
        resid_(config.flag("resid")),
        from_start_(config.flag("x0")),
        backout_(config.flag("backout")),
        embed_norm_(config.flag("embed_norm")),
        unet_(config.flag("unet") && config.num_hidden_layers > 1),
        projected_(config.text("value_from") == "x0"),
        normed_(config.block_norm == "sum"),
        tail_(config.text("mudd_tail")) {
    if (gate_channels_ < 0 || gate_channels_ > config.hidden_size)
      fail(Exit::usage, "shortcuts: gate_channels ", gate_channels_, " must be in 1..", config.hidden_size,
           ", the width, or 0");
    if (gate_channels_ == 0) gate_channels_ = std::min<int64_t>(12, config.hidden_size);
    if (!(gate_scale_ > 0)) fail(Exit::usage, "shortcuts: gate_scale ", gate_scale_, " must be more than 0");
    const std::string which = config.text("value_embeds");
    for (int64_t i = 0; i < L_; ++i) adds_values_.push_back(which == "alternate" && i % 2 == (L_ - 1) % 2);
    if (which == "list") read_layers(config.text("value_layers"));
    check_speed_run(config);
  }

  void declare(ParameterTable& params, const Config& c) const override {
    auto numbers = [&](const char* name, const Shape& shape, const Init& start, double wd_mul = 0) {
      params.add(name, shape, start, Role::source_router, {.lr_mul = 5, .wd_mul = wd_mul});
    };
    if (resid_) numbers("model.resid_lambdas", Shape{L_}, falling(1.15, 1.05), 0.5);
    if (from_start_) numbers("model.x0_lambdas", Shape{L_}, falling(0.2, 0.05));
    if (unet_) numbers("model.skip_weights", Shape{L_ / 2}, Init::constant(1));
    if (lanes_from_ > 0) {
      numbers("model.lane_post", Shape{L_ - lanes_from_, 2, 2}, attention_to_other_lane());
      numbers("model.lane_resid", Shape{L_ - lanes_from_, 2}, Init::constant(std::sqrt(1.1)));
    }
    for (int i = 0; i < L_; ++i)
      if (adds_values(i)) declare_values(params, c, i);
    if (tail_ != "none")
      for (const int i : {0, 1}) declare_tail(params, c, i);
    if (backout_) numbers("model.backout_lambda", Shape{1}, Init::constant(0.2));
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    if (embed_norm_) fail(Exit::usage, "shortcuts: the plain backbone does not normalise its embeddings");
    if (attn_saved_ > 0) fail(Exit::usage, "shortcuts: the plain backbone's attention reads no saved stream");
    for (const char* name : {"model.resid_lambdas", "model.lane_post", "model.lane_resid"})
      start_at(params, name, Init::constant(1));
    for (const char* name : {"model.x0_lambdas", "model.backout_lambda", "model.value_embeds.", "self_attn.ve_proj.",
                             "model.skip_weights"})
      start_at(params, name, Init::constant(0));
    return "";
  }

  std::string remark(const Config& config) const override {
    const bool none = std::find(adds_values_.begin(), adds_values_.end(), true) == adds_values_.end();
    return none && config.text("value_embeds") == "list"
               ? "note: value_embeds list without value_layers: no layer has a value table"
               : "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    if (embed_norm_) x_ = ops::rmsnorm(build.tape, "embed_norm", embeddings, nullptr, build.config.norm_eps);
    x0_ = keep(x_);
    one_ = build.tape.constant("one", Shape{1}, {1});
    zero_ = build.tape.constant("zero", Shape{1}, {0});
  }

  Value* read(const Sublayer& sublayer) override {
    if (sublayer.mlp) return norm(sublayer, lane_1_ != nullptr ? lane_1_ : x_);
    begin_layer(sublayer);
    return norm(sublayer, saved_ != nullptr ? saved_ : x_);
  }

  QueryKeyValue project(int layer, Value* x) override {
    QueryKeyValue own = Connection::project(layer, x);
    if (adds_values(layer)) {
      const std::string name = str("L", layer, ".value_embed");
      Value* gate =
          ops::channel_gate(build_->tape, name + ".gate", x, build_->parameter(gate_name(layer)), gate_scale_);
      Value* rows =
          projected_
              ? ops::linear(build_->tape, name, x0_, build_->parameter(projection_name(layer)), own.v->shape)
              : ops::embedding(build_->tape, name, build_->tokens, build_->parameter(table_name(layer)), own.v->shape);
      build_->mark("gate", layer, gate);
      build_->mark("value_embed", layer, rows);
      own.v = ops::gated_mix(build_->tape, name + ".mix", own.v, rows, gate);
    }
    if (last_values_ != nullptr) own.v = ops::add(build_->tape, str("L", layer, ".attn.v.tail"), own.v, last_values_);
    return own;
  }

  void write(const Sublayer& sublayer, Value* y) override {
    if (lane_1_ == nullptr) Connection::write(sublayer, y);
    else write_lanes(sublayer, y);
    if (!sublayer.mlp) return;
    put_out_ = sublayer.layer;
    if (!normed_) capture();
  }

  // Two lanes are two streams, of which the first begins before the second does.
  bool has_stream() const override { return lanes_from_ == 0; }
  Value* stream() override { return keep(x_); }
  void set_stream(Value* x) override {
    x_ = x;
    capture();
  }
  Value* hidden() override { return lanes_together("streams.seen"); }

  Value* finish() override {
    Value* x = lanes_together("lanes");
    if (tail_ != "none") x = ops::add(build_->tape, "tail.1.sum", x, tail(1, x, {x0_, middle_, before_last_})[0]);
    if (!backout_) return x;
    Value* minus_one = build_->tape.constant("minus_one", Shape{1}, {-1});
    Value* factor = ops::scale(build_->tape, "backout.factor", build_->parameter("model.backout_lambda"), minus_one);
    return mixed("backout", x, middle_, {one_, 0}, {factor, 0});
  }

 private:
  static std::string table_name(int i) { return str("model.value_embeds.", i, ".weight"); }
  static std::string projection_name(int i) { return layer_name(i, "self_attn.ve_proj.weight"); }
  static std::string gate_name(int i) { return layer_name(i, "self_attn.ve_gate.weight"); }
  static std::string tail_name(int i, const char* rest) { return str("model.mudd_tail.", i, ".", rest); }
  bool adds_values(int i) const { return adds_values_[static_cast<size_t>(i)]; }

  void check_speed_run(const Config& c) const {
    if (lanes_from_ >= L_)
      fail(Exit::usage, "shortcuts: lanes_from ", lanes_from_, " must be a layer of 1..", L_ - 1, ", or 0");
    if (attn_saved_ > 0 && attn_saved_ >= L_ - 1)
      fail(Exit::usage, "shortcuts: attn_saved ", attn_saved_, " must be a layer below ", L_ - 1,
           ", the last, whose attention is to read it, or 0");
    if (tail_ == "none") return;
    if (L_ < 3)
      fail(Exit::usage, "shortcuts: mudd_tail needs 3 layers, not ", L_, "; the middle comes before the last");
    if (mudd_width_ < 1) fail(Exit::usage, "shortcuts: mudd_width ", mudd_width_, " must be 1 at least");
    if (const int64_t width = c.num_key_value_heads * c.head_dim; tail_ == "both" && width != c.hidden_size)
      fail(Exit::usage, "shortcuts: mudd_tail both adds the stream, of ", c.hidden_size, " numbers, to values of ",
           width, "; give as many key/value heads as heads, or mudd_tail residual");
  }

  void declare_values(ParameterTable& params, const Config& c, int i) const {
    const int64_t K = c.num_key_value_heads, width = K * c.head_dim;
    const Init even = Init::uniform(std::sqrt(3.0 / static_cast<double>(c.hidden_size)));
    if (projected_) params.add(projection_name(i), Shape{width, c.hidden_size}, even, Role::input_projection);
    else params.add(table_name(i), Shape{c.vocab_size, width}, even, Role::table, {.wd_mul = 0.1});
    params.add(gate_name(i), Shape{K, gate_channels_}, small_gates(), Role::width_router, {.wd_mul = 1});
  }

  // Weights of three sources: before the last layer for the stream and perhaps its values, behind it for the output.
  void declare_tail(ParameterTable& params, const Config& c, int i) const {
    const int64_t n = i == 0 && tail_ == "both" ? 6 : 3;
    const Init even = Init::uniform(1 / std::sqrt(static_cast<double>(c.hidden_size)));
    const auto add = [&](const char* rest, const Shape& shape, const Init& start, Role role, double wd_mul) {
      params.add(tail_name(i, rest), shape, start, role, {.lr_mul = 0.25, .wd_mul = wd_mul});
    };
    add("w1.weight", Shape{mudd_width_, c.hidden_size}, even, Role::width_router, 1);
    add("w2.weight", Shape{n, mudd_width_}, Init::constant(0), Role::source_router, 1);
    add("bias", Shape{n}, Init::constant(0), Role::source_router, 0);
  }

  // From `first` in the first layer to `last` in the last.
  Init falling(double first, double last) const {
    return {str(first, " to ", last),
            [=, steps = static_cast<double>(std::max<int64_t>(L_ - 1, 1))](uint64_t, uint64_t, int64_t i) {
              return first + (last - first) * static_cast<double>(i) / steps;
            }};
  }
  static Init attention_to_other_lane() {
    return {"1 1.5 1 1", [](uint64_t, uint64_t, int64_t i) { return i % 4 == 1 ? 1.5 : 1.0; }};
  }
  static Init small_gates() {
    const Init even = Init::uniform(0.01);
    return {"uniform(0, 0.02)",
            [even](uint64_t seed, uint64_t stream, int64_t i) { return 0.01 + even.at(seed, stream, i); }};
  }

  // What a layer has put out, behind its second norm where that is of the stream. Loops and Engrams change it later.
  void capture() {
    const int64_t v = std::exchange(put_out_, -1);
    if (v < 0) return;
    if (unet_ && v < L_ / 2) outs_.push_back(keep(x_));
    if (v == L_ / 2 && (backout_ || tail_ != "none")) middle_ = keep(x_);
    if (v == attn_saved_ && attn_saved_ > 0) saved_ = keep(x_);
  }

  // From now on no mixture may write over it.
  Value* keep(Value* x) {
    kept_.insert(x);
    return x;
  }
  // own x + first other. It takes no value twice, and where its first number is not trained it writes over x.
  Value* mixed(const std::string& name, Value* x, Value* other, ops::Scalar own, ops::Scalar first) const {
    const bool overwrites = !own.values->needs_grad;
    if (x == other || (overwrites && kept_.contains(x))) x = ops::copy(build_->tape, name + ".copy", x);
    return ops::value_mix(build_->tape, name, x, other, own, first);
  }
  // Every lane, mixed so.
  void mix_lanes(const std::string& name, Value* other, ops::Scalar own, ops::Scalar first) {
    x_ = mixed(name, x_, other, own, first);
    if (lane_1_ != nullptr) lane_1_ = mixed(name + ".1", lane_1_, other, own, first);
  }

  void begin_layer(const Sublayer& sublayer) {
    const int64_t v = sublayer.layer, decoder = L_ - L_ / 2;
    if (lanes_from_ > 0 && v == lanes_from_) lane_1_ = keep(x_);
    if (unet_ && v >= decoder)
      mix_lanes(sublayer.name() + ".skip", outs_[static_cast<size_t>(L_ - 1 - v)], {one_, 0},
                {build_->parameter("model.skip_weights"), v - decoder});
    if (resid_ || from_start_)
      mix_lanes(sublayer.name() + ".lambdas", x0_,
                resid_ ? ops::Scalar{build_->parameter("model.resid_lambdas"), v} : ops::Scalar{one_, 0},
                from_start_ ? ops::Scalar{build_->parameter("model.x0_lambdas"), v} : ops::Scalar{zero_, 0});
    if (tail_ != "none" && v == L_ - 1) mix_before_last();
  }

  void mix_before_last() {
    before_last_ = x_ == middle_ ? ops::copy(build_->tape, "tail.stream", x_) : x_;  // mixtures take no value twice
    keep(before_last_);
    const std::vector<Value*> sums = tail(0, before_last_, {x0_, middle_, before_last_});
    x_ = ops::add(build_->tape, "tail.0.sum", before_last_, sums[0]);
    if (sums.size() > 1) last_values_ = sums[1];
  }

  // Sums of the sources by numbers that a small network computes of x.
  std::vector<Value*> tail(int i, Value* x, std::vector<Value*> sources) const {
    const std::string name = str("tail.", i);
    const auto row = [&](const char* rest) { return build_->parameter(tail_name(i, rest)); };
    const int64_t B = build_->B, T = build_->T;
    Tape& tape = build_->tape;
    Value* hidden = ops::linear(tape, name + ".w1", x, row("w1.weight"), Shape{B, T, mudd_width_});
    hidden = ops::gelu(tape, name + ".gelu", hidden);
    Value* weight = ops::linear(tape, name + ".w2", hidden, row("w2.weight"), Shape{B, T, row("bias")->shape[0]});
    weight = ops::scaled(tape, name + ".weight", weight, 0.1);
    build_->mark("tail", i, weight);  // (B, T, 3 or 6), without the bias
    Value* base = ops::scale(tape, name + ".base", row("bias"), tape.constant(name + ".tenth", Shape{1}, {0.1}));
    return ops::multiway_mix(tape, name, {.sources = std::move(sources), .weight = weight, .base = base},
                             build_->config.norm_eps);
  }

  void write_lanes(const Sublayer& sublayer, Value* y) {
    const int64_t at = 2 * (sublayer.layer - lanes_from_) + (sublayer.mlp ? 1 : 0);
    const ops::Scalar own{build_->parameter("model.lane_resid"), at};
    Value* post = build_->parameter("model.lane_post");
    keep(x_), keep(lane_1_);  // one of them is what the sublayer's norm has read
    x_ = mixed(sublayer.name() + ".lane_0", x_, y, own, {post, 2 * at});
    lane_1_ = mixed(sublayer.name() + ".lane_1", lane_1_, y, own, {post, 2 * at + 1});
  }
  // The stream, or the mean of both.
  Value* lanes_together(const std::string& name) const {
    if (lane_1_ == nullptr) return x_;
    return ops::scaled(build_->tape, name, ops::add(build_->tape, name + ".sum", x_, lane_1_), 0.5);
  }

  void read_layers(const std::string& text) {
    int64_t last = -1;
    for (const auto& layer : known_json(text)) {
      if (!layer.is_number_integer() || layer <= last || layer >= L_)
        fail(Exit::usage, "shortcuts: value_layers ", excerpt(text), " must be layers below ", L_,
             ", ascending, as in [1,3]");
      last = layer;
      adds_values_[static_cast<size_t>(last)] = true;
    }
  }

  int64_t L_, gate_channels_, lanes_from_, attn_saved_, mudd_width_;
  double gate_scale_;
  bool resid_, from_start_, backout_, embed_norm_, unet_, projected_, normed_;
  int64_t put_out_ = -1;  // the layer whose output is still to be captured; -1: none
  std::string tail_;
  std::vector<bool> adds_values_;  // by layer
  std::vector<Value*> outs_;       // of the first half of the layers, for unet
  std::unordered_set<Value*> kept_;
  Value *x0_ = nullptr, *middle_ = nullptr, *saved_ = nullptr, *one_ = nullptr, *zero_ = nullptr;
  Value* lane_1_ = nullptr;       // x_ is lane 0
  Value* before_last_ = nullptr;  // what the tail's first network has read
  Value* last_values_ = nullptr;  // what it adds to the last layer's values
};

}  // namespace

Architecture shortcuts_architecture() {
  return {
      "shortcuts",
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
       {"embed_norm", "false", "true or false: the embedding is normalised", {}},
       {"unet", "false", "true or false: the last half of the layers reads the first half's outputs, in reverse", {}},
       {"value_from",
        "tables",
        "tables or x0: values are looked up by token, or a product of the embedding",
        {"tables", "x0"},
        {{"value_embeds", {"alternate", "list"}}}},
       {"lanes_from", "0", "an integer: from this layer on attention and MLP read a stream each; 0: one", {}},
       {"attn_saved", "0", "an integer: behind this layer attention reads what the layer put out; 0: none", {}},
       {"mudd_tail",
        "none",
        "none, residual or both: the last layer's stream and the output are mixed token by token, and its values",
        {"none", "residual", "both"}},
       {"mudd_width",
        "64",
        "an integer above 0: hidden width of the networks that mix them",
        {},
        {{"mudd_tail", {"residual", "both"}}}}},
      [](const Config& config) { return std::make_unique<Shortcuts>(config); }};
}

}  // namespace crossply
