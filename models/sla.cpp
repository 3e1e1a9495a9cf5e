// Skip-layer attention (sla) and the simplified adaptive layerwise attention (ala): some query heads attend to the keys
// and values that an earlier layer has computed already. train/train_sla.cpp and train/train_ala.cpp explain them.
#include <algorithm>

#include "models/registry.h"

namespace crossply {
namespace {

class SkipAttention : public Connection {
 public:
  std::string start_as_plain(ParameterTable&, const Config& c) const override {
    for (int layer = 0; layer < c.num_hidden_layers; ++layer)
      for (int64_t j = 0; j < c.num_attention_heads; ++j)
        if (source(layer, j) != layer)
          fail(Exit::usage, c.arch, ": head ", j, " of layer ", layer, " reads the keys of layer ", source(layer, j),
               " from the start, so it cannot start as the plain backbone");
    return "";
  }

  KeyValue kv(int layer, KeyValue own) override {
    const int64_t H = build_->config.num_attention_heads, K = build_->config.num_key_value_heads, group = H / K;
    layers_.push_back(own);
    std::vector<int> read;  // the layers, each once
    std::vector<ops::Head> choice;
    for (int64_t j = 0; j < H; ++j) {
      const int from = source(layer, j);
      const auto at = std::find(read.begin(), read.end(), from);
      choice.push_back({static_cast<int>(at - read.begin()), j / group});
      if (at == read.end()) read.push_back(from);
    }
    if (read == std::vector<int>{layer}) return own;
    KeyValue chosen{};
    const std::string name = "L" + std::to_string(layer) + ".select";
    for (Value* KeyValue::*part : {&KeyValue::k, &KeyValue::v}) {
      std::vector<Value*> sources;
      for (const int from : read) sources.push_back(layers_[static_cast<size_t>(from)].*part);
      chosen.*part =
          ops::select_heads(build_->tape, name + (part == &KeyValue::k ? ".k" : ".v"), sources, grouped(choice, group));
    }
    return chosen;
  }

 protected:
  // The layer whose keys and values query head j of `layer` reads; layers from 0.
  virtual int source(int layer, int64_t j) const = 0;

 private:
  // One choice for each group of query heads where all of a group read the same: attention then shares their keys.
  static std::vector<ops::Head> grouped(const std::vector<ops::Head>& choice, int64_t group) {
    std::vector<ops::Head> shared;
    for (size_t j = 0; j < choice.size(); j += static_cast<size_t>(group)) {
      for (size_t i = j; i < j + static_cast<size_t>(group); ++i)
        if (choice[i].source != choice[j].source) return choice;
      shared.push_back(choice[j]);
    }
    return shared;
  }

  std::vector<KeyValue> layers_;
};

class Sla : public SkipAttention {
 public:
  // 0 takes what the paper's three sizes have in common: three quarters of the layers, half of the heads.
  explicit Sla(const Config& c) : distance_(c.integer("distance")), heads_(c.integer("heads")) {
    if (distance_ == 0) distance_ = std::max<int64_t>(1, 3 * c.num_hidden_layers / 4);
    if (heads_ == 0) heads_ = c.num_attention_heads / 2;
    if (heads_ > c.num_attention_heads)
      fail(Exit::usage, "sla: heads ", heads_, " of ", c.num_attention_heads, " query heads cannot skip; lower it");
  }

 private:
  int source(int layer, int64_t j) const override {
    return layer >= distance_ && j < heads_ ? layer - static_cast<int>(distance_) : layer;
  }
  int64_t distance_, heads_;
};

class Ala : public SkipAttention {
 public:
  explicit Ala(const Config& c) : stride_(c.integer("stride")), L_(c.num_hidden_layers), self_(c.flag("include_self")) {
    if (stride_ < 1) fail(Exit::usage, "ala: stride ", stride_, " must be at least 1");
  }

 private:
  int source(int layer, int64_t j) const override {
    const int64_t first = self_ ? 0 : 1, M = (L_ + stride_ - 1) / stride_ - first;
    return layer + 1 < L_ || M < 1 ? layer : layer - static_cast<int>(stride_ * (first + j % M));
  }
  int64_t stride_, L_;
  bool self_;  // the last layer's own keys and values are among the sources
};

}  // namespace

Architecture sla_architecture() {
  return {"sla",
          "some heads attend to the keys and values of an earlier layer",
          {{"distance", "0", "an integer: how many layers below (0: three quarters of all)", {}},
           {"heads", "0", "an integer: how many query heads do (0: half of them)", {}}},
          [](const Config& config) { return std::make_unique<Sla>(config); }};
}

Architecture ala_architecture() {
  return {"ala",
          "the last layer's heads attend to the keys and values of every second layer",
          {{"stride", "2", "an integer: every so many-th layer, counted from the last one", {}},
           {"include_self", "true", "true or false: the last layer is itself among these", {}}},
          [](const Config& config) { return std::make_unique<Ala>(config); }};
}

}  // namespace crossply
