#include "kernels/depth/streams/gated_streams.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/matmul.h"
#include "kernels/depth/ops.h"
#include "kernels/depth/streams/hyper_token.h"

namespace crossply {

using namespace hyper;

namespace {

// s = sigmoid(x), and 1 - s without a cancellation.
struct Sigmoid {
  Vec16 s, rest;
  explicit Sigmoid(const Vec16& x) {
    Vec16 e = -x;
    exp_in_place(e);
    s = 1.f / (1.f + e), rest = e * s;
  }
};

// -----------------------------------------------------------------------------------------------------------------
// Norm.

// What follows the sums, for any number of streams: compiled for each it would be the same loop.
template <class S>
[[gnu::noinline]] void scale_streams(S* normed, const S* x, const float* gain, const float* rstd, int64_t E,
                                     int64_t C) {
  for (int64_t i = 0; i < E; ++i)
    for_vectors(i * C, (i + 1) * C, [=, r = rstd[i]](int64_t at, auto part) {
      Vec16 s, w;
      load(s, x + at, part), load(w, gain + at, part);
      store(normed + at, s * r * (1.f + w), part);
    });
}

// One token: the streams are summed side by side, because a sum alone would wait for its additions.
template <int E, class S>
void norm_token(S* normed, float* rstd, const S* x, const float* gain, int64_t C, float eps) {
  Vec16 squares[E] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    unrolled<E>([&](auto i) {
      Vec16 s;
      load(s, x + i * C + c, part);
      squares[i] += s * s;
    });
  });
  float sums[E] = {};
  add_sums_of_lanes(sums, squares);
  for (int i = 0; i < E; ++i) rstd[i] = 1.f / std::sqrt(sums[i] / static_cast<float>(C) + eps);
  scale_streams(normed, x, gain, rstd, E, C);
}

template <int E, class S>
void gated_norm_forward_cpu(S* normed, float* rstd, const S* streams, const float* gain, float eps, int64_t rows,
                            int64_t C) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      norm_token<E>(normed + n * E * C, rstd + n * E, streams + n * E * C, gain, C, eps);
  });
}

// dx of a token, from the streams' <dnormed (1 + gain), x>.
template <bool accumulate, class S>
[[gnu::noinline]] void norm_back_streams(S* dx, const S* dnormed, const S* x, const float* gain, const float* rstd,
                                         const float* sums, int64_t E, int64_t C) {
  for (int64_t i = 0; i < E; ++i) {
    const float r = rstd[i], mean = sums[i] * r * r / static_cast<float>(C);
    for_vectors(i * C, (i + 1) * C, [=](int64_t at, auto part) {
      Vec16 s, dy, w;
      load(s, x + at, part), load(dy, dnormed + at, part), load(w, gain + at, part);
      store_or_accumulate<accumulate>(dx + at, r * (dy * (1.f + w) - s * mean), part);
    });
  }
}

template <int E, class S>
void norm_back_token(S* dx, float* dgain, const S* dnormed, const S* x, const float* gain, const float* rstd, int64_t C,
                     bool accumulate) {
  Vec16 dots[E] = {};
  for_vectors(0, C, [&](int64_t c, auto part) {
    unrolled<E>([&](auto i) {
      const int64_t at = i * C + c;
      Vec16 s, dy, w, dw;
      load(s, x + at, part), load(dy, dnormed + at, part), load(w, gain + at, part), load(dw, dgain + at, part);
      const Vec16 product = dy * s;
      dots[i] += product * (1.f + w);
      store(dgain + at, dw + product * rstd[i], part);
    });
  });
  float sums[E] = {};
  add_sums_of_lanes(sums, dots);
  const auto streams = accumulate ? norm_back_streams<true, S> : norm_back_streams<false, S>;
  streams(dx, dnormed, x, gain, rstd, sums, E, C);
}

