#include "models/llama.h"

namespace crossply {

void declare_llama_block(ParameterTable& params, const Config& c, int layer) {
  const int64_t C = c.hidden_size, F = c.intermediate_size, D = c.head_dim;
  const int64_t H = c.num_attention_heads, K = c.num_key_value_heads;
  auto matrix = [&](const std::string& name, int64_t out, int64_t in) {
    params.add(layer_name(layer, name), Shape{out, in}, Init::normal(c.initializer_range), 1, 1);
  };
  auto projection = [&](const std::string& name, int64_t out) {
    matrix(name + ".weight", out, C);
    if (c.qkv_bias) params.add(layer_name(layer, name + ".bias"), Shape{out}, Init::constant(0), 1, 0);
  };
  auto gain = [&](const std::string& name, int64_t width) {
    params.add(layer_name(layer, name), Shape{width}, Init::constant(1), 1, 0);
  };
  gain("input_layernorm.weight", C);
  projection("self_attn.q_proj", H * D);
  projection("self_attn.k_proj", K * D);
  projection("self_attn.v_proj", K * D);
  if (c.qk_norm) gain("self_attn.q_norm.weight", D);
  if (c.qk_norm) gain("self_attn.k_norm.weight", D);
  matrix("self_attn.o_proj.weight", C, H * D);
  gain("post_attention_layernorm.weight", C);
  matrix("mlp.gate_proj.weight", F, C);
  matrix("mlp.up_proj.weight", F, C);
  matrix("mlp.down_proj.weight", C, F);
}

void record_llama_block(const Build& b, Connection& connection, int layer, Value* rope) {
  const Config& c = b.config;
  const int64_t B = b.B, T = b.T;
  const Shape stream{B, T, c.hidden_size};
  auto weight = [&](const std::string& name) { return b.parameter(layer_name(layer, name + ".weight")); };

  const Site attn{layer, false};
  const std::string a = attn.name();
  Heads own = connection.project(layer, connection.read(attn));
  if (c.qk_norm) {
    own.q = ops::rmsnorm(b.tape, a + ".q_norm", own.q, weight("self_attn.q_norm"), c.qk_norm_eps);
    if (own.k != nullptr) own.k = ops::rmsnorm(b.tape, a + ".k_norm", own.k, weight("self_attn.k_norm"), c.qk_norm_eps);
  }
  own.q = ops::rope(b.tape, a + ".q_rope", own.q, rope);
  if (own.k != nullptr) own.k = ops::rope(b.tape, a + ".k_rope", own.k, rope);
  Value* heads = connection.attend(layer, own);
  connection.write(attn, ops::linear(b.tape, a + ".out", heads, weight("self_attn.o_proj"), stream));

  const Site mlp{layer, true};
  const std::string m = mlp.name();
  const Shape hidden{B, T, weight("mlp.gate_proj")->shape[0]};
  const auto branches =
      ops::linears(b.tape, m + ".expand", connection.read(mlp),
                   {{m + ".gate", weight("mlp.gate_proj"), hidden}, {m + ".up", weight("mlp.up_proj"), hidden}});
  Value* y = ops::swiglu(b.tape, m + ".swiglu", branches[0], branches[1]);
  connection.write(mlp, ops::linear(b.tape, m + ".down", y, weight("mlp.down_proj"), stream));
}

}  // namespace crossply
