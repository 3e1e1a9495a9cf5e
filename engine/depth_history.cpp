// Layers as sources of mixtures: LIMe's router over key/value heads, and mixtures of residual streams.
#include "engine/depth_ops.h"
#include "engine/node.h"
#include "kernels/depth_mix.h"
#include "kernels/route.h"

namespace crossply::ops {
namespace {

// in[0] is the layer's own slice, in[1] its weight if it has one; reads[0] is the slab.
struct Route : Node {
  int layer = 0;
  std::shared_ptr<std::vector<DepthRouter::Reader>> readers;  // of all layers, complete once the model is recorded
  std::vector<Router> routers;

  const char* op() const override { return "route"; }
  void prepare() override {
    routers.clear();
    for (const auto& reader : *readers)
      routers.push_back(Router{tensor_of(reader.weight), reader.sources, grad_of(reader.weight)});
  }
  void forward(const Step&, Stream stream) override {
    if (layer == 0) return;  // the output is the slice itself
    route_forward(output(), reads[0]->tensor, routers[static_cast<size_t>(layer)], stream);
  }
  void backward(const Step&, Stream stream) override {
    CHECK_THAT(!acc[0], name, " must be the only reader of ", in[0]->name);
    route_backward(dinput(0), reads[0]->tensor, doutput(), routers, layer, stream);
  }
  double flops() const override {
    if (layer == 0) return 0;
    const auto& sources = (*readers)[static_cast<size_t>(layer)].sources;
    const double heads = in.size() > 1 ? static_cast<double>(in[0]->shape[2]) : 1;
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * heads * static_cast<double>(sources.size());
  }
};

// A source of mixtures: out[0] is in[0]. Its backward gathers from the readers, which are recorded after it.
struct DepthSource : Node {
  struct Reader {
    Value *out, *weights;      // the mixture and its weights: a parameter, or one row per token
    int64_t column;            // of this source among them
    Value *scores, *pbar;      // vertical attention only
  };
  bool by_norm = false;        // saved[0] then holds the squared norms (B*T)
  double eps = 0;
  std::vector<Reader> readers;
  std::vector<DepthReader> mixes;  // the same as tensors
  std::vector<VerticalReader> attends;

  const char* op() const override { return "depth_source"; }
  void prepare() override {
    mixes.clear(), attends.clear();
    for (const Reader& r : readers) {
      if (r.out->grad == nullptr) continue;  // a tape that only goes forward
      if (by_norm)
        attends.push_back({grad_of(r.out), tensor_of(r.weights), tensor_of(r.pbar), grad_of(r.scores), r.column});
      else mixes.push_back({grad_of(r.out), tensor_of(r.weights), grad_of(r.weights), r.column});
    }
  }
  void forward(const Step&, Stream stream) override {
    if (by_norm) vertical_squares(saved[0]->tensor, input(0), stream);
  }
  double flops() const override { return by_norm ? 2.0 * static_cast<double>(in[0]->shape.numel()) : 0; }
  void backward(const Step&, Stream stream) override {
    const bool add = out[0]->grad != nullptr;  // which is dinput(0) then, with what the direct readers passed on
    if (by_norm) vertical_backward(dinput(0), output(), saved[0]->tensor, attends, eps, add, stream);
    else depth_mix_backward(dinput(0), output(), mixes, add, stream);
  }
};

// A mixture: reads the sources, which take care of all its gradients but one.
struct DepthMix : Node {
  std::vector<Value*> sources, squares;  // squares: vertical attention only, saved[0] the weights, saved[1] pbar
  double eps = 0;