// One partial dgain per block of tokens; the number of blocks is fixed by the shape alone.
template <int E, class S>
void gated_norm_backward_cpu(S* dstreams, float* dgain, const S* dnormed, const S* streams, const float* gain,
                             const float* rstd, int64_t rows, int64_t C, bool accumulate) {
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64), width = E * C;
  float* partial = scratch_f32(static_cast<size_t>(blocks * width));
  parallel_for(blocks, rows * width <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* own = partial + b * width;
      std::fill_n(own, width, 0.f);
      for (int64_t n = rows * b / blocks; n < rows * (b + 1) / blocks; ++n)
        norm_back_token<E>(dstreams + n * width, own, dnormed + n * width, streams + n * width, gain, rstd + n * E, C,
                           accumulate);
    }
  });
  for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) dgain[i] += partial[b * width + i];
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Silu.

template <class S>
void gated_silu_forward_cpu(S* out, const S* inp, float factor, int64_t n) {
  for_elements(n, 16384, [=](int64_t i, auto part) {
    Vec16 x;
    load(x, inp + i, part);
    x *= factor;
    store(out + i, x * Sigmoid(x).s, part);
  });
}

template <class S>
void gated_silu_backward_cpu(S* dinp, const S* dout, const S* inp, float factor, int64_t n) {
  for_elements(n, 16384, [=](int64_t i, auto part) {
    Vec16 x, dy;
    load(x, inp + i, part), load(dy, dout + i, part);
    x *= factor;
    const Sigmoid of(x);
    store(dinp + i, factor * dy * of.s * (1.f + x * of.rest), part);
  });
}

// -----------------------------------------------------------------------------------------------------------------
// Mean.

template <class S>
void gated_mean_forward_cpu(S* out, const S* normed, const S* logits, int64_t rows, int64_t E, int64_t C) {
  const float share = 1.f / static_cast<float>(E);
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for_vectors(0, C, [=](int64_t c, auto part) {
        Vec16 sum = {}, x, l;
        for (int64_t at = n * E * C + c; at < (n + 1) * E * C; at += C) {
          load(x, normed + at, part), load(l, logits + at, part);
          sum += Sigmoid(l).s * x;
        }
        store(out + n * C + c, sum * share, part);
      });
  });
}

template <class S>
void gated_mean_backward_cpu(S* dnormed, S* dlogits, const S* dout, const S* normed, const S* logits, int64_t rows,
                             int64_t E, int64_t C) {
  const float share = 1.f / static_cast<float>(E);
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for_vectors(0, C, [=](int64_t c, auto part) {
        Vec16 g, x, l;
        load(g, dout + n * C + c, part);
        g *= share;
        for (int64_t at = n * E * C + c; at < (n + 1) * E * C; at += C) {
          load(x, normed + at, part), load(l, logits + at, part);
          const Sigmoid gate(l);
          store(dnormed + at, gate.s * g, part);
          store(dlogits + at, x * gate.s * gate.rest * g, part);
        }
      });
  });
}

// -----------------------------------------------------------------------------------------------------------------
// Inject.

template <class S>
void weights_of(float* w, const S* logits, int64_t E) {
  const float share = -1.f / static_cast<float>(E);
  for (int64_t i = 0; i < E; ++i) w[i] = 2.f / (1.f + exp_f32(static_cast<float>(logits[i]) * share));
}

template <class S>
void gated_inject_forward_cpu(S* next, const S* streams, const S* logits, const S* y, int64_t rows, int64_t E,
                              int64_t C) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float w[max_streams];
      weights_of(w, logits + n * E, E);
      for (int64_t i = 0; i < E; ++i)
        for_vectors(0, C, [&, to = next + (n * E + i) * C, from = streams + (n * E + i) * C](int64_t c, auto part) {
          Vec16 x, in;
          load(x, from + c, part), load(in, y + n * C + c, part);
          store(to + c, x + w[i] * in, part);
        });
    }
  });
}

