#include "engine/ops.h"

#include <cmath>
#include <utility>

#include "engine/node.h"
#include "kernels/add.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"

namespace crossply::ops {
namespace {

// -----------------------------------------------------------------------------------------------------------------
// Nodes: one struct per op, each method one kernel call.

struct Embedding : Node {
  const char* op() const override { return "embedding"; }
  void forward(const Step&, Stream stream) override {
    embedding_forward(output(), input(0), reads[0]->tensor, stream);
  }
  void backward(const Step&, Stream stream) override {
    embedding_backward(dinput(0), doutput(), reads[0]->tensor, stream);
  }
};

struct Linear : Node {  // in[0] is shared by the weights in[1..], each with its out
  std::vector<Tensor> outs, douts, weights;
  const char* op() const override { return "linear"; }
  void prepare() override {
    outs = tensors_of(out), douts = grads_of(out), weights.clear();
    for (size_t i = 1; i < in.size(); ++i) weights.push_back(factor_of(in[i], in[0]->dtype));
  }
  void forward(const Step&, Stream stream) override {
    matmul_forward(outs, input(0), weights, stream, tensor_of(addend));
  }
  void backward(const Step&, Stream stream) override {
    matmul_backward_input(dinput(0), douts, weights, acc[0], stream);
    for (size_t i = 0; i < out.size(); ++i) matmul_backward_weight(dinput(i + 1), douts[i], input(0), stream);
  }
  double flops() const override {
    double sum = 0;
    for (size_t i = 1; i < in.size(); ++i)
      sum += 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[i]->shape[0]);
    return sum;
  }
};

struct RmsNorm : Node {  // in[1]: the gain, if it has one
  double eps = 0;
  const char* op() const override { return "rmsnorm"; }
  void forward(const Step&, Stream stream) override {
    rmsnorm_forward(output(), saved[0]->tensor, input(0), in.size() > 1 ? input(1) : Tensor{}, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    const bool gain = in.size() > 1;
    rmsnorm_backward(dinput(0), gain ? dinput(1) : Tensor{}, doutput(), input(0), gain ? input(1) : Tensor{},
                     saved[0]->tensor, acc[0], stream);
  }
};

struct Rope : Node {
  const char* op() const override { return "rope"; }
  void forward(const Step& step, Stream stream) override {
    rope_forward(output(), input(0), reads[0]->tensor, step.position, stream);
  }
  void backward(const Step&, Stream stream) override {
    rope_backward(dinput(0), doutput(), reads[0]->tensor, 0, false, stream);  // in place: always set
  }
};

struct Attention : Node {
  double scale = 0;
  const char* op() const override { return "attention"; }
  void forward(const Step&, Stream stream) override {
    attention_forward(output(), saved[0]->tensor, input(0), input(1), input(2), scale, stream);
  }
  void backward(const Step&, Stream stream) override {
    attention_backward(dinput(0), dinput(1), dinput(2), doutput(), output(), input(0), input(1), input(2),
                       saved[0]->tensor, scale, acc[0], acc[1], acc[2], stream);
  }
  double flops() const override {  // q.k and p.v over the causal half
    const Shape& q = in[0]->shape;
    return 2.0 * static_cast<double>(q.numel()) * static_cast<double>(q[1] + 1);
  }
};

struct CachedAttention : Node {
  double scale = 0;
  Value *k_cache = nullptr, *v_cache = nullptr;  // (B, cache length, K, D), kept from replay to replay
  const char* op() const override { return "cached_attn"; }
  void forward(const Step& step, Stream stream) override {
    attention_cached(output(), k_cache->tensor, v_cache->tensor, input(0), input(1), input(2), step.position, scale,
                     stream);
  }
  void backward(const Step&, Stream) override { CHECK_THAT(false, "a generation tape has no backward: ", name); }
};

struct Swiglu : Node {
  const char* op() const override { return "swiglu"; }
  void forward(const Step&, Stream stream) override { swiglu_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    swiglu_backward(dinput(0), dinput(1), doutput(), input(0), input(1), acc[0], acc[1], stream);
  }
};

struct Add : Node {
  const char* op() const override { return "add"; }
  void forward(const Step&, Stream stream) override { add_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    for (size_t i = 0; i < 2; ++i)
      if (dinput(i).data != doutput().data) accumulate(dinput(i), doutput(), acc[i], stream);
  }
};

struct Copy : Node {
  const char* op() const override { return "copy"; }
  void forward(const Step&, Stream stream) override { accumulate(output(), input(0), false, stream); }
  void backward(const Step&, Stream stream) override {
    if (dinput(0).data != doutput().data) accumulate(dinput(0), doutput(), acc[0], stream);
  }
};

struct CrossEntropy : Node {
  Tensor weight() const { return factor_of(in[1], in[0]->dtype); }
  const char* op() const override { return "cross_entropy"; }
  void forward(const Step& step, Stream stream) override {
    const Tensor& targets = reads[0]->tensor;
    if (!step.training) return cross_entropy_forward(output(), input(0), weight(), targets, stream);
    CHECK_THAT(!acc[0], name, " must be the only reader of ", in[0]->name);
    cross_entropy_forward_backward(output(), dinput(0), dinput(1), input(0), weight(), targets, step.grad_scale,
                                   stream);
  }
  void backward(const Step&, Stream) override {}  // done in the forward, while the logits were in cache
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[1]->shape[0]);
  }
};

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Recording

