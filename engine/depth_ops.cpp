#include "engine/depth_ops.h"

#include <map>

#include "engine/node.h"
#include "kernels/gate.h"
#include "kernels/gelu.h"
#include "kernels/head_mix.h"
#include "kernels/hyper.h"
#include "kernels/layernorm.h"
#include "kernels/select_heads.h"
#include "kernels/softmax.h"
#include "kernels/value_mix.h"
#include "kernels/way_mix.h"

namespace crossply::ops {
namespace {

// -----------------------------------------------------------------------------------------------------------------
// Nodes: one struct per op, each method one kernel call.

struct Softmax : Node {
  Pruning pruning;
  const char* op() const override { return "softmax"; }
  void forward(const Step&, Stream stream) override { softmax_forward(output(), input(0), pruning, stream); }
  void backward(const Step&, Stream stream) override {
    softmax_backward(dinput(0), doutput(), input(0), pruning, acc[0], stream);
  }
};

struct Scale : Node {
  const char* op() const override { return "scale"; }
  void forward(const Step&, Stream stream) override { scale_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    scale_backward(dinput(0), dinput(1), doutput(), input(0), input(1), acc[0], stream);
  }
};

struct GateNode : Node {
  Gate kind = Gate::relu;
  const char* op() const override { return "gate"; }
  void forward(const Step&, Stream stream) override { gate_forward(output(), input(0), kind, stream); }
  void backward(const Step&, Stream stream) override {
    gate_backward(dinput(0), doutput(), input(0), kind, acc[0], stream);
  }
};

struct Gelu : Node {
  const char* op() const override { return "gelu"; }
  void forward(const Step&, Stream stream) override { gelu_forward(output(), input(0), stream); }
  void backward(const Step&, Stream stream) override { gelu_backward(dinput(0), doutput(), input(0), acc[0], stream); }
};

struct LayerNorm : Node {
  double eps = 0;
  const char* op() const override { return "layernorm"; }
  void forward(const Step&, Stream stream) override {
    layernorm_forward(output(), saved[0]->tensor, saved[1]->tensor, input(0), eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    layernorm_backward(dinput(0), doutput(), input(0), saved[0]->tensor, saved[1]->tensor, acc[0], stream);
  }
};

struct ValueMix : Node {  // in: v, v1, the own scalar, the first layer's
  int64_t own = 0, first = 0;
  const char* op() const override { return "value_mix"; }
  void forward(const Step&, Stream stream) override {
    value_mix_forward(output(), input(0), input(1), {input(2), own}, {input(3), first}, stream);
  }
  void backward(const Step&, Stream stream) override {
    const Tensor v = in_place ? Tensor{} : input(0);
    value_mix_backward(dinput(0), dinput(1), {grad_of(in[2]), own}, {grad_of(in[3]), first}, doutput(), v, input(1),
                       {input(2), own}, {input(3), first}, acc[0], acc[1], stream);
  }
  double flops() const override { return 3.0 * static_cast<double>(in[0]->shape.numel()); }
};

struct GatedMix : Node {  // in: v, v1, alpha; the gradient of v is that of the output, in place
  const char* op() const override { return "gated_mix"; }
  void forward(const Step&, Stream stream) override {
    gated_mix_forward(output(), input(0), input(1), input(2), stream);
  }
  void backward(const Step&, Stream stream) override {
    gated_mix_backward(dinput(1), dinput(2), doutput(), input(1), input(2), acc[1], acc[2], stream);
  }
  double flops() const override { return 2.0 * static_cast<double>(in[0]->shape.numel()); }
};

struct SelectHeads : Node {
  std::vector<HeadChoice> choice;
  const char* op() const override { return "select_heads"; }
  void forward(const Step&, Stream stream) override { select_heads_forward(output(), tensors_of(in), choice, stream); }
  void backward(const Step&, Stream stream) override {
    for (size_t s = 0; s < in.size(); ++s)
      select_heads_backward(dinput(s), doutput(), choice, static_cast<int>(s), acc[s], stream);
  }
};

struct StreamsExpand : Node {
  const char* op() const override { return "expand"; }
  void forward(const Step&, Stream stream) override { streams_expand_forward(output(), input(0), stream); }
  void backward(const Step&, Stream stream) override { streams_expand_backward(dinput(0), doutput(), acc[0], stream); }
};

struct StreamsSum : Node {
  const char* op() const override { return "streams_sum"; }
  void forward(const Step&, Stream stream) override { streams_sum_forward(output(), input(0), stream); }
  void backward(const Step&, Stream stream) override { streams_sum_backward(dinput(0), doutput(), acc[0], stream); }
};

HyperWeights hyper_weights(const HyperParameters& p, Tensor (*get)(const Value*)) {
  return {get(p.static_alpha), get(p.static_beta), get(p.alpha_proj),  get(p.beta_proj),
          get(p.alpha_scale),  get(p.beta_scale),  get(p.norm_weight), get(p.norm_bias)};
}

struct HyperReadNode : Node {  // in[0]: the streams; out: what the sublayer reads, the coefficients
  HyperParameters parameters{};
  HyperNorm norm = HyperNorm::layernorm_no_affine;
  double eps = 0;
  const char* op() const override { return "hyper_read"; }
  Tensor stats() const { return saved.empty() ? Tensor{} : saved[0]->tensor; }
  void forward(const Step&, Stream stream) override {
    hyper_read_forward(output(), out[1]->tensor, stats(), input(0), hyper_weights(parameters, tensor_of), norm, eps,
                       stream);
  }
  void backward(const Step&, Stream stream) override {
    hyper_read_backward(dinput(0), hyper_weights(parameters, grad_of), doutput(), out[1]->grad->tensor, input(0),
                        out[1]->tensor, stats(), hyper_weights(parameters, tensor_of), norm, acc[0], stream);
  }
  double flops() const override {
    const double E = static_cast<double>(in[0]->shape[2]), projected = saved.empty() ? 0 : E + 2;
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * (1 + projected);
  }
};

struct HyperWrite : Node {  // in: streams, coefficients, the sublayer's output
  const char* op() const override { return "hyper_write"; }
  void forward(const Step&, Stream stream) override {
    hyper_write_forward(output(), input(0), input(1), input(2), stream);
  }
  void backward(const Step&, Stream stream) override {
    CHECK_THAT(!acc[1], name, " must be the only reader of ", in[1]->name);
    hyper_write_backward(dinput(0), dinput(1), dinput(2), doutput(), input(0), input(1), input(2), acc[0], acc[2],
                         stream);
  }
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[0]->shape[2] + 1);
  }
};

struct WayMixNode : Node {  // in: the sources, then whatever else of WaySources there is
  WaySources of;
  WayMix tensors, gradients;
  std::vector<Tensor> outs, douts;
  WayAcc add;