template <int E, class S>
void gated_inject_backward_cpu(S* dstreams, S* dlogits, S* dy, const S* dnext, const S* logits, const S* y,
                               int64_t rows, int64_t C, bool accumulate, bool accumulate_y) {
  parallel_for(rows, grain(E, C), [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float w[E], sums[E] = {};
      weights_of(w, logits + n * E, E);
      Vec16 dots[E] = {};
      for_vectors(0, C, [&](int64_t c, auto part) {
        Vec16 in, sum = {};
        load(in, y + n * C + c, part);
        if (accumulate_y) load(sum, dy + n * C + c, part);
        unrolled<E>([&](auto i) {
          const int64_t at = (n * E + i) * C + c;
          Vec16 g, before = {};
          load(g, dnext + at, part);
          dots[i] += g * in;
          sum += w[i] * g;
          if (dstreams == dnext) return;
          if (accumulate) load(before, dstreams + at, part);
          store(dstreams + at, before + g, part);
        });
        store(dy + n * C + c, sum, part);
      });
      add_sums_of_lanes(sums, dots);
      for (int i = 0; i < E; ++i) dlogits[n * E + i] = S(sums[i] * w[i] * (2.f - w[i]) / (2.f * E));
    }
  });
}

// Of out (..., C) and so many times as much.
StreamsSize size_of_mean(const Tensor& out, const Tensor& all) {
  const auto [rows, C] = rows_of(out);
  const int64_t E = all.numel() / (rows * C);
  CHECK_SHAPES(E >= 1 && E <= max_streams && all.numel() == rows * E * C, out, all);
  return {rows, E, C};
}

StreamsSize size_of_norm(const Tensor& streams, const Tensor& normed, const Tensor& gain, const Tensor& rstd) {
  const auto [rows, C] = rows_of(streams);
  const int64_t E = gain.numel() / C;
  CHECK_SHAPES(streams.shape.rank > 1 && streams.dim(streams.shape.rank - 2) == E && E <= max_streams &&
                   gain.numel() == E * C && rstd.numel() == rows && normed.numel() == rows * C,
               streams, normed, gain, rstd);
  return {rows / E, E, C};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void gated_norm_forward(const Tensor& normed, const Tensor& rstd, const Tensor& streams, const Tensor& gain, double eps,
                        Stream stream) {
  const StreamsSize z = size_of_norm(streams, normed, gain, rstd);
  dispatch(
      stream, streams.dtype, [&] { gated_norm_forward_cuda(normed, rstd, streams, gain, eps, z); },
      [&]<class S>(S) {
        with_streams(z.E, [&](auto E) {
          gated_norm_forward_cpu<E>(normed.as<S>(), rstd.as<float>(), streams.as<S>(), gain.as<float>(),
                                    static_cast<float>(eps), z.rows, z.C);
        });
      },
      [&]<class T>(T) { gated_norm_forward_ref(normed.as<T>(), rstd.as<T>(), streams.as<T>(), gain.as<T>(), eps, z); });
}

void gated_norm_backward(const Grad& dstreams, const Tensor& dgain, const Tensor& dnormed, const Tensor& streams,
                         const Tensor& gain, const Tensor& rstd, Stream stream) {
  const StreamsSize z = size_of_norm(streams, dnormed, gain, rstd);
  CHECK_SHAPES(dstreams.numel() == streams.numel() && dgain.numel() == gain.numel(), dstreams, dgain, streams, gain);
  dispatch(
      stream, streams.dtype, [&] { gated_norm_backward_cuda(dstreams, dgain, dnormed, streams, gain, rstd, z); },
      [&]<class S>(S) {
        with_streams(z.E, [&](auto E) {
          gated_norm_backward_cpu<E>(dstreams.as<S>(), dgain.as<float>(), dnormed.as<S>(), streams.as<S>(),
                                     gain.as<float>(), rstd.as<float>(), z.rows, z.C, dstreams.accumulate);
        });
      },
      [&]<class T>(T) {
        gated_norm_backward_ref(dstreams.as<T>(), dgain.as<T>(), dnormed.as<T>(), streams.as<T>(), gain.as<T>(),
                                rstd.as<T>(), z, dstreams.accumulate);
      });
}

void gated_silu_forward(const Tensor& out, const Tensor& inp, double factor, Stream stream) {
  const int64_t n = inp.numel();
  CHECK_SHAPES(out.numel() == n, out, inp);
  dispatch(
      stream, inp.dtype, [&] { gated_silu_forward_cuda(out, inp, factor); },
      [&]<class S>(S) { gated_silu_forward_cpu(out.as<S>(), inp.as<S>(), static_cast<float>(factor), n); },
      [&]<class T>(T) { gated_silu_forward_ref(out.as<T>(), inp.as<T>(), factor, n); });
}

void gated_silu_backward(const Tensor& dinp, const Tensor& dout, const Tensor& inp, double factor, Stream stream) {
  const int64_t n = inp.numel();
  CHECK_SHAPES(dinp.numel() == n && dout.numel() == n, dinp, dout, inp);
  dispatch(
      stream, inp.dtype, [&] { gated_silu_backward_cuda(dinp, dout, inp, factor); },
      [&]<class S>(S) {
        gated_silu_backward_cpu(dinp.as<S>(), dout.as<S>(), inp.as<S>(), static_cast<float>(factor), n);
      },
      [&]<class T>(T) { gated_silu_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), factor, n); });
}

