#include "kernels/depth/depth_mix.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"

namespace crossply {
namespace {

// Elements handled together where the weights do not depend on the token: a page of every input, and what the groups of
// inputs share stays in the L1 cache.
constexpr int64_t tile_size = 1024;

// sum_c a[c] * b[c] over columns [begin, end). One machine code for all that need the columns behind the last whole
// vector: with one source, the backward's own dot must be pbar to the bit, and inlined twice it could be rounded twice.
template <class Vec, class S>
[[gnu::noinline]] float dot_columns(const S* a, const S* b, int64_t begin, int64_t end) {
  Vec dot = {}, u, v;
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    load(u, a + c);
    load(v, b + c);
    dot += u * v;
  }
  return sum_of_lanes(dot);
}

// Columns [begin, end) of mix_row, for a few inputs whose sums stay in registers: out = from + them, from may be null.
template <class Vec, int Inputs, bool Dot, class Out, class From, class S>
void mix_columns(Out* out, From from, float* dots, const S* inp, const S* const* inputs, const float* weights,
                 int64_t at, int64_t begin, int64_t end) {
  constexpr bool add = !std::is_null_pointer_v<From>;
  const S* x[Inputs];
  float w[Inputs];
  Vec dot[Inputs] = {};
  for (int i = 0; i < Inputs; ++i) x[i] = inputs[i] + at, w[i] = weights[i];
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    Vec total, y, v;
    if constexpr (Dot) load(y, inp + c);
    if constexpr (add) load(total, from + c);
    for (int i = 0; i < Inputs; ++i) {
      load(v, x[i] + c);
      if constexpr (Dot) dot[i] += v * y;
      if (add || i > 0) total += w[i] * v;
      else total = w[i] * v;  // not 0 + w * v, which would lose the sign of -0
    }
    store(out + c, total);
  }
  if constexpr (Dot)
    for (int i = 0; i < Inputs; ++i) dots[i] += sum_of_lanes(dot[i]);
}

template <int Inputs, bool Dot, class Out, class From, class S>
void mix_group(Out* out, From from, float* dots, const S* inp, const S* const* x, const float* w, int64_t at,
               int64_t width) {
  const int64_t whole = width / lanes_of<Vec16> * lanes_of<Vec16>;
  if (whole > 0) mix_columns<Vec16, Inputs, Dot>(out, from, dots, inp, x, w, at, 0, whole);
  if (whole == width) return;
  mix_columns<float, Inputs, false>(out, from, nullptr, inp, x, w, at, whole, width);
  if constexpr (Dot)
    for (int i = 0; i < Inputs; ++i) dots[i] += dot_columns<float>(x[i] + at, inp, whole, width);
}

// The sum of a row between two groups of inputs, which must not be rounded: in the row itself if that is of floats.
template <class Out>
float* sums_of(Out* out, int64_t width) {
  if constexpr (std::is_same_v<Out, float>) return out;
  else return scratch_f32(static_cast<size_t>(width), 2);
}

// Both directions are this weighted sum over any number of inputs; the backward needs the dots as well:
//   out[c] = (add ? out[c] : 0) + sum_i w[i] * x[i][at + c],   c < width
//   dots[i] += sum_c x[i][at + c] * inp[c]                     if Dot
template <bool Dot, class Out, class S>
void mix_row(Out* out, float* dots, const S* inp, const S* const* x, const float* w, int64_t inputs, int64_t at,
             int64_t width, bool add) {
  float* sums = sums_of(out, width);
  for (int64_t i = 0; i < inputs;) {
    const int64_t left = inputs - i, step = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    float* d = Dot ? dots + i : nullptr;
    const auto group = [&](auto* to, auto from) {
      if (step == 8) mix_group<8, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else if (step == 4) mix_group<4, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else if (step == 2) mix_group<2, Dot>(to, from, d, inp, x + i, w + i, at, width);
      else mix_group<1, Dot>(to, from, d, inp, x + i, w + i, at, width);
    };
    const auto group_into = [&](auto* to) {
      if (i > 0) group(to, sums);
      else if (add) group(to, out);
      else group(to, nullptr);
    };
    if (step == left) group_into(out);
    else group_into(sums);
    i += step;
  }
}

