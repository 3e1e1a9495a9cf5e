// Manifold-constrained hyper-connections: E residual streams, and every token computes bounded coefficients from all of
// its streams at once. train/train_mhc.cpp explains them; kernels/depth/streams/mhc.h is the arithmetic.
#include <cmath>

#include "models/registry.h"

namespace crossply {
namespace {

class Mhc : public Connection {
 public:
  explicit Mhc(const Config& config)
      : E_(config.integer("hc_mult")),
        previous_(config.text("reads") == "previous"),
        one_hot_(config.text("start") == "one_hot") {
    const std::string mixing = config.text("mixing");
    const int64_t iterations = config.integer("hc_sinkhorn_iters"), most = max_streams_of(mixing);
    const double eps = config.number("hc_eps");
    if (E_ < 1 || E_ > most) fail(Exit::usage, "mhc: hc_mult ", E_, " must be in 1..", most, " with mixing ", mixing);
    if (iterations < 1 || iterations > max_sinkhorn_iterations)
      fail(Exit::usage, "mhc: hc_sinkhorn_iters ", iterations, " must be in 1..", max_sinkhorn_iterations);
    if (!(eps >= 0 && eps <= 1)) fail(Exit::usage, "mhc: hc_eps ", eps, " must be in 0..1");
    form_ = {mixing == "sinkhorn"   ? Mixing::sinkhorn
             : mixing == "identity" ? Mixing::identity
                                    : Mixing::permutations,
             iterations, eps, config.norm_eps};
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int layer = 0; layer < config.num_hidden_layers; ++layer)
      for (const bool mlp : {false, true}) declare_site(params, {layer, mlp}, config);
    if (previous_) return;
    params.add("model.hc_head.hc_fn", Shape{E_, E_ * config.hidden_size}, Init::normal(config.initializer_range),
               Role::width_router, {.wd_mul = 1});
    params.add("model.hc_head.hc_base", Shape{E_}, Init::constant(0), Role::scalar, {.wd_mul = 0});
    params.add("model.hc_head.hc_scale", Shape{1}, Init::constant(0.01), Role::scalar, {.wd_mul = 0});
  }

  std::string start_as_plain(ParameterTable&, const Config&) const override {
    fail(
        Exit::usage,
        "mhc computes the plain backbone where its scales and hc_eps are 0, but for the rounding of means, not bit for "
        "bit; train it from scratch");
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    streams_ = {ops::streams_expand(build.tape, "streams", embeddings, E_), nullptr, embeddings};
  }

  Value* read(const Sublayer& sublayer) override {
    auto parameter = [&](const char* name) { return build_->parameter(rows(sublayer) + name); };
    const ops::HyperRead own =
        ops::mhc_read(build_->tape, sublayer.name() + ".read", streams_.streams, streams_.squares,
                      {parameter("fn"), parameter("base"), parameter("scale")}, form_, !previous_);
    Value* x = previous_ ? streams_.x : own.x;
    coef_ = own.coef;
    build_->mark(sublayer.mlp ? "mlp_mixing" : "attn_mixing", sublayer.layer,
                 coef_);  // (B, T, E, E+2): pre, comb, post
    build_->mark(sublayer.mlp ? "mlp_read" : "attn_read", sublayer.layer, x);
    return norm(sublayer, x);
  }

  void write(const Sublayer& sublayer, Value* y) override {
    build_->mark(sublayer.mlp ? "mlp_output" : "attn_output", sublayer.layer, y);
    streams_ = ops::hyper_write_on(build_->tape, sublayer.name() + ".write", streams_.streams, coef_, y, previous_);
  }

  // Squares, and what the next sublayer would read by the last one's coefficients, were those of the old streams.
  Value* stream() override { return streams_.streams; }
  void set_stream(Value* streams) override {
    streams_ = {streams, nullptr, nullptr};
    if (!previous_) return;
    Value* by = coef_ != nullptr ? coef_ : first_of_all(streams->name + ".first", streams->shape);
    streams_.x = ops::hyper_reread(build_->tape, streams->name + ".read", streams, by);
  }
  Value* finish() override {
    Value* out = previous_ ? streams_.x : merged();
    build_->mark("last_out", 0, out);
    return out;
  }
  int64_t streams() const override { return E_; }
  Value* hidden() override { return ops::streams_sum(build_->tape, "streams.seen", streams_.streams); }

