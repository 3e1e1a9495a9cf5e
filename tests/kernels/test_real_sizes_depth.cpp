// The kernels of connections across depth at the sizes of training: 16 layers of width 2048, 4,096 tokens.
#include "kernels/depth/depth_mix.h"
#include "kernels/depth/gate.h"
#include "kernels/depth/head_mix.h"
#include "kernels/depth/head_scale.h"
#include "kernels/depth/multiway_mix.h"
#include "kernels/depth/route.h"
#include "kernels/depth/select_heads.h"
#include "kernels/depth/streams/hyper.h"
#include "kernels/depth/value_mix.h"
#include "tests/support/real_sizes.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t B = sized(2, 1), T = sized(2048, 19), N = B * T, C = sized(2048, 24), L = sized(16, 3);
constexpr int64_t K = sized(8, 2), D = sized(128, 8);  // heads of keys and values
constexpr double pointwise = 2e-6;

// The n tensors from the i-th on.
std::vector<Tensor> from(const std::vector<Tensor>& t, size_t i, int64_t n) {
  return {t.begin() + static_cast<int64_t>(i), t.begin() + static_cast<int64_t>(i) + n};
}

// `count` arrays like the one that make(name) adds; the first one's number.
template <class F>
size_t several(int64_t count, const std::string& name, F&& make) {
  const size_t first = make(name + "0");
  for (int64_t i = 1; i < count; ++i) make(name + std::to_string(i));
  return first;
}

}  // namespace

TEST_CASE("real sizes: depth_mix and vertical attention over all layers") {
  if (!available(Backend::cuda)) return;
  const double eps = 0.25;
  for (const Dtype dtype : storage_types) {
    CAPTURES(name_of(dtype));
    RealSizes at;
    const Shape shape{B, T, C}, tokens{N};
    const size_t source = several(L, "source", [&](auto name) { return at.input(name, dtype, shape); });
    const size_t dout = several(3, "dout", [&](auto name) { return at.input(name, dtype, shape); });
    const size_t scores = at.input("scores", Dtype::f32, {L});
    const size_t squares =
        several(L, "squares", [&](auto name) { return at.output(name, Dtype::f32, tokens, of_sum(C)); });
    const size_t plain = at.output("plain", dtype, shape, of_sum(L)), out = at.output("out", dtype, shape, of_sum(L));
    const size_t weights = at.output("weights", Dtype::f32, {N, L}, of_sum(L));
    at.run([&](auto& t, Stream stream) {
      depth_mix_forward(t[plain], from(t, source, L), t[scores], stream);
      for (size_t s = 0; s < static_cast<size_t>(L); ++s)
        vertical_dot(t[squares + s], t[source + s], t[source + s], stream);
      vertical_forward(t[out], t[weights], from(t, source, L), from(t, squares, L), t[scores], eps, stream);
    });
    // <dout, out>: a sum of C terms that cancel.
    const size_t pbar = several(3, "pbar", [&](auto name) { return at.output(name, Dtype::f32, tokens, of_sum(C)); });
    at.run([&](auto& t, Stream stream) {
      for (size_t r = 0; r < 3; ++r) vertical_dot(t[pbar + r], t[dout + r], t[out], stream);
    });
    const size_t dplain = at.output("dplain", dtype, shape, of_sum(C)), dinp = at.sum("dinp", dtype, shape, of_sum(C));
    const size_t dtrained = several(6, "dtrained", [&](auto name) {
      return at.sum(name, Dtype::f32, {L}, of_sum(N * C), N * C, 0.3 / static_cast<double>(L));
    });
    at.run([&](auto& t, Stream stream) {
      std::vector<DepthReader> readers, vertical;
      for (size_t r = 0; r < 3; ++r) {
        readers.push_back({t[dout + r], t[scores], t[dtrained + r], 1, {}});
        vertical.push_back({t[dout + r], t[weights], t[dtrained + 3 + r], 1, t[pbar + r]});
      }
      depth_mix_backward({t[dplain], false}, t[source + 1], readers, stream);
      vertical_backward({t[dinp], true}, t[source + 1], t[squares + 1], vertical, eps, stream);
    });
  }
}

