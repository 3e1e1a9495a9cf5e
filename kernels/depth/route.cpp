#include "kernels/depth/route.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// One layer's share of a sum over layers: out[n,o,:] += sum_i coef[i,o] * block[n,i,:].
template <class S>
struct Term {
  const S* block;     // (N,K,D)
  const float* coef;  // (K,K), or null: scale times the identity
  float scale;
};

// Columns [d, d + Vecs * lanes) of the heads [o, o + Heads) of the token that starts at element `at`: they stay in
// registers while all terms pass. In f32 each term is summed on its own first, for which bf16's rounding is too coarse.
template <class Vec, int Vecs, int HeadShape, class S>
void mix_columns(S* out, const std::vector<Term<S>>& terms, int64_t at, int64_t K, int64_t D, int64_t o, int64_t d,
                 int64_t ahead) {
  constexpr bool apart = std::is_same_v<S, float>;
  Vec total[HeadShape][Vecs] = {}, in;
  for (const Term<S>& term : terms) {
    const S* x = term.block + at + d;
    if (term.coef == nullptr) {
      for (int h = 0; h < HeadShape; ++h) {
        for (int v = 0; v < Vecs; ++v) {
          load(in, x + (o + h) * D + v * lanes_of<Vec>);
          total[h][v] += term.scale * in;
        }
      }
      continue;
    }
    Vec own[HeadShape][Vecs] = {}, (&sum)[HeadShape][Vecs] = apart ? own : total;
    for (int64_t i = 0; i < K; ++i) {
      const float* coef = term.coef + i * K + o;
      for (int v = 0; v < Vecs; ++v) {
        load(in, x + i * D + v * lanes_of<Vec>);
        if (o == 0 && v * lanes_of<Vec> * sizeof(S) % 64 == 0)
          __builtin_prefetch(x + i * D + v * lanes_of<Vec> + ahead);
        for (int h = 0; h < HeadShape; ++h) sum[h][v] += coef[h] * in;
      }
    }
    for (int h = 0; h < HeadShape && apart; ++h)
      for (int v = 0; v < Vecs; ++v) total[h][v] += own[h][v];
  }
  for (int h = 0; h < HeadShape; ++h)
    for (int v = 0; v < Vecs; ++v) store(out + at + (o + h) * D + d + v * lanes_of<Vec>, total[h][v]);
}

template <int HeadShape, class S>
void mix_tokens(S* out, const std::vector<Term<S>>& terms, int64_t begin, int64_t end, int64_t K, int64_t D,
                int64_t ahead) {
  for (int64_t at = begin * K * D; at < end * K * D; at += K * D) {
    for (int64_t o = 0; o < K; o += HeadShape) {
      int64_t d = 0;
      for (; d + 32 <= D; d += 32) mix_columns<Vec16, 2, HeadShape>(out, terms, at, K, D, o, d, ahead);
      for (; d + 16 <= D; d += 16) mix_columns<Vec16, 1, HeadShape>(out, terms, at, K, D, o, d, ahead);
      for (; d + 8 <= D; d += 8) mix_columns<Vec8, 1, HeadShape>(out, terms, at, K, D, o, d, ahead);
      for (; d < D; ++d) mix_columns<float, 1, HeadShape>(out, terms, at, K, D, o, d, ahead);
    }
  }
}

// out (N,K,D) = the sum of the terms, for tokens [begin, end). Memory is asked for what lies `ahead` elements on, which
// past the end does no harm: the machine's own guesses stop at every page.
template <class S>
void mix(S* out, const std::vector<Term<S>>& terms, int64_t begin, int64_t end, int64_t K, int64_t D, int64_t ahead) {
  if (K % 8 == 0 && sizeof(S) < 4) mix_tokens<8>(out, terms, begin, end, K, D, ahead);
  else if (K % 4 == 0) mix_tokens<4>(out, terms, begin, end, K, D, ahead);
  else if (K % 3 == 0) mix_tokens<3>(out, terms, begin, end, K, D, ahead);
  else if (K % 2 == 0) mix_tokens<2>(out, terms, begin, end, K, D, ahead);
  else mix_tokens<1>(out, terms, begin, end, K, D, ahead);
}

