#include <cmath>

#include "engine/node.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/depth_merge.h"
#include "kernels/attention/ops.h"

namespace crossply::ops {
namespace {

// in: q, k, v, then the keys of all slots over depth and their values; mostly there are none.
struct SlotsNode : AttentionNode {
  std::vector<Tensor> slot_keys, slot_values;

  size_t slots() const { return (in.size() - 3) / 2; }
  void prepare() override {
    slot_keys.clear(), slot_values.clear();
    for (size_t s = 0; s < slots(); ++s)
      slot_keys.push_back(input(3 + s)), slot_values.push_back(input(3 + slots() + s));
  }
  void merge_slots(const Tensor& lse, Stream stream) {
    if (slots() > 0) depth_merge_forward(output(), lse, input(0), slot_keys, slot_values, scale, stream);
  }
};

struct Attention : SlotsNode {
  std::vector<Grad> slot_dkeys, slot_dvalues;
  Value* documents = nullptr;  // null: each row is one

  AttentionMask mask() const { return {window, documents == nullptr ? Tensor{} : documents->tensor}; }

  const char* op() const override { return "attention"; }
  void prepare() override {
    SlotsNode::prepare();
    slot_dkeys.clear(), slot_dvalues.clear();
    for (size_t s = 0; s < slots() && !grad_modes.empty(); ++s)
      slot_dkeys.push_back(gradient(3 + s)), slot_dvalues.push_back(gradient(3 + slots() + s));
  }
  void forward(const Step&, Stream stream) override {
    attention_forward(output(), saved[0]->tensor, input(0), input(1), input(2), scale, mask(), stream);
    merge_slots(saved[0]->tensor, stream);
  }
  // Of the joint output and lse, which are those of attention where there are no slots.
  void backward(const Step&, Stream stream) override {
    attention_backward(gradient(0), gradient(1), gradient(2), doutput(), output(), input(0), input(1), input(2),
                       saved[0]->tensor, scale, mask(), stream);
    if (slots() > 0)
      depth_merge_backward(dinput(0), slot_dkeys, slot_dvalues, doutput(), output(), saved[0]->tensor, input(0),
                           slot_keys, slot_values, scale, stream);
  }
  // q.k and p.v over the keys that a query sees, as if each row were one document, and over all slots.
  double flops() const override {
    const Shape& q = in[0]->shape;
    const double T = static_cast<double>(q[1]), W = window > 0 ? std::min(static_cast<double>(window), T) : T;
    const double keys = W - W * (W - 1) / (2 * T);  // of a query, on average
    return 4 * static_cast<double>(q.numel()) * (keys + static_cast<double>(slots()));
  }
  ScratchBytes scratch() const override { return {saved[0]->bytes()}; }  // the backward's <dout, out> of each row
};

struct CachedAttention : SlotsNode {
  Value *k_cache = nullptr, *v_cache = nullptr;  // (B, cache length, K, D), kept from run to run
  bool appends = true;                           // no: another node with these keys and values has done so
  const char* op() const override { return "cached_attn"; }
  void forward(const Step& step, Stream stream) override {
    const Tensor lse = slots() > 0 ? forward_work[0]->tensor : Tensor{};
    attention_cached(output(), lse, k_cache->tensor, v_cache->tensor, input(0), appends ? input(1) : Tensor{},
                     appends ? input(2) : Tensor{}, step.position, scale, window, stream);
    merge_slots(lse, stream);
  }
  void backward(const Step&, Stream) override { CHECK_THAT(false, "a generation tape has no backward: ", name); }
};

// The first node of a generation tape that attends to these keys and values, and so has their caches; null if none.
const CachedAttention* reader_of(const Tape& t, const Value* k, const Value* v) {
  for (const auto& node : t.nodes())
    if (const auto* cached = dynamic_cast<const CachedAttention*>(node.get()))
      if (cached->in[1] == k && cached->in[2] == v) return cached;
  return nullptr;
}

}  // namespace

Value* attention(Tape& t, const std::string& name, Value* q, Value* k, Value* v, const Attended& how,
                 const std::vector<Value*>& slot_keys, const std::vector<Value*>& slot_values) {
  const Shape &qs = q->shape, &ks = k->shape;
  CHECK_THAT(ks == v->shape && qs[0] == ks[0] && qs[1] == ks[1] && qs[3] == ks[3] && qs[2] % ks[2] == 0, name, ": q ",
             qs.str(), " k ", ks.str(), " v ", v->shape.str());
  CHECK_THAT(slot_keys.size() == slot_values.size(), name, ": ", slot_keys.size(), " keys of slots, ",
             slot_values.size(), " values");
  const double scale = 1 / (std::sqrt(static_cast<double>(qs[3])) * how.divisor);
  const std::vector<Value*> in = joined(joined({q, k, v}, slot_keys), slot_values);
  Value* out = t.activation(name, qs);
  const auto lse = [&] { return t.statistic(name + ".lse", Shape{qs[0], qs[2], qs[1]}); };
  if (t.cache_length() > 0) {
    auto node = make_node<CachedAttention>(name, in, {out});
    node->scale = scale, node->window = how.window;
    if (!slot_keys.empty()) node->forward_work = {lse()};
    const Shape cache{ks[0], t.cache_length(), ks[2], ks[3]};
    if (const CachedAttention* first = reader_of(t, k, v)) {
      node->k_cache = first->k_cache, node->v_cache = first->v_cache;
      node->appends = false;
    } else {
      node->k_cache = t.input(name + ".k_cache", cache, k->dtype);
      node->v_cache = t.input(name + ".v_cache", cache, v->dtype);
    }
    node->reads = {node->k_cache, node->v_cache};
    return t.record(std::move(node));
  }
  auto node = make_node<Attention>(name, in, {out});
  node->scale = scale, node->window = how.window;
  node->documents = how.documents;
  if (how.documents != nullptr) node->reads = {how.documents};
  node->saved = {lse()};
  node->backward_reads = joined(in, {out});
  return t.record(std::move(node));
}

}  // namespace crossply::ops
