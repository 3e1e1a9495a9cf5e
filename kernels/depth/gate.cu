// Not yet run on hardware: only in the emulator.
#include "kernels/depth/gate.h"

#include "kernels/block/softmax.cuh"

namespace crossply {
namespace {

// These tensors are small, a number a head: each kernel is a few microseconds, most of them its launch.

__device__ __forceinline__ float gate_value(float z, Gate gate) {
  switch (gate) {
    case Gate::relu: return z < 0 ? 0.f : z;
    case Gate::sigmoid: return logistic(z).s;
    case Gate::tanh: return tanhf(z);
    default: return z;
  }
}
__device__ __forceinline__ float gate_slope(float z, Gate gate) {
  switch (gate) {
    case Gate::relu: return z > 0 ? 1.f : z <= 0 ? 0.f : z;
    case Gate::sigmoid: {
      const Logistic l = logistic(z);
      return l.s * l.rest;
    }
    case Gate::tanh: {
      const Logistic l = logistic(2.f * z);
      return 4.f * l.s * l.rest;
    }
    default: return 1.f;
  }
}

template <int width, class S>
__global__ void gate_forward_kernel(float* out, const S* inp, Gate gate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(inp + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] = gate_value(x[k], gate);
  store<width>(out + i, x);
}

template <int width, class S>
__global__ void gate_backward_kernel(S* dinp, const float* dout, const S* inp, Gate gate, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> x = load<width>(inp + i);
  Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) d[k] *= gate_slope(x[k], gate);
  store_or_accumulate<width>(dinp + i, d, accumulate);
}

// -----------------------------------------------------------------------------------------------------------------
// With a softmax, over rows of K.

template <class S>
__global__ void softmax_gate_forward_kernel(float* out, const S* inp, int64_t rows, int64_t K, bool sigmoid,
                                            int lanes) {
  const SoftmaxRow r = softmax_of_row(inp, rows, K, lanes);
  for (int64_t i = r.n * K + r.lane; i < r.n * K + r.width; i += lanes) {
    const float x = to_float(inp[i]), y = static_cast<float>(K) * expf(x - r.largest) * r.scale;
    out[i] = sigmoid ? y * logistic(x).s : y;
  }
}

// With y = out and f = 2 - s, or 1 without a sigmoid: dinp = y dout f - p sum_j dout y.
template <class S>
__global__ void softmax_gate_backward_kernel(S* dinp, const float* dout, const S* inp, int64_t rows, int64_t K,
                                             bool sigmoid, bool accumulate, int lanes) {
  const SoftmaxRow r = softmax_of_row(inp, rows, K, lanes);
  const int64_t first = r.n * K + r.lane, end = r.n * K + r.width;
  const auto p_of = [&](float x) { return expf(x - r.largest) * r.scale; };
  const auto sigmoid_of = [&](float x) { return sigmoid ? logistic(x) : Logistic{1.f, 0.f}; };
  float sum = 0;
  for (int64_t i = first; i < end; i += lanes) {
    const float x = to_float(inp[i]);
    sum += dout[i] * (static_cast<float>(K) * p_of(x) * sigmoid_of(x).s);
  }
  sum = group_sum(sum, lanes);
  for (int64_t i = first; i < end; i += lanes) {
    const float x = to_float(inp[i]), p = p_of(x);
    const Logistic l = sigmoid_of(x);
    const float d = p * (static_cast<float>(K) * l.s * dout[i] * (1.f + l.rest) - sum);
    store_or_accumulate<1>(dinp + i, Floats<1>{{d}}, accumulate);
  }
}

bool has_softmax(Gate gate) { return gate == Gate::softmax || gate == Gate::softmax_sigmoid; }

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void gate_forward_cuda(const Tensor& out, const Tensor& inp, int64_t K, Gate gate) {
  const int64_t n = inp.numel(), rows = n / K;
  const int lanes = lanes_of_row(K);
  with_access(inp.dtype, n, {out.data, inp.data}, [&]<class S>(S, auto width) {
    if (has_softmax(gate))
      launch(launch_of_rows("softmax_gate_forward", rows, lanes), softmax_gate_forward_kernel<S>, out.as<float>(),
             inp.as<S>(), rows, K, gate == Gate::softmax_sigmoid, lanes);
    else
      launch_elementwise("gate_forward", n, width, gate_forward_kernel<width, S>, out.as<float>(), inp.as<S>(), gate);
  });
}

void gate_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, int64_t K, Gate gate) {
  const int64_t n = inp.numel(), rows = n / K;
  const int lanes = lanes_of_row(K);
  with_access(inp.dtype, n, {dinp.data, dout.data, inp.data}, [&]<class S>(S, auto width) {
    if (has_softmax(gate))
      launch(launch_of_rows("softmax_gate_backward", rows, lanes), softmax_gate_backward_kernel<S>, dinp.as<S>(),
             dout.as<float>(), inp.as<S>(), rows, K, gate == Gate::softmax_sigmoid, dinp.accumulate, lanes);
    else
      launch_elementwise("gate_backward", n, width, gate_backward_kernel<width, S>, dinp.as<S>(), dout.as<float>(),
                         inp.as<S>(), gate, dinp.accumulate);
  });
}

}  // namespace crossply