// dw[h,i] += sum over tokens and columns [d, end) of dout[t,h,:] * x[t,i,:], a square of Heads x Heads at a time.
template <class Vec, int HeadShape, class S>
void correlate_columns(float* dw, const S* dout, const float* x, int64_t tokens, int64_t K, int64_t D, int64_t d,
                       int64_t end) {
  for (int64_t h = 0; h < K; h += HeadShape) {
    for (int64_t i = 0; i < K; i += HeadShape) {
      Vec sum[HeadShape][HeadShape] = {};
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = d; c < end; c += lanes_of<Vec>) {
          for (int a = 0; a < HeadShape; ++a) {
            for (int b = 0; b < HeadShape; ++b) {
              Vec dy, in;
              load(dy, dout + (t * K + h + a) * D + c);
              load(in, x + (t * K + i + b) * D + c);
              sum[a][b] += dy * in;
            }
          }
        }
      }
      for (int a = 0; a < HeadShape; ++a)
        for (int b = 0; b < HeadShape; ++b) dw[(h + a) * K + i + b] += sum_of_lanes(sum[a][b]);
    }
  }
}

template <int HeadShape, class S>
void correlate(float* dw, const S* dout, const float* x, int64_t tokens, int64_t K, int64_t D) {
  const int64_t end16 = D / 16 * 16, end8 = D / 8 * 8;
  if (end16 > 0) correlate_columns<Vec16, HeadShape>(dw, dout, x, tokens, K, D, 0, end16);
  if (end8 > end16) correlate_columns<Vec8, HeadShape>(dw, dout, x, tokens, K, D, end16, end8);
  if (D > end8) correlate_columns<float, HeadShape>(dw, dout, x, tokens, K, D, end8, D);
}

// The term of reading block `s` through a router: forward [i = h', o = h], backward the transpose. Its coefficients, if
// any, are packed into `coef`, because the rows of a weight lie apart by a multiple of the cache's period.
template <class S>
Term<S> make_term(const S* block, const Router& router, int64_t s, bool backward, float* coef, int64_t K) {
  if (router.weight.data == nullptr) return {block, nullptr, 1.f / static_cast<float>(router.sources.size())};
  const float* weight = router.weight.as<float>() + s * K;
  const int64_t columns = router.weight.dim(1);
  for (int64_t h = 0; h < K; ++h)
    for (int64_t from = 0; from < K; ++from) coef[backward ? h * K + from : from * K + h] = weight[h * columns + from];
  return {block, coef, 1.f};
}

template <class S>
void route_forward_cpu(S* out, const S* slab, const Router& router, int64_t N, int64_t K, int64_t D) {
  const int64_t layers = static_cast<int64_t>(router.sources.size());
  float* coef = scratch_f32(static_cast<size_t>(layers * K * K));
  std::vector<Term<S>>& terms = empty_list<Term<S>>();
  for (int s : router.sources) {
    terms.push_back(make_term(slab + s * N * K * D, router, s, false, coef, K));
    coef += K * K;
  }
  parallel_for(N, 32768 / (K * D * layers),
               [=, &terms](int64_t begin, int64_t end) { mix(out, terms, begin, end, K, D, 4 * K * D); });
}

// dw (K,K) += the correlation of a reader's dout with what it read, both (tokens,K,D).
template <class S>
void weight_gradient(float* dw, const S* dout, const float* x, int64_t tokens, int64_t K, int64_t D) {
  if (K % 4 == 0) correlate<4>(dw, dout, x, tokens, K, D);
  else if (K % 2 == 0) correlate<2>(dw, dout, x, tokens, K, D);
  else correlate<1>(dw, dout, x, tokens, K, D);
}

// What reading block `layer` has to give to a router's gradient.
struct BlockReader {
  float* dweight;  // W's element [0, layer*K], or null
  int64_t columns;
};

// Tokens handled together in the backward: a block's own tile of 16 KB stays in the L1 cache for all its readers, whose
// tiles are still in the L2 cache when they are used for the second time.
int64_t tile_tokens(int64_t K, int64_t D) { return (std::clamp<int64_t>(8192 / (K * D), 4, 64) + 1) / 2; }

