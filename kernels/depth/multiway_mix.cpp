#include "kernels/depth/multiway_mix.h"

#include <algorithm>
#include <type_traits>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"

namespace crossply {
namespace {

template <class Storage>
using Data = MultiwayMixData<Storage, float>;

// coef(S,W) of token n: the W weights of a source side by side.
template <int W, class Storage>
void gather_coefficients(float* coef, const Data<Storage>& m, int64_t n) {
  const int64_t S = static_cast<int64_t>(m.sources.size());
  const Storage* weight = m.weight + n * W * S;
  for (int64_t s = 0; s < S; ++s)
    for (int64_t w = 0; w < W; ++w) coef[s * W + w] = weight[w * S + s] + m.base[w * S + s];
}

// Columns [begin, end) of all a_w of token n: the sums of a block of columns stay in registers while the sources pass.
template <class Vec, int Vecs, int W, bool prepost, class Out, class Storage>
void mix_columns(Out* const* a, const float* coef /*(S,W)*/, const Data<Storage>& m, int64_t n, int64_t C,
                 int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c += Vecs * lanes_of<Vec>) {
    Vec sum[W][Vecs] = {};
    for (size_t s = 0; s < m.sources.size(); ++s) {
      for (int v = 0; v < Vecs; ++v) {
        Vec x;
        load(x, m.sources[s] + n * C + c + v * lanes_of<Vec>);
        if constexpr (prepost) {
          Vec gain;
          load(gain, m.gains[s] + c + v * lanes_of<Vec>);
          x *= gain;
        }
        for (int w = 0; w < W; ++w) sum[w][v] += coef[s * W + static_cast<size_t>(w)] * x;
      }
    }
    for (int w = 0; w < W; ++w)
      for (int v = 0; v < Vecs; ++v) store(a[w] + c + v * lanes_of<Vec>, sum[w][v]);
  }
}

template <int W, bool prepost, class Out, class Storage>
void mix(Out* const* a /*W times (C)*/, const float* coef, const Data<Storage>& m, int64_t n, int64_t C) {
  constexpr int wide = W <= 4 ? 4 : 2;  // 16 sums leave registers for the rest
  const int64_t end = C / (16 * wide) * (16 * wide), end16 = C / 16 * 16;
  mix_columns<Vec16, wide, W, prepost>(a, coef, m, n, C, 0, end);
  mix_columns<Vec16, 1, W, prepost>(a, coef, m, n, C, end, end16);
  mix_columns<float, 1, W, prepost>(a, coef, m, n, C, end16, C);
}

// out = post * a * r + skip; returns r.
template <class Storage>
float normalize(Storage* out, const float* a, const float* post, const Storage* skip, int64_t C, float eps) {
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t c = 0; c < C; ++c) square += a[c] * a[c];
  const float r = 1.f / std::sqrt(square / static_cast<float>(C) + eps);
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) out[c] = post[c] * a[c] * r + skip[c];
  return r;
}

template <int W, bool prepost, class Storage>
void multiway_mix_forward_cpu(const std::vector<Storage*>& outs, float* rstd, const Data<Storage>& m, int64_t N,
                              int64_t C, float eps) {
  const int64_t S = static_cast<int64_t>(m.sources.size());
  parallel_for(N, 32768 / (S * C), [=, &outs, &m](int64_t begin, int64_t end) {
    float* coef = scratch_f32(static_cast<size_t>(W * (S + C)));
    float* a[W];  // of one token, where it is not the result
    Storage* rows[W];
    for (int w = 0; w < W; ++w) a[w] = coef + W * S + w * C;
    for (int64_t n = begin; n < end; ++n) {
      for (size_t w = 0; w < W; ++w) rows[w] = outs[w] + n * C;
      gather_coefficients<W>(coef, m, n);
      if constexpr (prepost) {
        mix<W, prepost>(a, coef, m, n, C);
        for (size_t w = 0; w < W; ++w)
          rstd[n * W + static_cast<int64_t>(w)] = normalize(rows[w], a[w], m.post[w], m.skip + n * C, C, eps);
      } else {
        mix<W, prepost>(rows, coef, m, n, C);
      }
    }
  });
}