void gated_mean_forward(const Tensor& out, const Tensor& normed, const Tensor& logits, Stream stream) {
  const StreamsSize z = size_of_mean(out, normed);
  CHECK_SHAPES(logits.numel() == normed.numel(), out, normed, logits);
  dispatch(
      stream, out.dtype, [&] { gated_mean_forward_cuda(out, normed, logits, z); },
      [&]<class S>(S) { gated_mean_forward_cpu(out.as<S>(), normed.as<S>(), logits.as<S>(), z.rows, z.E, z.C); },
      [&]<class T>(T) { gated_mean_forward_ref(out.as<T>(), normed.as<T>(), logits.as<T>(), z); });
}

void gated_mean_backward(const Tensor& dnormed, const Tensor& dlogits, const Tensor& dout, const Tensor& normed,
                         const Tensor& logits, Stream stream) {
  const StreamsSize z = size_of_mean(dout, normed);
  CHECK_SHAPES(
      dnormed.numel() == normed.numel() && dlogits.numel() == normed.numel() && logits.numel() == normed.numel(),
      dnormed, dlogits, dout, normed, logits);
  dispatch(
      stream, dout.dtype, [&] { gated_mean_backward_cuda(dnormed, dlogits, dout, normed, logits, z); },
      [&]<class S>(S) {
        gated_mean_backward_cpu(dnormed.as<S>(), dlogits.as<S>(), dout.as<S>(), normed.as<S>(), logits.as<S>(), z.rows,
                                z.E, z.C);
      },
      [&]<class T>(T) {
        gated_mean_backward_ref(dnormed.as<T>(), dlogits.as<T>(), dout.as<T>(), normed.as<T>(), logits.as<T>(), z);
      });
}

void gated_inject_forward(const Tensor& next, const Tensor& streams, const Tensor& logits, const Tensor& y,
                          Stream stream) {
  const StreamsSize z = check_streams(streams, y);
  CHECK_SHAPES(next.shape == streams.shape && logits.numel() == z.rows * z.E, next, streams, logits);
  dispatch(
      stream, next.dtype, [&] { gated_inject_forward_cuda(next, streams, logits, y, z); },
      [&]<class S>(S) {
        gated_inject_forward_cpu(next.as<S>(), streams.as<S>(), logits.as<S>(), y.as<S>(), z.rows, z.E, z.C);
      },
      [&]<class T>(T) { gated_inject_forward_ref(next.as<T>(), streams.as<T>(), logits.as<T>(), y.as<T>(), z); });
}

