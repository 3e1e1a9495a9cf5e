// DenseFormer: after a block, the stream becomes a learned combination of all outputs so far.
// train/train_denseformer.cpp explains it.
#include <optional>

#include "models/registry.h"

namespace crossply {
namespace {

class DenseFormer : public Connection {
 public:
  explicit DenseFormer(const Config& config)
      : dilation_(config.integer("dilation")), period_(config.integer("period")) {
    if (dilation_ < 1 || period_ < 1)
      fail(Exit::usage, "denseformer: dilation ", dilation_, " and period ", period_, " must be at least 1");
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int i = 1; i <= config.num_hidden_layers; ++i) {
      if (i % period_ != 0) continue;
      const int64_t S = static_cast<int64_t>(sources(i).size());
      const Init last_one{"0 .. 0 1", [S](uint64_t, uint64_t, int64_t j) { return j == S - 1 ? 1.0 : 0.0; }};
      params.add(weight_name(i), Shape{1, S}, last_one, Role::source_router, {.wd_mul = 0});
    }
  }

  // A new model's weights are the identity anyway.
  std::string start_as_plain(ParameterTable&, const Config&) const override { return ""; }

  void begin(const Build& build, Value* embeddings) override {
    build_ = &build;
    history_.emplace(build.tape, /*by_norm=*/false);
    x_ = history_->add("X0", embeddings);
  }

  void write(const Sublayer& sublayer, Value* y) override {
    Connection::write(sublayer, y);
    if (!sublayer.mlp) return;
    const int i = sublayer.layer + 1;
    x_ = out_ = history_->add(str("X", i), x_);
    if (i % period_ == 0) x_ = history_->mix(str("Y", i), sources(i), build_->parameter(weight_name(i)));
    if (i < build_->config.num_hidden_layers) build_->mark("mixed", i, x_);
  }

  Value* hidden() override { return out_; }
  bool has_stream() const override { return false; }

 private:
  static std::string weight_name(int i) { return str("model.dwa_modules.alphas.", i - 1, ".weight"); }

  std::vector<int> sources(int i) const {
    std::vector<int> list;
    for (int64_t j = i % dilation_; j <= i; j += dilation_) list.push_back(static_cast<int>(j));
    return list;
  }

  int64_t dilation_, period_;
  Value* out_ = nullptr;  // of the last block
  std::optional<ops::DepthHistory> history_;
};

}  // namespace

Architecture denseformer_architecture() {
  return {"denseformer",
          "the stream becomes a learned combination of all earlier outputs",
          {{"dilation", "1", "an integer: a combination reads every so many-th output", {}},
           {"period", "1", "an integer: a combination after every so many blocks", {}}},
          [](const Config& config) { return std::make_unique<DenseFormer>(config); }};
}

}  // namespace crossply
