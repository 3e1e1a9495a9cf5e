// Linear layers on the tape: products of one input with several weights. And fusion: a layer that does the work of the
// sum or the GELU beside it as well.
#include "engine/node.h"
#include "kernels/block/add.h"
#include "kernels/block/bias.h"
#include "kernels/block/fused.h"
#include "kernels/block/matmul.h"
#include "kernels/block/ops.h"
#include "kernels/block/quantize.h"

namespace crossply::ops {
namespace {

// Values [begin, end) of a list that the planner has laid one behind the other, or one that it has not.
struct Span {
  size_t begin, end;
  template <class List>
  Tensors of(const List& list) const {
    return list.empty() ? Tensors() : Tensors(list).subspan(begin, end - begin);
  }
  bool contiguous() const { return end - begin > 1; }
};
template <class Projection>
std::vector<Span> spans_of(const std::vector<Value*>& values, Projection&& value_of) {
  const auto place = [&](size_t i) -> const Buffer* {  // shared by those that lie together
    const Value* value = value_of(values[i]);
    return value != nullptr && value->buffer->inside != nullptr && !value->buffer->inside->sliced
               ? value->buffer->inside
               : nullptr;
  };
  std::vector<Span> spans;
  for (size_t i = 0; i < values.size(); ++i)
    if (!spans.empty() && place(i) != nullptr && place(i) == place(i - 1)) spans.back().end = i + 1;
    else spans.push_back({i, i + 1});
  return spans;
}

struct Linear : Node {  // in[0] is shared by the weights that follow, each with its out; then come the biases
  std::vector<std::pair<size_t, size_t>> with_bias;  // out, in
  // Set by fuse_linears(), with one weight only:
  bool with_add = false;    // the last input is added to out[0]
  bool with_gelu = false;   // out[1] is the gelu of out[0], by tanh
  bool after_gelu = false;  // in[0] is what goes into a gelu, reads[0] what comes out, which is multiplied
  std::vector<Tensor> outs, douts, weights, dweights, biases, bf16_biases;
  std::vector<Span> out_spans, dout_spans;
  const char* op() const override { return "linear"; }
  void prepare() override {
    const std::vector<Value*> products(out.begin(), out.end() - with_gelu);
    outs = tensors_of(products), douts = grads_of(products), weights.clear(), dweights.clear();
    for (size_t i = 1; i <= products.size(); ++i) {
      weights.push_back(matmul_weight(in[i], in[0]->dtype));
      dweights.push_back(grad_of(in[i]));
    }
    out_spans = spans_of(products, [](const Value* value) { return value; });
    dout_spans = spans_of(products, [](const Value* value) { return value->grad; });
    biases.assign(with_bias.empty() ? 0 : products.size(), {}), bf16_biases = biases;
    for (const auto& [o, i] : with_bias) biases[o] = in[i]->tensor, bf16_biases[o] = matmul_weight(in[i], in[0]->dtype);
  }
  size_t layers() const { return out.size() - with_gelu; }
  const Tensor& factor() const { return after_gelu ? reads[0]->tensor : input(0); }
  Tensor addend() const { return with_add ? in.back()->tensor : Tensor{}; }
  Tensor activated() const { return with_gelu ? out[1]->tensor : Tensor{}; }
  void pass_on_sum(Stream stream) {  // to what is added
    if (with_add && in.back()->grad != nullptr && in.back()->grad->tensor.data != doutput().data)
      accumulate(gradient(in.size() - 1), doutput(), stream);
  }
  void forward(const Step&, Stream stream) override {
    if (stream.backend != Backend::cuda)
      return matmul_forward(outs, factor(), weights, stream, addend(), biases, activated());
    for (const Span& span : out_spans)
      matmul_forward(span.of(outs), factor(), span.of(weights), stream, addend(), span.of(bf16_biases), activated(),
                     span.contiguous());
  }
  void backward(const Step& step, Stream stream) override {
    pass_on_sum(stream);
    matmul_backward_input(gradient(0), douts, weights, stream, after_gelu ? input(0) : Tensor{});
    for (const Span& span : dout_spans)
      for (size_t i = span.begin, end; i < span.end; i = end) {  // those that are overwritten, or accumulated, together
        const bool accumulate = gradient(i + 1, step).accumulate;
        for (end = i + 1; end < span.end && gradient(end + 1, step).accumulate == accumulate;) ++end;
        const Span part{i, end};
        matmul_backward_weights(part.of(dweights), accumulate, part.of(douts), factor(), stream, part.contiguous());
      }
    for (const auto& [o, i] : with_bias) bias_backward(dinput(i), douts[o], stream);
  }
  bool can_overwrite(size_t i) const override { return i > 0 && i <= layers(); }
  bool reads_bf16_copy(size_t i) const override { return i > 0 && i <= layers() && in[0]->dtype == Dtype::bf16; }
  bool grad_aliases_output(size_t i) const override { return with_add && i + 1 == in.size(); }
  bool contiguous_outputs() const override { return layers() > 1; }
  double flops() const override {
    double sum = 0;
    for (size_t i = 1; i <= layers(); ++i)
      sum += 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[i]->shape[0]);
    return sum;
  }
};

// In eight bits in training, in bf16 otherwise: the input and the weights as e4m3, which has more digits, the outputs'
// gradients as e5m2, which reaches farther (Micikevicius et al., arXiv 2209.05433), each tensor times a scale from what
// was largest in it in earlier steps. Products of eight bits want both factors with the summed index last, so what is
// summed over rows lies there transposed as well. Weights are rounded with Step::new_weights, once in a step.
// Not yet run on hardware: only in the emulator.
struct LinearOfEightBits : Linear {
  struct Rounded {
    QuantizationScalars scalars;
    int64_t rows, columns;
    Value *plain, *transposed;  // memory for (rows, columns) and (columns, rows), or more

