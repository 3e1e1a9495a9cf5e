// The write of the hyper-connections and its backward; of the family hyper.h.
#include "engine/node.h"
#include "kernels/depth/mix_row.h"
#include "kernels/depth/ops.h"
#include "kernels/depth/streams/hyper.h"
#include "kernels/depth/streams/hyper_token.h"

namespace crossply {

using namespace hyper;

namespace {

// next_i = b[i] y + sum_k A[k,i+1] x_k; with `more` also their sum of squares, and read = sum_i A[i,0] next_i if there
// is a place for it.
template <class Vec, int E, bool more, class S>
float write_columns(S* next, S* read, const S* x, const float* coef, const S* y, int64_t c, int64_t C) {
  Vec squares = {};
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec in, s[E], mean = {};
    load(in, y + c);
    unrolled<E>([&](auto k) {
      prefetch(x + (E + k) * C + c);
      load(s[k], x + k * C + c);
    });
    unrolled<E>([&](auto i) {
      prefetch_to_write(next + (E + i) * C + c);
      Vec sum = coef[i * (E + 2) + E + 1] * in;
      unrolled<E>([&](auto k) { sum += coef[k * (E + 2) + i + 1] * s[k]; });
      store(next + i * C + c, sum);
      if constexpr (more) {
        if constexpr (!std::is_same_v<S, float>) load(sum, next + i * C + c);
        squares += sum * sum, mean += coef[i * (E + 2)] * sum;
      }
    });
    if (more && read != nullptr) store(read + c, mean);
  }
  float sum = sum_of_lanes(squares);
  if (c < C) sum += write_columns<float, E, more>(next, read, x, coef, y, c, C);
  return sum;
}

template <int E, bool more, class S>
void hyper_write_forward_cpu(const WriteOutputNumbers<S, float>& out, const S* streams, const float* coef, const S* y,
                             int64_t rows, int64_t C) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float a[E * (E + 2)];  // a copy, which the stores to next cannot change
      std::copy_n(coef + n * E * (E + 2), E * (E + 2), a);
      S* read = out.x != nullptr ? out.x + n * C : nullptr;
      const float squares =
          write_columns<Vec16, E, more>(out.next + n * E * C, read, streams + n * E * C, a, y + n * C, 0, C);
      if (out.squares != nullptr) out.squares[n] = squares;
    }
  });
}

// In the write's backward y is to b what stream k is to A[k,1..E]: one more row.
template <int E, class S>
struct WriteRow {
  const S* x;  // (C)
  S* dx;       // (C)
  float coef[E];
  float dcoef[E];
  bool accumulate;
  int64_t step;  // to the next token's x
};

// One token: the gradients of next and of what `weight` read of it, one of which may be missing.
template <int E, class S>
struct WrittenToken {
  const S *dnext, *dread;  // (E,C), (C)
  float weight[E];

  template <class Vec>
  void gradients(Vec (&g)[E], int64_t c, int64_t C) const {
    Vec d = {};
    if (dread != nullptr) load(d, dread + c);
    unrolled<E>([&](auto i) {
      g[i] = Vec{};
      if (dnext != nullptr) prefetch(dnext + (E + i) * C + c), load(g[i], dnext + i * C + c);
      if (dread != nullptr) g[i] += weight[i] * d;
    });
  }
};

// For R rows: dcoef[i] += x . g_i, dx = or += sum_i coef[i] g_i
template <class Vec, int R, int E, class S>
void write_back_columns(WriteRow<E, S>* rows, const WrittenToken<E, S>& written, int64_t c, int64_t C) {
  Vec dots[R * E] = {};
  float coef[R][E];  // a copy, which the stores cannot change
  for (int r = 0; r < R; ++r) std::copy_n(rows[r].coef, E, coef[r]);
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec g[E];
    written.gradients(g, c, C);
    unrolled<R>([&](auto r) {
      Vec x, sum = {};
      if (rows[r].accumulate) load(sum, rows[r].dx + c);
      prefetch(rows[r].x + rows[r].step + c);
      prefetch_to_write(rows[r].dx + rows[r].step + c);
      load(x, rows[r].x + c);
      unrolled<E>([&](auto i) {
        dots[r * E + i] += x * g[i];
        sum += coef[r][i] * g[i];
      });
      store(rows[r].dx + c, sum);
    });
  }
  float sums[R * E] = {};
  add_sums_of_lanes(sums, dots);
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < E; ++i) rows[r].dcoef[i] += sums[r * E + i];
  if (c < C) write_back_columns<float, R>(rows, written, c, C);
}

