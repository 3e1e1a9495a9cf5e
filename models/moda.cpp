// MoDA: a layer's queries attend, in one softmax, to the sequence and to what lower layers kept for the same token:
// their keys and values, and a key and a value that each makes of its MLP's input. train/train_moda.cpp explains it;
// kernels/attention/depth_merge.h is the joint softmax.
#include <algorithm>
#include <map>

#include "models/registry.h"

namespace crossply {
namespace {

class Moda : public Connection {
 public:
  explicit Moda(const Config& config)
      : start_(config.integer("depth_start")),
        window_(config.integer("depth_window")),
        layers_(config.num_hidden_layers),
        ffn_kv_(config.flag("ffn_kv")) {
    if (start_ < 1 || start_ > layers_)
      fail(Exit::usage, "moda: depth_start ", start_, " must be 1..", layers_, " for ", layers_, " layers");
    if (window_ < 0) fail(Exit::usage, "moda: depth_window ", window_, " must be at least 0");
  }

  void declare(ParameterTable& params, const Config& c) const override {
    const Shape projection{c.num_key_value_heads * c.head_dim, c.hidden_size};
    const Init normal = Init::normal(c.initializer_range);
    for (int layer = 0; layer < c.num_hidden_layers && ffn_kv_; ++layer) {
      if (!is_read(layer)) continue;
      for (const char* name : {"mlp.depth_k_proj.weight", "mlp.depth_v_proj.weight"})
        params.add(layer_name(layer, name), projection, normal, Role::input_projection);
      if (c.qk_norm)
        params.add(layer_name(layer, "mlp.depth_k_norm.weight"), Shape{c.head_dim}, Init::constant(1), Role::norm);
    }
  }

  std::string start_as_plain(ParameterTable&, const Config&) const override {
    if (start_ < layers_)
      fail(Exit::usage,
           "moda: slots take a share of the softmax even where their keys and values are 0, and no weight turns them "
           "off; train it from scratch");
    return "";
  }

  std::string remark(const Config&) const override {
    if (start_ >= layers_) return str("note: depth_start ", start_, " is above the last layer, so moda adds nothing");
    if (window_ >= layers_ - 1)
      return str("note: depth_window ", window_, " has no effect: no layer has more than ", layers_ - 1, " below it");
    return "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    slots_.clear();
  }

  // Of what the MLP reads the layer also makes a slot.
  void offer(const Sublayer& sublayer, Value* x) override {
    if (sublayer.mlp && ffn_kv_ && is_read(sublayer.layer)) slots_[sublayer.layer].push_back(slot_of_mlp(sublayer, x));
  }

  Value* attend(int layer, QueryKeyValue own) override {
    std::vector<Value*> keys, values;
    for (int64_t u = lowest_read(layer); u < layer; ++u)
      for (const auto& [k, v] : slots_.at(u)) keys.push_back(k), values.push_back(v);
    if (is_read(layer)) slots_[layer].push_back({own.k, own.v});
    return ops::attention(build_->tape, Sublayer{layer, false}.name(), own.q, own.k, own.v, attended(*build_, layer),
                          keys, values);
  }

 private:
  // The first layer whose slots this one reads; itself if it reads none.
  int64_t lowest_read(int64_t layer) const {
    if (layer < start_) return layer;
    return window_ == 0 ? 0 : std::max<int64_t>(0, layer - window_);
  }
  bool is_read(int64_t layer) const {
    for (int64_t reader = layer + 1; reader < layers_; ++reader)
      if (lowest_read(reader) <= layer) return true;
    return false;
  }

  // Projected from what the MLP reads; the key is normed and rotated as attention's own.
  KeyValue slot_of_mlp(const Sublayer& mlp, Value* x) const {
    const Config& c = build_->config;
    const std::string name = mlp.name() + ".depth";
    const Shape heads{build_->B, build_->T, c.num_key_value_heads, c.head_dim};
    const auto rows = [&](const char* row) { return build_->parameter(layer_name(mlp.layer, row)); };
    const auto kv = ops::linears(
        build_->tape, name, x,
        {{name + ".k", rows("mlp.depth_k_proj.weight"), heads}, {name + ".v", rows("mlp.depth_v_proj.weight"), heads}});
    Value* k = kv[0];
    if (c.qk_norm) k = ops::rmsnorm(build_->tape, name + ".k_norm", k, rows("mlp.depth_k_norm.weight"), c.qk_norm_eps);
    if (build_->rope != nullptr) k = ops::rope(build_->tape, name + ".k_rope", k, build_->rope);
    build_->mark("depth_key", mlp.layer, k), build_->mark("depth_value", mlp.layer, kv[1]);
    return {k, kv[1]};
  }

  int64_t start_, window_, layers_;
  bool ffn_kv_;
  std::map<int64_t, std::vector<KeyValue>> slots_;  // of the layers so far that others read
};

}  // namespace

Architecture moda_architecture() {
  return {"moda",
          "attention to the sequence and, in one softmax, to what lower layers kept for the token",
          {{"depth_start",
            "1",
            "an integer: the first layer that reads lower ones, from 1; the number of layers: none",
            {}},
           {"depth_window", "0", "an integer: so many layers right below are read; 0: all", {}},
           {"ffn_kv", "true", "true or false: each layer also keeps a key and a value of its MLP's input", {}}},
          [](const Config& config) { return std::make_unique<Moda>(config); }};
}

}  // namespace crossply