  const char* op() const override { return "way_mix"; }
  Tensor rstd() const { return saved.empty() ? Tensor{} : saved[0]->tensor; }
  void prepare() override {
    tensors = {tensors_of(of.sources), tensors_of(of.gains), tensors_of(of.post), tensor_of(of.weight),
               tensor_of(of.base),     tensor_of(of.skip),   of.eps};
    gradients = {grads_of(of.sources), grads_of(of.gains), grads_of(of.post), grad_of(of.weight),
                 grad_of(of.base),     grad_of(of.skip),   of.eps};
    outs = tensors_of(out), douts = grads_of(out);
    if (acc.empty()) return;  // a tape that only goes forward
    add.sources.clear();
    for (size_t s = 0; s < of.sources.size(); ++s) add.sources.push_back(acc[s] != 0);
    CHECK_THAT(acc[of.sources.size()] == 0, name, " must be the only reader of ", of.weight->name);
    add.skip = of.skip != nullptr && acc[of.sources.size() + 1] != 0;
  }
  void forward(const Step&, Stream stream) override { way_mix_forward(outs, rstd(), tensors, stream); }
  void backward(const Step&, Stream stream) override {
    way_mix_backward(gradients, douts, rstd(), tensors, add, stream);
  }
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel() * static_cast<int64_t>(of.sources.size() * out.size()));
  }
};

struct HeadMixNode : Node {  // in: the sources, weight, gain, wk, wv; out: keys, values
  size_t S = 0;
  HeadMix tensors, gradients;
  std::vector<bool> add;

