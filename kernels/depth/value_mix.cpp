#include "kernels/depth/value_mix.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

// dx = (accumulate ? dx : 0) + factor * dy, and <dy, x>, or 0 without x. dx may be dy.
template <bool accumulate>
float scale_and_dot(float* dx, const float* dy, float factor, const float* x, int64_t n) {
  const float sum = x == nullptr ? 0.f : dot_of(dy, x, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = accumulate ? dx[i] + factor * dy[i] : factor * dy[i];
  return sum;
}

template <class Vec, bool accumulate>
float scale_columns(bf16* dx, const bf16* dy, float factor, const bf16* x, int64_t begin, int64_t end) {
  Vec sum = {}, u, v;
  for (int64_t i = begin; i < end; i += lanes_of<Vec>) {
    load(u, dy + i);
    if (x != nullptr) {
      load(v, x + i);
      sum += u * v;
    }
    u *= factor;
    if constexpr (accumulate) {
      load(v, dx + i);
      u += v;
    }
    store(dx + i, u);
  }
  return sum_of_lanes(sum);
}

// The same in one pass: converting costs more than adding.
template <bool accumulate>
float scale_and_dot(bf16* dx, const bf16* dy, float factor, const bf16* x, int64_t n) {
  const int64_t by16 = n / 16 * 16, by8 = n / 8 * 8;
  return scale_columns<Vec16, accumulate>(dx, dy, factor, x, 0, by16) +
         scale_columns<Vec8, accumulate>(dx, dy, factor, x, by16, by8) +
         scale_columns<float, accumulate>(dx, dy, factor, x, by8, n);
}

template <class S>
void value_mix_forward_cpu(S* out, const S* v, const S* v1, float own, float first, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = own * v[i] + first * v1[i];
  });
}

// In pieces that are short enough for f32 dot products, and for all steps to find dout in the L1 cache; over the pieces
// the sums are in f64.
template <bool accumulate_v, bool accumulate_v1, class S>
void value_mix_backward_cpu(S* dv, S* dv1, float* d_own, float* d_first, const S* dout, const S* v, const S* v1,
                            float own, float first, int64_t n) {
  constexpr int64_t piece = 2048, max_blocks = 64;
  // One pair of partial sums per block of pieces; the number of blocks is fixed by the shape alone.
  const int64_t pieces = ceil_div(n, piece), blocks = std::clamp<int64_t>(pieces / 4, 1, max_blocks);
  struct Sums {
    double own = 0, first = 0;
  } partial[max_blocks];
  parallel_for(blocks, n <= grain ? blocks : 1, [=, &partial](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      Sums sums;
      for (int64_t p = pieces * b / blocks; p < pieces * (b + 1) / blocks; ++p) {
        const int64_t start = p * piece, count = std::min(piece, n - start);
        sums.first += static_cast<double>(scale_and_dot<accumulate_v1>(
            dv1 + start, dout + start, first, d_first == nullptr ? nullptr : v1 + start, count));
        sums.own += static_cast<double>(
            scale_and_dot<accumulate_v>(dv + start, dout + start, own, d_own == nullptr ? nullptr : v + start, count));
      }
      partial[b] = sums;
    }
  });
  Sums total;
  for (const Sums& sums : partial) total.own += sums.own, total.first += sums.first;
  if (d_own != nullptr) *d_own += static_cast<float>(total.own);
  if (d_first != nullptr) *d_first += static_cast<float>(total.first);
}

template <class S>
void gated_mix_forward_cpu(S* out, const S* v, const S* v1, const float* alpha, int64_t rows, int64_t D) {
  parallel_for(rows, grain / D, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float a = alpha[n];
#pragma omp simd
      for (int64_t i = n * D; i < (n + 1) * D; ++i) out[i] = v[i] + a * v1[i];
    }
  });
}

template <bool accumulate_v1, class S>
void gated_mix_backward_cpu(S* dv1, float* dalpha, const S* dout, const S* v1, const float* alpha, int64_t rows,
                            int64_t D, bool accumulate_alpha) {
  parallel_for(rows, grain / D, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float sum = scale_and_dot<accumulate_v1>(dv1 + n * D, dout + n * D, alpha[n], v1 + n * D, D);
      dalpha[n] = accumulate_alpha ? dalpha[n] + sum : sum;
    }
  });
}

template <class S>
void scale_forward_cpu(S* out, const S* inp, float factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = factor * inp[i];
}