template <class S>
void route_backward_cpu(S* dslice, S* slab, const S* dout, const std::vector<Router>& routers, int layer, int64_t N,
                        int64_t K, int64_t D) {
  std::vector<Term<S>>& terms = empty_list<Term<S>>();  // what the readers pass on
  std::vector<BlockReader>& readers = empty_list<BlockReader>();
  float* coef = scratch_f32(routers.size() * static_cast<size_t>(K * K));
  for (size_t r = static_cast<size_t>(layer); r < routers.size(); ++r, coef += K * K) {
    const Router& router = routers[r];
    if (!std::binary_search(router.sources.begin(), router.sources.end(), layer)) continue;
    terms.push_back(make_term(slab + static_cast<int64_t>(r) * N * K * D, router, layer, true, coef, K));
    readers.push_back({router.dweight.data == nullptr ? nullptr : router.dweight.as<float>() + layer * K,
                       static_cast<int64_t>(r + 1) * K});
  }
  const int64_t layers = static_cast<int64_t>(readers.size());
  const int64_t tokens = tile_tokens(K, D), tiles = ceil_div(N, tokens);
  // One partial sum per block of tiles; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(tiles / 4, 1, 32), size = layers * K * K;
  float* partial = scratch_f32(static_cast<size_t>(blocks * size), 1);
  std::fill_n(partial, blocks * size, 0.f);
  parallel_for(blocks, N * K * D * layers <= 32768 ? blocks : 1, [=, &terms, &readers](int64_t begin, int64_t end) {
    float* own = scratch_f32(static_cast<size_t>(tokens * K * D), 2);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min(N, tiles * (b + 1) / blocks * tokens);
      for (int64_t n = tiles * b / blocks * tokens; n < last; n += tokens) {
        const int64_t count = std::min(tokens, last - n), at = n * K * D;
        S* block = slab + layer * N * K * D + at;
        copy_row(own, block, count * K * D);
        std::copy_n(dout + at, count * K * D, block);
        float* dw = partial + b * size;
        for (size_t r = 0; r < readers.size(); ++r, dw += K * K)
          if (readers[r].dweight != nullptr) weight_gradient(dw, terms[r].block + at, own, count, K, D);
        mix(dslice, terms, n, n + count, K, D, count * K * D);
      }
    }
  });
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < layers; ++r) {
      const BlockReader& reader = readers[static_cast<size_t>(r)];
      for (int64_t h = 0; h < K && reader.dweight != nullptr; ++h)
        for (int64_t from = 0; from < K; ++from)
          reader.dweight[h * reader.columns + from] += partial[b * size + (r * K + h) * K + from];
    }
}

void check_router(const Router& router, int64_t layer, int64_t K) {
  const auto& [weight, sources, dweight] = router;
  bool ascending = !sources.empty() && sources.front() >= 0 && sources.back() <= layer;
  for (size_t i = 1; i < sources.size(); ++i) ascending &= sources[i - 1] < sources[i];
  CHECK_THAT(ascending, "the sources of layer ", layer, " must ascend within 0 to ", layer);
  CHECK_THAT(weight.data == nullptr || weight.shape == Shape({K, (layer + 1) * K}), "layer ", layer, " has the weight ",
             weight.str(), " for ", K, " heads");
  CHECK_SHAPES(dweight.data == nullptr || dweight.shape == weight.shape, weight, dweight);
}

