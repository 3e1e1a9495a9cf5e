#include "kernels/depth/multiway_mix.h"

#include <algorithm>
#include <type_traits>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int max_ways = 4;

template <class Storage>
using Data = MultiwayMix<Storage*, float*>;

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
  constexpr int wide = 4;  // 16 sums leave registers for the rest
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
void skip_backward(Storage* dskip, const Storage* const* dy /*W times (C)*/, bool accumulate, int64_t C) {
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) {
    float sum = dy[0][c];
    for (int w = 1; w < W; ++w) sum += dy[w][c];
    dskip[c] = accumulate ? dskip[c] + sum : sum;
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
  bool accumulate;
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
      if (row.accumulate) {
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
  const MultiwayMix<Grad, Tensor>& gradients;  // d as it came: which are added to
  int64_t C, S;

  // Plain f32 needs no da: it is dout. From bf16 it is converted, once for all sources.
  static constexpr bool in_place = !prepost && std::is_same_v<Storage, float>;

  // da(W,C), dpost and dskip of token n.
  void way_gradients(float* da, const Partial& partial, const float* coef, int64_t n) const {
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
    skip_backward<W>(d.skip + n * C, dy, gradients.skip.accumulate, C);
  }

  // Source s of token n: its gradient, dweight, and its parts of dbase and dgain.
  void source_gradients(const Partial& partial, const float* da, const float* coef, int64_t n, int64_t s) const {
    const size_t i = static_cast<size_t>(s);
    const float* rows[W];
    for (int w = 0; w < W; ++w) {
      if constexpr (in_place) rows[w] = douts[static_cast<size_t>(w)] + n * C;
      else rows[w] = da + w * C;
    }
    SourceRow<Storage> row{rows,
                           coef + s * W,
                           m.sources[i] + n * C,
                           nullptr,
                           d.sources[i] + n * C,
                           nullptr,
                           gradients.sources[i].accumulate};
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
        if constexpr (!in_place) way_gradients(da + t * W * C, partial, coef + t * W * S, n + t);
      }
      for (int64_t s = 0; s < S; ++s)
        for (int64_t t = 0; t < tokens; ++t) source_gradients(partial, da + t * W * C, coef + t * W * S, n + t, s);
    }
  }
};

void add_row(float* out, const float* inp, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] += inp[i];
}