// Rows [r, E], R at a time.
template <int R, int E, class S>
void write_back(WriteRow<E, S>* rows, const WrittenToken<E, S>& written, int64_t C, int r) {
  for (; r + R <= E + 1; r += R) write_back_columns<Vec16, R>(rows + r, written, 0, C);
  if constexpr (R > 1)
    if (r < E + 1) write_back<1>(rows, written, C, r);
}

template <int E, class S>
void hyper_write_backward_cpu(S* dstreams, float* dcoef, S* dy, const WrittenNumbers<S>& written, const S* streams,
                              const float* coef, const S* y, int64_t tokens, int64_t C, bool accumulate_streams,
                              bool accumulate_coef, bool accumulate_y) {
  constexpr int J = E + 2;
  parallel_for(tokens, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* a = coef + n * E * J;
      float* da = dcoef + n * E * J;
      WriteRow<E, S> rows[E + 1];
      for (int k = 0; k < E; ++k) {
        rows[k] = {streams + (n * E + k) * C, dstreams + (n * E + k) * C, {}, {}, accumulate_streams, E * C};
        for (int i = 0; i < E; ++i) rows[k].coef[i] = a[k * J + i + 1];
      }
      rows[E] = {y + n * C, dy + n * C, {}, {}, accumulate_y, C};
      for (int i = 0; i < E; ++i) rows[E].coef[i] = a[i * J + E + 1];
      WrittenToken<E, S> token{written.dnext != nullptr ? written.dnext + n * E * C : nullptr,
                               written.dx != nullptr ? written.dx + n * C : nullptr,
                               {}};
      for (int i = 0; i < E; ++i) token.weight[i] = a[i * J];
      write_back<E <= 4 ? E + 1 : E <= 6 ? 3 : 2>(rows, token, C, 0);  // so many fit in registers
      for (int k = 0; k < E; ++k) {
        float own[J] = {token.dread != nullptr ? dot_row(written.next + (n * E + k) * C, token.dread, C) : 0};
        std::copy_n(rows[k].dcoef, E, own + 1);
        own[E + 1] = rows[E].dcoef[k];
        for (int j = 0; j < J; ++j) da[k * J + j] = (accumulate_coef ? da[k * J + j] : 0) + own[j];
      }
    }
  });
}

template <class Vec, int E, class S>
void reread_columns(S* x, const S* streams, const float* coef, int64_t c, int64_t C) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec sum = {}, s;
    for (int i = 0; i < E; ++i) {
      load(s, streams + i * C + c);
      sum += coef[i * (E + 2)] * s;
    }
    store(x + c, sum);
  }
  if (c < C) reread_columns<float, E>(x, streams, coef, c, C);
}

template <int E, class S>
void hyper_reread_forward_cpu(S* x, const S* streams, const float* coef, int64_t rows, int64_t C) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      reread_columns<Vec16, E>(x + n * C, streams + n * E * C, coef + n * E * (E + 2), 0, C);
  });
}

template <class Vec, class S>
void scale_columns(S* dx, const S* dout, float factor, int64_t c, int64_t C, bool accumulate) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec d, sum = {};
    load(d, dout + c);
    if (accumulate) load(sum, dx + c);
    store(dx + c, sum + factor * d);
  }
  if (c < C) scale_columns<float>(dx, dout, factor, c, C, accumulate);
}

