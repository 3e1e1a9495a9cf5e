#include "kernels/depth/depth_mix.h"

#include <cstring>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/depth/mix_row.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// Elements handled together where the weights do not depend on the token: a page of every input, and what the groups of
// inputs share stays in the L1 cache.
constexpr int64_t tile_size = 1024;

template <class S>
void depth_mix_forward_cpu(S* out, const std::vector<const S*>& sources, const float* weights, int64_t size) {
  const int64_t inputs = static_cast<int64_t>(sources.size()), tiles = ceil_div(size, tile_size);
  parallel_for(tiles, size * inputs <= 32768 ? tiles : 1, [=, &sources](int64_t begin, int64_t end) {
    for (int64_t at = begin * tile_size; at < std::min(size, end * tile_size); at += tile_size)
      mix_row<false, S, S>(out + at, nullptr, nullptr, sources.data(), weights, inputs, at,
                           std::min(tile_size, size - at), false);
  });
}

// Each reader's number of the trained ones, where it has any, += the sum over the blocks of partial (blocks, R).
void add_partial(const std::vector<DepthReader>& readers, const float* partial, int64_t blocks) {
  const int64_t R = static_cast<int64_t>(readers.size());
  float* sums = scratch_f32(static_cast<size_t>(R), 1);
  std::fill_n(sums, R, 0.f);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < R; ++r) sums[r] += partial[b * R + r];
  for (size_t r = 0; r < readers.size(); ++r)
    if (readers[r].dtrained.data != nullptr) readers[r].dtrained.as<float>()[readers[r].column] += sums[r];
}

template <class S>
void depth_mix_backward_cpu(S* dinp, const S* inp, const std::vector<DepthReader>& readers, int64_t size,
                            bool accumulate) {
  const int64_t R = static_cast<int64_t>(readers.size()), tiles = ceil_div(size, tile_size);
  const std::vector<const S*>& dout = data_of<const S>(readers, &DepthReader::dout);
  const WorkSplit split(tiles, size * R);
  float* partial = scratch_f32(static_cast<size_t>((split.blocks + 1) * R));
  float* weights = partial + split.blocks * R;
  std::fill_n(partial, split.blocks * R, 0.f);
  for (size_t r = 0; r < readers.size(); ++r) weights[r] = readers[r].weights.as<float>()[readers[r].column];
  parallel_for(split.blocks, split.grain(), [=, &dout](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t last = std::min(size, tiles * (b + 1) / split.blocks * tile_size);
      for (int64_t at = tiles * b / split.blocks * tile_size; at < last; at += tile_size)
        mix_row<true>(dinp + at, partial + b * R, inp + at, dout.data(), weights, R, at, std::min(tile_size, last - at),
                      accumulate);
    }
  });
  add_partial(readers, partial, split.blocks);
}

template <class S>
void vertical_dot_cpu(float* dots, const S* a, const S* b, int64_t N, int64_t C) {
  parallel_for(N, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) dots[n] = dot_row(a + n * C, b + n * C, C);
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
  float* exp_scores = scratch_f32(sources.size(), 3);
  const float max = scores == nullptr ? 0.f : *std::max_element(scores, scores + inputs);
  for (int64_t s = 0; s < inputs; ++s) exp_scores[s] = scores == nullptr ? 1.f : std::exp(scores[s] - max);
  parallel_for(N, 32768 / (C * inputs), [=, &sources, &squares](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      token_weights(weights + n * inputs, squares, exp_scores, n, eps);
      mix_row<false, S, S>(out + n * C, nullptr, nullptr, sources.data(), weights + n * inputs, inputs, n * C, C,
                           false);
    }
  });
}

// A reader's share in the weights of the tokens.
struct WeightColumn {
  const float* weights;  // weights[n * stride]
  int64_t stride;
  const float* pbar;  // (N)
};

