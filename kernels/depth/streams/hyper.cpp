#include "kernels/depth/streams/hyper.h"

#include "engine/node.h"
#include "kernels/depth/ops.h"
#include "kernels/depth/streams/hyper_token.h"

namespace crossply {

using namespace hyper;

namespace {

template <class Vec, int E, class S>
void expand_columns(S* streams, const S* x, int64_t c, int64_t C, bool accumulate) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec in, s = {};
    load(in, x + c);
    for (int i = 0; i < E; ++i) {
      prefetch_to_write(streams + (E + i) * C + c);
      if (accumulate) load(s, streams + i * C + c);
      store(streams + i * C + c, accumulate ? s + in : in);
    }
  }
  if (c < C) expand_columns<float, E>(streams, x, c, C, accumulate);
}

template <int E, class S>
void streams_expand_cpu(S* streams, const S* x, int64_t rows, int64_t C, bool accumulate) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) expand_columns<Vec16, E>(streams + n * E * C, x + n * C, 0, C, accumulate);
  });
}

template <class Vec, int E, class S>
void sum_columns(S* out, const S* x, int64_t c, int64_t C, bool accumulate) {
  for (; c + lanes_of<Vec> <= C; c += lanes_of<Vec>) {
    Vec sum = {}, s;
    if (accumulate) load(sum, out + c);
    for (int i = 0; i < E; ++i) {
      prefetch(x + (E + i) * C + c);
      load(s, x + i * C + c);
      sum += s;
    }
    store(out + c, sum);
  }
  if (c < C) sum_columns<float, E>(out, x, c, C, accumulate);
}

template <int E, class S>
void streams_sum_cpu(S* out, const S* streams, int64_t rows, int64_t C, bool accumulate) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) sum_columns<Vec16, E>(out + n * C, streams + n * E * C, 0, C, accumulate);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points. Those of the read and the write are in hyper_read.cpp and hyper_write.cpp.

void streams_expand(const Grad& streams, const Tensor& x, Stream stream) {
  const auto [rows, E, C] = check_streams(streams, x);
  dispatch(
      stream, x.dtype, [&] { streams_expand_cuda(streams, x, rows, E, C); },
      [&]<class S>(S) {
        with_streams(
            E, [&](auto count) { streams_expand_cpu<count>(streams.as<S>(), x.as<S>(), rows, C, streams.accumulate); });
      },
      [&]<class T>(T) { streams_expand_ref(streams.as<T>(), x.as<T>(), rows, E, C, streams.accumulate); });
}

void streams_sum(const Grad& out, const Tensor& streams, Stream stream) {
  const auto [rows, E, C] = check_streams(streams, out);
  dispatch(
      stream, out.dtype, [&] { streams_sum_cuda(out, streams, rows, E, C); },
      [&]<class S>(S) {
        with_streams(
            E, [&](auto count) { streams_sum_cpu<count>(out.as<S>(), streams.as<S>(), rows, C, out.accumulate); });
      },
      [&]<class T>(T) { streams_sum_ref(out.as<T>(), streams.as<T>(), rows, E, C, out.accumulate); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct StreamsExpand : Node {
  const char* op() const override { return "expand"; }
  void forward(const Step&, Stream stream) override { streams_expand({output(), false}, input(0), stream); }
  void backward(const Step&, Stream stream) override { streams_sum(gradient(0), doutput(), stream); }
};

struct StreamsSum : Node {
  const char* op() const override { return "streams_sum"; }
  void forward(const Step&, Stream stream) override { streams_sum({output(), false}, input(0), stream); }
  void backward(const Step&, Stream stream) override { streams_expand(gradient(0), doutput(), stream); }
};

}  // namespace

Value* streams_expand(Tape& t, const std::string& name, Value* x, int64_t E) {
  const Shape& s = x->shape;
  return t.record(make_node<StreamsExpand>(name, {x}, {t.activation(name, Shape{s[0], s[1], E, s[2]})}));
}

Value* streams_sum(Tape& t, const std::string& name, Value* streams) {
  const Shape& s = streams->shape;
  return t.record(make_node<StreamsSum>(name, {streams}, {t.activation(name, Shape{s[0], s[1], s[3]})}));
}

}  // namespace ops
}  // namespace crossply
