// Keys and values shared across layers: only some layers, the owners, have their own. train/train_kv_share.cpp explains
// it, and the three ways to name the owners.
#include <algorithm>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "models/registry.h"

namespace crossply {
namespace {

class KvShare : public Connection {
 public:
  explicit KvShare(const Config& config) {
    const std::string sharing = config.text("sharing");
    const int64_t L = config.num_hidden_layers, factor = config.integer("cla_factor"),
                  shared = config.integer("num_kv_shared_layers");
    if (factor < 1) fail(Exit::usage, "kv_share: cla_factor ", factor, " must be at least 1");
    if (shared < 0 || shared >= L)
      fail(Exit::usage, "kv_share: num_kv_shared_layers ", shared, " must be 0..", L - 1, " for ", L, " layers");
    for (int64_t i = 0; i < L; ++i) owner_.push_back(sharing == "cla" ? i % factor == 0 : i < L - shared);
    if (sharing == "list") read_owners(config.text("kv_owners"));
    for (int64_t i = 1, of = 0; i < L; ++i) {
      if (owner(i)) of = i;
      if (config.window_of(i) != config.window_of(of))
        fail(Exit::usage, "kv_share: layer ", i, " reads the keys and values of layer ", of,
             ", but only one of them has the attention window; give such layers one letter in the pattern ",
             config.window_pattern);
    }
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int i = 0; i < config.num_hidden_layers; ++i) {
      if (owner(i)) continue;
      remove_module(params, i, "self_attn.k_proj");
      remove_module(params, i, "self_attn.v_proj");
      if (config.qk_norm) remove_module(params, i, "self_attn.k_norm");
    }
  }

  std::string start_as_plain(ParameterTable&, const Config&) const override {
    if (shares())
      fail(Exit::usage,
           "kv_share: layers without keys and values of their own compute something else than the plain "
           "backbone; train it from scratch");
    return "";
  }

  std::string remark(const Config&) const override {
    if (shares()) return "";
    return "note: with these options every layer has keys and values of its own, so kv_share changes nothing";
  }

  QueryKeyValue project(int layer, Value* x) override {
    if (owner(layer)) return Connection::project(layer, x);
    return {linears(layer, x, {queries(layer)})[0], nullptr, nullptr};
  }

  KeyValue kv(int layer, KeyValue own) override { return owner(layer) ? read_ = own : read_; }

 private:
  bool shares() const { return std::find(owner_.begin(), owner_.end(), false) != owner_.end(); }
  bool owner(int64_t layer) const { return owner_[static_cast<size_t>(layer)]; }

  void read_owners(const std::string& text) {
    const auto refuse = [&] {
      fail(Exit::usage, "kv_share: kv_owners ", excerpt(text), " must be layers below ", owner_.size(),
           ", ascending, the first of them 0, as in [0,4,8]");
    };
    owner_.assign(owner_.size(), false);
    int64_t last = -1;
    for (const auto& layer : known_json(text)) {
      if (!layer.is_number_integer() || layer <= last || layer >= static_cast<int64_t>(owner_.size())) refuse();
      last = layer;
      owner_[static_cast<size_t>(last)] = true;
    }
    if (!owner_[0]) refuse();
  }

  std::vector<bool> owner_;  // by layer
  KeyValue read_{};          // of the latest owner
};

}  // namespace

Architecture kv_share_architecture() {
  return {"kv_share",
          "groups of layers share the keys and values of their first",
          {{"sharing",
            "cla",
            "cla, suffix or list",
            {"cla", "suffix", "list"},
            {{.key = "num_kv_shared_layers", .only_for = "suffix"}}},
           {"cla_factor",
            "2",
            "an integer, for cla: every so many-th layer has keys and values of its own",
            {},
            {{"sharing", {"cla"}}}},
           {"num_kv_shared_layers",
            "0",
            "an integer, for suffix: so many last layers have none; with 0 it is the plain model",
            {},
            {{"sharing", {"suffix"}}}},
           {"kv_owners",
            "[0]",
            "a list like [0,4,8], for the sharing list: the layers that have keys and values",
            {},
            {{"sharing", {"list"}}}}},
          [](const Config& config) { return std::make_unique<KvShare>(config); }};
}

}  // namespace crossply