template <class S>
void vertical_backward_cpu(S* dinp, const S* inp, const float* squares, const std::vector<DepthReader>& readers,
                           int64_t N, int64_t C, float eps, bool accumulate) {
  const std::vector<const S*>& dout = data_of<const S>(readers, &DepthReader::dout);
  const int64_t R = static_cast<int64_t>(readers.size());
  std::vector<WeightColumn>& columns = empty_list<WeightColumn>();
  for (const DepthReader& r : readers)
    columns.push_back({r.weights.as<float>() + r.column, r.weights.numel() / N, r.pbar.as<float>()});
  const WorkSplit split(N, N * C * R);
  float* partial = scratch_f32(static_cast<size_t>(split.blocks * R));
  std::fill_n(partial, split.blocks * R, 0.f);
  const bool apart = accumulate && !std::is_same_v<S, float>;  // to sums elsewhere; those in dinp start from it
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
          const WeightColumn& column = columns[static_cast<size_t>(r)];
          w[r] = column.weights[n * column.stride];
          p[r] = 0;
        }
        mix_row<true>(sums, p, x, dout.data(), w, R, n * C, C, accumulate && !apart);
        float total = 0;
        for (int64_t r = 0; r < R; ++r) {
          const float q = w[r] * (p[r] - columns[static_cast<size_t>(r)].pbar[n]);
          q_sum[r] += q;
          total += q;
        }
        const float scale = total / (squares[n] + eps);
        subtract_scaled<Vec16>(dx, sums, scale, x, 0, C / 16 * 16, apart);
        subtract_scaled<float>(dx, sums, scale, x, C / 16 * 16, C, apart);
      }
    }
  });
  add_partial(readers, partial, split.blocks);
}

void check_sources(const Tensor& out, const std::vector<Tensor>& sources) {
  CHECK_THAT(!sources.empty(), "no sources for ", out.str());
  for (const Tensor& source : sources) CHECK_SHAPES(source.numel() == out.numel(), out, source);
}