  const char* op() const override { return "head_mix"; }
  static HeadMix gather(const std::vector<Value*>& list, size_t S,
                        std::vector<Tensor> (*get)(const std::vector<Value*>&)) {
    const std::vector<Tensor> all = get(list);
    return {{all.begin(), all.begin() + static_cast<std::ptrdiff_t>(S)}, all[S], all[S + 1], all[S + 2], all[S + 3]};
  }
  void prepare() override {
    tensors = gather(in, S, tensors_of), gradients = gather(in, S, grads_of);
    tensors.wk = factor_of(in[S + 2], in[0]->dtype), tensors.wv = factor_of(in[S + 3], in[0]->dtype);
    add.clear();
    for (size_t s = 0; s < S && !acc.empty(); ++s) add.push_back(acc[s] != 0);
  }
  void forward(const Step&, Stream stream) override { head_mix_forward(output(), out[1]->tensor, tensors, stream); }
  void backward(const Step&, Stream stream) override {
    CHECK_THAT(!acc[S], name, " must be the only reader of ", in[S]->name);
    head_mix_backward(gradients, doutput(), out[1]->grad->tensor, tensors, add, stream);
  }
  double flops() const override {  // the mixtures, then the two projections
    const double heads = static_cast<double>(out[0]->shape[2]), rows = static_cast<double>(in[0]->shape.numel());
    return 2.0 * rows * heads * static_cast<double>(S) + 4.0 * rows * heads * static_cast<double>(out[0]->shape[3]);
  }
};

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Recording

