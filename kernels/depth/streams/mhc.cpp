#include "kernels/depth/streams/mhc.h"

#include "engine/node.h"
#include "kernels/cpu/gemm.h"
#include "kernels/depth/mix_row.h"
#include "kernels/depth/ops.h"
#include "kernels/depth/streams/hyper_token.h"

namespace crossply {

using hyper::check_streams;

namespace {

// -----------------------------------------------------------------------------------------------------------------
// Coefficients, sixteen tokens at a time: a number of each in a vector's lanes.

constexpr int64_t lanes = lanes_of<Vec16>;

// By reference, because passing such vectors by value depends on the instruction set.
void sigmoid(Vec16& to, const Vec16& x) {
  to = -x;
  exp_in_place(to);
  to = 1.f / (1.f + to);
}

void softmax_in_place(Vec16* z, int64_t count) {
  Vec16 max = z[0], sum = {};
  for (int64_t i = 1; i < count; ++i) put_where_less(max, max, z[i], z[i]);
  for (int64_t i = 0; i < count; ++i) z[i] -= max, exp_in_place(z[i]), sum += z[i];
  for (int64_t i = 0; i < count; ++i) z[i] /= sum;
}
void softmax_backward(Vec16* g, const Vec16* p, int64_t count) {
  Vec16 along = {};
  for (int64_t i = 0; i < count; ++i) along += g[i] * p[i];
  for (int64_t i = 0; i < count; ++i) g[i] = p[i] * (g[i] - along);
}

// The numbers of sixteen tokens, and what mhc.h says of them; divisors has room for as many vectors as memory below.
struct SixteenTokens {
  int64_t E;
  const MhcForm& form;
  float eps = static_cast<float>(form.eps);
  Vec16 pre[max_streams], comb[max_streams * max_streams], post[max_streams];
  Vec16* divisors;

  static int64_t memory(int64_t E, const MhcForm& form) {
    return std::max(sinkhorn_steps(form.iterations) * E, permutations_of(std::min(E, max_permuted_streams)));
  }

  void coefficients(const Vec16* l) {
    for (int64_t i = 0; i < E; ++i) sigmoid(pre[i], l[i]), pre[i] += eps;
    if (form.mixing == Mixing::merge) return;
    for (int64_t i = 0; i < E; ++i) sigmoid(post[i], l[E + i]), post[i] *= 2.f;
    for (int64_t e = 0; e < E * E; ++e) comb[e] = Vec16{} + (e % (E + 1) == 0 ? 1.f : 0.f);
    if (form.mixing == Mixing::permutations) permutations(l + 2 * E);
    if (form.mixing == Mixing::sinkhorn) std::copy_n(l + 2 * E, E * E, comb), sinkhorn();
  }
  // dl from the gradients of pre and post to those of l; of comb, dcomb, to the rest of dl. comb may be undone.
  void backward(Vec16* dl, const Vec16* dcomb) {
    for (int64_t i = 0; i < E; ++i) dl[i] *= (pre[i] - eps) * (1.f + eps - pre[i]);
    if (form.mixing == Mixing::merge) return;
    for (int64_t i = 0; i < E; ++i) dl[E + i] *= post[i] * (2.f - post[i]) * 0.5f;
    if (form.mixing == Mixing::sinkhorn) std::copy_n(dcomb, E * E, dl + 2 * E), sinkhorn_backward(dl + 2 * E);
    if (form.mixing == Mixing::permutations) permutations_backward(dl + 2 * E, dcomb);
  }

 private:
  void permutations(const Vec16* l) {
    const int64_t count = permutations_of(E);
    std::copy_n(l, count, divisors);
    softmax_in_place(divisors, count);
    std::fill_n(comb, E * E, Vec16{});
    for (int64_t p = 0; p < count; ++p)
      for (int64_t k = 0; k < E; ++k) comb[k * E + permuted(p, E, k)] += divisors[p];
  }
  void permutations_backward(Vec16* dl, const Vec16* dcomb) {
    const int64_t count = permutations_of(E);
    for (int64_t p = 0; p < count; ++p) {
      dl[p] = Vec16{};
      for (int64_t k = 0; k < E; ++k) dl[p] += dcomb[k * E + permuted(p, E, k)];
    }
    softmax_backward(dl, divisors, count);
  }