TEST_CASE("real sizes: route over the heads of all layers") {
  if (!available(Backend::cuda)) return;
  const int last = static_cast<int>(L) - 1;
  for (const Dtype dtype : storage_types) {
    CAPTURES(name_of(dtype));
    const double rounded = dtype == Dtype::bf16 ? 0x1p-14 : 0;  // on tensor cores weights have 16 bits
    RealSizes at;
    const Shape shape{N, K, D};
    const size_t slab = at.input("slab", dtype, {L, N, K, D}), dout = at.input("dout", dtype, shape);
    const size_t weight = several(L, "weight", [&, l = int64_t{0}](auto name) mutable {
      return ++l, at.input(name, Dtype::f32, {K, l * K});
    });
    const size_t out = at.output("out", dtype, shape, of_products(dtype, L * K) + rounded);
    const size_t dslice = several(
        L, "dslice", [&](auto name) { return at.output(name, dtype, shape, of_products(dtype, L * K) + rounded); });
    const size_t dweight = several(L, "dweight", [&, l = int64_t{0}](auto name) mutable {
      return ++l, at.sum(name, Dtype::f32, {K, l * K}, of_products(dtype, N * D));
    });
    at.run([&](auto& t, Stream stream) {
      std::vector<Router> routers;
      for (int l = 0; l <= last; ++l) {
        std::vector<int> sources;
        for (int s = 0; s <= l; ++s) sources.push_back(s);
        const size_t i = static_cast<size_t>(l);
        routers.push_back({l == 0 ? Tensor{} : t[weight + i], sources, l == 0 ? Tensor{} : t[dweight + i]});
      }
      route_forward(t[out], t[slab], routers.back(), stream);
      for (int l = last; l >= 0; --l)
        route_backward(t[dslice + static_cast<size_t>(l)], t[slab], t[dout], routers, l, stream);
    });
  }
}

namespace {

// What both passes of multiway_mix read.
struct MultiwaySizes {
  static constexpr int64_t W = 4;
  Dtype dtype;
  bool prepost;
  RealSizes at{};
  Shape shape{B, T, C};
  int64_t norms = prepost ? L : 0, posts = prepost ? W : 0;
  size_t source = several(L, "source", [&](auto name) { return at.input(name, dtype, shape); });
  size_t gain = several(L, "gain", [&](auto name) { return at.input(name, Dtype::f32, {C}); });
  size_t post = several(W, "post", [&](auto name) { return at.input(name, Dtype::f32, {C}); });
  size_t weight = at.input("weight", dtype, {B, T, W*L}), base = at.input("base", Dtype::f32, {W, L});
  size_t skip = at.input("skip", dtype, shape);
  size_t rstd = prepost ? at.output("rstd", Dtype::f32, {B, T, W}, of_sum(C)) : at.input("none", Dtype::f32, {1});