struct HeadShape {
  int64_t N, K, D;
};
HeadShape heads_of(const Tensor& out) {
  const int rank = out.shape.rank;
  CHECK_SHAPES(rank >= 2, out);
  const int64_t K = out.dim(rank - 2), D = out.dim(rank - 1);
  return {out.numel() / (K * D), K, D};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void route_forward(const Tensor& out, const Tensor& slab, const Router& router, Stream stream) {
  const auto [N, K, D] = heads_of(out);
  const bool trained = router.weight.data != nullptr;
  check_router(router, trained ? router.weight.dim(1) / K - 1 : slab.dim(0) - 1, K);
  CHECK_SHAPES(slab.numel() == slab.dim(0) * out.numel() && router.sources.back() < slab.dim(0), out, slab);
  dispatch(
      stream, out.dtype, [&] { route_forward_cuda(out, slab, router, N, K, D); },
      [&]<class S>(S) { route_forward_cpu(out.as<S>(), slab.as<S>(), router, N, K, D); },
      [&]<class T>(T) {
        route_forward_ref(out.as<T>(), slab.as<T>(), data_or_null<T>(router.weight), router.sources,
                          router.weight.dim(1), N, K, D);
      });
}

void route_backward(const Tensor& dslice, const Tensor& slab, const Tensor& dout, const std::vector<Router>& routers,
                    int layer, Stream stream) {
  const auto [N, K, D] = heads_of(dslice);
  const int64_t L = static_cast<int64_t>(routers.size());
  CHECK_THAT(layer >= 0 && layer < L, "layer ", layer, " of ", L);
  CHECK_SHAPES(slab.dim(0) == L && slab.numel() == L * dslice.numel() && dout.numel() == dslice.numel(), dslice, slab,
               dout);
  for (int64_t r = layer; r < L; ++r) check_router(routers[static_cast<size_t>(r)], r, K);
  dispatch(
      stream, dslice.dtype, [&] { route_backward_cuda(dslice, slab, dout, routers, layer, N, K, D); },
      [&]<class S>(S) { route_backward_cpu(dslice.as<S>(), slab.as<S>(), dout.as<S>(), routers, layer, N, K, D); },
      [&]<class T>(T) { route_backward_ref(dslice.as<T>(), slab.as<T>(), dout.as<T>(), routers, layer, N, K, D); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// in[0] is the layer's own slice, in[1] its weight if it has one; reads[0] is the slab.
struct Route : Node {
  int layer = 0;
  std::shared_ptr<std::vector<Router>> routers;  // of all layers, complete once all of them are prepared
  std::vector<Value*> later_weights;             // those that read this slice as well

  const char* op() const override { return "route"; }
  Router& router() const { return (*routers)[static_cast<size_t>(layer)]; }
  void prepare() override {
    if (in.size() == 1) return;
    router().weight = input(1), router().dweight = grad_of(in[1]);
  }
  void forward(const Step&, Stream stream) override {
    if (layer == 0) return;  // the output is the slice itself
    route_forward(output(), reads[0]->tensor, router(), stream);
  }
  void backward(const Step&, Stream stream) override {
    check_only_reader(0);
    route_backward(dinput(0), reads[0]->tensor, doutput(), *routers, layer, stream);
  }
  // The backward replaces slice after slice by gradients (kernels/depth/route.h).
  bool donated_input() const override { return true; }
  std::vector<Value*> later_parameters() const override { return later_weights; }
  double flops() const override {
    if (layer == 0) return 0;
    const double heads = in.size() > 1 ? static_cast<double>(in[0]->shape[2]) : 1;
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * heads * static_cast<double>(router().sources.size());
  }
  ScratchBytes scratch() const override {
    const Shape& s = in[0]->shape;
    const int64_t D = s[s.rank - 1], K = s[s.rank - 2], readers = static_cast<int64_t>(routers->size()) - layer;
    return {static_cast<size_t>(max_sums(s.numel() / (K * D), D) * readers * K * K) * sizeof(float)};
  }
};

}  // namespace

DepthRouter::DepthRouter(Tape& t, const std::string& name, int64_t layers, Shape slice)
    : tape_(t), slab_(t.slab(name, layers, slice)), routers_(std::make_shared<std::vector<Router>>()) {}

Value* DepthRouter::route(const std::string& name, int layer, Value* own, Value* weight, std::vector<int> sources) {
  CHECK_THAT(layer == static_cast<int>(routers_->size()), name, ": layers must be routed in order, got ", layer);
  CHECK_THAT(layer > 0 || (weight == nullptr && sources == std::vector<int>{0}), name, ": layer 0 reads itself");
  const int64_t K = own->shape[2];
  CHECK_THAT(weight == nullptr || (weight->shape == Shape{K, (layer + 1) * K}), name, ": weight ", weight->shape.str(),
             ", own ", own->shape.str());
  routers_->push_back({{}, std::move(sources), {}});
  tape_.place(own, slab_, layer);
  auto node = make_node<Route>(name, {own}, {tape_.activation(name, own->shape)});
  if (weight != nullptr) node->in.push_back(weight);
  if (weight != nullptr)
    for (Node* earlier : nodes_) static_cast<Route*>(earlier)->later_weights.push_back(weight);
  nodes_.push_back(node.get());
  node->layer = layer;
  node->routers = routers_;
  node->reads = {slab_.all};
  node->backward_reads = {slab_.all};
  if (layer == 0) tape_.share(node->out[0], own);
  return tape_.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
