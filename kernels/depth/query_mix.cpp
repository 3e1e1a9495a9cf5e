#include "kernels/depth/query_mix.h"

#include <cstring>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/depth/depth_mix.h"
#include "kernels/depth/mix_row.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t rows_at_once = 8;  // whose shares in the gradient of a query are added up together

template <class S>
void query_mix_forward_cpu(S* out, const QueryMixNumbers<float>& mix, const std::vector<const S*>& sources,
                           const std::vector<const float*>& squares, int64_t N, int64_t C, float eps) {
  const int64_t inputs = static_cast<int64_t>(sources.size());
  for (int64_t c = 0; c < C; ++c) mix.query[c] = mix.proj[c] * mix.gain[c];
  parallel_for(N, 32768 / (C * inputs), [=, &sources, &squares](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float *z = mix.logits + n * inputs, *w = mix.weights + n * inputs;
      for (int64_t s = 0; s < inputs; ++s) {
        const S* x = sources[static_cast<size_t>(s)] + n * C;
        const float product = dot_row(x, mix.query, C);
        z[s] = product / std::sqrt(squares[static_cast<size_t>(s)][n] / static_cast<float>(C) + eps);
      }
      softmax_over_sources(w, z, inputs);
      mix_row<false, S, S>(out + n * C, nullptr, nullptr, sources.data(), w, inputs, n * C, C, false);
    }
  });
}

// A reader's share in what the tokens saved, and its query.
struct Share {
  const float *weights, *logits;  // of token n at [n * stride]
  int64_t stride;
  const float* pbar;  // (N)
};

// One block of rows of the gather. R readers: their gradients, their queries, and what each of them saved.
template <class S>
struct Gather {
  S* dinp;
  const S* inp;
  const float* squares;
  const std::vector<const S*>& dout;
  const std::vector<const float*>& queries;
  const std::vector<Share>& shares;
  int64_t R, C;
  float eps;
  bool accumulate;

  // Row n of dinp. pull[r * rows_at_once] becomes q_r times the row's scale: its share in the query's gradient.
  void row(int64_t n, float* pull) const {
    constexpr bool in_bf16 = !std::is_same_v<S, float>;
    S* dx = dinp + n * C;
    const S* x = inp + n * C;
    float* sums = sums_of(dx, C);
    float* w = scratch_f32(static_cast<size_t>(3 * R), 1);
    float *p = w + R, *qr = p + R;
    for (int64_t r = 0; r < R; ++r) {
      w[r] = shares[static_cast<size_t>(r)].weights[n * shares[static_cast<size_t>(r)].stride];
      p[r] = 0;
    }
    mix_row<true>(sums, p, x, dout.data(), w, R, n * C, C, accumulate && !in_bf16);
    const float scale = 1.f / std::sqrt(squares[n] / static_cast<float>(C) + eps);
    float through_norm = 0;
    for (int64_t r = 0; r < R; ++r) {
      const Share& share = shares[static_cast<size_t>(r)];
      const float q = w[r] * (p[r] - share.pbar[n]);
      through_norm += q * share.logits[n * share.stride];
      qr[r] = pull[r * rows_at_once] = q * scale;
    }
    mix_row<false, float, float>(sums, nullptr, nullptr, queries.data(), qr, R, 0, C, true);
    const float factor = through_norm * scale * scale / static_cast<float>(C);
    const int64_t whole = C / lanes_of<Vec16> * lanes_of<Vec16>;
    subtract_scaled<Vec16>(dx, sums, factor, x, 0, whole, accumulate && in_bf16);
    subtract_scaled<float>(dx, sums, factor, x, whole, C, accumulate && in_bf16);
  }
  // Rows [begin, end), and their shares in the gradients of the queries: dqueries (R, C).
  void rows(int64_t begin, int64_t end, float* dqueries) const {
    float* pulls = scratch_f32(static_cast<size_t>(R * rows_at_once), 3);
    const S* x[rows_at_once];
    for (int64_t first = begin; first < end; first += rows_at_once) {
      const int64_t count = std::min(rows_at_once, end - first);
      for (int64_t i = 0; i < count; ++i) row(first + i, pulls + i), x[i] = inp + (first + i) * C;
      for (int64_t r = 0; r < R; ++r)
        mix_row<false, float, S>(dqueries + r * C, nullptr, nullptr, x, pulls + r * rows_at_once, count, 0, C, true);
    }
  }
};

// Adds the sums over the blocks of dqueries (blocks, R, C) to what the readers train.
void add_to_trained(const std::vector<QueryReader>& readers, const float* dqueries, int64_t blocks, int64_t C) {
  const int64_t R = static_cast<int64_t>(readers.size());
  parallel_for(R, 32768 / (blocks * C), [=, &readers](int64_t begin, int64_t end) {
    float* sum = scratch_f32(static_cast<size_t>(C), 1);
    for (int64_t i = begin; i < end; ++i) {
      const QueryReader& r = readers[static_cast<size_t>(i)];
      std::fill_n(sum, C, 0.f);
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t c = 0; c < C; ++c) sum[c] += dqueries[(b * R + i) * C + c];
      const float *proj = r.mix.proj.as<float>(), *gain = r.mix.gain.as<float>();
      for (int64_t c = 0; c < C; ++c) r.dproj.as<float>()[c] += sum[c] * gain[c];
      for (int64_t c = 0; c < C; ++c) r.dgain.as<float>()[c] += sum[c] * proj[c];
    }
  });
}