  MultiwayMix<Tensor> members(const std::vector<Tensor>& t) const {
    MultiwayMix<Tensor> m{from(t, source, L), from(t, gain, norms), from(t, post, posts), t[weight], t[base], {}};
    if (prepost) m.skip = t[skip];
    return m;
  }
  Tensor saved(const std::vector<Tensor>& t) const { return prepost ? t[rstd] : Tensor{}; }
  // A parameter's gradient.
  size_t gradient(const std::string& name) {
    return prepost ? at.sum(name, Dtype::f32, {C}, of_sum(N)) : at.input(name, Dtype::f32, {C});
  }
  void forward() {
    const size_t out = several(W, "out", [&](auto name) { return at.output(name, dtype, shape, of_sum(L + C)); });
    at.run([&](auto& t, Stream stream) { multiway_mix_forward(from(t, out, W), saved(t), members(t), 1e-6, stream); });
  }
  void backward() {
    const size_t dout = several(W, "dout", [&](auto name) { return at.input(name, dtype, shape); });
    const size_t dsource = several(L, "dsource", [&, s = 0](auto name) mutable {
      return at.gradient(name, dtype, shape, of_sum(W + C), s++ % 2 == 0);
    });
    const size_t dweight = at.output("dweight", dtype, {B, T, W * L}, of_sum(C));
    const size_t dbase = at.sum("dbase", Dtype::f32, {W, L}, of_sum(N));
    const size_t dgain = several(L, "dgain", [&](auto name) { return gradient(name); });
    const size_t dpost = several(W, "dpost", [&](auto name) { return gradient(name); });
    const size_t dskip = prepost ? at.sum("dskip", dtype, shape, of_sum(W)) : at.input("dskip", dtype, {1});
    at.run([&](auto& t, Stream stream) {
      MultiwayMix<Grad, Tensor> d{{}, from(t, dgain, norms), from(t, dpost, posts), {t[dweight], false}, t[dbase], {}};
      for (size_t s = 0; s < static_cast<size_t>(L); ++s) d.sources.push_back({t[dsource + s], s % 2 == 0});
      if (prepost) d.skip = {t[dskip], true};
      multiway_mix_backward(d, from(t, dout, W), saved(t), members(t), stream);
    });
  }
};

// What all passes of hyper-connections read, and what they save.
struct HyperSizes {
  static constexpr int64_t E = 4;
  Dtype dtype;
  HyperNorm norm;
  RealSizes at{};
  Shape rows{B, T, C}, all{B, T, E, C};
  std::vector<Shape> fields{{E, E + 1}, {E}, {C, E + 1}, {C}, {1}, {1}, {C}, {C}};
  size_t streams = at.input("streams", dtype, all), y = at.input("y", dtype, rows);
  size_t w = several(8, "w", [&, f = size_t{0}](auto name) mutable {
    const double scale = f == 2 || f == 3 ? 1.5 / std::sqrt(static_cast<double>(C)) : 1;
    return at.input(name, Dtype::f32, fields[f++], scale);
  });
  // The tanhs see sums of C terms; what they scale sums of few.
  size_t coef = at.output("coef", Dtype::f32, {B, T, E, E + 2}, of_sum(C));
  size_t stats = at.output("stats", Dtype::f32, {B, T, E, E + 4}, of_sum(C));

  HyperWeights<Tensor> weights(const std::vector<Tensor>& t, size_t i) const {
    const Tensor bias = norm == HyperNorm::layernorm ? t[i + 7] : Tensor{};
    return {t[i], t[i + 1], t[i + 2], t[i + 3], t[i + 4], t[i + 5], t[i + 6], bias};
  }
  void forward() {
    const size_t out = at.output("out", dtype, rows, of_sum(C)), next = at.output("next", dtype, all, of_sum(C));
    const size_t expanded = at.output("expanded", dtype, all, exact), sum = at.sum("sum", dtype, rows, pointwise);
    at.run([&](auto& t, Stream stream) {
      streams_expand({t[expanded], false}, t[y], stream);
      streams_sum({t[sum], true}, t[streams], stream);
      hyper_read_forward(t[out], t[coef], t[stats], t[streams], weights(t, w), norm, 1e-5, stream);
      hyper_write_forward({t[next], {}, {}}, t[streams], t[coef], t[y], stream);
    });
  }
  void backward() {
    const size_t dnext = at.input("dnext", dtype, all), dout = at.input("dout", dtype, rows);
    const size_t dcoef = at.output("dcoef", Dtype::f32, {B, T, E, E + 2}, of_sum(C));
    const size_t dy = at.output("dy", dtype, rows, pointwise);
    const size_t dstreams = at.output("dstreams", dtype, all, pointwise);
    at.run([&](auto& t, Stream stream) {
      hyper_write_backward({t[dstreams], false}, {t[dcoef], false}, {t[dy], false}, {{}, t[dnext], {}}, t[streams],
                           t[coef], t[y], stream);
    });
    const size_t dread = at.sum("dread", dtype, all, of_sum(C));
    const size_t d = several(8, "d", [&, f = size_t{0}](auto name) mutable {
      const bool unused = f == 7 && norm != HyperNorm::layernorm;
      const Shape shape = fields[f++];
      if (unused) return at.input(name, Dtype::f32, shape);
      // The gradients of coef are sums of C terms themselves.
      return at.sum(name, Dtype::f32, shape, of_sum(N * E) + of_sum(C), shape.numel() < 64 ? N * C : 0, 0.3);
    });
    at.run([&](auto& t, Stream stream) {
      hyper_read_backward({t[dread], true}, weights(t, d), t[dout], t[dcoef], t[streams], t[coef], t[stats],
                          weights(t, w), norm, stream);
    });
  }
};

}  // namespace