  // Member i of row or column j, for a step of Sinkhorn's.
  int64_t at(int64_t step, int64_t j, int64_t i) const { return step % 2 == 0 ? i * E + j : j * E + i; }

  void sinkhorn() {
    for (int64_t k = 0; k < E; ++k) softmax_in_place(comb + k * E, E);
    for (int64_t e = 0; e < E * E; ++e) comb[e] += eps;
    for (int64_t step = 0; step < sinkhorn_steps(form.iterations); ++step)
      for (int64_t j = 0; j < E; ++j) {
        Vec16 sum = Vec16{} + eps;
        for (int64_t i = 0; i < E; ++i) sum += comb[at(step, j, i)];
        const Vec16 inverse = 1.f / sum;
        for (int64_t i = 0; i < E; ++i) comb[at(step, j, i)] *= inverse;
        divisors[step * E + j] = sum;
      }
  }
  void sinkhorn_backward(Vec16* g) {
    for (int64_t step = sinkhorn_steps(form.iterations) - 1; step >= 0; --step)
      for (int64_t j = 0; j < E; ++j) {
        const Vec16 d = divisors[step * E + j], inverse = 1.f / d;
        Vec16 along = {};
        for (int64_t i = 0; i < E; ++i) along += g[at(step, j, i)] * comb[at(step, j, i)];
        for (int64_t i = 0; i < E; ++i) {
          g[at(step, j, i)] = (g[at(step, j, i)] - along) * inverse;
          comb[at(step, j, i)] *= d;
        }
      }
    for (int64_t e = 0; e < E * E; ++e) comb[e] -= eps;
    for (int64_t k = 0; k < E; ++k) softmax_backward(g + k * E, comb + k * E, E);
  }
};

// Of `count` tokens, `apart` from one to the next, a number each in lanes, 0 in the others; and back.
void gather(Vec16& v, const float* of_first, int64_t apart, int64_t count) {
  float numbers[lanes] = {};
  for (int64_t i = 0; i < count; ++i) numbers[i] = of_first[i * apart];
  load(v, numbers);
}
void scatter(float* of_first, int64_t apart, int64_t count, const Vec16& v) {
  float numbers[lanes];
  store(numbers, v);
  for (int64_t i = 0; i < count; ++i) of_first[i * apart] = numbers[i];
}

// -----------------------------------------------------------------------------------------------------------------
// Both directions take a chunk of tokens after the other, whose streams stay in the caches.

constexpr int64_t chunk = 128;
constexpr int divisor_slot = 0, streams_slot = 1, product_slot = 2, logits_slot = 3;

template <class S>
using Read = MhcRead<S*, float*>;

template <class S>
struct Sizes {
  int64_t rows, E, C;
  MhcForm form;
  int64_t M = mhc_rows(form.mixing, E), EC = E * C;
  int64_t grain() const { return 32768 / EC / lanes; }  // of sixteen tokens