Value* softmax(Tape& t, const std::string& name, Value* inp, double top_p, bool renormalize) {
  auto node = make_node<Softmax>(name, {inp}, {t.statistic(name, inp->shape)});
  node->pruning = {top_p, renormalize};
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* scale(Tape& t, const std::string& name, Value* inp, Value* factor) {
  CHECK_THAT(factor->shape.numel() == 1, name, ": factor ", factor->shape.str());
  auto node = make_node<Scale>(name, {inp, factor}, {t.statistic(name, inp->shape)});
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* gate(Tape& t, const std::string& name, Value* inp, const std::string& kind) {
  static const std::map<std::string, Gate> kinds = {
      {"relu", Gate::relu},       {"sigmoid", Gate::sigmoid},
      {"softmax", Gate::softmax}, {"softmax_sigmoid", Gate::softmax_sigmoid},
      {"tanh", Gate::tanh},       {"identity", Gate::identity}};
  CHECK_THAT(kinds.contains(kind), name, ": no gate '", kind, "'");
  auto node = make_node<GateNode>(name, {inp}, {t.statistic(name, inp->shape)});
  node->kind = kinds.at(kind);
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* gelu(Tape& t, const std::string& name, Value* inp) {
  auto node = make_node<Gelu>(name, {inp}, {t.activation(name, inp->shape)});
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* layernorm(Tape& t, const std::string& name, Value* inp, double eps) {
  const Shape rows{inp->shape.numel() / inp->shape[inp->shape.rank - 1]};
  auto node = make_node<LayerNorm>(name, {inp}, {t.activation(name, inp->shape)});
  node->eps = eps;
  node->saved = {t.statistic(name + ".mean", rows), t.statistic(name + ".rstd", rows)};
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* value_mix(Tape& t, const std::string& name, Value* v, Value* v1, Scalar own, Scalar first) {
  CHECK_THAT(
      v->shape == v1->shape && own.index < own.values->shape.numel() && first.index < first.values->shape.numel(), name,
      ": v ", v->shape.str(), " v1 ", v1->shape.str());
  auto node = make_node<ValueMix>(name, {v, v1, own.values, first.values}, {t.activation(name, v->shape)});
  node->own = own.index;
  node->first = first.index;
  node->adds_to = {own.values, first.values};
  node->in_place = !own.values->needs_grad;  // else v is needed for the gradient of its scalar
  node->keep = {v1, own.values, first.values};
  if (!node->in_place) node->keep.push_back(v);
  return t.record(std::move(node));
}

Value* gated_mix(Tape& t, const std::string& name, Value* v, Value* v1, Value* alpha) {
  CHECK_THAT(v->shape == v1->shape && alpha->shape.numel() * v->shape[3] == v->shape.numel(), name, ": v ",
             v->shape.str(), " v1 ", v1->shape.str(), " alpha ", alpha->shape.str());
  auto node = make_node<GatedMix>(name, {v, v1, alpha}, {t.activation(name, v->shape)});
  node->in_place = true;
  node->keep = {v1, alpha};
  return t.record(std::move(node));
}

Value* select_heads(Tape& t, const std::string& name, const std::vector<Value*>& sources,
                    const std::vector<Head>& choice) {
  const Shape& s = sources.at(0)->shape;
  auto node = make_node<SelectHeads>(name, sources, {});
  for (const Head& head : choice) {
    CHECK_THAT(head.source < static_cast<int>(sources.size()) && head.head < s[2], name, ": head ", head.head,
               " of source ", head.source);
    node->choice.push_back({head.source, head.head});
  }
  node->out = {t.activation(name, Shape{s[0], s[1], static_cast<int64_t>(choice.size()), s[3]})};
  return t.record(std::move(node));
}

Value* streams_expand(Tape& t, const std::string& name, Value* x, int64_t E) {
  const Shape& s = x->shape;
  return t.record(make_node<StreamsExpand>(name, {x}, {t.activation(name, Shape{s[0], s[1], E, s[2]})}));
}

Value* streams_sum(Tape& t, const std::string& name, Value* streams) {
  const Shape& s = streams->shape;
  return t.record(make_node<StreamsSum>(name, {streams}, {t.activation(name, Shape{s[0], s[1], s[3]})}));
}

HyperRead hyper_read(Tape& t, const std::string& name, Value* streams, const HyperParameters& p,
                     const std::string& norm, double eps) {
  const Shape& s = streams->shape;
  const int64_t E = s[2];
  Value* x = t.activation(name, Shape{s[0], s[1], s[3]});
  Value* coef = t.statistic(name + ".coef", Shape{s[0], s[1], E, E + 2});
  auto node = make_node<HyperReadNode>(
      name, present({streams, p.static_alpha, p.static_beta, p.alpha_proj, p.beta_proj, p.alpha_scale, p.beta_scale,
                     p.norm_weight, p.norm_bias}), {x, coef});
  node->parameters = p;
  node->norm = norm == "rmsnorm"     ? HyperNorm::rmsnorm
               : norm == "layernorm" ? HyperNorm::layernorm
                                     : HyperNorm::layernorm_no_affine;
  node->eps = eps;
  if (p.alpha_proj != nullptr) node->saved = {t.statistic(name + ".stats", Shape{s[0], s[1], E, E + 4})};
  node->keep = {streams, coef};
  t.record(std::move(node));
  return {x, coef};
}

Value* hyper_write(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y) {
  auto node = make_node<HyperWrite>(name, {streams, coef, y}, {t.activation(name, streams->shape)});
  node->keep = {streams, coef, y};
  return t.record(std::move(node));
}

std::vector<Value*> way_mix(Tape& t, const std::string& name, const WaySources& s) {
  const int64_t S = static_cast<int64_t>(s.sources.size()), W = s.base->shape[0];
  const Shape& stream = s.sources.at(0)->shape;
  CHECK_THAT(s.base->shape == (Shape{W, S}) && s.weight->shape.numel() == stream[0] * stream[1] * W * S, name,
             ": base ", s.base->shape.str(), " weight ", s.weight->shape.str());
  std::vector<Value*> outs;
  for (int64_t w = 0; w < W; ++w) outs.push_back(t.activation(str(name, ".", w), stream));
  auto node = make_node<WayMixNode>(
      name, joined(joined(joined(s.sources, present({s.weight, s.skip, s.base})), s.gains), s.post), outs);
  node->of = s;
  node->keep = joined(s.sources, {s.weight});
  if (s.skip != nullptr) node->saved = {t.statistic(name + ".rstd", Shape{stream[0], stream[1], W})};
  t.record(std::move(node));
  return outs;
}

std::pair<Value*, Value*> head_mix(Tape& t, const std::string& name, const HeadSources& s, int64_t K) {
  const Shape& stream = s.sources.at(0)->shape;
  const Shape heads{stream[0], stream[1], K, s.wk->shape[0] / K};
  Value *k = t.activation(name + ".k", heads), *v = t.activation(name + ".v", heads);
  auto node = make_node<HeadMixNode>(name, joined(s.sources, {s.weight, s.gain, s.wk, s.wv}), {k, v});
  node->S = s.sources.size();
  node->keep = joined(s.sources, {s.weight});
  t.record(std::move(node));
  return {k, v};
}

}  // namespace crossply::ops