template <class S>
void query_mix_backward_cpu(S* dinp, const S* inp, const float* squares, const std::vector<QueryReader>& readers,
                            int64_t N, int64_t C, float eps, bool accumulate) {
  const int64_t R = static_cast<int64_t>(readers.size());
  std::vector<Share>& shares = empty_list<Share>();
  for (const QueryReader& r : readers)
    shares.push_back({r.mix.weights.as<float>() + r.column, r.mix.logits.as<float>() + r.column,
                      r.mix.weights.numel() / N, r.pbar.as<float>()});
  const auto query = [](const QueryReader& r) -> const Tensor& { return r.mix.query; };
  const Gather<S> gather{dinp,
                         inp,
                         squares,
                         data_of<const S>(readers, &QueryReader::dout),
                         data_of<const float, 1>(readers, query),
                         shares,
                         R,
                         C,
                         eps,
                         accumulate};
  const WorkSplit split(N, N * C * R, 4 * rows_at_once);
  float* dqueries = scratch_f32(static_cast<size_t>(split.blocks * R * C));
  parallel_for(split.blocks, split.grain(), [=, &gather](int64_t begin, int64_t end) {
    std::fill(dqueries + begin * R * C, dqueries + end * R * C, 0.f);
    for (int64_t b = begin; b < end; ++b)
      gather.rows(N * b / split.blocks, N * (b + 1) / split.blocks, dqueries + b * R * C);
  });
  add_to_trained(readers, dqueries, split.blocks, C);
}

