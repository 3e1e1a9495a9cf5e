#include "kernels/depth/gate.h"

#include <map>

#include "engine/node.h"
#include "kernels/block/softmax.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

// The gates of one number, and their slopes.
struct Relu {
  static float value(float z) { return z < 0 ? 0.f : z; }
  static float slope(float z) { return z > 0 ? 1.f : z <= 0 ? 0.f : z; }
};
struct Sigmoid {
  static float value(float z) { return 1.f / (1.f + exp_f32(-z)); }
  static float slope(float z) {
    const float e = exp_f32(-z), s = 1.f / (1.f + e);
    return s * (e * s);  // e s is 1 - s without the cancellation
  }
};
struct Tanh {
  static float value(float z) { return tanh_f32(z); }
  static float slope(float z) {
    const float e = exp_f32(-2.f * std::fabs(z)), r = 1.f / (1.f + e);
    return 4.f * e * r * r;
  }
};
struct Identity {
  static float value(float z) { return z; }
  static float slope(float) { return 1.f; }
};

template <class G, class S>
void forward_each(float* out, const S* inp, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = G::value(inp[i]);
  });
}

template <class G, class S>
void backward_each(S* dinp, const float* dout, const S* inp, int64_t n, bool accumulate) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
    if (accumulate) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) dinp[i] += dout[i] * G::slope(inp[i]);
    } else {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) dinp[i] = dout[i] * G::slope(inp[i]);
    }
  });
}

template <bool sigmoid, class S>
void softmax_gate_forward(float* out, const S* inp, int64_t rows, int64_t K) {
  for_row_tiles(rows, K, [=](int64_t n, int64_t count) {
    const float* z = read_floats(scratch_f32(static_cast<size_t>(count * K), 3), inp + n * K, count * K);
    float* y = out + n * K;
    softmax_rows_cpu(y, z, count, K);
#pragma omp simd
    for (int64_t i = 0; i < count * K; ++i) y[i] *= static_cast<float>(K) * (sigmoid ? Sigmoid::value(z[i]) : 1.f);
  });
}

// With y = out and f = 2 - s, or 1 without a sigmoid: dinp = y dout f - p sum_j dout y.
template <bool sigmoid, class S>
void softmax_gate_backward(S* dinp, const float* dout, const S* inp, int64_t rows, int64_t K, bool accumulate) {
  for_row_tiles(rows, K, [=](int64_t n, int64_t count) {
    float* p = scratch_f32(static_cast<size_t>(count * K));
    float* dy_y = scratch_f32(static_cast<size_t>(count * K), 1);
    float* f = scratch_f32(static_cast<size_t>(count * K), 2);
    float* floats = scratch_f32(static_cast<size_t>(count * K), 3);
    const float* z = read_floats(floats, inp + n * K, count * K);
    softmax_rows_cpu(p, z, count, K);
#pragma omp simd
    for (int64_t i = 0; i < count * K; ++i) {
      const float e = sigmoid ? exp_f32(-z[i]) : 0.f, s = 1.f / (1.f + e);
      dy_y[i] = dout[n * K + i] * (static_cast<float>(K) * p[i] * s);
      f[i] = 1.f + e * s;
    }
    float* dz = begin_floats(floats, dinp + n * K, count * K, accumulate);
    for (int64_t row = 0; row < count; ++row) {
      const float sum = sum_of(dy_y + row * K, K);
      if (accumulate) {
#pragma omp simd
        for (int64_t i = row * K; i < (row + 1) * K; ++i) dz[i] += dy_y[i] * f[i] - p[i] * sum;
      } else {
#pragma omp simd
        for (int64_t i = row * K; i < (row + 1) * K; ++i) dz[i] = dy_y[i] * f[i] - p[i] * sum;
      }
    }
    write_floats(dinp + n * K, dz, count * K);
  });
}

template <class S>
void gate_forward_cpu(float* out, const S* inp, int64_t rows, int64_t K, Gate gate) {
  switch (gate) {
    case Gate::relu: return forward_each<Relu>(out, inp, rows * K);
    case Gate::sigmoid: return forward_each<Sigmoid>(out, inp, rows * K);
    case Gate::softmax: return softmax_gate_forward<false>(out, inp, rows, K);
    case Gate::softmax_sigmoid: return softmax_gate_forward<true>(out, inp, rows, K);
    case Gate::tanh: return forward_each<Tanh>(out, inp, rows * K);
    case Gate::identity: return forward_each<Identity>(out, inp, rows * K);
  }
}

template <class S>
void gate_backward_cpu(S* dinp, const float* dout, const S* inp, int64_t rows, int64_t K, Gate gate, bool accumulate) {
  switch (gate) {
    case Gate::relu: return backward_each<Relu>(dinp, dout, inp, rows * K, accumulate);
    case Gate::sigmoid: return backward_each<Sigmoid>(dinp, dout, inp, rows * K, accumulate);
    case Gate::softmax: return softmax_gate_backward<false>(dinp, dout, inp, rows, K, accumulate);
    case Gate::softmax_sigmoid: return softmax_gate_backward<true>(dinp, dout, inp, rows, K, accumulate);
    case Gate::tanh: return backward_each<Tanh>(dinp, dout, inp, rows * K, accumulate);
    case Gate::identity: return backward_each<Identity>(dinp, dout, inp, rows * K, accumulate);
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void gate_forward(const Tensor& out, const Tensor& inp, Gate gate, Stream stream) {
  const auto [rows, K] = rows_of(inp);
  CHECK_SHAPES(out.numel() == inp.numel(), out, inp);
  dispatch(
      stream, inp.dtype, [&] { gate_forward_cuda(out, inp, K, gate); },
      [&]<class S>(S) { gate_forward_cpu(out.as<float>(), inp.as<S>(), rows, K, gate); },
      [&]<class T>(T) { gate_forward_ref(out.as<T>(), inp.as<T>(), rows, K, gate); });
}

void gate_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, Gate gate, Stream stream) {
  const auto [rows, K] = rows_of(inp);
  CHECK_SHAPES(dinp.numel() == inp.numel() && dout.numel() == inp.numel(), dinp, dout, inp);
  dispatch(
      stream, inp.dtype, [&] { gate_backward_cuda(dinp, dout, inp, K, gate); },
      [&]<class S>(S) {
        gate_backward_cpu(dinp.as<S>(), dout.as<float>(), inp.as<S>(), rows, K, gate, dinp.accumulate);
      },
      [&]<class T>(T) { gate_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), rows, K, gate, dinp.accumulate); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct GateNode : Node {
  Gate kind = Gate::relu;
  const char* op() const override { return "gate"; }
  void forward(const Step&, Stream stream) override { gate_forward(output(), input(0), kind, stream); }
  void backward(const Step&, Stream stream) override { gate_backward(gradient(0), doutput(), input(0), kind, stream); }
};

}  // namespace

Value* gate(Tape& t, const std::string& name, Value* inp, const std::string& kind) {
  static const std::map<std::string, Gate> kinds = {
      {"relu", Gate::relu},       {"sigmoid", Gate::sigmoid},
      {"softmax", Gate::softmax}, {"softmax_sigmoid", Gate::softmax_sigmoid},
      {"tanh", Gate::tanh},       {"identity", Gate::identity}};
  CHECK_THAT(kinds.contains(kind), name, ": no gate '", kind, "'");
  auto node = make_node<GateNode>(name, {inp}, {t.statistic(name, inp->shape)});
  node->kind = kinds.at(kind);
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