void gated_inject_backward(const Grad& dstreams, const Tensor& dlogits, const Grad& dy, const Tensor& dnext,
                           const Tensor& logits, const Tensor& y, Stream stream) {
  const StreamsSize z = check_streams(dnext, y);
  check_streams(dstreams, dy);
  CHECK_THAT(!dstreams.accumulate || dstreams.data != dnext.data, "added to itself");
  CHECK_SHAPES(dstreams.shape == dnext.shape && logits.numel() == z.rows * z.E && dlogits.numel() == z.rows * z.E,
               dstreams, dlogits, dnext, logits);
  dispatch(
      stream, dnext.dtype, [&] { gated_inject_backward_cuda(dstreams, dlogits, dy, dnext, logits, y, z); },
      [&]<class S>(S) {
        with_streams(z.E, [&](auto E) {
          gated_inject_backward_cpu<E>(dstreams.as<S>(), dlogits.as<S>(), dy.as<S>(), dnext.as<S>(), logits.as<S>(),
                                       y.as<S>(), z.rows, z.C, dstreams.accumulate, dy.accumulate);
        });
      },
      [&]<class T>(T) {
        gated_inject_backward_ref(dstreams.as<T>(), dlogits.as<T>(), dy.as<T>(), dnext.as<T>(), logits.as<T>(),
                                  y.as<T>(), z, dstreams.accumulate, dy.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// Of a tensor (B,T,...) the tokens [first, first + count), as (1,count,...).
Tensor tokens_of(const Tensor& t, int64_t first, int64_t count) {
  Tensor part = t;
  part.shape.dim[0] = 1, part.shape.dim[1] = count;
  const size_t token = t.bytes() / static_cast<size_t>(t.dim(0) * t.dim(1));
  part.data = static_cast<std::byte*>(t.data) + static_cast<size_t>(first) * token;
  return part;
}

// So many tokens at a time that what is E times as wide as the model stays in the caches; on a GPU so many that its
// memory is bounded.
constexpr int64_t max_tokens = 8192;
int64_t tokens_at_once(Stream stream, int64_t width) {
  return stream.backend == Backend::cuda ? max_tokens : std::clamp<int64_t>((int64_t{1} << 19) / width, 16, max_tokens);
}

// The whole read as one node, which keeps the streams and the small product: what is E times as wide as the model is
// computed again in the backward. In: the streams, gain, down, up and, if the sublayer is to write, inject.
struct GatedRead : Node {
  double eps = 0;
  Value *a = nullptr, *rstd = nullptr;                       // (B,T,R), of the activations' type, and (B,T,E)
  Value *normed = nullptr, *d = nullptr, *logits = nullptr;  // of some tokens: (n,E*C), (n,R), (n,E*C)
  Value *normed_again = nullptr, *d_again = nullptr, *logits_again = nullptr;
  Value *dnormed = nullptr, *dd = nullptr;
  std::vector<Tensor> weights;  // of the products with normed
  Tensor up;
  const char* op() const override { return "gated_read"; }
  bool reads_bf16_copy(size_t i) const override { return i >= 2 && in[0]->dtype == Dtype::bf16; }
  void prepare() override {
    const Dtype real = in[0]->dtype;
    up = matmul_weight(in[3], real), weights = {matmul_weight(in[2], real)};
    if (writes()) weights.push_back(matmul_weight(in[4], real));
  }
  bool writes() const { return in.size() > 4; }
  double factor() const { return 1 / static_cast<double>(in[0]->shape[2]); }

  // Calls body(part, work) for some tokens after the other: part(tensor) is what a tensor has of them, work(value)
  // memory for as many.
  template <class F>
  void for_tokens(Stream stream, F&& body) const {
    const Shape& s = in[0]->shape;
    const int64_t rows = s[0] * s[1], step = std::min(rows, tokens_at_once(stream, s[2] * s[3]));
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      body([=](const Tensor& t) { return tokens_of(t, first, count); },
           [=](const Value* v) { return tokens_of(v->tensor, 0, count); });
    }
  }

  void forward(const Step&, Stream stream) override {
    for_tokens(stream, [&](auto part, auto work) {
      const Tensor x = work(normed), z = part(a->tensor), hidden = work(d), l = work(logits);
      gated_norm_forward(x, part(rstd->tensor), part(input(0)), input(1), eps, stream);
      if (writes()) matmul_forward({z, part(out[1]->tensor)}, x, weights, stream);
      else matmul_forward({z}, x, weights, stream);
      gated_silu_forward(hidden, z, factor(), stream);
      matmul_forward({l}, hidden, {up}, stream);
      gated_mean_forward(part(output()), x, l, stream);
    });
  }
  void backward(const Step&, Stream stream) override {
    for_tokens(stream, [&](auto part, auto work) {
      const Tensor x = work(normed_again), z = part(a->tensor), hidden = work(d_again), l = work(logits_again);
      const Tensor dx = work(dnormed), dz = work(dd), streams = part(input(0)), r = part(rstd->tensor);
      gated_norm_forward(x, r, streams, input(1), eps, stream);
      gated_silu_forward(hidden, z, factor(), stream);
      matmul_forward({l}, hidden, {up}, stream);
      gated_mean_backward(dx, l, part(doutput()), x, l, stream);
      matmul_backward_input({dz, false}, {l}, {up}, stream);
      matmul_backward_weight({dinput(3), true}, l, hidden, stream);
      gated_silu_backward(dz, dz, z, factor(), stream);
      matmul_backward_weight({dinput(2), true}, dz, x, stream);
      if (writes()) {
        const Tensor dinject = part(out[1]->grad->tensor);
        matmul_backward_input({dx, true}, {dz, dinject}, weights, stream);
        matmul_backward_weight({dinput(4), true}, dinject, x, stream);
      } else {
        matmul_backward_input({dx, true}, {dz}, weights, stream);
      }
      gated_norm_backward({part(gradient(0)), gradient(0).accumulate}, dinput(1), dx, streams, input(1), r, stream);
    });
  }
  double flops() const override {
    const Shape &s = in[0]->shape, &w = in[2]->shape;
    const int64_t rows = 2 * w[0] + (writes() ? s[2] : 0) + 1;  // of products with one of all columns; the mean
    return 2.0 * static_cast<double>(s.numel()) * static_cast<double>(rows);
  }
};

struct GatedInject : Node {  // in: streams, logits, the sublayer's output
  const char* op() const override { return "gated_inject"; }
  void forward(const Step&, Stream stream) override {
    gated_inject_forward(output(), input(0), input(1), input(2), stream);
  }
  void backward(const Step&, Stream stream) override {
    check_only_reader(1);
    gated_inject_backward(gradient(0), dinput(1), gradient(2), doutput(), input(1), input(2), stream);
  }
  bool grad_aliases_output(size_t i) const override { return i == 0; }
  double flops() const override { return 2.0 * static_cast<double>(in[0]->shape.numel()); }
};

}  // namespace

GatedReadOutputs gated_read(Tape& t, const std::string& name, Value* streams, const GatedWeights<Value*>& p,
                            double eps) {
  const Shape& s = streams->shape;
  const int64_t B = s[0], T = s[1], E = s[2], C = s[3], R = p.down->shape[0];
  CHECK_THAT(p.norm->shape == Shape{E * C} && p.down->shape == (Shape{R, E * C}) && p.up->shape == (Shape{E * C, R}),
             name, ": streams ", s.str(), " norm ", p.norm->shape.str(), " down ", p.down->shape.str(), " up ",
             p.up->shape.str());
  auto node = make_node<GatedRead>(name, present({streams, p.norm, p.down, p.up, p.inject}),
                                   {t.activation(name, Shape{B, T, C})});
  if (p.inject != nullptr) node->out.push_back(t.activation(name + ".inject", Shape{B, T, E}));
  node->eps = eps;
  const int64_t tokens = std::min(B * T, max_tokens);
  const Shape all{1, tokens, E * C}, few{1, tokens, R};
  node->saved = {node->a = t.activation(name + ".a", Shape{B, T, R}),
                 node->rstd = t.statistic(name + ".rstd", Shape{B, T, E})};
  const auto work = [&](std::vector<Value*>& list, const char* part, const Shape& shape) {
    list.push_back(t.activation(name + part, shape));
    return list.back();
  };
  node->normed = work(node->forward_work, ".normed", all);
  node->d = work(node->forward_work, ".d", few);
  node->logits = work(node->forward_work, ".logits", all);
  node->normed_again = work(node->backward_work, ".normed again", all);
  node->d_again = work(node->backward_work, ".d again", few);
  node->logits_again = work(node->backward_work, ".logits again", all);
  node->dnormed = work(node->backward_work, ".dnormed", all);
  node->dd = work(node->backward_work, ".dd", few);
  node->backward_reads = {streams};
  const GatedReadOutputs out{node->out[0], p.inject != nullptr ? node->out[1] : nullptr};
  t.record(std::move(node));
  return out;
}

Value* gated_inject(Tape& t, const std::string& name, Value* streams, Value* logits, Value* y) {
  auto node = make_node<GatedInject>(name, {streams, logits, y}, {t.activation(name, streams->shape)});
  node->backward_reads = {logits, y};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