template <class Storage>
void copy_row(float* to, const Storage* from, int64_t C) {
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) to[c] = from[c];
}

// In: da = a_w of a token, dy = its dout_w. Out: da = da_w, dpost added.
template <class Storage>
void normalize_backward(float* da, float* dpost, const Storage* dy, const float* post, float r, int64_t C) {
  float mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t c = 0; c < C; ++c) {
    const float g = dy[c] * da[c];
    mean += g * post[c];
    dpost[c] += g * r;
  }
  mean *= r * r / static_cast<float>(C);
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) da[c] = r * (dy[c] * post[c] - da[c] * mean);
}

template <int W, class Storage>
void skip_backward(Storage* dskip, const Storage* const* dy /*W times (C)*/, bool acc, int64_t C) {
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) {
    float sum = dy[0][c];
    for (int w = 1; w < W; ++w) sum += dy[w][c];
    dskip[c] = acc ? dskip[c] + sum : sum;
  }
}

// One source of one token. da: W times (C); x, dx, gain, dgain: (C); gain and dgain only if prepost.
template <class Storage>
struct SourceRow {
  const float* const* da;
  const float* coef;  // (W)
  const Storage* x;
  const float* gain;
  Storage* dx;
  float* dgain;
  bool acc;
};

// Columns [begin, end): adds <da_w, gain x> to product(W) and v x to dgain, sets or adds dx = gain v.
template <class Vec, int Vecs, int W, bool prepost, class Storage>
void source_columns(float* product, const SourceRow<Storage>& row, int64_t begin, int64_t end) {
  if (begin == end) return;
  Vec sum[W][Vecs] = {};
  for (int64_t block = begin; block < end; block += Vecs * lanes_of<Vec>) {
    for (int i = 0; i < Vecs; ++i) {
      const int64_t c = block + i * lanes_of<Vec>;
      Vec x, gain, scaled, v = {}, da;
      load(x, row.x + c);
      if constexpr (prepost) load(gain, row.gain + c), scaled = gain * x;
      else scaled = x;
      for (int w = 0; w < W; ++w) {
        load(da, row.da[w] + c);
        sum[w][i] += da * scaled;
        v += row.coef[w] * da;
      }
      if constexpr (prepost) {
        Vec dgain;
        load(dgain, row.dgain + c);
        store<Vec>(row.dgain + c, dgain + v * x);
        v *= gain;
      }
      if (row.acc) {
        Vec before;
        load(before, row.dx + c);
        v += before;
      }
      store(row.dx + c, v);
    }
  }
  for (int w = 0; w < W; ++w) {
    Vec total = sum[w][0];
    for (int i = 1; i < Vecs; ++i) total += sum[w][i];
    product[w] += sum_of_lanes(total);
  }
}

// The sums over tokens of one block of tokens: dbase (W,S), then, if prepost, dgains (S,C) and dpost (W,C).
struct Partial {
  float *base, *gains = nullptr, *post = nullptr;
  static int64_t size(int64_t W, int64_t S, int64_t C, bool prepost) { return W * S + (prepost ? (S + W) * C : 0); }
  Partial(float* data, int64_t W, int64_t S, int64_t C, bool prepost) : base(data) {
    if (prepost) gains = base + W * S, post = gains + S * C;
  }
};

template <int W, bool prepost, class Storage>
struct Backward {
  const Data<Storage>& d;
  const std::vector<Storage*>& douts;
  const float* rstd;
  const Data<Storage>& m;
  const MultiwayAcc& acc;
  int64_t C, S;

  // Plain f32 needs no da: it is dout. From bf16 it is converted, once for all sources.
  static constexpr bool in_place = !prepost && std::is_same_v<Storage, float>;

  // da(W,C) and dskip of token n.
  void token(float* da, const Partial& partial, const float* coef, int64_t n) const {
    float* rows[W];
    const Storage* dy[W];
    for (int w = 0; w < W; ++w) rows[w] = da + w * C, dy[w] = douts[static_cast<size_t>(w)] + n * C;
    if constexpr (!prepost) {
      for (int w = 0; w < W; ++w) copy_row(rows[w], dy[w], C);
      return;
    }
    mix<W, prepost>(rows, coef, m, n, C);
    for (int w = 0; w < W; ++w)
      normalize_backward(rows[w], partial.post + w * C, dy[w], m.post[static_cast<size_t>(w)], rstd[n * W + w], C);
    skip_backward<W>(d.skip + n * C, dy, acc.skip, C);
  }

