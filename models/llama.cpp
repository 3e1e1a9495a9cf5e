#include "models/llama.h"

namespace crossply {

void declare_llama_block(ParameterTable& params, const Config& c, int layer) {
  const int64_t C = c.hidden_size, F = c.intermediate_size, D = c.head_dim;
  const int64_t H = c.num_attention_heads, K = c.num_key_value_heads;
  const Init normal = Init::normal(c.initializer_range);
  auto input = [&](const std::string& name, int64_t out) {
    params.add(layer_name(layer, name + ".weight"), Shape{out, C}, normal, Role::input_projection);
  };
  auto output = [&](const std::string& name, int64_t in) {
    params.add(layer_name(layer, name + ".weight"), Shape{C, in}, normal, Role::output_projection);
  };
  auto heads = [&](const std::string& name, int64_t out) {
    input(name, out);
    if (c.qkv_bias) params.add(layer_name(layer, name + ".bias"), Shape{out}, Init::constant(0), Role::bias);
  };
  auto gain = [&](const std::string& name, int64_t width) {
    params.add(layer_name(layer, name + ".weight"), Shape{width}, Init::constant(1), Role::norm);
  };
  gain("input_layernorm", C);
  heads("self_attn.q_proj", H * D);
  heads("self_attn.k_proj", K * D);
  heads("self_attn.v_proj", K * D);
  if (c.qk_norm) gain("self_attn.q_norm", D);
  if (c.qk_norm) gain("self_attn.k_norm", D);
  output("self_attn.o_proj", H * D);
  if (c.block_norm != "pre") gain("input_layernorm_2", C), gain("post_attention_layernorm_2", C);
  gain("post_attention_layernorm", C);
  input("mlp.gate_proj", F);
  input("mlp.up_proj", F);
  output("mlp.down_proj", F);
}

void record_llama_block(const Build& b, Connection& connection, int layer) {
  const Config& c = b.config;
  const int64_t B = b.B, T = b.T;
  const Shape stream{B, T, c.hidden_size};
  auto weight = [&](const std::string& name) { return b.parameter(layer_name(layer, name + ".weight")); };

  const Sublayer attn{layer, false};
  const std::string a = attn.name();
  QueryKeyValue own = connection.project(layer, read_and_offer(connection, attn));
  if (c.qk_norm) {
    own.q = ops::rmsnorm(b.tape, a + ".q_norm", own.q, weight("self_attn.q_norm"), c.qk_norm_eps);
    if (own.k != nullptr) own.k = ops::rmsnorm(b.tape, a + ".k_norm", own.k, weight("self_attn.k_norm"), c.qk_norm_eps);
  }
  own.q = ops::rope(b.tape, a + ".q_rope", own.q, b.rope);
  if (own.k != nullptr) own.k = ops::rope(b.tape, a + ".k_rope", own.k, b.rope);
  Value* heads = connection.attend(layer, own);
  write_normed(b, connection, attn, ops::linear(b.tape, a + ".out", heads, weight("self_attn.o_proj"), stream));

  const Sublayer mlp{layer, true};
  const std::string m = mlp.name();
  const Shape hidden{B, T, weight("mlp.gate_proj")->shape[0]};
  const auto branches =
      ops::linears(b.tape, m + ".expand", read_and_offer(connection, mlp),
                   {{m + ".gate", weight("mlp.gate_proj"), hidden}, {m + ".up", weight("mlp.up_proj"), hidden}});
  Value* y = ops::swiglu(b.tape, m + ".swiglu", branches[0], branches[1]);
  write_normed(b, connection, mlp, ops::linear(b.tape, m + ".down", y, weight("mlp.down_proj"), stream));
}

}  // namespace crossply