template <int W, bool prepost, class Storage>
void multiway_mix_backward_cpu(const Data<Storage>& d, const std::vector<Storage*>& douts, const float* rstd,
                               const Data<Storage>& m, const MultiwayMix<Grad, Tensor>& gradients, int64_t N,
                               int64_t C) {
  const int64_t S = static_cast<int64_t>(m.sources.size()), size = Partial::size(W, S, C, prepost);
  // One partial sum per block of tokens; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(N / 32, 1, 32);
  float* partials = scratch_f32(static_cast<size_t>(blocks * size), 1);
  const Backward<W, prepost, Storage> backward{d, douts, rstd, m, gradients, C, S};
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

// Calls body(W, prepost) as constants.
template <int First = 1, class F>
void with_ways(size_t W, bool prepost, F&& body) {
  if constexpr (First < max_ways)
    if (W > First) return with_ways<First + 1>(W, prepost, body);
  const std::integral_constant<int, First> ways;
  prepost ? body(ways, std::true_type{}) : body(ways, std::false_type{});
}

// The tensors' data. It is the thread's own for these types, as that of data_of.
template <class T, class P = T, class Mix>
MultiwayMix<T*, P*>& mix_data(const Mix& m) {
  static thread_local MultiwayMix<T*, P*> data;
  map_members(data, m, data_or_null<T>, data_or_null<P>);
  return data;
}

template <class T>
void backward_ref(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts, const Tensor& rstd,
                  const MultiwayMix<Tensor>& m, int64_t N, int64_t C) {
  for (const Grad& dx : d.sources)
    if (!dx.accumulate) std::fill_n(dx.as<T>(), dx.numel(), T(0));
  if (d.skip.data != nullptr && !d.skip.accumulate) std::fill_n(d.skip.as<T>(), d.skip.numel(), T(0));
  multiway_mix_backward_ref(mix_data<T>(d), data_of<T>(douts), data_or_null<const T>(rstd), mix_data<T>(m), N, C);
}

template <class List>
void check_list(const char* what, const List& tensors, size_t count, int64_t numel) {
  CHECK_THAT(tensors.size() == count, tensors.size(), " ", what, ", not ", count);
  for (const Tensor& tensor : tensors)
    CHECK_THAT(tensor.data != nullptr && tensor.numel() == numel, what, " ", tensor.str());
}

template <class Mix>
void check_members(const Mix& m, size_t W, size_t S, int64_t N, int64_t C, bool prepost) {
  const auto& [sources, gains, post, weight, base, skip] = m;
  const int64_t pairs = static_cast<int64_t>(W * S);
  check_list("sources", sources, S, N * C);
  check_list("gains", gains, prepost ? S : 0, C);
  check_list("post", post, prepost ? W : 0, C);
  CHECK_SHAPES(weight.numel() == N * pairs && base.numel() == pairs, weight, base, sources[0]);
  CHECK_SHAPES((skip.data != nullptr) == prepost && (!prepost || skip.numel() == N * C), skip, sources[0]);
}

// Returns the rows of the streams, (N,C).
Rows check_mix(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix<Tensor>& m) {
  const size_t W = outs.size(), S = m.sources.size();
  CHECK_THAT(W > 0 && W <= max_ways && S > 0, W, " ways of ", S, " sources");
  const auto [N, C] = rows_of(outs[0]);
  const bool prepost = !m.post.empty();
  check_list("outs", outs, W, N * C);
  check_members(m, W, S, N, C, prepost);
  CHECK_SHAPES((rstd.data != nullptr) == prepost && (!prepost || rstd.numel() == N * static_cast<int64_t>(W)), rstd,
               outs[0]);
  return {N, C};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void multiway_mix_forward(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix<Tensor>& m, double eps,
                          Stream stream) {
  const auto [N, C] = check_mix(outs, rstd, m);
  dispatch(
      stream, outs[0].dtype, [&] { multiway_mix_forward_cuda(outs, rstd, m, eps, N, C); },
      [&]<class S>(S) {
        with_ways(outs.size(), !m.post.empty(), [&](auto ways, auto prepost) {
          multiway_mix_forward_cpu<ways, prepost>(data_of<S>(outs), data_or_null<float>(rstd), mix_data<S, float>(m), N,
                                                  C, static_cast<float>(eps));
        });
      },
      [&]<class T>(T) {
        multiway_mix_forward_ref(data_of<T>(outs), data_or_null<T>(rstd), mix_data<T>(m), N, C, eps);
      });
}

void multiway_mix_backward(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts, const Tensor& rstd,
                           const MultiwayMix<Tensor>& m, Stream stream) {
  const auto [N, C] = check_mix(douts, rstd, m);
  check_members(d, douts.size(), m.sources.size(), N, C, !m.post.empty());
  CHECK_SHAPES(!d.weight.accumulate, d.weight);
  dispatch(
      stream, douts[0].dtype, [&] { multiway_mix_backward_cuda(d, douts, rstd, m, N, C); },
      [&]<class S>(S) {
        with_ways(douts.size(), !m.post.empty(), [&](auto ways, auto prepost) {
          multiway_mix_backward_cpu<ways, prepost>(mix_data<S, float>(d), data_of<S>(douts), data_or_null<float>(rstd),
                                                   mix_data<S, float>(m), d, N, C);
        });
      },
      [&]<class T>(T) { backward_ref<T>(d, douts, rstd, m, N, C); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct MultiwayMixNode : Node {  // in: the sources, the weight, then whatever else there is
  MultiwayMix<Value*> of;
  MultiwayMix<Tensor> tensors;
  MultiwayMix<Grad, Tensor> gradients;
  std::vector<Tensor> outs, douts;
  double eps = 0;

  const char* op() const override { return "multiway_mix"; }
  Tensor rstd() const { return saved.empty() ? Tensor{} : saved[0]->tensor; }
  void prepare() override {
    map_members(tensors, of, tensor_of, tensor_of);
    outs = tensors_of(out), douts = grads_of(out);
    if (grad_modes.empty()) return;  // a tape that only goes forward
    check_only_reader(of.sources.size());
    size_t i = 0;  // among the inputs
    const auto next = [&](const Value* value) { return value == nullptr ? Grad{} : gradient(i++); };
    map_members(gradients, of, next, grad_of);
  }
  void forward(const Step&, Stream stream) override { multiway_mix_forward(outs, rstd(), tensors, eps, stream); }
  void backward(const Step&, Stream stream) override {
    multiway_mix_backward(gradients, douts, rstd(), tensors, stream);
  }
  bool only_accumulates(size_t i) const override { return in[i] == of.base; }
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel() * static_cast<int64_t>(of.sources.size() * out.size()));
  }
  ScratchBytes scratch() const override {
    const Shape& stream = in[0]->shape;
    const int64_t N = stream[0] * stream[1], C = stream[2], W = static_cast<int64_t>(out.size());
    const size_t each = size_of(in[0]->dtype);
    const bool wide = C % static_cast<int64_t>(16 / each) == 0;  // on a tape arrays are aligned
    const int ways = ways_of_thread(W, wide), columns = columns_of_thread(ways, wide, each);
    const auto bytes_of = [&]<bool prepost>(std::bool_constant<prepost>) {
      const int64_t S = static_cast<int64_t>(of.sources.size());
      const BlockSums sums = way_sums<prepost>(N, C, W, S, ways, columns);
      return ScratchBytes{static_cast<size_t>(sums.blocks * sums.row) * sizeof(float)};
    };
    return of.post.empty() ? bytes_of(std::false_type{}) : bytes_of(std::true_type{});
  }
};

}  // namespace

std::vector<Value*> multiway_mix(Tape& t, const std::string& name, const MultiwayMix<Value*>& m, double eps) {
  const int64_t S = static_cast<int64_t>(m.sources.size()), W = m.base->shape.numel() / S;
  const Shape& stream = m.sources.at(0)->shape;
  CHECK_THAT(m.base->shape.numel() == W * S && m.weight->shape.numel() == stream[0] * stream[1] * W * S, name,
             ": base ", m.base->shape.str(), " weight ", m.weight->shape.str());
  std::vector<Value*> outs;
  for (int64_t w = 0; w < W; ++w) outs.push_back(t.activation(str(name, ".", w), stream));
  auto node = make_node<MultiwayMixNode>(
      name, joined(joined(joined(m.sources, present({m.weight, m.skip, m.base})), m.gains), m.post), outs);
  node->of = m;
  node->eps = eps;
  node->backward_reads = joined(m.sources, {m.weight, m.base});
  if (m.skip != nullptr) node->saved = {t.statistic(name + ".rstd", Shape{stream[0], stream[1], W})};
  t.record(std::move(node));
  return outs;
}

}  // namespace ops
}  // namespace crossply