  void source(const Partial& partial, const float* da, const float* coef, int64_t n, int64_t s) const {
    const size_t i = static_cast<size_t>(s);
    const float* rows[W];
    for (int w = 0; w < W; ++w) {
      if constexpr (in_place) rows[w] = douts[static_cast<size_t>(w)] + n * C;
      else rows[w] = da + w * C;
    }
    SourceRow<Storage> row{rows,    coef + s * W,  m.sources[i] + n * C, nullptr, d.sources[i] + n * C,
                           nullptr, acc.sources[i]};
    if constexpr (prepost) row.gain = m.gains[i], row.dgain = partial.gains + s * C;
    float product[W] = {};
    const int64_t end32 = C / 32 * 32, end16 = C / 16 * 16;
    source_columns<Vec16, 2, W, prepost>(product, row, 0, end32);
    source_columns<Vec16, 1, W, prepost>(product, row, end32, end16);
    source_columns<float, 1, W, prepost>(product, row, end16, C);
    for (int w = 0; w < W; ++w) {
      d.weight[(n * W + w) * S + s] = product[w];
      partial.base[w * S + s] += product[w];
    }
  }

  // Tokens [begin, end), a tile at a time: the tile's rows of all sources stay in the L2 cache between the two passes
  // over them, and a source's gain and dgain in L1 while the tile's tokens pass.
  void block(const Partial& partial, int64_t begin, int64_t end) const {
    const int64_t tile = std::clamp<int64_t>(65536 / (S * C), 1, 16);
    float* coef = scratch_f32(static_cast<size_t>(tile * W * (S + C)));
    float* da = coef + tile * W * S;
    for (int64_t n = begin; n < end; n += tile) {
      const int64_t tokens = std::min(tile, end - n);
      for (int64_t t = 0; t < tokens; ++t) {
        gather_coefficients<W>(coef + t * W * S, m, n + t);
        if constexpr (!in_place) token(da + t * W * C, partial, coef + t * W * S, n + t);
      }
      for (int64_t s = 0; s < S; ++s)
        for (int64_t t = 0; t < tokens; ++t) source(partial, da + t * W * C, coef + t * W * S, n + t, s);
    }
  }
};

void add_row(float* out, const float* inp, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] += inp[i];
}

template <int W, bool prepost, class Storage>
void multiway_mix_backward_cpu(const Data<Storage>& d, const std::vector<Storage*>& douts, const float* rstd,
                               const Data<Storage>& m, const MultiwayAcc& acc, int64_t N, int64_t C) {
  const int64_t S = static_cast<int64_t>(m.sources.size()), size = Partial::size(W, S, C, prepost);
  // One partial sum per block of tokens; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(N / 32, 1, 32);
  float* partials = scratch_f32(static_cast<size_t>(blocks * size), 1);
  const Backward<W, prepost, Storage> backward{d, douts, rstd, m, acc, C, S};
  parallel_for(blocks, N * S * C <= 32768 ? blocks : 1, [=, &backward](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      std::fill_n(partials + b * size, size, 0.f);
      backward.block(Partial(partials + b * size, W, S, C, prepost), N * b / blocks, N * (b + 1) / blocks);
    }
  });
  for (int64_t b = 0; b < blocks; ++b) {
    const Partial partial(partials + b * size, W, S, C, prepost);
    add_row(d.base, partial.base, W * S);
    for (size_t s = 0; s < d.gains.size(); ++s) add_row(d.gains[s], partial.gains + static_cast<int64_t>(s) * C, C);
    for (size_t w = 0; w < d.post.size(); ++w) add_row(d.post[w], partial.post + static_cast<int64_t>(w) * C, C);
  }
}