 private:
  static int64_t max_streams_of(const std::string& mixing) {
    return mixing == "permutations" ? max_permuted_streams : 8;
  }
  static std::string rows(const Sublayer& sublayer) {
    return layer_name(sublayer.layer, sublayer.mlp ? "ffn_hc." : "attn_hc.");
  }

  // Coefficients that read the first stream, as the first sublayer does with reads previous.
  Value* first_of_all(const std::string& name, const Shape& streams) const {
    const Shape shape{streams[0], streams[1], E_, E_ + 2};
    std::vector<double> numbers(static_cast<size_t>(shape.numel()));
    for (size_t i = 0; i < numbers.size(); i += static_cast<size_t>(E_ * (E_ + 2))) numbers[i] = 1;
    return build_->tape.constant(name, shape, numbers);
  }

  // Streams that are equal are passed on as they are, and the output is added to each: LLaMA's function, but for the
  // norms' eps, as long as they stay equal. What parts them is fn, where they are read evenly; where every sublayer
  // reads another one most, the gradients of post do so in the first step.
  void declare_site(ParameterTable& params, const Sublayer& sublayer, const Config& config) const {
    const bool permutations = form_.mixing == Mixing::permutations;
    const double mean = E_ > 1 ? -std::log(static_cast<double>(E_ - 1)) : 0;
    auto start = [E = E_, permutations, mean, own = one_hot_ ? (2 * sublayer.layer + sublayer.mlp) % E_ : -1](
                     uint64_t, uint64_t, int64_t i) {
      const int64_t of_comb = i - 2 * E;
      if (i < E) return own < 0 ? mean : i == own ? 1. : -1.;
      return of_comb < 0 || (permutations ? of_comb == 0 : of_comb % (E + 1) == 0) ? 0. : -8.;
    };
    const int64_t M = mhc_rows(form_.mixing, E_);
    params.add(rows(sublayer) + "fn", Shape{M, E_ * config.hidden_size}, Init::normal(config.initializer_range),
               Role::width_router, {.wd_mul = 1, .matrix = true});
    params.add(rows(sublayer) + "base", Shape{M},
               Init{one_hot_ ? "1 of E, 1, the identity" : "1/E, 1, the identity", start}, Role::scalar, {.wd_mul = 0});
    params.add(rows(sublayer) + "scale", Shape{mhc_groups(form_.mixing)}, Init::constant(0.01), Role::scalar,
               {.wd_mul = 0});
  }

  // By weights of its own.
  Value* merged() const {
    MhcForm last = form_;
    last.mixing = Mixing::merge;
    auto parameter = [&](const char* name) { return build_->parameter(std::string("model.hc_head.") + name); };
    build_->mark("last_streams", 0, streams_.streams);  // (B, T, E, C)
    return ops::mhc_read(build_->tape, "streams.read", streams_.streams, streams_.squares,
                         {parameter("hc_fn"), parameter("hc_base"), parameter("hc_scale")}, last, true)
        .x;
  }

  int64_t E_;
  bool previous_, one_hot_;
  MhcForm form_{};
  ops::HyperWritten streams_{};  // x: what the next sublayer reads, with reads previous
  Value* coef_ = nullptr;        // of the sublayer in progress
};

}  // namespace

Architecture mhc_architecture() {
  const std::vector<std::string> reads = {"own", "previous"}, starts = {"even", "one_hot"},
                                 mixings = {"sinkhorn", "identity", "permutations"};
  return {
      "mhc",
      "several residual streams, mixed by matrices whose rows and columns sum to 1",
      {{"hc_mult", "4", "an integer in 1..8 (permutations: 1..4): how many streams", {}},
       {"mixing", "sinkhorn", "sinkhorn, identity or permutations: what mixes the streams among themselves", mixings},
       {"reads", "own", "own or previous: whose weights a sublayer reads by, its own or the one's before", reads},
       {"start", "even", "even or one_hot: what a sublayer reads at first, all streams or one more than others",
        starts},
       {"hc_sinkhorn_iters", "20", "an integer in 1..64: iterations of Sinkhorn", {}, {{"mixing", {"sinkhorn"}}}},
       {"hc_eps", "1e-06", "a number in 0..1: added to sums and reading weights", {}}},
      [](const Config& config) { return std::make_unique<Mhc>(config); }};
}

}  // namespace crossply
