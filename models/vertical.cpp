// Vertical attention: before every block, the stream is a convex mixture of all representations so far.
// train/train_vertical.cpp explains it; kernels/depth/depth_mix.h is the mixture.
#include <cmath>
#include <optional>

#include "models/registry.h"

namespace crossply {
namespace {

constexpr double norm_eps = 1e-12;  // added to squared norms

class Vertical : public Connection {
 public:
  explicit Vertical(const Config& config)
      : map_(config.text("map")),
        residual_(config.flag("residual")),
        diagonal_(config.number("init_diag")),
        mirror_(config.integer("mirror_offset")) {
    if (mirror_ < 1 || mirror_ > 2) fail(Exit::usage, "vertical: mirror_offset ", mirror_, " must be 1 or 2");
    if (!(std::abs(diagonal_) <= 1e4))
      fail(Exit::usage, "vertical: init_diag ", diagonal_, " must be within -1e4..1e4");
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int l = 0; l < config.num_hidden_layers && map_ == "learned"; ++l) {
      const Init start{str("0 .. 0 ", diagonal_),
                       [l, c = diagonal_](uint64_t, uint64_t, int64_t i) { return i == l ? c : 0.0; }};
      params.add(score_name(l), Shape{l + 1}, start, Role::source_router, {.lr_mul = 10, .wd_mul = 1});
    }
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    if (map_ != "learned" || !residual_)
      fail(Exit::usage, "vertical: only map learned with residual true can start as the plain backbone");
    for (Parameter& row : params.rows())
      if (row.name.ends_with("vertical_attention.scores"))
        row.init = {"0 .. 0 1000",
                    [last = row.shape[0] - 1](uint64_t, uint64_t, int64_t i) { return i == last ? 1000.0 : 0.0; }};
    return "its scores read the layer below alone, and so far from the others they have no gradient: it stays the "
           "plain backbone until something else moves them";
  }

  void begin(const Build& build, Value* embeddings) override {
    build_ = &build;
    history_.emplace(build.tape, /*by_norm=*/true, norm_eps);
    x_ = history_->add("h1", embeddings);
  }

  Value* read(const Sublayer& sublayer) override {
    if (!sublayer.mlp) {
      const std::vector<int> read = sources(sublayer.layer);  // of one source the mixture is the source itself
      Value* scores = map_ == "learned" ? build_->parameter(score_name(sublayer.layer)) : nullptr;
      if (read.size() > 1) x_ = history_->attend(str("v", sublayer.layer + 1), read, scores);
      build_->mark("mixed", sublayer.layer, x_);
    }
    return norm(sublayer, x_);
  }

  void write(const Sublayer& sublayer, Value* y) override {
    if (residual_) Connection::write(sublayer, y);
    else x_ = y;
    out_ = x_;
    if (sublayer.mlp && sublayer.layer + 1 < build_->config.num_hidden_layers)
      x_ = history_->add(str("h", sublayer.layer + 2), x_);
  }

  Value* hidden() override { return out_; }
  bool has_stream() const override { return false; }

 private:
  static std::string score_name(int l) { return layer_name(l, "vertical_attention.scores"); }

  // The representations that layer l (from 0) reads, counted from 0, ascending; the last one is the ordinary stream.
  std::vector<int> sources(int l) const {
    const int L = static_cast<int>(build_->config.num_hidden_layers);
    std::vector<int> list;
    for (int i = 0; i <= l; ++i) {
      const bool inet = i < 2, unet = l >= (L + 1) / 2 && i == L - 2 - l + mirror_;
      if (i == l || map_ == "learned" || (map_ == "inet" ? inet : unet)) list.push_back(i);
    }
    return list;
  }

  std::string map_;
  bool residual_;
  double diagonal_;       // how the scores of the ordinary stream start
  int64_t mirror_;        // unet: 1 mirrors what the blocks read, 2 what they put out
  Value* out_ = nullptr;  // of the last block, before its norms are taken
  std::optional<ops::DepthHistory> history_;
};

}  // namespace

Architecture vertical_architecture() {
  const char* residual = "true or false: false lets sublayers replace their input, as the paper's equations read";
  return {"vertical",
          "a block reads a softmax mixture of all earlier outputs",
          {{"map", "learned", "learned, unet or inet", {"learned", "unet", "inet"}},
           {"residual", "true", residual, {}},
           {"init_diag",
            "0.0",
            "a number: how the score of the ordinary stream starts (4: nearly LLaMA)",
            {},
            {{"map", {"learned"}}}},
           {"mirror_offset",
            "1",
            "1 or 2: unet reads the input or the output of the mirrored block",
            {},
            {{"map", {"unet"}}}}},
          [](const Config& config) { return std::make_unique<Vertical>(config); }};
}

}  // namespace crossply