// Without readers nothing else has to be done.
bool set_to_zero(const Grad& dinp, const std::vector<DepthReader>& readers) {
  if (readers.empty() && !dinp.accumulate) std::memset(dinp.data, 0, dinp.bytes());
  return readers.empty();
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void depth_mix_forward(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights, Stream stream) {
  check_sources(out, sources);
  CHECK_THAT(weights.numel() == static_cast<int64_t>(sources.size()), weights.str(), " for ", sources.size());
  dispatch(
      stream, out.dtype, [&] { depth_mix_forward_cuda(out, sources, weights); },
      [&]<class S>(S) {
        depth_mix_forward_cpu(out.as<S>(), data_of<const S>(sources), weights.as<float>(), out.numel());
      },
      [&]<class T>(T) { depth_mix_forward_ref(out.as<T>(), data_of<const T>(sources), weights.as<T>(), out.numel()); });
}

void depth_mix_backward(const Grad& dinp, const Tensor& inp, const std::vector<DepthReader>& readers, Stream stream) {
  const int64_t size = dinp.numel();
  CHECK_SHAPES(inp.numel() == size, dinp, inp);
  for (const auto& [dout, weights, dtrained, column, pbar] : readers) {
    CHECK_SHAPES(dout.numel() == size && dtrained.numel() == weights.numel(), dinp, dout, weights, dtrained);
    CHECK_THAT(column >= 0 && column < weights.numel(), column, " of ", weights.str());
  }
  dispatch(
      stream, dinp.dtype, [&] { depth_mix_backward_cuda(dinp, inp, readers); },
      [&]<class S>(S) {
        if (set_to_zero(dinp, readers)) return;
        depth_mix_backward_cpu(dinp.as<S>(), inp.as<S>(), readers, size, dinp.accumulate);
      },
      [&]<class T>(T) { depth_mix_backward_ref(dinp.as<T>(), inp.as<T>(), readers, size, dinp.accumulate); });
}

void vertical_dot(const Tensor& dots, const Tensor& a, const Tensor& b, Stream stream) {
  const int64_t N = dots.numel(), C = a.numel() / N;
  CHECK_SHAPES(a.numel() == N * C && b.numel() == N * C, dots, a, b);
  dispatch(
      stream, a.dtype, [&] { vertical_dot_cuda(dots, a, b, N, C); },
      [&]<class S>(S) { vertical_dot_cpu(dots.as<float>(), a.as<S>(), b.as<S>(), N, C); },
      [&]<class T>(T) { vertical_dot_ref(dots.as<T>(), a.as<T>(), b.as<T>(), N, C); });
}

void vertical_forward(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                      const std::vector<Tensor>& squares, const Tensor& scores, double eps, Stream stream) {
  check_sources(out, sources);
  const int64_t S = static_cast<int64_t>(sources.size()), N = weights.numel() / S, C = out.numel() / N;
  CHECK_SHAPES(weights.numel() == N * S && out.numel() == N * C && (scores.data == nullptr || scores.numel() == S), out,
               weights, scores);
  CHECK_THAT(squares.size() == sources.size(), S, " sources, ", squares.size(), " squares");
  for (const Tensor& square : squares) CHECK_SHAPES(square.numel() == N, square, weights);
  dispatch(
      stream, out.dtype, [&] { vertical_forward_cuda(out, weights, sources, squares, scores, N, C, eps); },
      [&]<class Stored>(Stored) {
        vertical_forward_cpu(out.as<Stored>(), weights.as<float>(), data_of<const Stored>(sources),
                             data_of<const float, 1>(squares), data_or_null<float>(scores), N, C,
                             static_cast<float>(eps));
      },
      [&]<class T>(T) {
        vertical_forward_ref(out.as<T>(), weights.as<T>(), data_of<const T>(sources), data_of<const T, 1>(squares),
                             data_or_null<const T>(scores), N, C, eps);
      });
}

void vertical_backward(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                       const std::vector<DepthReader>& readers, double eps, Stream stream) {
  const int64_t N = squares.numel(), C = inp.numel() / N;
  CHECK_SHAPES(inp.numel() == N * C && dinp.numel() == N * C, dinp, inp, squares);
  for (const auto& [dout, weights, dscores, column, pbar] : readers) {
    const int64_t S = weights.numel() / N;
    CHECK_SHAPES(dout.numel() == N * C && weights.numel() == N * S && pbar.numel() == N &&
                     (dscores.data == nullptr || dscores.numel() == S),
                 dinp, dout, weights, pbar, dscores);
    CHECK_THAT(column >= 0 && column < S, column, " of ", weights.str());
  }
  dispatch(
      stream, dinp.dtype, [&] { vertical_backward_cuda(dinp, inp, squares, readers, N, C, eps); },
      [&]<class S>(S) {
        if (set_to_zero(dinp, readers)) return;
        vertical_backward_cpu(dinp.as<S>(), inp.as<S>(), squares.as<float>(), readers, N, C, static_cast<float>(eps),
                              dinp.accumulate);
      },
      [&]<class T>(T) {
        vertical_backward_ref(dinp.as<T>(), inp.as<T>(), squares.as<T>(), readers, N, C, eps, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// A mixture: reads the sources, which take care of all its gradients but one.
struct DepthMix : Node {
  std::vector<Value*> sources, squares;  // squares: vertical attention only, saved[0] the weights, saved[1] pbar
  Value* trained = nullptr;              // in[0]: the weights, or the scores, which may be null
  std::vector<Tensor> source_tensors, square_tensors;
  double eps = 0;

  const char* op() const override { return squares.empty() ? "depth_mix" : "vertical"; }
  void prepare() override { source_tensors = tensors_of(sources), square_tensors = tensors_of(squares); }
  void forward(const Step&, Stream stream) override {
    const Tensor weights = tensor_of(trained);
    if (squares.empty()) depth_mix_forward(output(), source_tensors, weights, stream);
    else vertical_forward(output(), saved[0]->tensor, source_tensors, square_tensors, weights, eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    if (!squares.empty()) vertical_dot(saved[1]->tensor, doutput(), output(), stream);
  }
  double flops() const override {
    return 2.0 * static_cast<double>(out[0]->shape.numel()) * static_cast<double>(sources.size());
  }
  // As its source number `column` sees it.
  DepthReader reader(int64_t column) const {
    if (squares.empty()) return {doutput(), tensor_of(trained), grad_of(trained), column, {}};
    return {doutput(), saved[0]->tensor, grad_of(trained), column, saved[1]->tensor};
  }
};

// A source of mixtures: out[0] is in[0]. Its backward gathers from the readers, which are recorded after it.
struct DepthSource : Node {
  bool by_norm = false;  // saved[0] then holds the squared norms (B*T)
  double eps = 0;
  std::vector<std::pair<const DepthMix*, int64_t>> mixes;  // and which of their sources this is
  std::vector<DepthReader> readers;

  const char* op() const override { return "depth_source"; }
  void prepare() override {
    readers.clear();
    for (const auto& [mix, column] : mixes)
      if (mix->out[0]->grad != nullptr)
        readers.push_back(mix->reader(column));  // null on a tape that only goes forward
  }
  void forward(const Step&, Stream stream) override {
    if (by_norm) vertical_dot(saved[0]->tensor, input(0), input(0), stream);
  }
  bool in_place() const override { return true; }
  bool grad_optional() const override { return true; }
  std::vector<Value*> later_parameters() const override {
    std::vector<Value*> list;
    for (const auto& [mix, column] : mixes)
      if (mix->trained != nullptr && mix->trained->parameter != nullptr) list.push_back(mix->trained);
    return list;
  }
  double flops() const override { return by_norm ? 2.0 * static_cast<double>(in[0]->shape.numel()) : 0; }
  void backward(const Step&, Stream stream) override {
    // out[0]'s gradient, where it has one, is in[0]'s with what the direct readers passed on.
    const Grad dinp{dinput(0), out[0]->grad != nullptr};
    if (by_norm) vertical_backward(dinp, output(), saved[0]->tensor, readers, eps, stream);
    else depth_mix_backward(dinp, output(), readers, stream);
  }
};

// The mixture reads the sources, and each of them learns of its reader.
void connect(DepthMix& mix, const std::vector<Node*>& nodes, const std::vector<int>& sources) {
  for (const int s : sources) {
    auto& source = static_cast<DepthSource&>(*nodes.at(static_cast<size_t>(s)));
    source.mixes.emplace_back(&mix, static_cast<int64_t>(mix.sources.size()));
    source.backward_reads_grads.push_back(mix.out[0]);
    source.backward_reads.insert(source.backward_reads.end(), mix.saved.begin(), mix.saved.end());
    mix.sources.push_back(source.out[0]);
    if (source.by_norm) mix.squares.push_back(source.saved[0]);
  }
  mix.reads = joined(mix.sources, mix.squares);
}

}  // namespace

Value* DepthHistory::add(const std::string& name, Value* x) {
  CHECK_THAT(x->shape.rank == 3, name, ": a source is (B, T, C), got ", x->shape.str());
  auto node = make_node<DepthSource>(name, {x}, {tape_.activation(name, x->shape)});
  node->by_norm = by_norm_;
  node->eps = eps_;
  if (by_norm_) node->saved = {tape_.statistic(name + ".squares", Shape{x->shape[0] * x->shape[1]})};
  node->backward_reads = {node->out[0]};
  nodes_.push_back(node.get());
  return tape_.record(std::move(node));
}

Value* DepthHistory::mix(const std::string& name, const std::vector<int>& sources, Value* weight) {
  const int64_t S = static_cast<int64_t>(sources.size());
  CHECK_THAT(!by_norm_ && S > 0 && weight->shape.numel() == S, name, ": ", S, " sources, weight ", weight->shape.str());
  auto node = make_node<DepthMix>(name, {weight}, {tape_.activation(name, nodes_[0]->out[0]->shape)});
  node->trained = weight;
  connect(*node, nodes_, sources);
  return tape_.record(std::move(node));
}

Value* DepthHistory::attend(const std::string& name, const std::vector<int>& sources, Value* scores) {
  const int64_t S = static_cast<int64_t>(sources.size());
  CHECK_THAT(by_norm_ && S > 0 && (scores == nullptr || scores->shape.numel() == S), name, ": ", S, " sources");
  const Shape stream = nodes_[0]->out[0]->shape;
  const int64_t N = stream[0] * stream[1];
  auto node = make_node<DepthMix>(name, present({scores}), {tape_.activation(name, stream)});
  node->trained = scores;
  node->eps = eps_;
  node->saved = {tape_.statistic(name + ".weights", Shape{N, S}), tape_.statistic(name + ".pbar", Shape{N})};
  connect(*node, nodes_, sources);
  node->backward_reads = {node->out[0]};
  Value* out = tape_.record(std::move(node));
  out->needs_grad = nodes_[0]->out[0]->needs_grad;  // through the sources, also where there are no scores
  return out;
}

}  // namespace ops
}  // namespace crossply
