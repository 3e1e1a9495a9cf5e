// ResFormer: attention uses values mixed with those of the first layer. train/train_resformer.cpp explains it, and what
// its variants are.
#include <algorithm>

#include "models/registry.h"

namespace crossply {
namespace {

class ResFormer : public Connection {
 public:
  explicit ResFormer(const Config& config)
      : variant_(config.text("variant")),
        L_(config.num_hidden_layers),
        last_k_(config.integer("last_k")),
        frozen_(config.text("lambda_scale") == "frozen"),
        own_frozen_(config.text("lambda2") == "frozen") {
    if (variant_ == "sparse" && last_k_ == 0) last_k_ = std::max<int64_t>(1, 3 * L_ / 8);
  }

  void declare(ParameterTable& params, const Config&) const override {
    auto scalar = [&](const std::string& name, Shape shape, double start) {
      params.add(name, shape, Init::constant(start), Role::scalar, {.wd_mul = 0});
    };
    if (variant_ == "plus" && L_ > 1) {
      scalar("model.lambda_manager.lambda_scale", Shape{1}, static_cast<double>(L_));
      if (frozen_) params.at("model.lambda_manager.lambda_scale").lr_mul = 0;
      scalar("model.lambda_manager.lambda_logits", Shape{L_ - 1}, 0);
    }
    for (int n = 1; n < L_; ++n) {
      if (!mixes(n)) continue;
      if (variant_ == "svformer") remove_module(params, n, "self_attn.v_proj");
      if (variant_ == "learnable") scalar(scalar_name(n, "lambda1"), Shape{1}, 0.5);
      if (variant_ == "learnable" || variant_ == "plus") scalar(scalar_name(n, "lambda2"), Shape{1}, 0.5);
      if (own_frozen_ && variant_ == "plus") params.at(scalar_name(n, "lambda2")).lr_mul = 0;
    }
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    if (variant_ != "plus" && variant_ != "learnable")
      fail(Exit::usage, "resformer: variant ", variant_,
           " mixes in the first layer's values by a fixed number; plus and learnable can start as the plain backbone");
    if (frozen_) fail(Exit::usage, "resformer: lambda_scale frozen at 0 would stay the plain backbone; take learned");
    start_at(params, "lambda_scale", Init::constant(0));
    start_at(params, "value_residual_mixing.lambda1", Init::constant(0));
    start_at(params, "value_residual_mixing.lambda2", Init::constant(1));
    return "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    if (L_ < 2) return;
    if (variant_ == "plus") {
      Value* shares = ops::softmax(build.tape, "lambda.shares", build.parameter("model.lambda_manager.lambda_logits"));
      budget_ = ops::scale(build.tape, "lambda", shares, build.parameter("model.lambda_manager.lambda_scale"));
    } else if (variant_ != "learnable" && variant_ != "svformer") {
      const double first = variant_ == "identity" ? 0.5 : variant_ == "constant" ? 2 : 5;
      fixed_ = build.tape.constant("lambda", Shape{2}, {variant_ == "identity" ? 0.5 : 1, first});
    }
  }

  QueryKeyValue project(int layer, Value* x) override {
    if (mixes(layer) && variant_ == "svformer") {
      const auto heads = linears(layer, x, {queries(layer), keys(layer)});
      return {heads[0], heads[1], v1_};
    }
    QueryKeyValue own = Connection::project(layer, x);
    if (layer == 0) v1_ = own.v;
    else if (mixes(layer))
      own.v = ops::value_mix(build_->tape, str("L", layer, ".value_mix"), own.v, v1_, own_weight(layer),
                             first_weight(layer));
    return own;
  }

 private:
  static std::string scalar_name(int n, const std::string& which) {
    return layer_name(n, "self_attn.value_residual_mixing." + which);
  }
  bool mixes(int n) const { return takes_first(n, last_k_, L_); }

  ops::Scalar own_weight(int n) const {
    return fixed_ != nullptr ? ops::Scalar{fixed_, 0} : ops::Scalar{build_->parameter(scalar_name(n, "lambda2"))};
  }
  ops::Scalar first_weight(int n) const {
    if (fixed_ != nullptr) return {fixed_, 1};
    return budget_ != nullptr ? ops::Scalar{budget_, n - 1} : ops::Scalar{build_->parameter(scalar_name(n, "lambda1"))};
  }

  std::string variant_;
  int64_t L_, last_k_;
  bool frozen_, own_frozen_;
  Value *v1_ = nullptr, *budget_ = nullptr, *fixed_ = nullptr;  // fixed: own, first
};

}  // namespace

Architecture resformer_architecture() {
  const std::vector<std::string> variants = {"plus", "identity", "constant", "learnable", "sparse", "svformer"},
                                 scales = {"learned", "frozen"};
  return {"resformer",
          "attention's values are mixed with the first layer's",
          {{"variant", "plus", "plus, identity, constant, learnable, sparse or svformer", variants},
           {"last_k", "0", "an integer: how many last layers mix (0: all from the second on)", {}},
           {"lambda_scale",
            "learned",
            "learned or frozen (as bf16 weights leave it): the sum of plus's shares",
            scales,
            {{"variant", {"plus"}}}},
           {"lambda2",
            "learned",
            "learned or frozen (as SATFormer's text has it): what plus multiplies a layer's own values by",
            scales,
            {{"variant", {"plus"}}}}},
          [](const Config& config) { return std::make_unique<ResFormer>(config); }};
}

}  // namespace crossply
