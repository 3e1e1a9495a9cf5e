// Depth-Attention: before it attends over the sequence, a layer attends over the depth of each token: its values become
// a mixture with those of some lower layers. train/train_depth_attention.cpp explains it;
// kernels/depth/depth_attention.h is the mixture. mixing_key.i: a layer's own keys, by which it is chosen.
#include <algorithm>

#include "models/registry.h"

namespace crossply {
namespace {

class DepthAttention : public Connection {
 public:
  explicit DepthAttention(const Config& config)
      : start_(config.integer("depth_start")),
        stride_(config.integer("depth_stride")),
        recent_(config.integer("depth_recent")) {
    const int64_t L = config.num_hidden_layers;
    if (start_ < 1 || start_ > L)
      fail(Exit::usage, "depth_attention: depth_start ", start_, " must be 1..", L, " for ", L, " layers");
    if (stride_ < 0) fail(Exit::usage, "depth_attention: depth_stride ", stride_, " must be at least 0");
    if (recent_ < 0) fail(Exit::usage, "depth_attention: depth_recent ", recent_, " must be at least 0");
    if (stride_ == 0) stride_ = std::max<int64_t>(1, L / 2);
  }

  std::string start_as_plain(ParameterTable&, const Config& config) const override {
    if (start_ < config.num_hidden_layers)
      fail(Exit::usage,
           "depth_attention: a layer that reads lower layers averages values at least, and has no weight that turns "
           "this off; train it from scratch");
    return "";
  }

  std::string remark(const Config& config) const override {
    const int64_t L = config.num_hidden_layers;
    if (start_ >= L)
      return str("note: depth_start ", start_, " is above the last layer, so depth_attention adds nothing");
    if (recent_ > 0 && stride_ == 1)
      return "note: depth_recent has no effect: with every layer a multiple of the stride, all are sources already";
    if (recent_ >= L - 1)
      return str("note: depth_stride has no effect: depth_recent ", recent_, " makes a source of every lower layer");
    return "";
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    keys_.clear(), values_.clear();
  }

  // Later layers, and the cache, see the values as they are mixed here.
  Value* attend(int layer, QueryKeyValue own) override {
    std::vector<Value*> keys, values;
    build_->mark("mixing_key", layer, own.k);
    for (const size_t j : sources(layer)) keys.push_back(keys_[j]), values.push_back(values_[j]);
    if (!keys.empty()) {
      keys.push_back(own.k), values.push_back(own.v);
      own.v = ops::depth_attention(build_->tape, str("L", layer, ".depth"), own.q, keys, values);
    }
    keys_.push_back(own.k), values_.push_back(own.v);
    return Connection::attend(layer, own);
  }

 private:
  std::vector<size_t> sources(int layer) const {
    std::vector<size_t> list;
    for (int64_t j = 0; j < layer && layer >= start_; ++j)
      if (j % stride_ == 0 || j >= layer - recent_) list.push_back(static_cast<size_t>(j));
    return list;
  }

  int64_t start_, stride_, recent_;
  std::vector<Value*> keys_, values_;  // of the layers so far
};

}  // namespace

Architecture depth_attention_architecture() {
  return {"depth_attention",
          "values mixed with those of lower layers, by attention over depth",
          {{"depth_start",
            "1",
            "an integer: the first layer that reads lower ones, from 1; the number of layers: none",
            {}},
           {"depth_stride",
            "0",
            "an integer: the layers that are multiples of it are read by all above; 0: half the number of layers",
            {}},
           {"depth_recent", "0", "an integer: each layer also reads so many layers right below it", {}}},
          [](const Config& config) { return std::make_unique<DepthAttention>(config); }};
}

}  // namespace crossply
