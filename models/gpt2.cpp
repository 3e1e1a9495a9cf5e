#include "models/gpt2.h"

namespace crossply {

void declare_gpt2_block(ParameterTable& params, const Config& c, int layer) {
  const int64_t C = c.hidden_size, F = c.intermediate_size;
  auto add = [&](const std::string& name, Shape shape, const Init& init, double wd_mul) {
    params.add(layer_name(layer, name), shape, init, 1, wd_mul);
  };
  auto linear = [&](const std::string& name, int64_t out, int64_t in, double spread) {
    add(name + ".weight", Shape{out, in}, Init::normal(spread), 1);
    if (c.bias) add(name + ".bias", Shape{out}, Init::constant(0), 0);
  };
  auto norm = [&](const std::string& name) {
    add(name + ".weight", Shape{C}, Init::constant(1), 0);
    if (c.bias) add(name + ".bias", Shape{C}, Init::constant(0), 0);
  };
  norm("input_layernorm");
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
    linear(name, C, C, c.initializer_range);
  linear("self_attn.o_proj", C, C, output_spread(c));
  norm("post_attention_layernorm");
  linear("mlp.up_proj", F, C, c.initializer_range);
  linear("mlp.down_proj", C, F, output_spread(c));
}

void record_gpt2_block(const Build& b, Connection& connection, int layer) {
  const Shape stream{b.B, b.T, b.config.hidden_size};
  auto linear = [&](const std::string& name, Value* x, const std::string& rows, Shape shape) {
    Value* bias = b.find(layer_name(layer, rows + ".bias"));
    return ops::linear(b.tape, name, x, b.parameter(layer_name(layer, rows + ".weight")), shape, bias);
  };

  const Site attn{layer, false};
  Heads own = connection.project(layer, connection.read(attn));
  Value* heads = connection.attend(layer, own);
  connection.write(attn, linear(attn.name() + ".out", heads, "self_attn.o_proj", stream));

  const Site mlp{layer, true};
  const std::string m = mlp.name();
  const int64_t F = b.params.at(layer_name(layer, "mlp.up_proj.weight")).shape[0];
  const GeluKind kind = b.config.activation_function == "gelu" ? GeluKind::erf : GeluKind::tanh;
  Value* up = linear(m + ".up", connection.read(mlp), "mlp.up_proj", Shape{b.B, b.T, F});
  connection.write(mlp, linear(m + ".down", ops::gelu(b.tape, m + ".gelu", up, kind), "mlp.down_proj", stream));
}

}  // namespace crossply
