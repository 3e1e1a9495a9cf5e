#include "kernels/depth/engram_gate.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

// Of a stream's q: gam, and the slope of gam by q.
struct Gated {
  float gam, slope;
};
Gated gated(float q) {
  const bool clamped = std::fabs(q) < static_cast<float>(engram_least_logit);
  const float root = std::sqrt(clamped ? static_cast<float>(engram_least_logit) : std::fabs(q));
  const float e = exp_f32(-root), r = 1.f / (1.f + e);
  return {std::signbit(q) ? e * r : r, clamped ? 0.f : e * r * r / (2.f * root)};
}

// (E, C): what a key and a stream are multiplied by. Of the calling thread, in slot 0.
const float* gains(const float* wq, const float* wk, int64_t count) {
  float* w = scratch_f32(static_cast<size_t>(count));
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) w[i] = wq[i] * wk[i];
  return w;
}

template <class S>
void forward_stream(S* out, float* saved, const S* x, const S* k, const S* val, const float* w, float eps, int64_t C) {
  Vec16 dots{}, xx{}, kk{};
  for_vectors(0, C, [&](int64_t c, auto part) {
    Vec16 a, b, g;
    load(a, x + c, part), load(b, k + c, part), load(g, w + c, part);
    dots += a * g * b, xx += a * a, kk += b * b;
  });
  const auto width = static_cast<float>(C);
  const float dot = sum_of_lanes(dots), rx = 1.f / std::sqrt(sum_of_lanes(xx) / width + eps),
              rk = 1.f / std::sqrt(sum_of_lanes(kk) / width + eps);
  const float gam = gated(dot * rx * rk / std::sqrt(width)).gam;
  for_vectors(0, C, [&](int64_t c, auto part) {
    Vec16 a, v;
    load(a, x + c, part), load(v, val + c, part);
    store(out + c, a + gam * v, part);
  });
  saved[0] = dot, saved[1] = gam, saved[2] = rx, saved[3] = rk;
}

template <class S>
void engram_gate_forward_cpu(S* out, float* saved, const S* x, const S* kv, const float* wq, const float* wk, float eps,
                             const EngramGateSize& z) {
  const float* w = gains(wq, wk, z.E * z.C);
  parallel_for(z.N, grain / (z.E * z.C), [=, &z](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const S *keys = kv + n * (z.E + 1) * z.C, *val = keys + z.E * z.C;
      for (int64_t s = 0; s < z.E; ++s) {
        const int64_t at = (n * z.E + s) * z.C;
        forward_stream(out + at, saved + (n * z.E + s) * engram_saved, x + at, keys + s * z.C, val, w + s * z.C, eps,
                       z.C);
      }
    }
  });
}

// dx and dk of a stream; adds to dval (C) and to dw (C), the sums of t rx rk x k.
template <bool dx_added, bool dk_added, class S>
void backward_stream(S* dx, S* dk, float* dval, float* dw, const S* dout, const S* x, const S* k, const S* val,
                     const float* w, const float* saved, int64_t C) {
  Vec16 sum{};
  for_vectors(0, C, [&](int64_t c, auto part) {
    Vec16 dy, v;
    load(dy, dout + c, part), load(v, val + c, part);
    sum += dy * v;
  });
  const auto width = static_cast<float>(C);
  const float dot = saved[0], gam = saved[1], rx = saved[2], rk = saved[3];
  const float t = sum_of_lanes(sum) * gated(dot * rx * rk / std::sqrt(width)).slope / std::sqrt(width);
  const float a = t * rx * rk, of_x = a * dot * rx * rx / width, of_k = a * dot * rk * rk / width;
  for_vectors(0, C, [&](int64_t c, auto part) {
    Vec16 dy, xs, ks, g, dv, dg;
    load(dy, dout + c, part), load(xs, x + c, part), load(ks, k + c, part), load(g, w + c, part);
    load(dv, dval + c, part), load(dg, dw + c, part);
    store_or_accumulate<dx_added>(dx + c, dy + a * g * ks - of_x * xs, part);
    store_or_accumulate<dk_added>(dk + c, a * g * xs - of_k * ks, part);
    store(dval + c, dv + gam * dy, part);
    store(dw + c, dg + a * xs * ks, part);
  });
}

struct Gains {
  float *dwq, *dwk;
  const float *wq, *wk;
};

template <bool dx_added, bool dkv_added, class S>
void engram_gate_backward_cpu(S* dx, S* dkv, const Gains& g, const S* dout, const S* x, const S* kv, const float* saved,
                              const EngramGateSize& z) {
  const int64_t parts = engram_gate_parts(z.N), size = z.E * z.C;
  const float* w = gains(g.wq, g.wk, size);
  float* partial = scratch_f32(static_cast<size_t>(parts * size), 1);
  std::fill_n(partial, parts * size, 0.f);
  parallel_for(parts, z.N * size <= grain ? parts : 1, [=, &z](int64_t begin, int64_t end) {
    float* dval = scratch_f32(static_cast<size_t>(z.C), 2);
    for (int64_t p = begin; p < end; ++p)
      for (int64_t n = z.N * p / parts; n < z.N * (p + 1) / parts; ++n) {
        const int64_t keys = n * (z.E + 1) * z.C, value = keys + z.E * z.C;
        std::fill_n(dval, z.C, 0.f);
        for (int64_t s = 0; s < z.E; ++s) {
          const int64_t at = (n * z.E + s) * z.C, key = keys + s * z.C;
          backward_stream<dx_added, dkv_added>(dx + at, dkv + key, dval, partial + p * size + s * z.C, dout + at,
                                               x + at, kv + key, kv + value, w + s * z.C,
                                               saved + (n * z.E + s) * engram_saved, z.C);
        }
        for_vectors(0, z.C, [&](int64_t c, auto part) {
          Vec16 dv;
          load(dv, dval + c, part);
          store_or_accumulate<dkv_added>(dkv + value + c, dv, part);
        });
      }
  });
  for (int64_t i = 0; i < size; ++i) {
    float sum = 0;
    for (int64_t p = 0; p < parts; ++p) sum += partial[p * size + i];
    g.dwq[i] += g.wk[i] * sum, g.dwk[i] += g.wq[i] * sum;
  }
}