QueryMixNumbers<float> numbers_of(const QueryMix& mix) {
  return {mix.proj.as<float>(), mix.gain.as<float>(), mix.query.as<float>(), mix.logits.as<float>(),
          mix.weights.as<float>()};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void query_mix_forward(const Tensor& out, const QueryMix& mix, const std::vector<Tensor>& sources,
                       const std::vector<Tensor>& squares, double eps, Stream stream) {
  CHECK_THAT(!sources.empty() && squares.size() == sources.size(), sources.size(), " sources, ", squares.size(),
             " squares");
  const int64_t C = mix.proj.numel(), N = out.numel() / C, S = static_cast<int64_t>(sources.size());
  CHECK_SHAPES(out.numel() == N * C && mix.gain.numel() == C && mix.query.numel() == C, out, mix.proj, mix.gain);
  CHECK_SHAPES(mix.logits.numel() == N * S && mix.weights.numel() == N * S, out, mix.logits, mix.weights);
  for (const Tensor& source : sources) CHECK_SHAPES(source.numel() == out.numel(), out, source);
  for (const Tensor& square : squares) CHECK_SHAPES(square.numel() == N, square, mix.weights);
  dispatch(
      stream, out.dtype, [&] { query_mix_forward_cuda(out, mix, sources, squares, N, C, eps); },
      [&]<class Stored>(Stored) {
        query_mix_forward_cpu(out.as<Stored>(), numbers_of(mix), data_of<const Stored>(sources),
                              data_of<const float, 1>(squares), N, C, static_cast<float>(eps));
      },
      [&]<class T>(T) {
        query_mix_forward_ref<T>(
            out.as<T>(),
            {mix.proj.as<T>(), mix.gain.as<T>(), mix.query.as<T>(), mix.logits.as<T>(), mix.weights.as<T>()},
            data_of<const T>(sources), data_of<const T, 1>(squares), N, C, eps);
      });
}

void query_mix_backward(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                        const std::vector<QueryReader>& readers, double eps, Stream stream) {
  const int64_t N = squares.numel(), C = inp.numel() / N;
  CHECK_SHAPES(inp.numel() == N * C && dinp.numel() == N * C, dinp, inp, squares);
  for (const auto& [dout, mix, dproj, dgain, pbar, column] : readers) {
    const int64_t S = mix.weights.numel() / N;
    CHECK_SHAPES(dout.numel() == N * C && mix.weights.numel() == N * S && mix.logits.numel() == N * S, dinp, dout,
                 mix.weights, mix.logits);
    CHECK_SHAPES(pbar.numel() == N && dproj.numel() == C && dgain.numel() == C, pbar, dproj, dgain);
    CHECK_THAT(column >= 0 && column < S, column, " of ", mix.weights.str());
  }
  dispatch(
      stream, dinp.dtype, [&] { query_mix_backward_cuda(dinp, inp, squares, readers, N, C, eps); },
      [&]<class S>(S) {
        if (readers.empty() && !dinp.accumulate) std::memset(dinp.data, 0, dinp.bytes());
        if (readers.empty()) return;
        query_mix_backward_cpu(dinp.as<S>(), inp.as<S>(), squares.as<float>(), readers, N, C, static_cast<float>(eps),
                               dinp.accumulate);
      },
      [&]<class T>(T) {
        query_mix_backward_ref(dinp.as<T>(), inp.as<T>(), squares.as<T>(), readers, N, C, eps, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// A mixture: reads the sources, which take care of all its gradients but pbar.
struct QueryMixNode : Node {
  std::vector<Value*> sources, squares;  // in: proj, gain; saved: query, logits, weights, pbar
  std::vector<Tensor> source_tensors, square_tensors;
  double eps = 0;

  const char* op() const override { return "query_mix"; }
  QueryMix mix() const { return {input(0), input(1), saved[0]->tensor, saved[1]->tensor, saved[2]->tensor}; }
  void prepare() override { source_tensors = tensors_of(sources), square_tensors = tensors_of(squares); }
  void forward(const Step&, Stream stream) override {
    query_mix_forward(output(), mix(), source_tensors, square_tensors, eps, stream);
  }
  void backward(const Step&, Stream stream) override { vertical_dot(saved[3]->tensor, doutput(), output(), stream); }
  // The logits and the sum: a row is read and multiplied twice.
  double flops() const override {
    return 4.0 * static_cast<double>(out[0]->shape.numel()) * static_cast<double>(sources.size());
  }
  // As its source number `column` sees it.
  QueryReader reader(int64_t column) const {
    return {doutput(), mix(), grad_of(in[0]), grad_of(in[1]), saved[3]->tensor, column};
  }
};

// A source of mixtures: out[0] is in[0]. Its backward gathers from the readers, which are recorded after it.
struct QuerySource : Node {
  double eps = 0;                                              // saved[0]: the squared norms (B*T)
  std::vector<std::pair<const QueryMixNode*, int64_t>> mixes;  // and which of their sources this is
  std::vector<QueryReader> readers;

  const char* op() const override { return "query_source"; }
  void prepare() override {
    readers.clear();
    for (const auto& [mix, column] : mixes)
      if (mix->out[0]->grad != nullptr)
        readers.push_back(mix->reader(column));  // null on a tape that only goes forward
  }
  void forward(const Step&, Stream stream) override { vertical_dot(saved[0]->tensor, input(0), input(0), stream); }
  void backward(const Step&, Stream stream) override {
    // out[0]'s gradient, where it has one, is in[0]'s with what the direct readers passed on.
    query_mix_backward({dinput(0), out[0]->grad != nullptr}, output(), saved[0]->tensor, readers, eps, stream);
  }
  bool in_place() const override { return true; }
  bool grad_optional() const override { return true; }
  std::vector<Value*> later_parameters() const override {
    std::vector<Value*> list;
    for (const auto& [mix, column] : mixes) list.insert(list.end(), mix->in.begin(), mix->in.end());
    return list;
  }
  double flops() const override { return 2.0 * static_cast<double>(in[0]->shape.numel()); }
  ScratchBytes scratch() const override {
    const Shape& x = in[0]->shape;
    return query_mix_scratch(x[0] * x[1], x[2], static_cast<int64_t>(mixes.size()));
  }
};

}  // namespace

Value* QueryHistory::add(const std::string& name, Value* x) {
  CHECK_THAT(x->shape.rank == 3, name, ": a source is (B, T, C), got ", x->shape.str());
  auto node = make_node<QuerySource>(name, {x}, {tape_.activation(name, x->shape)});
  node->eps = eps_;
  node->saved = {tape_.statistic(name + ".squares", Shape{x->shape[0] * x->shape[1]})};
  node->backward_reads = {node->out[0]};
  nodes_.push_back(node.get());
  return tape_.record(std::move(node));
}

Value* QueryHistory::mix(const std::string& name, const std::vector<int>& sources, Value* proj, Value* gain) {
  const Shape stream = nodes_.at(0)->out[0]->shape;
  const int64_t S = static_cast<int64_t>(sources.size()), N = stream[0] * stream[1], C = stream[2];
  CHECK_THAT(S > 0 && proj->shape.numel() == C && gain->shape.numel() == C, name, ": ", S, " sources, query ",
             proj->shape.str(), ", gain ", gain->shape.str());
  auto node = make_node<QueryMixNode>(name, {proj, gain}, {tape_.activation(name, stream)});
  node->eps = eps_;
  node->saved = {tape_.statistic(name + ".query", Shape{C}), tape_.statistic(name + ".logits", Shape{N, S}),
                 tape_.statistic(name + ".weights", Shape{N, S}), tape_.statistic(name + ".pbar", Shape{N})};
  node->backward_reads = {node->out[0]};
  for (const int s : sources) {
    auto& source = static_cast<QuerySource&>(*nodes_.at(static_cast<size_t>(s)));
    source.mixes.emplace_back(node.get(), static_cast<int64_t>(node->sources.size()));
    source.backward_reads_grads.push_back(node->out[0]);
    for (Value* trained : {proj, gain}) source.backward_reads.push_back(trained);
    source.backward_reads.insert(source.backward_reads.end(), node->saved.begin(), node->saved.end());
    node->sources.push_back(source.out[0]);
    node->squares.push_back(source.saved[0]);
  }
  node->reads = joined(node->sources, node->squares);
  return tape_.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