template <class S>
void scale_backward_cpu(S* dinp, float* dfactor, const S* dout, const S* inp, float factor, int64_t n,
                        bool accumulate) {
  if (dfactor != nullptr) *dfactor += dot_of(dout, inp, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dinp[i] = accumulate ? dinp[i] + factor * dout[i] : factor * dout[i];
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void value_mix_forward(const Tensor& out, const Tensor& v, const Tensor& v1, const MixWeight& own,
                       const MixWeight& first, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(v.numel() == n && v1.numel() == n, out, v, v1);
  dispatch(
      stream, out.dtype, [&] { value_mix_forward_cuda(out, v, v1, own, first); },
      [&]<class S>(S) {
        value_mix_forward_cpu(out.as<S>(), v.as<S>(), v1.as<S>(), *number_of<float>(own), *number_of<float>(first), n);
      },
      [&]<class T>(T) {
        value_mix_forward_ref(out.as<T>(), v.as<T>(), v1.as<T>(), *number_of<T>(own), *number_of<T>(first), n);
      });
}

void value_mix_backward(const Grad& dv, const Grad& dv1, const MixWeight& d_own, const MixWeight& d_first,
                        const Tensor& dout, const Tensor& v, const Tensor& v1, const MixWeight& own,
                        const MixWeight& first, Stream stream) {
  const int64_t n = dout.numel();
  const bool needs_v = d_own.values.data != nullptr;
  CHECK_SHAPES(dv.numel() == n && dv1.numel() == n && v1.numel() == n && (v.numel() == n || !needs_v), dv, dv1, dout, v,
               v1);
  dispatch(
      stream, dout.dtype, [&] { value_mix_backward_cuda(dv, dv1, d_own, d_first, dout, v, v1, own, first); },
      [&]<class S>(S) {
        auto backward = dv.accumulate    ? dv1.accumulate ? value_mix_backward_cpu<true, true, S>
                                                          : value_mix_backward_cpu<true, false, S>
                           : dv1.accumulate ? value_mix_backward_cpu<false, true, S>
                                         : value_mix_backward_cpu<false, false, S>;
        backward(dv.as<S>(), dv1.as<S>(), number_of<float>(d_own), number_of<float>(d_first), dout.as<S>(),
                 needs_v ? v.as<S>() : nullptr, v1.as<S>(), *number_of<float>(own), *number_of<float>(first), n);
      },
      [&]<class T>(T) {
        value_mix_backward_ref(dv.as<T>(), dv1.as<T>(), number_of<T>(d_own), number_of<T>(d_first), dout.as<T>(),
                               needs_v ? v.as<T>() : nullptr, v1.as<T>(), *number_of<T>(own), *number_of<T>(first), n,
                               dv.accumulate, dv1.accumulate);
      });
}

void gated_mix_forward(const Tensor& out, const Tensor& v, const Tensor& v1, const Tensor& alpha, Stream stream) {
  const auto [rows, D] = rows_of(v1);
  CHECK_SHAPES(alpha.numel() == rows && out.numel() == rows * D && v.numel() == rows * D, out, v, v1, alpha);
  dispatch(
      stream, out.dtype, [&] { gated_mix_forward_cuda(out, v, v1, alpha, D); },
      [&]<class S>(S) { gated_mix_forward_cpu(out.as<S>(), v.as<S>(), v1.as<S>(), alpha.as<float>(), rows, D); },
      [&]<class T>(T) { gated_mix_forward_ref(out.as<T>(), v.as<T>(), v1.as<T>(), alpha.as<T>(), rows, D); });
}

void gated_mix_backward(const Grad& dv1, const Grad& dalpha, const Tensor& dout, const Tensor& v1, const Tensor& alpha,
                        Stream stream) {
  const auto [rows, D] = rows_of(v1);
  CHECK_SHAPES(alpha.numel() == rows && dalpha.numel() == rows && dv1.numel() == rows * D && dout.numel() == rows * D,
               dv1, dalpha, dout, v1, alpha);
  dispatch(
      stream, dout.dtype, [&] { gated_mix_backward_cuda(dv1, dalpha, dout, v1, alpha, D); },
      [&]<class S>(S) {
        auto backward = dv1.accumulate ? gated_mix_backward_cpu<true, S> : gated_mix_backward_cpu<false, S>;
        backward(dv1.as<S>(), dalpha.as<float>(), dout.as<S>(), v1.as<S>(), alpha.as<float>(), rows, D,
                 dalpha.accumulate);
      },
      [&]<class T>(T) {
        gated_mix_backward_ref(dv1.as<T>(), dalpha.as<T>(), dout.as<T>(), v1.as<T>(), alpha.as<T>(), rows, D,
                               dv1.accumulate, dalpha.accumulate);
      });
}

void scale_forward(const Tensor& out, const Tensor& inp, const Tensor& factor, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(inp.numel() == n && factor.numel() == 1, out, inp, factor);
  dispatch(
      stream, out.dtype, [&] { scale_forward_cuda(out, inp, factor); },
      [&]<class S>(S) { scale_forward_cpu(out.as<S>(), inp.as<S>(), *factor.as<float>(), n); },
      [&]<class T>(T) { scale_forward_ref(out.as<T>(), inp.as<T>(), *factor.as<T>(), n); });
}

void scale_backward(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                    const Tensor& factor, Stream stream) {
  const int64_t n = dout.numel();
  CHECK_SHAPES(dinp.numel() == n && inp.numel() == n && factor.numel() == 1 && dfactor.numel() == 1, dinp, dfactor,
               dout, inp, factor);  // without a shape the latter has one element, too
  dispatch(
      stream, dout.dtype, [&] { scale_backward_cuda(dinp, dfactor, dout, inp, factor); },
      [&]<class S>(S) {
        scale_backward_cpu(dinp.as<S>(), data_or_null<float>(dfactor), dout.as<S>(), inp.as<S>(), *factor.as<float>(),
                           n, dinp.accumulate);
      },
      [&]<class T>(T) {
        scale_backward_ref(dinp.as<T>(), data_or_null<T>(dfactor), dout.as<T>(), inp.as<T>(), *factor.as<T>(), n,
                           dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Scale : Node {
  const char* op() const override { return "scale"; }
  void forward(const Step&, Stream stream) override { scale_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    scale_backward(gradient(0), grad_of(in[1]), doutput(), input(0), input(1), stream);
  }
};

struct ValueMix : Node {  // in: v, v1, the own scalar, the first layer's
  int64_t own = 0, first = 0;
  const char* op() const override { return "value_mix"; }
  void forward(const Step&, Stream stream) override {
    value_mix_forward(output(), input(0), input(1), {input(2), own}, {input(3), first}, stream);
  }
  void backward(const Step&, Stream stream) override {
    const Tensor v = in_place() ? Tensor{} : input(0);
    value_mix_backward(gradient(0), gradient(1), {grad_of(in[2]), own}, {grad_of(in[3]), first}, doutput(), v, input(1),
                       {input(2), own}, {input(3), first}, stream);
  }
  bool in_place() const override { return !in[2]->needs_grad; }  // else v is needed for the gradient of its scalar
  bool only_accumulates(size_t i) const override { return i >= 2; }
  double flops() const override { return 3.0 * static_cast<double>(in[0]->shape.numel()); }
};

struct GatedMix : Node {  // in: v, v1, alpha; the gradient of v is that of the output, in place
  const char* op() const override { return "gated_mix"; }
  void forward(const Step&, Stream stream) override {
    gated_mix_forward(output(), input(0), input(1), input(2), stream);
  }
  void backward(const Step&, Stream stream) override {
    gated_mix_backward(gradient(1), gradient(2), doutput(), input(1), input(2), stream);
  }
  bool in_place() const override { return true; }
  double flops() const override { return 2.0 * static_cast<double>(in[0]->shape.numel()); }
};

}  // namespace

Value* scale(Tape& t, const std::string& name, Value* inp, Value* factor) {
  CHECK_THAT(factor->shape.numel() == 1, name, ": factor ", factor->shape.str());
  auto node = make_node<Scale>(name, {inp, factor}, {t.statistic(name, inp->shape)});
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

Value* value_mix(Tape& t, const std::string& name, Value* v, Value* v1, Scalar own, Scalar first) {
  CHECK_THAT(
      v->shape == v1->shape && own.index < own.values->shape.numel() && first.index < first.values->shape.numel(), name,
      ": v ", v->shape.str(), " v1 ", v1->shape.str());
  auto node = make_node<ValueMix>(name, {v, v1, own.values, first.values}, {t.activation(name, v->shape)});
  node->own = own.index;
  node->first = first.index;
  node->backward_reads = {v1, own.values, first.values};
  if (!node->in_place()) node->backward_reads.push_back(v);
  return t.record(std::move(node));
}

Value* gated_mix(Tape& t, const std::string& name, Value* v, Value* v1, Value* alpha) {
  CHECK_THAT(v->shape == v1->shape && alpha->shape.numel() * v->shape[3] == v->shape.numel(), name, ": v ",
             v->shape.str(), " v1 ", v1->shape.str(), " alpha ", alpha->shape.str());
  auto node = make_node<GatedMix>(name, {v, v1, alpha}, {t.activation(name, v->shape)});
  node->backward_reads = {v1, alpha};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