    Tensor tensor(bool turned) const {
      const Tensor& memory = (turned ? transposed : plain)->tensor;
      return {memory.data, memory.dtype, turned ? Shape{columns, rows} : Shape{rows, columns}};
    }
    Quantized factor(bool turned) const { return {tensor(turned), scalars.inverse->tensor}; }
  };
  Rounded x;
  std::vector<Rounded> w, dy;  // of each out; all dy in the same memory, one after the other
  // of: (rows, columns) after flattening. Neither plain nor turned: it is only measured.
  static void look_at(const Tensor& of, const Rounded& to, bool plain, bool turned, Stream stream) {
    quantize(plain ? to.tensor(false) : Tensor{}, turned ? to.tensor(true) : Tensor{}, to.scalars.amax->tensor,
             Tensor{of.data, of.dtype, Shape{to.rows, to.columns}}, to.scalars.scale->tensor, stream);
  }

  void forward(const Step& step, Stream stream) override {
    const bool rounds = step.training && !step.measures;
    if (step.training) look_at(factor(), x, rounds, false, stream);
    for (size_t i = 0; step.training && step.new_weights && i < w.size(); ++i)
      look_at(weights[i], w[i], rounds, rounds, stream);
    if (!rounds) return Linear::forward(step, stream);
    for (size_t i = 0; i < w.size(); ++i)
      matmul_quantized({outs[i], false}, x.factor(false), w[i].factor(false), true, stream, addend(),
                       bf16_biases.empty() ? Tensor{} : bf16_biases[i]);
    if (with_gelu) gelu_forward(activated(), outs[0], GeluKind::tanh, stream);
  }
  void backward(const Step& step, Stream stream) override {
    const bool rounds = !step.measures;
    if (!rounds) {
      for (size_t i = 0; i < w.size(); ++i) look_at(douts[i], dy[i], false, false, stream);
      return Linear::backward(step, stream);
    }
    pass_on_sum(stream);
    look_at(factor(), x, false, true, stream);
    for (size_t i = 0; i < w.size(); ++i) {
      const Grad dinp = gradient(0);
      look_at(douts[i], dy[i], true, true, stream);
      matmul_quantized({dinp, dinp.accumulate || i > 0}, dy[i].factor(false), w[i].factor(true), false, stream);
      matmul_quantized(gradient(i + 1, step), dy[i].factor(true), x.factor(true), false, stream);
    }
    if (after_gelu) gelu_backward({dinput(0), false}, dinput(0), input(0), GeluKind::tanh, stream);
    for (const auto& [o, i] : with_bias) bias_backward(dinput(i), douts[o], stream);
  }
};

// Rows of a product, by its input (.., in) and a weight (out, in).
int64_t rows_of(const Value& inp, const Value& weight) { return inp.shape.numel() / weight.shape[1]; }

// cuBLASLt's accesses are of 16 bytes. Narrow layers, as of gates, would gain nothing.
bool suits_eight_bits(const Value& inp, const Value& weight) {
  constexpr int64_t least = 64;
  return weight.shape[0] >= least && weight.shape[1] >= least && weight.shape[0] % 16 == 0 &&
         weight.shape[1] % 16 == 0 && rows_of(inp, weight) % 16 == 0;
}

std::unique_ptr<Linear> make_linear_of_eight_bits(Tape& t, const std::string& name, Value* inp,
                                                  const std::vector<Projection>& projections) {
  auto node = make_node<LinearOfEightBits>(name, {inp}, {});
  const int64_t rows = rows_of(*inp, *projections[0].weight), C = projections[0].weight->shape[1];
  const auto memory = [&](const std::string& of, int64_t size, Dtype dtype, bool persistent) {
    return t.memory(of, Shape{size}, dtype, persistent);
  };
  const auto widest = [](const Projection& a, const Projection& b) { return a.weight->shape[0] < b.weight->shape[0]; };
  const int64_t most = rows * std::max_element(projections.begin(), projections.end(), widest)->weight->shape[0];
  node->forward_work = {memory(name + ".in.8", rows * C, Dtype::e4m3, false)};
  node->backward_work = {memory(name + ".in.8T", rows * C, Dtype::e4m3, false),
                         memory("d:" + name + ".8", most, Dtype::e5m2, false),
                         memory("d:" + name + ".8T", most, Dtype::e5m2, false)};
  node->x = {t.add_quantized(name + ".in", e4m3::largest), rows, C, node->forward_work[0], node->backward_work[0]};
  for (const Projection& p : projections) {
    const int64_t O = p.weight->shape[0];
    node->w.push_back({t.add_quantized(p.name + ".weight", e4m3::largest), O, C,
                       memory(p.name + ".weight.8", O * C, Dtype::e4m3, true),
                       memory(p.name + ".weight.8T", O * C, Dtype::e4m3, true)});
    node->dy.push_back(
        {t.add_quantized("d:" + p.name, e5m2::largest), rows, O, node->backward_work[1], node->backward_work[2]});
  }
  return node;
}

}  // namespace