// How work is shared out. `blocks` is fixed by the shape alone, because every block has a partial sum of its own.
struct Split {
  int64_t blocks;
  bool small;  // not worth waking the threads
  Split(int64_t items, int64_t elements) : blocks(std::clamp<int64_t>(items / 8, 1, 64)), small(elements <= 32768) {}
  int64_t grain() const { return small ? blocks : 1; }
};

template <class S>
void depth_mix_forward_cpu(S* out, const std::vector<const S*>& sources, const float* weights, int64_t size) {
  const int64_t inputs = static_cast<int64_t>(sources.size()), tiles = ceil_div(size, tile_size);
  parallel_for(tiles, size * inputs <= 32768 ? tiles : 1, [=, &sources](int64_t begin, int64_t end) {
    for (int64_t at = begin * tile_size; at < std::min(size, end * tile_size); at += tile_size)
      mix_row<false, S, S>(out + at, nullptr, nullptr, sources.data(), weights, inputs, at,
                           std::min(tile_size, size - at), false);
  });
}

// dweights (R): one number per reader.
template <class S>
void depth_mix_backward_cpu(S* dinp, float* dweights, const S* inp, const std::vector<const S*>& dout,
                            const float* weights, int64_t size, bool acc) {
  const int64_t R = static_cast<int64_t>(dout.size()), tiles = ceil_div(size, tile_size);
  const Split split(tiles, size * R);
  float* partial = scratch_f32(static_cast<size_t>(split.blocks * R));
  std::fill_n(partial, split.blocks * R, 0.f);
  parallel_for(split.blocks, split.grain(), [=, &dout](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min(size, tiles * (b + 1) / split.blocks * tile_size);
      for (int64_t at = tiles * b / split.blocks * tile_size; at < last; at += tile_size)
        mix_row<true>(dinp + at, partial + b * R, inp + at, dout.data(), weights, R, at, std::min(tile_size, last - at),
                      acc);
    }
  });
  std::fill_n(dweights, R, 0.f);
  for (int64_t b = 0; b < split.blocks; ++b)
    for (int64_t r = 0; r < R; ++r) dweights[r] += partial[b * R + r];
}

template <class S>
void row_dots_cpu(float* dots, const S* a, const S* b, int64_t N, int64_t C) {
  const int64_t whole = C / lanes_of<Vec16> * lanes_of<Vec16>;
  parallel_for(N, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      dots[n] = dot_columns<Vec16>(a + n * C, b + n * C, 0, whole) + dot_columns<float>(a + n * C, b + n * C, whole, C);
  });
}

// softmax(score - 1/2 ln(square)) without the logarithm: exp(score) / sqrt(square), normalised. exp_scores has 1 as its
// largest, so the sum is far from 0 for every norm. The division makes the weight of a single source exactly 1.
void token_weights(float* w, const std::vector<const float*>& squares, const float* exp_scores, int64_t n, float eps) {
  const size_t sources = squares.size();
  for (size_t s = 0; s < sources; ++s) w[s] = squares[s][n];
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t s = 0; s < sources; ++s) sum += w[s] = exp_scores[s] / std::sqrt(w[s] + eps);
#pragma omp simd
  for (size_t s = 0; s < sources; ++s) w[s] /= sum;
}

template <class S>
void vertical_forward_cpu(S* out, float* weights, const std::vector<const S*>& sources,
                          const std::vector<const float*>& squares, const float* scores, int64_t N, int64_t C,
                          float eps) {
  const int64_t inputs = static_cast<int64_t>(sources.size());
  std::vector<float> exp_scores(sources.size(), 1.f);
  if (scores != nullptr) {
    const float max = *std::max_element(scores, scores + inputs);
    for (int64_t s = 0; s < inputs; ++s) exp_scores[static_cast<size_t>(s)] = std::exp(scores[s] - max);
  }
  parallel_for(N, 32768 / (C * inputs), [=, &sources, &squares, &exp_scores](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      token_weights(weights + n * inputs, squares, exp_scores.data(), n, eps);
      mix_row<false, S, S>(out + n * C, nullptr, nullptr, sources.data(), weights + n * inputs, inputs, n * C, C,
                           false);
    }
  });
}