Value* embedding(Tape& t, const std::string& name, Value* tokens, Value* weight) {
  CHECK_THAT(tokens->dtype == Dtype::i32 && weight->shape.rank == 2, name, ": ", tokens->shape.str());
  Value* out = t.activation(name, Shape{tokens->shape[0], tokens->shape[1], weight->shape[1]});
  auto node = make_node<Embedding>(name, {weight}, {out});
  node->reads = {tokens};
  return t.record(std::move(node));
}

std::vector<Value*> linears(Tape& t, const std::string& name, Value* inp, const std::vector<Projection>& projections) {
  auto node = make_node<Linear>(name, {inp}, {});
  for (const Projection& p : projections) {
    const int64_t in = p.weight->shape[1], rows = inp->shape.numel() / in;
    CHECK_THAT(inp->shape.numel() % in == 0 && p.shape.numel() == rows * p.weight->shape[0], p.name, ": inp ",
               inp->shape.str(), " weight ", p.weight->shape.str(), " out ", p.shape.str());
    node->in.push_back(p.weight);
    node->out.push_back(t.activation(p.name, p.shape));
  }
  node->keep = {inp};
  node->can_add = projections.size() == 1;
  const std::vector<Value*> outs = node->out;
  t.record(std::move(node));
  return outs;
}

Value* linear(Tape& t, const std::string& name, Value* inp, Value* weight, Shape shape) {
  return linears(t, name, inp, {{name, weight, shape}})[0];
}

Value* rmsnorm(Tape& t, const std::string& name, Value* inp, Value* weight, double eps) {
  const int64_t C = inp->shape[inp->shape.rank - 1];
  CHECK_THAT(weight == nullptr || weight->shape[0] == C, name, ": inp ", inp->shape.str(), " weight ",
             weight->shape.str());
  auto node = make_node<RmsNorm>(name, {inp}, {t.activation(name, inp->shape)});
  if (weight != nullptr) node->in.push_back(weight);
  node->eps = eps;
  node->saved = {t.statistic(name + ".rstd", Shape{inp->shape.numel() / C})};
  node->keep = {inp};
  return t.record(std::move(node));
}

Value* rope_positions(Tape& t, int64_t count, const std::vector<double>& frequencies) {
  return t.constant("rope", Shape{count, 2 * static_cast<int64_t>(frequencies.size())},
                    rope_table(count, frequencies));
}

Value* rope(Tape& t, const std::string& name, Value* inp, Value* table) {
  CHECK_THAT(inp->shape.rank == 4 && inp->shape[3] == table->shape[1], name, ": inp ", inp->shape.str(), " table ",
             table->shape.str());
  auto node = make_node<Rope>(name, {inp}, {t.activation(name, inp->shape)});
  node->reads = {table};
  node->in_place = true;
  return t.record(std::move(node));
}

Value* attention(Tape& t, const std::string& name, Value* q, Value* k, Value* v) {
  const Shape &qs = q->shape, &ks = k->shape;
  CHECK_THAT(ks == v->shape && qs[0] == ks[0] && qs[1] == ks[1] && qs[3] == ks[3] && qs[2] % ks[2] == 0, name, ": q ",
             qs.str(), " k ", ks.str(), " v ", v->shape.str());
  const double scale = 1 / std::sqrt(static_cast<double>(qs[3]));
  Value* out = t.activation(name, qs);
  if (t.cache_length() > 0) {
    auto node = make_node<CachedAttention>(name, {q, k, v}, {out});
    node->scale = scale;
    node->k_cache = t.result(name + ".k_cache", Shape{ks[0], t.cache_length(), ks[2], ks[3]});
    node->v_cache = t.result(name + ".v_cache", Shape{ks[0], t.cache_length(), ks[2], ks[3]});
    return t.record(std::move(node));
  }
  auto node = make_node<Attention>(name, {q, k, v}, {out});
  node->scale = scale;
  node->saved = {t.statistic(name + ".lse", Shape{qs[0], qs[2], qs[1]})};
  node->keep = {q, k, v, out};
  return t.record(std::move(node));
}

Value* swiglu(Tape& t, const std::string& name, Value* gate, Value* up) {
  CHECK_THAT(gate->shape == up->shape, name, ": gate ", gate->shape.str(), " up ", up->shape.str());
  auto node = make_node<Swiglu>(name, {gate, up}, {t.activation(name, gate->shape)});
  node->keep = {gate, up};
  node->grads_over_inputs = true;
  return t.record(std::move(node));
}

Value* add(Tape& t, const std::string& name, Value* a, Value* b) {
  CHECK_THAT(a->shape == b->shape, name, ": ", a->shape.str(), " and ", b->shape.str());
  auto node = make_node<Add>(name, {a, b}, {t.activation(name, a->shape)});
  node->passes_grad = a != b;
  node->is_sum = true;
  return t.record(std::move(node));
}

Value* copy(Tape& t, const std::string& name, Value* inp) {
  CHECK_THAT(inp->dtype == t.dtype(), name, ": ", inp->name, " is not stored as activations are");
  auto node = make_node<Copy>(name, {inp}, {t.activation(name, inp->shape)});
  node->passes_grad = true;
  return t.record(std::move(node));
}

Value* cross_entropy(Tape& t, const std::string& name, Value* inp, Value* weight, Value* targets) {
  CHECK_THAT(inp->shape[0] == targets->shape[0] && inp->shape[1] == targets->shape[1] &&
                 inp->shape[2] == weight->shape[1],
             name, ": inp ", inp->shape.str(), " weight ", weight->shape.str(), " targets ", targets->shape.str());
  auto node = make_node<CrossEntropy>(name, {inp, weight}, {t.result(name, targets->shape)});
  node->reads = {targets};
  node->grad_in_forward = true;
  return t.record(std::move(node));
}

}  // namespace crossply::ops