  // `count` tokens' streams as floats.
  const float* floats(const S* x, int64_t count) const {
    if constexpr (std::is_same_v<S, float>) return x;
    float* to = scratch_f32(static_cast<size_t>(chunk * EC), streams_slot);
    parallel_for(count, 32768 / EC, [=, width = EC](int64_t begin, int64_t end) {
      for (int64_t e = begin * width; e < end * width; ++e) to[e] = static_cast<float>(x[e]);
    });
    return to;
  }
  SixteenTokens tokens() const {
    float* memory = scratch_f32(static_cast<size_t>(SixteenTokens::memory(E, form) * lanes), divisor_slot);
    return {.E = E, .form = form, .pre = {}, .comb = {}, .post = {}, .divisors = reinterpret_cast<Vec16*>(memory)};
  }
  // The logits l (M) of tokens n.., from their z.
  void logits(Vec16* l, const float* z, const MhcWeights<const float*>& w, int64_t n, int64_t count) const {
    for (int64_t m = 0; m < M; ++m) {
      gather(l[m], z + n * M + m, M, count);
      l[m] = w.scale[mhc_group(m, E)] * l[m] + w.base[m];
    }
  }
};

// pre, coef, rho and z of tokens n.., of whose z the products are there.
template <class S>
void write_coefficients(const Read<S>& t, const MhcWeights<const float*>& w, const Sizes<S>& s, int64_t n,
                        int64_t count) {
  SixteenTokens tokens = s.tokens();
  Vec16 l[max_mhc_rows];
  for (int64_t i = n; i < n + count; ++i) {
    const S* x = t.streams + i * s.EC;
    const float squares = t.squares != nullptr ? t.squares[i] : dot_row(x, x, s.EC);
    t.rho[i] = 1.f / std::sqrt(squares / static_cast<float>(s.EC) + static_cast<float>(s.form.norm_eps));
    for (int64_t m = 0; m < s.M; ++m) t.z[i * s.M + m] *= t.rho[i];
  }
  s.logits(l, t.z, w, n, count);
  tokens.coefficients(l);
  const int64_t E = s.E, J = E + 2;
  for (int64_t k = 0; k < E; ++k) {
    scatter(t.pre + n * E + k, E, count, tokens.pre[k]);
    if (t.coef == nullptr) continue;
    float* row = t.coef + (n * E + k) * J;
    scatter(row, E * J, count, tokens.pre[k]), scatter(row + E + 1, E * J, count, tokens.post[k]);
    for (int64_t i = 0; i < E; ++i) scatter(row + 1 + i, E * J, count, tokens.comb[k * E + i]);
  }
}

template <class S>
void mhc_read_forward_cpu(const Read<S>& t, const MhcWeights<const float*>& w, const Sizes<S>& s) {
  for (int64_t first = 0; first < s.rows; first += chunk) {
    const int64_t count = std::min(chunk, s.rows - first);
    gemm(t.z + first * s.M, {s.floats(t.streams + first * s.EC, count), s.EC, 1}, {w.fn, 1, s.EC}, count, s.M, s.EC,
         false);
    parallel_for(ceil_div(count, lanes), s.grain(), [=, &t, &w, &s](int64_t begin, int64_t end) {
      for (int64_t n = first + begin * lanes; n < std::min(first + end * lanes, first + count); n += lanes) {
        const int64_t some = std::min(lanes, first + count - n);
        write_coefficients(t, w, s, n, some);
        if (t.out == nullptr) continue;
        hyper::with_streams(s.E, [&](auto E) {
          for (int64_t i = n; i < n + some; ++i)
            hyper::read_columns<Vec16, E, false>(t.out + i * s.C, t.streams + i * s.EC, t.pre + i * E, 1, 0, s.C);
        });
      }
    });
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Backward.

template <class S>
struct Gradients {
  S* dstreams;
  bool add_streams;
  const S* dout;
  const float* dcoef;
};

// Of tokens n..: dl (M) of each to dl, rho dz to k, <dz, z> rho^2 / (E C) to along.
template <class S>
void coefficient_gradients(float* dl, float* k, float* along, const Gradients<S>& g, const Read<S>& t,
                           const MhcWeights<const float*>& w, const Sizes<S>& s, int64_t n, int64_t count) {
  const int64_t E = s.E, J = E + 2, M = s.M;
  Vec16 d[max_mhc_rows] = {}, l[max_mhc_rows], dcomb[max_streams * max_streams];
  for (int64_t e = 0; e < E && g.dcoef != nullptr; ++e) {
    const float* row = g.dcoef + (n * E + e) * J;
    gather(d[e], row, E * J, count), gather(d[E + e], row + E + 1, E * J, count);
    for (int64_t i = 0; i < E; ++i) gather(dcomb[e * E + i], row + 1 + i, E * J, count);
  }
  float dots[max_streams][lanes] = {};
  for (int64_t i = 0; i < count && g.dout != nullptr; ++i)
    for (int64_t e = 0; e < E; ++e)
      dots[e][i] = dot_row(t.streams + (n + i) * s.EC + e * s.C, g.dout + (n + i) * s.C, s.C);
  for (int64_t e = 0; e < E; ++e) {
    Vec16 more;
    load(more, dots[e]);
    d[e] += more;
  }
  SixteenTokens tokens = s.tokens();
  s.logits(l, t.z, w, n, count);
  tokens.coefficients(l);
  tokens.backward(d, dcomb);
  Vec16 rho, z, sum = {};
  gather(rho, t.rho + n, 1, count);
  for (int64_t m = 0; m < M; ++m) {
    const Vec16 dz = d[m] * w.scale[mhc_group(m, E)];
    gather(z, t.z + n * M + m, M, count);
    sum += dz * z;
    scatter(dl + m, M, count, d[m]), scatter(k + m, M, count, rho * dz);
  }
  scatter(along, 1, count, sum * rho * rho / static_cast<float>(s.EC));
}

// dx = or += pre dout + through - along x, of one token's stream; dout may be null.
template <class Vec, class S>
void stream_gradients(S* dx, float pre, const S* dout, const float* through, float along, const S* x, int64_t c,
                      int64_t C, bool accumulate) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec sum, v;
    load(sum, through + c);
    if (dout != nullptr) load(v, dout + c), sum += pre * v;
    load(v, x + c);
    sum -= along * v;
    if (accumulate) load(v, dx + c), sum += v;
    store(dx + c, sum);
  }
  if constexpr (lanes_of < Vec >> 1)
    if (c < C) stream_gradients<float>(dx, pre, dout, through, along, x, c, C, accumulate);
}

// What `count` tokens' dl (M) and z add to the gradients of base and scale.
void add_to_scales(const MhcWeights<float*>& d, const float* dl, const float* z, int64_t count, int64_t M, int64_t E) {
  float dbase[max_mhc_rows] = {}, dscale[max_mhc_rows] = {};
  for (int64_t n = 0; n < count; ++n) {
#pragma omp simd
    for (int64_t m = 0; m < M; ++m) dbase[m] += dl[n * M + m], dscale[m] += dl[n * M + m] * z[n * M + m];
  }
  for (int64_t m = 0; m < M; ++m) {
    if (d.base != nullptr) d.base[m] += dbase[m];
    if (d.scale != nullptr) d.scale[mhc_group(m, E)] += dscale[m];
  }
}

template <class S>
void mhc_read_backward_cpu(const Gradients<S>& g, const MhcWeights<float*>& d, const Read<S>& t,
                           const MhcWeights<const float*>& w, const Sizes<S>& s) {
  const auto [M, E, C, EC] = std::tuple{s.M, s.E, s.C, s.EC};
  float* dl = scratch_f32(static_cast<size_t>(chunk * (2 * M + 1)), logits_slot);
  float *k = dl + chunk * M, *along = k + chunk * M;
  for (int64_t first = 0; first < s.rows; first += chunk) {
    const int64_t count = std::min(chunk, s.rows - first);
    parallel_for(ceil_div(count, lanes), s.grain(), [=, &g, &t, &w, &s](int64_t begin, int64_t end) {
      for (int64_t i = begin * lanes; i < std::min(end * lanes, count); i += lanes)
        coefficient_gradients(dl + i * s.M, k + i * s.M, along + i, g, t, w, s, first + i, std::min(lanes, count - i));
    });
    add_to_scales(d, dl, t.z + first * M, count, M, E);
    if (d.fn != nullptr) gemm(d.fn, {k, 1, M}, {s.floats(t.streams + first * EC, count), EC, 1}, M, EC, count, true);
    float* through = scratch_f32(static_cast<size_t>(chunk * EC), product_slot);
    gemm(through, {k, M, 1}, {w.fn, EC, 1}, count, EC, M, false);
    parallel_for(count, 32768 / EC, [=, &g, &t](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t e = 0; e < E; ++e) {
          const int64_t n = first + i, at = n * E * C + e * C;
          const S* dout = g.dout != nullptr ? g.dout + n * C : nullptr;
          stream_gradients<Vec16>(g.dstreams + at, t.pre[n * E + e], dout, through + (i * E + e) * C, along[i],
                                  t.streams + at, 0, C, g.add_streams);
        }
    });
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

StreamsSize check_read(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form) {
  CHECK_THAT(t.streams.shape.rank == 4, t.streams.str());
  const int64_t B = t.streams.dim(0), T = t.streams.dim(1);
  const StreamsSize z{B * T, t.streams.dim(2), t.streams.dim(3)};
  CHECK_THAT(z.E >= 1 && z.E <= max_streams, t.streams.str());
  const int64_t M = mhc_rows(form.mixing, z.E);
  const bool sublayer = mhc_groups(form.mixing) > 1;
  CHECK_THAT(form.mixing != Mixing::permutations || z.E <= max_permuted_streams, z.E, " streams permuted");
  CHECK_THAT(form.iterations >= 1 && form.iterations <= max_sinkhorn_iterations, form.iterations, " iterations");
  const auto check = [&](const char* name, const Tensor& tensor, bool wanted, Shape shape) {
    CHECK_THAT((tensor.data != nullptr) == wanted && (!wanted || tensor.shape == shape), name, " ",
               tensor.data != nullptr ? tensor.str() : "without data", " for ", z.E, " streams of ", z.C);
  };
  check("squares", t.squares, t.squares.data != nullptr, {B, T});
  check("out", t.out, t.out.data != nullptr, {B, T, z.C});
  check("coef", t.coef, sublayer, {B, T, z.E, z.E + 2});
  check("pre", t.pre, true, {B, T, z.E});
  check("z", t.z, true, {B, T, M});
  check("rho", t.rho, true, {B, T});
  check("fn", w.fn, true, {M, z.E * z.C});
  check("base", w.base, true, {M});
  check("scale", w.scale, true, {mhc_groups(form.mixing)});
  return z;
}

template <class S, class P>
MhcRead<S*, P*> pointers(const MhcRead<Tensor>& t) {
  return {t.streams.as<S>(),      data_or_null<P>(t.squares),
          data_or_null<S>(t.out), data_or_null<P>(t.coef),
          t.pre.as<P>(),          t.z.as<P>(),
          t.rho.as<P>()};
}
template <class G, class S, class P>
G gradient_pointers(const MhcGradients& g) {
  return {g.dstreams.as<S>(), g.dstreams.accumulate, data_or_null<S>(g.dout), data_or_null<P>(g.dcoef)};
}

}  // namespace

void mhc_read_forward(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form, Stream stream) {
  const auto [rows, E, C] = check_read(t, w, form);
  dispatch(
      stream, t.streams.dtype, [&, rows = rows, E = E, C = C] { mhc_read_forward_cuda(t, w, form, rows, E, C); },
      [&, rows = rows, E = E, C = C]<class S>(S) {
        const Sizes<S> s{.rows = rows, .E = E, .C = C, .form = form};
        mhc_read_forward_cpu<S>(pointers<S, float>(t), mapped(w, data_or_null<const float>), s);
      },
      [&, rows = rows, E = E, C = C]<class T>(T) {
        mhc_read_forward_ref<T>(pointers<T, T>(t), mapped(w, data_or_null<const T>), form, rows, E, C);
      });
}

void mhc_read_backward(const MhcGradients& g, const MhcWeights<Tensor>& d, const MhcRead<Tensor>& t,
                       const MhcWeights<Tensor>& w, const MhcForm& form, Stream stream) {
  const auto [rows, E, C] = check_read(t, w, form);
  CHECK_SHAPES(g.dstreams.shape == t.streams.shape, g.dstreams, t.streams);
  CHECK_THAT((g.dcoef.data != nullptr) == (t.coef.data != nullptr), "dcoef is there for coef");
  CHECK_SHAPES(g.dout.data == nullptr || g.dout.shape == t.out.shape, g.dout, t.out);
  dispatch(
      stream, g.dstreams.dtype,
      [&, rows = rows, E = E, C = C] { mhc_read_backward_cuda(g, d, t, w, form, rows, E, C); },
      [&, rows = rows, E = E, C = C]<class S>(S) {
        const Sizes<S> s{.rows = rows, .E = E, .C = C, .form = form};
        mhc_read_backward_cpu<S>(gradient_pointers<Gradients<S>, S, float>(g), mapped(d, data_or_null<float>),
                                 pointers<S, float>(t), mapped(w, data_or_null<const float>), s);
      },
      [&, rows = rows, E = E, C = C]<class T>(T) {
        mhc_read_backward_ref<T>(gradient_pointers<MhcGradientNumbers<T>, T, T>(g), mapped(d, data_or_null<T>),
                                 pointers<T, T>(t), mapped(w, data_or_null<const T>), form, rows, E, C);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct MhcReadNode : Node {  // in: the streams, the parameters; out: what is read, coef, one of which there is
  MhcForm form{};
  Value *squares = nullptr, *x = nullptr, *coef = nullptr;  // saved: pre, z, rho
  MhcWeights<Value*> parameters;
  MhcRead<Tensor> read;
  MhcWeights<Tensor> weights, gradients;
  const char* op() const override { return "mhc_read"; }
  void prepare() override {
    read = {input(0),         tensor_of(squares), tensor_of(x),    tensor_of(coef),
            saved[0]->tensor, saved[1]->tensor,   saved[2]->tensor};
    weights = mapped(parameters, [](const Value* v) { return tensor_of(v); });
    gradients = mapped(parameters, [](const Value* v) { return grad_of(v); });
  }
  void forward(const Step&, Stream stream) override { mhc_read_forward(read, weights, form, stream); }
  void backward(const Step&, Stream stream) override {
    mhc_read_backward({gradient(0), grad_of(x), grad_of(coef)}, gradients, read, weights, form, stream);
  }
  double flops() const override {
    const int64_t sums = mhc_rows(form.mixing, in[0]->shape[2]) + (x != nullptr);
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(sums);
  }
  ScratchBytes scratch() const override {
    const Shape& s = in[0]->shape;
    return mhc_scratch(form, s[0] * s[1], s[2], s[3], in[0]->dtype);
  }
};

}  // namespace

HyperRead mhc_read(Tape& t, const std::string& name, Value* streams, Value* squares, const MhcWeights<Value*>& p,
                   const MhcForm& form, bool reads) {
  const Shape& s = streams->shape;
  const int64_t B = s[0], T = s[1], E = s[2];
  auto node = make_node<MhcReadNode>(name, {streams, p.fn, p.base, p.scale}, {});
  node->form = form, node->squares = squares, node->parameters = p;
  if (reads) node->out.push_back(node->x = t.activation(name, Shape{B, T, s[3]}));
  if (mhc_groups(form.mixing) > 1) node->out.push_back(node->coef = t.statistic(name + ".coef", Shape{B, T, E, E + 2}));
  node->saved = {t.statistic(name + ".pre", Shape{B, T, E}),
                 t.statistic(name + ".z", Shape{B, T, mhc_rows(form.mixing, E)}),
                 t.statistic(name + ".rho", Shape{B, T})};
  node->backward_reads = {streams};
  if (squares != nullptr) node->reads = {squares};
  const HyperRead read{node->x, node->coef};
  t.record(std::move(node));
  return read;
}

}  // namespace ops
}  // namespace crossply