// Columns [begin, end): out = (add ? out : 0) + sums - scale * x
template <class Vec, class S>
void subtract_scaled(S* out, const float* sums, float scale, const S* x, int64_t begin, int64_t end, bool add) {
  for (int64_t c = begin; c < end; c += lanes_of<Vec>) {
    Vec total, v, before;
    load(total, sums + c);
    load(v, x + c);
    if (add) {
      load(before, out + c);
      total += before;
    }
    total -= scale * v;
    store(out + c, total);
  }
}

// A reader's share in the weights of the tokens.
struct Column {
  const float* weights;  // weights[n * stride]
  int64_t stride;
  const float* pbar;  // (N)
};

// dscores (R): one number per reader.
template <class S>
void vertical_backward_cpu(S* dinp, float* dscores, const S* inp, const float* squares,
                           const std::vector<const S*>& dout, const std::vector<Column>& columns, int64_t N, int64_t C,
                           float eps, bool acc) {
  const int64_t R = static_cast<int64_t>(dout.size());
  const Split split(N, N * C * R);
  float* partial = scratch_f32(static_cast<size_t>(split.blocks * R));
  std::fill_n(partial, split.blocks * R, 0.f);
  const bool add = acc && !std::is_same_v<S, float>;  // to sums elsewhere; those in dinp start from it
  parallel_for(split.blocks, split.grain(), [=, &dout, &columns](int64_t begin, int64_t end) {
    float* w = scratch_f32(static_cast<size_t>(2 * R), 1);
    float* p = w + R;
    for (int64_t b = begin; b < end; ++b) {
      float* q_sum = partial + b * R;
      for (int64_t n = N * b / split.blocks; n < N * (b + 1) / split.blocks; ++n) {
        S* dx = dinp + n * C;
        const S* x = inp + n * C;
        float* sums = sums_of(dx, C);
        for (int64_t r = 0; r < R; ++r) {
          const Column& column = columns[static_cast<size_t>(r)];
          w[r] = column.weights[n * column.stride];
          p[r] = 0;
        }
        mix_row<true>(sums, p, x, dout.data(), w, R, n * C, C, acc && !add);
        float total = 0;
        for (int64_t r = 0; r < R; ++r) {
          const float q = w[r] * (p[r] - columns[static_cast<size_t>(r)].pbar[n]);
          q_sum[r] += q;
          total += q;
        }
        const float scale = total / (squares[n] + eps);
        subtract_scaled<Vec16>(dx, sums, scale, x, 0, C / 16 * 16, add);
        subtract_scaled<float>(dx, sums, scale, x, C / 16 * 16, C, add);
      }
    }
  });
  std::fill_n(dscores, R, 0.f);
  for (int64_t b = 0; b < split.blocks; ++b)
    for (int64_t r = 0; r < R; ++r) dscores[r] += partial[b * R + r];
}

void check_sources(const char* name, const Tensor& out, const std::vector<Tensor>& sources) {
  CHECK_THAT(!sources.empty(), name, ": no sources");
  for (const Tensor& source : sources)
    CHECK_THAT(source.numel() == out.numel(), name, ": out ", out.str(), " source ", source.str());
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void depth_mix_forward(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights, Stream stream) {
  check_sources("depth_mix_forward", out, sources);
  CHECK_THAT(weights.numel() == static_cast<int64_t>(sources.size()), "depth_mix_forward: weights ", weights.str(),
             " for ", sources.size(), " sources");
  if (stream.backend == Backend::cuda) return depth_mix_forward_cuda(out, sources, weights);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      depth_mix_forward_cpu(out.as<S>(), pointers<const S>(sources), weights.as<float>(), out.numel());
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    depth_mix_forward_ref(out.as<T>(), pointers<const T>(sources), weights.as<T>(), out.numel());
  });
}

