#include "kernels/depth/channel_gate.h"

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

// The first G channels of a token as floats.
template <class S>
const float* first_channels(const S* x, int64_t G) {
  float* to = scratch_f32(static_cast<size_t>(G), 1);
  for (int64_t g = 0; g < G; ++g) to[g] = static_cast<float>(x[g]);
  return to;
}

template <class S>
void channel_gate_forward_cpu(float* out, const S* inp, const float* weight, float factor, const ChannelGateSize& s) {
  parallel_for(s.N, grain / (s.K * s.G), [=, &s](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* x = first_channels(inp + n * s.C, s.G);
      float* y = out + n * s.K;
      for (int64_t k = 0; k < s.K; ++k) y[k] = dot_of(weight + k * s.G, x, s.G);
#pragma omp simd
      for (int64_t k = 0; k < s.K; ++k) y[k] = factor / (1.f + exp_f32(-y[k]));
    }
  });
}

// What one token leaves in dx (G) and dweight.
void token_backward(float* dx, float* dweight, const float* dout, const float* out, const float* x, const float* weight,
                    float factor, const ChannelGateSize& s) {
  for (int64_t k = 0; k < s.K; ++k) {
    const float dz = dout[k] * out[k] * (1.f - out[k] / factor);
#pragma omp simd
    for (int64_t g = 0; g < s.G; ++g) {
      dx[g] += dz * weight[k * s.G + g];
      dweight[k * s.G + g] += dz * x[g];
    }
  }
}

template <class S>
void channel_gate_backward_cpu(S* dinp, float* dweight, const float* dout, const float* out, const S* inp,
                               const float* weight, float factor, const ChannelGateSize& s, bool accumulate) {
  const int64_t blocks = channel_gate_parts(s.N), size = s.K * s.G;
  float* partial = scratch_f32(static_cast<size_t>(blocks * size));
  std::fill_n(partial, blocks * size, 0.f);
  parallel_for(blocks, s.N * (size + s.C) <= grain ? blocks : 1, [=, &s](int64_t begin, int64_t end) {
    float* dx = scratch_f32(static_cast<size_t>(s.G), 2);
    for (int64_t b = begin; b < end; ++b)
      for (int64_t n = s.N * b / blocks; n < s.N * (b + 1) / blocks; ++n) {
        S* to = dinp + n * s.C;
        for (int64_t g = 0; g < s.G; ++g) dx[g] = accumulate ? static_cast<float>(to[g]) : 0.f;
        token_backward(dx, partial + b * size, dout + n * s.K, out + n * s.K, first_channels(inp + n * s.C, s.G),
                       weight, factor, s);
        for (int64_t g = 0; g < s.G; ++g) to[g] = S(dx[g]);
        if (!accumulate) std::fill(to + s.G, to + s.C, S(0.f));
      }
  });
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < size; ++i) dweight[i] += partial[b * size + i];
}

ChannelGateSize check_sizes(const Tensor& out, const Tensor& inp, const Tensor& weight, double factor) {
  const auto [N, C] = rows_of(inp);
  const auto [K, G] = rows_of(weight);
  CHECK_SHAPES(out.numel() == N * K && G <= C, out, inp, weight);
  CHECK_THAT(factor > 0, factor);
  return {N, C, K, G};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void channel_gate_forward(const Tensor& out, const Tensor& inp, const Tensor& weight, double factor, Stream stream) {
  const ChannelGateSize z = check_sizes(out, inp, weight, factor);
  dispatch(
      stream, inp.dtype, [&] { channel_gate_forward_cuda(out, inp, weight, factor, z); },
      [&]<class S>(S) {
        channel_gate_forward_cpu(out.as<float>(), inp.as<S>(), weight.as<float>(), static_cast<float>(factor), z);
      },
      [&]<class T>(T) { channel_gate_forward_ref(out.as<T>(), inp.as<T>(), weight.as<T>(), factor, z); });
}

void channel_gate_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& out,
                           const Tensor& inp, const Tensor& weight, double factor, Stream stream) {
  const ChannelGateSize z = check_sizes(out, inp, weight, factor);
  CHECK_SHAPES(dinp.numel() == inp.numel() && dout.numel() == out.numel() && dweight.shape == weight.shape, dinp, dout,
               dweight, inp, out, weight);
  dispatch(
      stream, inp.dtype, [&] { channel_gate_backward_cuda(dinp, dweight, dout, out, inp, weight, factor, z); },
      [&]<class S>(S) {
        channel_gate_backward_cpu(dinp.as<S>(), dweight.as<float>(), dout.as<float>(), out.as<float>(), inp.as<S>(),
                                  weight.as<float>(), static_cast<float>(factor), z, dinp.accumulate);
      },
      [&]<class T>(T) {
        channel_gate_backward_ref(dinp.as<T>(), dweight.as<T>(), dout.as<T>(), out.as<T>(), inp.as<T>(), weight.as<T>(),
                                  factor, z, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct ChannelGate : Node {  // in: inp, weight
  double factor = 1;
  const char* op() const override { return "channel_gate"; }
  void forward(const Step&, Stream stream) override {
    channel_gate_forward(output(), input(0), input(1), factor, stream);
  }
  void backward(const Step&, Stream stream) override {
    channel_gate_backward(gradient(0), dinput(1), doutput(), output(), input(0), input(1), factor, stream);
  }
  bool only_accumulates(size_t i) const override { return i == 1; }
  double flops() const override {
    return 2.0 * static_cast<double>(out[0]->shape.numel()) * static_cast<double>(in[1]->shape[1]);
  }
  ScratchBytes scratch() const override {
    const Shape &x = in[0]->shape, &w = in[1]->shape;
    return channel_gate_scratch({x[0] * x[1], x[2], w[0], w[1]});
  }
};

}  // namespace

Value* channel_gate(Tape& t, const std::string& name, Value* inp, Value* weight, double factor) {
  const Shape& x = inp->shape;
  auto node = make_node<ChannelGate>(name, {inp, weight}, {t.statistic(name, Shape{x[0], x[1], weight->shape[0]})});
  node->factor = factor;
  node->backward_reads = {inp, node->out[0]};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