TEST_CASE("real sizes: multiway_mix of every layer's four ways") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const bool prepost : {false, true}) {
      CAPTURES(name_of(dtype), prepost);
      MultiwaySizes sizes{dtype, prepost};
      sizes.forward(), sizes.backward();
    }
}

TEST_CASE("real sizes: hyper-connections with four streams") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const HyperNorm norm : {HyperNorm::layernorm, HyperNorm::rmsnorm}) {
      CAPTURES(name_of(dtype), norm);
      HyperSizes sizes{dtype, norm};
      sizes.forward(), sizes.backward();
    }
}

TEST_CASE("real sizes: head_mix of all layers") {
  if (!available(Backend::cuda)) return;
  const int64_t tokens = sized(2048, 19), width = sized(1024, 24);
  for (const Dtype dtype : storage_types)
    for (const bool shared : {false, true}) {
      CAPTURES(name_of(dtype), shared);
      // On a GPU mixtures, and weights times the gain, are rounded to bf16 too.
      const double rounded = dtype == Dtype::bf16 ? 2 * of_bf16 : 0;
      const auto products = [&](int64_t n) { return of_products(dtype, n) + of_sum(L) + rounded; };
      RealSizes at;
      const Shape heads{1, tokens, K, D}, shape{1, tokens, width}, matrix{K * D, width};
      const Shape of_weight = shared ? Shape{K, L} : Shape{1, tokens, K, L};
      const size_t source = several(L, "source", [&](auto name) { return at.input(name, dtype, shape); });
      const size_t weight = at.input("weight", Dtype::f32, of_weight), gain = at.input("gain", Dtype::f32, {width});
      const size_t wk = at.input("wk", dtype, matrix), wv = at.input("wv", dtype, matrix);
      const size_t dk = at.input("dk", dtype, heads), dv = at.input("dv", dtype, heads);
      const size_t k = at.output("k", dtype, heads, products(width)), v = at.output("v", dtype, heads, products(width));
      const size_t dsource = several(L, "dsource", [&, s = 0](auto name) mutable {
        return at.gradient(name, dtype, shape, products(K * D), s++ % 2 == 0);
      });
      const size_t dweight = at.output("dweight", Dtype::f32, of_weight, products(shared ? tokens * width : width));
      const size_t dgain = at.sum("dgain", Dtype::f32, {width}, products(tokens));
      const size_t dwk = at.sum("dwk", Dtype::f32, matrix, products(tokens));
      const size_t dwv = at.sum("dwv", Dtype::f32, matrix, products(tokens));
      at.run([&](auto& t, Stream stream) {
        const HeadMix<Tensor> m{from(t, source, L), t[weight], t[gain], t[wk], t[wv]};
        HeadMix<Grad, Tensor> d{{}, t[dweight], t[dgain], t[dwk], t[dwv]};
        for (size_t s = 0; s < static_cast<size_t>(L); ++s) d.sources.push_back({t[dsource + s], s % 2 == 0});
        head_mix_forward(t[k], t[v], m, stream);
        head_mix_backward(d, t[dk], t[dv], m, stream);
      });
    }
}

namespace {

// What both passes of the ops on values and heads read.
struct ValueSizes {
  Dtype dtype;
  bool accumulates;
  RealSizes at{};
  Shape shape{B, T, K, D}, wide{B, T, 2 * K, D};
  std::vector<HeadChoice> choice{};
  size_t v = several(3, "v", [&](auto name) { return at.input(name, dtype, shape); });
  size_t w = at.input("w", Dtype::f32, {3}), factor = at.input("factor", Dtype::f32, {K});
  size_t one = at.input("one", Dtype::f32, {1}), open = at.input("open", dtype, {B, T, K}, 3);
  size_t alpha = at.output("alpha", Dtype::f32, {B, T, K}, pointwise + of_sum(K));