void depth_mix_backward(const Tensor& dinp, const Tensor& inp, const std::vector<DepthReader>& readers, bool acc,
                        Stream stream) {
  CHECK_THAT(inp.numel() == dinp.numel(), "depth_mix_backward: dinp ", dinp.str(), " inp ", inp.str());
  for (const DepthReader& r : readers)
    CHECK_THAT(r.dout.numel() == dinp.numel() && r.dweights.numel() == r.weights.numel() && r.column >= 0 &&
                   r.column < r.weights.numel(),
               "depth_mix_backward: dinp ", dinp.str(), " dout ", r.dout.str(), " weights ", r.weights.str(),
               " dweights ", r.dweights.str(), " column ", r.column);
  if (stream.backend == Backend::cuda) return depth_mix_backward_cuda(dinp, inp, readers, acc);
  if (stream.backend == Backend::reference) {
    with_real(dinp.dtype, [&](auto real) {
      using T = decltype(real);
      depth_mix_backward_ref(dinp.as<T>(), inp.as<T>(), readers, dinp.numel(), acc);
    });
    return;
  }
  with_storage(dinp.dtype, [&](auto storage) {
    using S = decltype(storage);
    if (readers.empty() && !acc) std::fill_n(dinp.as<S>(), dinp.numel(), S(0.f));
    if (readers.empty()) return;
    std::vector<const S*> dout;
    std::vector<float> weights, dweights(readers.size());
    for (const DepthReader& r : readers) {
      dout.push_back(r.dout.as<S>());
      weights.push_back(r.weights.as<float>()[r.column]);
    }
    depth_mix_backward_cpu(dinp.as<S>(), dweights.data(), inp.as<S>(), dout, weights.data(), dinp.numel(), acc);
    for (size_t r = 0; r < readers.size(); ++r) readers[r].dweights.as<float>()[readers[r].column] += dweights[r];
  });
}

void vertical_squares(const Tensor& squares, const Tensor& inp, Stream stream) {
  vertical_dot(squares, inp, inp, stream);
}

void vertical_dot(const Tensor& pbar, const Tensor& dout, const Tensor& out, Stream stream) {
  const int64_t N = pbar.numel(), C = out.numel() / N;
  CHECK_THAT(out.numel() == N * C && dout.numel() == N * C, "vertical_dot: pbar ", pbar.str(), " dout ", dout.str(),
             " out ", out.str());
  if (stream.backend == Backend::cuda) return vertical_dot_cuda(pbar, dout, out, N, C);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      row_dots_cpu(pbar.as<float>(), dout.as<S>(), out.as<S>(), N, C);
    });
  with_real(pbar.dtype, [&](auto real) {
    using T = decltype(real);
    row_dots_ref(pbar.as<T>(), dout.as<T>(), out.as<T>(), N, C);
  });
}

void vertical_forward(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                      const std::vector<Tensor>& squares, const Tensor& scores, double eps, Stream stream) {
  check_sources("vertical_forward", out, sources);
  const int64_t S = static_cast<int64_t>(sources.size()), N = weights.numel() / S, C = out.numel() / N;
  CHECK_THAT(weights.numel() == N * S && out.numel() == N * C && squares.size() == sources.size() &&
                 (scores.data == nullptr || scores.numel() == S),
             "vertical_forward: out ", out.str(), " weights ", weights.str(), " scores ", scores.str(), ", ", S,
             " sources, ", squares.size(), " squares");
  for (const Tensor& square : squares)
    CHECK_THAT(square.numel() == N, "vertical_forward: squares ", square.str(), " for ", N, " tokens");
  const bool trained = scores.data != nullptr;
  if (stream.backend == Backend::cuda) return vertical_forward_cuda(out, weights, sources, squares, scores, N, C, eps);
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using Stored = decltype(storage);
      vertical_forward_cpu(out.as<Stored>(), weights.as<float>(), pointers<const Stored>(sources),
                           pointers<const float>(squares), trained ? scores.as<float>() : nullptr, N, C,
                           static_cast<float>(eps));
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    vertical_forward_ref(out.as<T>(), weights.as<T>(), pointers<const T>(sources), pointers<const T>(squares),
                         trained ? scores.as<T>() : nullptr, N, C, eps);
  });
}

