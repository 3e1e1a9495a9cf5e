// Relay: values are handed up from layer to layer. Attention in layer n uses
//
//   V'_n = V_n + g_n V'_{n-1}        g_n = relu(x Wg_n), one number for each token and key/value head
//
// with x the normalised input that Q, K and V are projected from. What a layer lets pass, the next one can pass on: the
// first layer's values reach layer n through n gates. It is in none of the papers; see docs/add-a-connection.md.
#include "models/registry.h"

namespace crossply {
namespace {

class Relay : public Connection {
 public:
  void declare(ParameterTable& params, const Config& c) const override {
    for (int n = 1; n < c.num_hidden_layers; ++n)
      params.add(gate_name(n), Shape{c.num_key_value_heads, c.hidden_size}, Init::normal(c.initializer_range),
                 Role::width_router, {.wd_mul = 1});
  }

  std::string start_as_plain(ParameterTable& params, const Config&) const override {
    start_at(params, "relay_gate", Init::constant(0));
    return "a relu gate has no gradient at 0, so relay's gates stay shut and hand no values on";
  }

  QueryKeyValue project(int layer, Value* x) override {
    if (layer == 0) {
      const QueryKeyValue own = Connection::project(layer, x);
      below_ = own.v;
      return own;
    }
    const Shape gates{build_->B, build_->T, build_->config.num_key_value_heads};
    const std::string name = str("L", layer);
    const auto heads = linears(
        layer, x,
        {queries(layer), keys(layer), values(layer), {name + ".pass", build_->parameter(gate_name(layer)), gates}});
    Value* gate = ops::gate(build_->tape, name + ".gate", heads[3], "relu");
    build_->mark("gate", layer, gate);
    below_ = ops::gated_mix(build_->tape, name + ".relay", heads[2], below_, gate);
    return {heads[0], heads[1], below_};
  }

 private:
  static std::string gate_name(int n) { return layer_name(n, "self_attn.relay_gate.weight"); }

  Value* below_ = nullptr;  // V' of the layer below
};

}  // namespace

Architecture relay_architecture() {
  return {"relay", "values are handed from layer to layer through gates", {}, [](const Config&) {
            return std::make_unique<Relay>();
          }};
}

}  // namespace crossply