// Calls body(W, prepost, float{} or bf16{}) with the first two as constants.
template <class F>
void with_ways(size_t W, bool prepost, Dtype dtype, F&& body) {
  auto with = [&](auto ways) {
    with_storage(dtype, [&](auto storage) {
      prepost ? body(ways, std::true_type{}, storage) : body(ways, std::false_type{}, storage);
    });
  };
  switch (W) {
    case 1: return with(std::integral_constant<int, 1>{});
    case 2: return with(std::integral_constant<int, 2>{});
    case 3: return with(std::integral_constant<int, 3>{});
    case 4: return with(std::integral_constant<int, 4>{});
    case 5: return with(std::integral_constant<int, 5>{});
    case 6: return with(std::integral_constant<int, 6>{});
    case 7: return with(std::integral_constant<int, 7>{});
    case 8: return with(std::integral_constant<int, 8>{});
  }
}

template <class T, class P = T>
MultiwayMixData<T, P> data_of(const MultiwayMix& m) {
  return {pointers<T>(m.sources), pointers<P>(m.gains), pointers<P>(m.post),
          m.weight.as<T>(),       m.base.as<P>(),       data_or_null<T>(m.skip)};
}

struct Size {
  int64_t W, S, N, C;
};

void check_size(const char* name, const char* what, const std::vector<Tensor>& tensors, int64_t count, int64_t numel) {
  CHECK_THAT(static_cast<int64_t>(tensors.size()) == count, name, ": ", tensors.size(), " ", what, ", not ", count);
  for (const Tensor& tensor : tensors)
    CHECK_THAT(tensor.data != nullptr && tensor.numel() == numel, name, ": ", what, " ", tensor.str(), ", not of ",
               numel, " numbers");
}

void check_members(const char* name, const MultiwayMix& m, const Size& size, bool prepost) {
  check_size(name, "sources", m.sources, size.S, size.N * size.C);
  check_size(name, "gains", m.gains, prepost ? size.S : 0, size.C);
  check_size(name, "post", m.post, prepost ? size.W : 0, size.C);
  CHECK_THAT(m.weight.numel() == size.N * size.W * size.S && m.base.numel() == size.W * size.S, name, ": weight ",
             m.weight.str(), " base ", m.base.str(), " for ", size.W, " ways of ", size.S, " sources");
  CHECK_THAT((m.skip.data != nullptr) == prepost && (!prepost || m.skip.numel() == size.N * size.C), name, ": skip ",
             m.skip.str());
}