void vertical_backward(const Tensor& dinp, const Tensor& inp, const Tensor& squares,
                       const std::vector<VerticalReader>& readers, double eps, bool acc, Stream stream) {
  const int64_t N = squares.numel(), C = inp.numel() / N;
  CHECK_THAT(inp.numel() == N * C && dinp.numel() == N * C, "vertical_backward: dinp ", dinp.str(), " inp ", inp.str(),
             " squares ", squares.str());
  for (const VerticalReader& r : readers) {
    const int64_t S = r.weights.numel() / N;
    CHECK_THAT(r.dout.numel() == N * C && r.weights.numel() == N * S && r.pbar.numel() == N && r.column >= 0 &&
                   r.column < S && (r.dscores.data == nullptr || r.dscores.numel() == S),
               "vertical_backward: dinp ", dinp.str(), " dout ", r.dout.str(), " weights ", r.weights.str(), " pbar ",
               r.pbar.str(), " dscores ", r.dscores.str(), " column ", r.column);
  }
  if (stream.backend == Backend::cuda) return vertical_backward_cuda(dinp, inp, squares, readers, N, C, eps, acc);
  if (stream.backend == Backend::reference) {
    with_real(dinp.dtype, [&](auto real) {
      using T = decltype(real);
      vertical_backward_ref(dinp.as<T>(), inp.as<T>(), squares.as<T>(), readers, N, C, eps, acc);
    });
    return;
  }
  with_storage(dinp.dtype, [&](auto storage) {
    using S = decltype(storage);
    if (readers.empty() && !acc) std::fill_n(dinp.as<S>(), N * C, S(0.f));
    if (readers.empty()) return;
    std::vector<const S*> dout;
    std::vector<Column> columns;
    std::vector<float> dscores(readers.size());
    for (const VerticalReader& r : readers) {
      dout.push_back(r.dout.as<S>());
      columns.push_back({r.weights.as<float>() + r.column, r.weights.numel() / N, r.pbar.as<float>()});
    }
    vertical_backward_cpu(dinp.as<S>(), dscores.data(), inp.as<S>(), squares.as<float>(), dout, columns, N, C,
                          static_cast<float>(eps), acc);
    for (size_t r = 0; r < readers.size(); ++r)
      if (readers[r].dscores.data != nullptr) readers[r].dscores.as<float>()[readers[r].column] += dscores[r];
  });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// A source of mixtures: out[0] is in[0]. Its backward gathers from the readers, which are recorded after it.
struct DepthSource : Node {
  struct Reader {
    Value *out, *weights;  // the mixture and its weights: a parameter, or one row per token
    int64_t column;        // of this source among them
    Value *scores, *pbar;  // vertical attention only
  };
  bool by_norm = false;  // saved[0] then holds the squared norms (B*T)
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
  std::vector<Tensor> rows, row_squares;  // the same as tensors

  const char* op() const override { return squares.empty() ? "depth_mix" : "vertical"; }
  void prepare() override { rows = tensors_of(sources), row_squares = tensors_of(squares); }
  void forward(const Step&, Stream stream) override {
    const Tensor weights = in.empty() ? Tensor{} : input(0);
    if (squares.empty()) depth_mix_forward(output(), rows, weights, stream);
    else vertical_forward(output(), saved[0]->tensor, rows, row_squares, weights, eps, stream);
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

}  // namespace ops
}  // namespace crossply