std::vector<Value*> linears(Tape& t, const std::string& name, Value* inp, const std::vector<Projection>& projections) {
  for (const Projection& p : projections)
    CHECK_THAT(inp->shape.numel() % p.weight->shape[1] == 0 &&
                   p.shape.numel() == rows_of(*inp, *p.weight) * p.weight->shape[0],
               p.name, ": inp ", inp->shape.str(), " weight ", p.weight->shape.str(), " out ", p.shape.str());
  const bool eight = t.eight_bits() && std::all_of(projections.begin(), projections.end(), [&](const Projection& p) {
                       return suits_eight_bits(*inp, *p.weight);
                     });
  std::unique_ptr<Linear> node =
      eight ? make_linear_of_eight_bits(t, name, inp, projections) : make_node<Linear>(name, {inp}, {});
  for (const Projection& p : projections) {
    node->in.push_back(p.weight);
    node->out.push_back(t.activation(p.name, p.shape));
  }
  for (size_t o = 0; o < projections.size(); ++o) {
    Value* bias = projections[o].bias;
    if (bias == nullptr) continue;
    CHECK_THAT(bias->shape == Shape{projections[o].weight->shape[0]}, projections[o].name, ": bias ",
               bias->shape.str());
    node->with_bias.emplace_back(o, node->in.size());
    node->in.push_back(bias);
  }
  node->backward_reads = {inp};
  const std::vector<Value*> outs = node->out;
  t.record(std::move(node));
  return outs;
}

Value* linear(Tape& t, const std::string& name, Value* inp, Value* weight, Shape shape, Value* bias) {
  return linears(t, name, inp, {{name, weight, shape, bias}})[0];
}

namespace {

using Nodes = std::deque<std::unique_ptr<Node>>;
using Inner = std::unordered_set<const Value*>;  // Tape::read_by_next()

// Node n, if it is a layer of one weight.
Linear* layer_at(const Nodes& nodes, size_t n) {
  auto* layer = dynamic_cast<Linear*>(nodes[n].get());
  return layer != nullptr && layer->layers() == 1 ? layer : nullptr;
}

// A layer, a GELU and the layer that reads it, as a GPU's products have it: the first layer writes the GELU's input and
// its output, the backward of the second one sets the gradient of the input. The output's is never in memory.
void fuse_gelu(Nodes& nodes, size_t n, const Inner& inner) {
  const auto aligned = [](const Linear& layer) {  // accesses of 16 bytes
    return layer.in[1]->shape[0] % 8 == 0 && layer.in[1]->shape[1] % 8 == 0;
  };
  Linear *before = layer_at(nodes, n), *after = layer_at(nodes, n + 2);
  const auto* gelu = dynamic_cast<const Gelu*>(nodes[n + 1].get());
  if (before == nullptr || gelu == nullptr || after == nullptr || gelu->kind != GeluKind::tanh) return;
  Value *x = gelu->in[0], *y = gelu->out[0];
  if (x->dtype != Dtype::bf16 || !aligned(*before) || !aligned(*after)) return;
  if (before->out[0] != x || after->in[0] != y || !inner.contains(x) || !inner.contains(y)) return;
  before->with_gelu = true, before->out.push_back(y);
  after->after_gelu = true, after->in[0] = x, after->reads = {y}, after->backward_reads = {x, y};
  y->needs_grad = false;
  nodes[n + 1] = nullptr;
}

// A layer and the sum after it: the layer's own output need not be in memory by itself. If the layer reads what it is
// added to, its backward would read and add to one gradient at once.
void fuse_add(Nodes& nodes, size_t n, const Inner& inner) {
  Linear* layer = layer_at(nodes, n);
  const auto* sum = dynamic_cast<const Add*>(nodes[n + 1].get());
  if (layer == nullptr || sum == nullptr || sum->in[1] != layer->out[0] || !inner.contains(sum->in[1])) return;
  if (sum->in[0] == sum->in[1] || sum->in[0] == layer->in[0]) return;
  layer->with_add = true, layer->in.push_back(sum->in[0]);
  layer->out[0]->fused_into = sum->out[0], layer->out = sum->out;
  nodes[n + 1] = nullptr;
}

}  // namespace

void fuse_linears(Tape& t) {
  t.rewrite([inner = t.read_by_next()](Nodes& nodes) {
    for (size_t n = 0; n + 2 < nodes.size(); ++n) fuse_gelu(nodes, n, inner);
    for (size_t n = 0; n + 1 < nodes.size(); ++n) fuse_add(nodes, n, inner);
  });
}

}  // namespace crossply::ops