  const char* op() const override { return squares.empty() ? "depth_mix" : "vertical"; }
  void forward(const Step&, Stream stream) override {
    const Tensor weights = in.empty() ? Tensor{} : input(0);
    if (squares.empty()) depth_mix_forward(output(), tensors_of(sources), weights, stream);
    else vertical_forward(output(), saved[0]->tensor, tensors_of(sources), tensors_of(squares), weights, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    if (!squares.empty()) vertical_dot(saved[1]->tensor, doutput(), output(), stream);
  }
  double flops() const override {
    return 2.0 * static_cast<double>(out[0]->shape.numel()) * static_cast<double>(sources.size());
  }
};

// The mixture reads the sources by `weights`, and each source learns of its reader. Vertical attention passes the
// scores, or null, and saves its weights and pbar in the mixture.
void connect(DepthMix& mix, const std::vector<Node*>& nodes, const std::vector<int>& sources, Value* weights,
             Value* scores, Value* pbar) {
  for (const int s : sources) {
    auto& source = static_cast<DepthSource&>(*nodes.at(static_cast<size_t>(s)));
    source.readers.push_back({mix.out[0], weights, static_cast<int64_t>(mix.sources.size()), scores, pbar});
    source.keep_grads.push_back(mix.out[0]);
    source.keep.insert(source.keep.end(), mix.saved.begin(), mix.saved.end());
    mix.sources.push_back(source.out[0]);
    if (source.by_norm) mix.squares.push_back(source.saved[0]);
  }
  mix.reads = joined(mix.sources, mix.squares);
}

}  // namespace

DepthRouter::DepthRouter(Tape& t, const std::string& name, int64_t layers, Shape slice)
    : tape_(t), slab_(t.slab(name, layers, slice)), readers_(std::make_shared<std::vector<Reader>>()) {}

Value* DepthRouter::route(const std::string& name, int layer, Value* own, Value* weight, std::vector<int> sources) {
  CHECK_THAT(layer == static_cast<int>(readers_->size()), name, ": layers must be routed in order, got ", layer);
  CHECK_THAT(layer > 0 || (weight == nullptr && sources == std::vector<int>{0}), name, ": layer 0 reads itself");
  const int64_t K = own->shape[2];
  CHECK_THAT(weight == nullptr || (weight->shape == Shape{K, (layer + 1) * K}), name, ": weight ",
             weight->shape.str(), ", own ", own->shape.str());
  readers_->push_back(Reader{weight, std::move(sources)});
  tape_.place(own, slab_, layer);
  auto node = make_node<Route>(name, {own}, {tape_.activation(name, own->shape)});
  if (weight != nullptr) node->in.push_back(weight);
  node->layer = layer;
  node->readers = readers_;
  node->reads = {slab_.all};
  node->keep = {slab_.all};
  node->takes_input = true;  // the backward replaces slice after slice by gradients (kernels/route.h)
  if (layer == 0) tape_.share(node->out[0], own);
  return tape_.record(std::move(node));
}

Value* DepthHistory::add(const std::string& name, Value* x) {
  CHECK_THAT(x->shape.rank == 3, name, ": a source is (B, T, C), got ", x->shape.str());
  auto node = make_node<DepthSource>(name, {x}, {tape_.activation(name, x->shape)});
  node->in_place = true;
  node->grad_optional = true;
  node->by_norm = by_norm_;
  node->eps = eps_;
  if (by_norm_) node->saved = {tape_.statistic(name + ".squares", Shape{x->shape[0] * x->shape[1]})};
  node->keep = {node->out[0]};
  nodes_.push_back(node.get());
  return tape_.record(std::move(node));
}

Value* DepthHistory::mix(const std::string& name, const std::vector<int>& sources, Value* weight) {
  const int64_t S = static_cast<int64_t>(sources.size());
  CHECK_THAT(!by_norm_ && S > 0 && weight->shape.numel() == S, name, ": ", S, " sources, weight ", weight->shape.str());
  auto node = make_node<DepthMix>(name, {weight}, {tape_.activation(name, nodes_[0]->out[0]->shape)});
  connect(*node, nodes_, sources, weight, nullptr, nullptr);
  return tape_.record(std::move(node));
}

Value* DepthHistory::attend(const std::string& name, const std::vector<int>& sources, Value* scores) {
  const int64_t S = static_cast<int64_t>(sources.size());
  CHECK_THAT(by_norm_ && S > 0 && (scores == nullptr || scores->shape.numel() == S), name, ": ", S, " sources");
  const Shape stream = nodes_[0]->out[0]->shape;
  const int64_t N = stream[0] * stream[1];
  auto node = make_node<DepthMix>(name, present({scores}), {tape_.activation(name, stream)});
  node->eps = eps_;
  node->saved = {tape_.statistic(name + ".weights", Shape{N, S}), tape_.statistic(name + ".pbar", Shape{N})};
  connect(*node, nodes_, sources, node->saved[0], scores, node->saved[1]);
  node->keep = {node->out[0]};
  Value* out = tape_.record(std::move(node));
  out->needs_grad = true;  // through the sources, also where there are no scores
  return out;
}

}  // namespace crossply::ops