EngramGateSize check_sizes(const Tensor& out, const Tensor& saved, const EngramGateInputs& in) {
  const auto [rows, C] = rows_of(in.kv);
  const int64_t E = in.wq.numel() / C, N = rows / (E + 1);
  CHECK_SHAPES(E >= 1 && in.wq.numel() == E * C && in.wk.numel() == E * C && rows == N * (E + 1) &&
                   in.x.numel() == N * E * C && out.numel() == in.x.numel() && saved.numel() == N * E * engram_saved,
               out, in.x, in.kv, in.wq, in.wk, saved);
  return {N, E, C};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void engram_gate_forward(const Tensor& out, const Tensor& saved, const EngramGateInputs& in, double eps,
                         Stream stream) {
  const EngramGateSize z = check_sizes(out, saved, in);
  dispatch(
      stream, in.x.dtype, [&] { engram_gate_forward_cuda(out, saved, in, eps, z); },
      [&]<class S>(S) {
        engram_gate_forward_cpu(out.as<S>(), saved.as<float>(), in.x.as<S>(), in.kv.as<S>(), in.wq.as<float>(),
                                in.wk.as<float>(), static_cast<float>(eps), z);
      },
      [&]<class T>(T) {
        engram_gate_forward_ref(out.as<T>(), saved.as<T>(), in.x.as<T>(), in.kv.as<T>(), in.wq.as<T>(), in.wk.as<T>(),
                                eps, z);
      });
}

void engram_gate_backward(const Grad& dx, const Grad& dkv, const Tensor& dwq, const Tensor& dwk, const Tensor& dout,
                          const EngramGateInputs& in, const Tensor& saved, Stream stream) {
  const EngramGateSize z = check_sizes(dout, saved, in);
  CHECK_SHAPES(dx.numel() == in.x.numel() && dkv.numel() == in.kv.numel() && dwq.numel() == in.wq.numel() &&
                   dwk.numel() == in.wk.numel(),
               dx, dkv, dwq, dwk);
  dispatch(
      stream, in.x.dtype, [&] { engram_gate_backward_cuda(dx, dkv, dwq, dwk, dout, in, saved, z); },
      [&]<class S>(S) {
        const Gains gains{dwq.as<float>(), dwk.as<float>(), in.wq.as<float>(), in.wk.as<float>()};
        with_flag(dx.accumulate, [&](auto x_added) {
          with_flag(dkv.accumulate, [&](auto kv_added) {
            engram_gate_backward_cpu<x_added, kv_added>(dx.as<S>(), dkv.as<S>(), gains, dout.as<S>(), in.x.as<S>(),
                                                        in.kv.as<S>(), saved.as<float>(), z);
          });
        });
      },
      [&]<class T>(T) {
        engram_gate_backward_ref(dx.as<T>(), dx.accumulate, dkv.as<T>(), dkv.accumulate, dwq.as<T>(), dwk.as<T>(),
                                 dout.as<T>(), in.x.as<T>(), in.kv.as<T>(), in.wq.as<T>(), in.wk.as<T>(), saved.as<T>(),
                                 z);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct EngramGate : Node {  // in: streams, kv, gains of streams and keys
  double eps = 0;
  const char* op() const override { return "engram_gate"; }
  EngramGateInputs inputs() const { return {input(0), input(1), input(2), input(3)}; }
  void forward(const Step&, Stream stream) override {
    engram_gate_forward(output(), saved[0]->tensor, inputs(), eps, stream);
  }
  void backward(const Step&, Stream stream) override {
    engram_gate_backward(gradient(0), gradient(1), dinput(2), dinput(3), doutput(), inputs(), saved[0]->tensor, stream);
  }
  bool only_accumulates(size_t i) const override { return i >= 2; }
  double flops() const override { return 8.0 * static_cast<double>(out[0]->shape.numel()); }
  ScratchBytes scratch() const override {
    const Shape& gain = in[2]->shape;
    return engram_gate_scratch({out[0]->shape.numel() / gain.numel(), gain[0], gain[1]});
  }
};

}  // namespace

Value* engram_gate(Tape& t, const std::string& name, Value* streams, Value* kv, Value* q_gain, Value* k_gain,
                   double eps) {
  const int64_t E = q_gain->shape[0], C = q_gain->shape[1], N = streams->shape.numel() / (E * C);
  CHECK_THAT(kv->shape.numel() == N * (E + 1) * C, name, ": streams ", streams->shape.str(), ", keys and values ",
             kv->shape.str(), ", gains ", q_gain->shape.str());
  auto node = make_node<EngramGate>(name, {streams, kv, q_gain, k_gain}, {t.activation(name, streams->shape)});
  node->eps = eps;
  node->saved = {t.statistic(name + ".gates", Shape{streams->shape[0], streams->shape[1], E, engram_saved})};
  node->backward_reads = {streams, kv};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