  void forward() {
    for (int64_t j = 0; j < 2 * K; ++j) choice.push_back({static_cast<int>(j % 3), (j * 5) % K});
    const size_t chosen = at.output("chosen", dtype, wide, exact), mixed = at.output("mixed", dtype, shape, pointwise);
    const size_t scaled = at.output("scaled", dtype, shape, pointwise);
    const size_t by_head = at.output("by_head", dtype, shape, pointwise);
    at.run([&](auto& t, Stream stream) {
      select_heads_forward(t[chosen], from(t, v, 3), choice, stream);
      value_mix_forward(t[mixed], t[v], t[v + 1], {t[w], 0}, {t[w], 2}, stream);
      gate_forward(t[alpha], t[open], Gate::softmax_sigmoid, stream);
      scale_forward(t[scaled], t[v], t[one], stream);
      head_scale_forward(t[by_head], t[v], t[factor], stream);
    });
    const size_t gated = at.output("gated", dtype, shape, pointwise);
    at.run([&](auto& t, Stream stream) { gated_mix_forward(t[gated], t[v], t[v + 1], t[alpha], stream); });
  }
  size_t gradient(const std::string& name) { return at.gradient(name, dtype, shape, pointwise, accumulates); }
  // A parameter's gradient, each element a sum of so many terms.
  size_t sum(const std::string& name, int64_t count, int64_t terms) {
    return at.sum(name, Dtype::f32, {count}, of_sum(terms), terms, 0.3);
  }
  void backward() {
    const size_t dout = at.input("dout", dtype, shape), dwide = at.input("dwide", dtype, wide);
    const size_t dalpha_in = at.input("dalpha_in", Dtype::f32, {B, T, K});
    const size_t dchosen = several(3, "dchosen", [&](auto name) { return gradient(name); });
    const size_t dv = gradient("dv"), dfirst = gradient("dfirst"), dgated = gradient("dgated");
    const size_t dscaled = gradient("dscaled"), dhead = gradient("dhead");
    const size_t dalpha = at.gradient("dalpha", Dtype::f32, {B, T, K}, of_sum(D), accumulates);
    const size_t dopen = at.gradient("dopen", dtype, {B, T, K}, pointwise + of_sum(K), accumulates);
    const size_t dw = sum("dw", 3, N * K * D), done = sum("done", 1, N * K * D), dfactor = sum("dfactor", K, N * D);
    at.run([&](auto& t, Stream stream) {
      for (int s = 0; s < 3; ++s)
        select_heads_backward({t[dchosen + static_cast<size_t>(s)], accumulates}, t[dwide], choice, s, stream);
      value_mix_backward({t[dv], accumulates}, {t[dfirst], accumulates}, {t[dw], 0}, {t[dw], 2}, t[dout], t[v],
                         t[v + 1], {t[w], 0}, {t[w], 2}, stream);
      gated_mix_backward({t[dgated], accumulates}, {t[dalpha], accumulates}, t[dout], t[v + 1], t[alpha], stream);
      gate_backward({t[dopen], accumulates}, t[dalpha_in], t[open], Gate::softmax_sigmoid, stream);
      scale_backward({t[dscaled], accumulates}, t[done], t[dout], t[v], t[one], stream);
      head_scale_backward({t[dhead], accumulates}, t[dfactor], t[dout], t[v], t[factor], stream);
    });
  }
};

}  // namespace

TEST_CASE("real sizes: values and heads of other layers") {
  if (!available(Backend::cuda)) return;
  for (const Dtype dtype : storage_types)
    for (const bool accumulates : {false, true}) {
      CAPTURES(name_of(dtype), accumulates);
      ValueSizes sizes{dtype, accumulates};
      sizes.forward(), sizes.backward();
    }
}
