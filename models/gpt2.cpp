#include "models/gpt2.h"

namespace crossply {

void declare_gpt2_block(ParameterTable& params, const Config& c, int layer) {
  const int64_t C = c.hidden_size, F = c.intermediate_size;
  auto add = [&](const std::string& name, Shape shape, const Init& init, Role role) {
    params.add(layer_name(layer, name + ".weight"), shape, init, role);
    if (c.bias) params.add(layer_name(layer, name + ".bias"), Shape{shape[0]}, Init::constant(0), Role::bias);
  };
  auto norm = [&](const std::string& name) { add(name, Shape{C}, Init::constant(1), Role::norm); };
  auto input = [&](const std::string& name, int64_t out) {
    add(name, Shape{out, C}, Init::normal(c.initializer_range), Role::input_projection);
  };
  auto output = [&](const std::string& name, int64_t in) {
    add(name, Shape{C, in}, Init::normal(output_spread(c)), Role::output_projection);
  };
  norm("input_layernorm");
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}) input(name, C);
  output("self_attn.o_proj", C);
  norm("post_attention_layernorm");
  if (c.block_norm != "pre") norm("input_layernorm_2"), norm("post_attention_layernorm_2");
  input("mlp.up_proj", F);
  output("mlp.down_proj", F);
}

void record_gpt2_block(const Build& b, Connection& connection, int layer) {
  const Shape stream{b.B, b.T, b.config.hidden_size};
  auto linear = [&](const std::string& name, Value* x, const std::string& rows, Shape shape) {
    Value* bias = b.find(layer_name(layer, rows + ".bias"));
    return ops::linear(b.tape, name, x, b.parameter(layer_name(layer, rows + ".weight")), shape, bias);
  };

  const Sublayer attn{layer, false};
  QueryKeyValue own = connection.project(layer, read_and_offer(connection, attn));
  Value* heads = connection.attend(layer, own);
  write_normed(b, connection, attn, linear(attn.name() + ".out", heads, "self_attn.o_proj", stream));

  const Sublayer mlp{layer, true};
  const std::string m = mlp.name();
  const int64_t F = b.row(layer_name(layer, "mlp.up_proj.weight")).shape[0];
  const GeluKind kind = b.config.activation_function == "gelu" ? GeluKind::erf : GeluKind::tanh;
  Value* up = linear(m + ".up", read_and_offer(connection, mlp), "mlp.up_proj", Shape{b.B, b.T, F});
  write_normed(b, connection, mlp,
               linear(m + ".down", ops::gelu(b.tape, m + ".gelu", up, kind), "mlp.down_proj", stream));
}

}  // namespace crossply