Size check_mix(const char* name, const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix& m) {
  CHECK_THAT(!outs.empty() && outs.size() <= 8 && !m.sources.empty(), name, ": ", outs.size(), " ways of ",
             m.sources.size(), " sources");
  const int rank = outs[0].shape.rank;
  CHECK_THAT(rank >= 1 && outs[0].numel() > 0, name, ": out ", outs[0].str());
  const int64_t C = outs[0].dim(rank - 1);
  const Size size{static_cast<int64_t>(outs.size()), static_cast<int64_t>(m.sources.size()), outs[0].numel() / C, C};
  const bool prepost = !m.post.empty();
  check_size(name, "outs", outs, size.W, size.N * C);
  check_members(name, m, size, prepost);
  CHECK_THAT((rstd.data != nullptr) == prepost && (!prepost || rstd.numel() == size.N * size.W), name, ": rstd ",
             rstd.str());
  return size;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void multiway_mix_forward(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix& m, Stream stream) {
  const Size size = check_mix("multiway_mix_forward", outs, rstd, m);
  if (stream.backend == Backend::cuda) return multiway_mix_forward_cuda(outs, rstd, m, size.N, size.C);
  if (stream.backend == Backend::cpu)
    return with_ways(outs.size(), !m.post.empty(), outs[0].dtype, [&](auto ways, auto prepost, auto storage) {
      using S = decltype(storage);
      multiway_mix_forward_cpu<ways, prepost>(pointers<S>(outs), data_or_null<float>(rstd), data_of<S, float>(m),
                                              size.N, size.C, static_cast<float>(m.eps));
    });
  with_real(outs[0].dtype, [&](auto real) {
    using T = decltype(real);
    multiway_mix_forward_ref(pointers<T>(outs), data_or_null<T>(rstd), data_of<T>(m), size.N, size.C, m.eps);
  });
}

void multiway_mix_backward(const MultiwayMix& d, const std::vector<Tensor>& douts, const Tensor& rstd,
                           const MultiwayMix& m, const MultiwayAcc& acc, Stream stream) {
  const Size size = check_mix("multiway_mix_backward", douts, rstd, m);
  check_members("multiway_mix_backward, gradients", d, size, !m.post.empty());
  CHECK_THAT(acc.sources.size() == m.sources.size(), "multiway_mix_backward: ", acc.sources.size(), " flags for ",
             m.sources.size(), " sources");
  if (stream.backend == Backend::cuda) return multiway_mix_backward_cuda(d, douts, rstd, m, acc, size.N, size.C);
  if (stream.backend == Backend::cpu)
    return with_ways(douts.size(), !m.post.empty(), douts[0].dtype, [&](auto ways, auto prepost, auto storage) {
      using S = decltype(storage);
      multiway_mix_backward_cpu<ways, prepost>(data_of<S, float>(d), pointers<S>(douts), data_or_null<float>(rstd),
                                               data_of<S, float>(m), acc, size.N, size.C);
    });
  with_real(douts[0].dtype, [&](auto real) {
    using T = decltype(real);
    multiway_mix_backward_ref(data_of<T>(d), pointers<T>(douts), static_cast<const T*>(data_or_null<T>(rstd)),
                              data_of<T>(m), acc, size.N, size.C);
  });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct MultiwayMixNode : Node {  // in: the sources, then whatever else of MultiwaySources there is
  MultiwaySources of;
  MultiwayMix tensors, gradients;
  std::vector<Tensor> outs, douts;
  MultiwayAcc add;

  const char* op() const override { return "multiway_mix"; }
  Tensor rstd() const { return saved.empty() ? Tensor{} : saved[0]->tensor; }
  void prepare() override {
    tensors = {tensors_of(of.sources),
               tensors_of(of.gains),
               tensors_of(of.post),
               tensor_of(of.weight),
               tensor_of(of.base),
               tensor_of(of.skip),
               of.eps};
    gradients = {grads_of(of.sources),
                 grads_of(of.gains),
                 grads_of(of.post),
                 grad_of(of.weight),
                 grad_of(of.base),
                 grad_of(of.skip),
                 of.eps};
    outs = tensors_of(out), douts = grads_of(out);
    if (acc.empty()) return;  // a tape that only goes forward
    add.sources.clear();
    for (size_t s = 0; s < of.sources.size(); ++s) add.sources.push_back(acc[s] != 0);
    CHECK_THAT(acc[of.sources.size()] == 0, name, " must be the only reader of ", of.weight->name);
    add.skip = of.skip != nullptr && acc[of.sources.size() + 1] != 0;
  }
  void forward(const Step&, Stream stream) override { multiway_mix_forward(outs, rstd(), tensors, stream); }
  void backward(const Step&, Stream stream) override {
    multiway_mix_backward(gradients, douts, rstd(), tensors, add, stream);
  }
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel() * static_cast<int64_t>(of.sources.size() * out.size()));
  }
};

}  // namespace

std::vector<Value*> multiway_mix(Tape& t, const std::string& name, const MultiwaySources& s) {
  const int64_t S = static_cast<int64_t>(s.sources.size()), W = s.base->shape[0];
  const Shape& stream = s.sources.at(0)->shape;
  CHECK_THAT(s.base->shape == (Shape{W, S}) && s.weight->shape.numel() == stream[0] * stream[1] * W * S, name,
             ": base ", s.base->shape.str(), " weight ", s.weight->shape.str());
  std::vector<Value*> outs;
  for (int64_t w = 0; w < W; ++w) outs.push_back(t.activation(str(name, ".", w), stream));
  auto node = make_node<MultiwayMixNode>(
      name, joined(joined(joined(s.sources, present({s.weight, s.skip, s.base})), s.gains), s.post), outs);
  node->of = s;
  node->keep = joined(s.sources, {s.weight});
  if (s.skip != nullptr) node->saved = {t.statistic(name + ".rstd", Shape{stream[0], stream[1], W})};
  t.record(std::move(node));
  return outs;
}

}  // namespace ops
}  // namespace crossply