template <int E, class S>
void hyper_reread_backward_cpu(S* dstreams, float* dcoef, const S* dx, const S* streams, const float* coef,
                               int64_t tokens, int64_t C, bool accumulate_streams, bool accumulate_coef) {
  constexpr int J = E + 2;
  parallel_for(tokens, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin * E; n < end * E; ++n) {
      const S* d = dx + n / E * C;
      if (dcoef != nullptr && !accumulate_coef) std::fill_n(dcoef + n * J, J, 0.f);
      if (dcoef != nullptr) dcoef[n * J] += dot_row(streams + n * C, d, C);
      scale_columns<Vec16>(dstreams + n * C, d, coef[n * J], 0, C, accumulate_streams);
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void hyper_reread_forward(const Tensor& x, const Tensor& streams, const Tensor& coef, Stream stream) {
  const auto [rows, E, C] = check_streams(streams, x);
  check_coef(coef, streams);
  dispatch(
      stream, x.dtype, [&, rows = rows, E = E, C = C] { hyper_reread_forward_cuda(x, streams, coef, rows, E, C); },
      [&, rows = rows, E = E, C = C]<class S>(S) {
        with_streams(E, [&](auto count) {
          hyper_reread_forward_cpu<count>(x.as<S>(), streams.as<S>(), coef.as<float>(), rows, C);
        });
      },
      [&, rows = rows, E = E, C = C]<class T>(T) {
        hyper_reread_forward_ref(x.as<T>(), streams.as<T>(), coef.as<T>(), rows, E, C);
      });
}

void hyper_reread_backward(const Grad& dstreams, const Grad& dcoef, const Tensor& dx, const Tensor& streams,
                           const Tensor& coef, Stream stream) {
  const auto [rows, E, C] = check_streams(streams, dx);
  CHECK_SHAPES(dstreams.shape == streams.shape, dstreams, streams);
  check_coef(coef, streams);
  if (dcoef.data != nullptr) check_coef(dcoef, streams);
  dispatch(
      stream, dx.dtype,
      [&, rows = rows, E = E, C = C] { hyper_reread_backward_cuda(dstreams, dcoef, dx, streams, coef, rows, E, C); },
      [&, rows = rows, E = E, C = C]<class S>(S) {
        with_streams(E, [&](auto count) {
          hyper_reread_backward_cpu<count>(dstreams.as<S>(), data_or_null<float>(dcoef), dx.as<S>(), streams.as<S>(),
                                           coef.as<float>(), rows, C, dstreams.accumulate, dcoef.accumulate);
        });
      },
      [&, rows = rows, E = E, C = C]<class T>(T) {
        hyper_reread_backward_ref(dstreams.as<T>(), data_or_null<T>(dcoef), dx.as<T>(), streams.as<T>(), coef.as<T>(),
                                  rows, E, C, dstreams.accumulate, dcoef.accumulate);
      });
}

void hyper_write_forward(const WriteOutputs& out, const Tensor& streams, const Tensor& coef, const Tensor& y,
                         Stream stream) {
  const auto [rows, E, C] = check_streams(streams, y);
  CHECK_SHAPES(out.next.shape == streams.shape, out.next, streams);
  CHECK_SHAPES(out.x.data == nullptr || out.x.shape == y.shape, out.x, y);
  CHECK_SHAPES(out.squares.data == nullptr || out.squares.numel() == rows, out.squares, y);
  check_coef(coef, streams);
  dispatch(
      stream, out.next.dtype,
      [&, rows = rows, E = E, C = C] { hyper_write_forward_cuda(out, streams, coef, y, rows, E, C); },
      [&, rows = rows, E = E, C = C]<class S>(S) {
        const WriteOutputNumbers<S, float> to{out.next.as<S>(), data_or_null<S>(out.x),
                                              data_or_null<float>(out.squares)};
        with_streams(E, [&](auto count) {
          const auto write = to.x != nullptr || to.squares != nullptr ? hyper_write_forward_cpu<count, true, S>
                                                                      : hyper_write_forward_cpu<count, false, S>;
          write(to, streams.as<S>(), coef.as<float>(), y.as<S>(), rows, C);
        });
      },
      [&, rows = rows, E = E, C = C]<class T>(T) {
        hyper_write_forward_ref<T>({out.next.as<T>(), data_or_null<T>(out.x), data_or_null<T>(out.squares)},
                                   streams.as<T>(), coef.as<T>(), y.as<T>(), rows, E, C);
      });
}

void hyper_write_backward(const Grad& dstreams, const Grad& dcoef, const Grad& dy, const Written& written,
                          const Tensor& streams, const Tensor& coef, const Tensor& y, Stream stream) {
  const auto [rows, E, C] = check_streams(streams, y);
  check_streams(dstreams, dy);
  CHECK_SHAPES(dstreams.shape == streams.shape, dstreams, streams);
  CHECK_THAT(written.dx.data != nullptr || written.dnext.data != nullptr, "no gradient of what was written");
  CHECK_SHAPES(written.dnext.data == nullptr || written.dnext.shape == streams.shape, written.dnext, streams);
  CHECK_SHAPES(written.dx.data == nullptr || (written.dx.shape == y.shape && written.next.shape == streams.shape),
               written.dx, written.next);
  check_coef(coef, streams), check_coef(dcoef, streams);
  const auto numbers = [&]<class S>(S) -> WrittenNumbers<S> {
    return {data_or_null<const S>(written.next), data_or_null<const S>(written.dnext),
            data_or_null<const S>(written.dx)};
  };
  dispatch(
      stream, dstreams.dtype,
      [&, rows = rows, E = E, C = C] {
        hyper_write_backward_cuda(dstreams, dcoef, dy, written, streams, coef, y, rows, E, C);
      },
      [&, rows = rows, E = E, C = C]<class S>(S of) {
        with_streams(E, [&](auto count) {
          hyper_write_backward_cpu<count>(dstreams.as<S>(), dcoef.as<float>(), dy.as<S>(), numbers(of), streams.as<S>(),
                                          coef.as<float>(), y.as<S>(), rows, C, dstreams.accumulate, dcoef.accumulate,
                                          dy.accumulate);
        });
      },
      [&, rows = rows, E = E, C = C]<class T>(T of) {
        hyper_write_backward_ref(dstreams.as<T>(), dcoef.as<T>(), dy.as<T>(), numbers(of), streams.as<T>(),
                                 coef.as<T>(), y.as<T>(), rows, E, C, dstreams.accumulate, dcoef.accumulate,
                                 dy.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct HyperWrite : Node {  // in: streams, coefficients, the sublayer's output; out: the streams, and what is read
  Value *x = nullptr, *squares = nullptr;
  const char* op() const override { return "hyper_write"; }
  void forward(const Step&, Stream stream) override {
    hyper_write_forward({output(), tensor_of(x), tensor_of(squares)}, input(0), input(1), input(2), stream);
  }
  void backward(const Step&, Stream stream) override {
    hyper_write_backward(gradient(0), gradient(1), gradient(2), {output(), grad_of(out[0]), grad_of(x)}, input(0),
                         input(1), input(2), stream);
  }
  // Behind the last read nobody differentiates the streams.
  bool grad_optional() const override { return x != nullptr; }
  double flops() const override {
    const int64_t sums = in[0]->shape[2] + 1 + (x != nullptr);
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(sums);
  }
};

struct HyperReread : Node {  // in: streams, coefficients
  const char* op() const override { return "hyper_reread"; }
  void forward(const Step&, Stream stream) override { hyper_reread_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    const Grad dcoef = in[1]->grad != nullptr ? gradient(1) : Grad();
    hyper_reread_backward(gradient(0), dcoef, doutput(), input(0), input(1), stream);
  }
  double flops() const override { return 2.0 * static_cast<double>(in[0]->shape.numel()); }
};

std::unique_ptr<HyperWrite> write_node(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y) {
  auto node = make_node<HyperWrite>(name, {streams, coef, y}, {t.activation(name, streams->shape)});
  node->backward_reads = {streams, coef, y};
  return node;
}

}  // namespace

Value* hyper_write(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y) {
  return t.record(write_node(t, name, streams, coef, y));
}

Value* hyper_reread(Tape& t, const std::string& name, Value* streams, Value* coef) {
  const Shape& s = streams->shape;
  auto node = make_node<HyperReread>(name, {streams, coef}, {t.activation(name, Shape{s[0], s[1], s[3]})});
  node->backward_reads = {streams, coef};
  return t.record(std::move(node));
}

HyperWritten hyper_write_on(Tape& t, const std::string& name, Value* streams, Value* coef, Value* y, bool reads) {
  auto node = write_node(t, name, streams, coef, y);
  node->squares = t.statistic(name + ".squares", Shape{streams->shape[0], streams->shape[1]});
  node->saved = {node->squares};
  if (reads) {
    node->out.push_back(node->x = t.activation(name + ".read", y->shape));
    node->backward_reads.push_back(node->out[0]);
  }
  const HyperWritten written{node->out[0], node->squares, node->x};
  t.record(std::move(node));
  return written;
}

}  // namespace ops
}  // namespace crossply
