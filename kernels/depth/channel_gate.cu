// Not yet run on hardware: only in the emulator.
#include "kernels/depth/channel_gate.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Only G of C channels are read, and K elements written: a few microseconds, most of them the launches.

template <class S>
__global__ void channel_gate_forward_kernel(float* out, const S* inp, const float* weight, float factor,
                                            ChannelGateSize s, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  const S* x = inp + i / s.K * s.C;
  const float* w = weight + i % s.K * s.G;
  float z = 0;
  for (int64_t g = 0; g < s.G; ++g) z += w[g] * to_float(x[g]);
  out[i] = factor * logistic(z).s;
}

__global__ void channel_gate_logits_kernel(float* dz, const float* dout, const float* out, float factor, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i < n) dz[i] = dout[i] * out[i] * (1.f - out[i] / factor);
}

// A thread for each number of dinp, or, where they are added to, of those that change: `columns` of each token.
template <class S>
__global__ void channel_gate_input_kernel(S* dinp, const float* dz, const float* weight, ChannelGateSize s,
                                          int64_t columns, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  const int64_t row = i / columns, g = i % columns;
  float sum = 0;
  for (int64_t k = 0; k < s.K && g < s.G; ++k) sum += dz[row * s.K + k] * weight[k * s.G + g];
  store_or_accumulate<1>(dinp + row * s.C + g, Floats<1>{{sum}}, accumulate);
}

// A thread for each number of the weight, a block of the grid's y for a part of the tokens.
template <class S>
__global__ void channel_gate_weight_kernel(float* partial, const float* dz, const S* inp, ChannelGateSize s) {
  const int64_t i = first_of_thread<1>();
  if (i >= s.K * s.G) return;
  const int64_t k = i / s.G, g = i % s.G;
  float sum = 0;
  for (int64_t n = s.N * blockIdx.y / gridDim.y; n < s.N * (blockIdx.y + 1) / gridDim.y; ++n)
    sum += dz[n * s.K + k] * to_float(inp[n * s.C + g]);
  partial[blockIdx.y * s.K * s.G + i] = sum;
}

}  // namespace

void channel_gate_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, double factor,
                               const ChannelGateSize& z) {
  with_storage(inp.dtype, [&]<class S>(S) {
    launch_elementwise("channel_gate_forward", z.N * z.K, 1, channel_gate_forward_kernel<S>, out.as<float>(),
                       inp.as<S>(), weight.as<float>(), static_cast<float>(factor), z);
  });
}

void channel_gate_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& out,
                                const Tensor& inp, const Tensor& weight, double factor, const ChannelGateSize& z) {
  const int64_t parts = channel_gate_parts(z.N), size = z.K * z.G, columns = dinp.accumulate ? z.G : z.C;
  float *dz = scratch<float>(z.N * z.K), *partial = scratch<float>(parts * size, 1);
  launch_elementwise("channel_gate_logits", z.N * z.K, 1, channel_gate_logits_kernel, dz, dout.as<float>(),
                     out.as<float>(), static_cast<float>(factor));
  with_storage(inp.dtype, [&]<class S>(S) {
    launch_elementwise("channel_gate_input", z.N * columns, 1, channel_gate_input_kernel<S>, dinp.as<S>(), dz,
                       weight.as<float>(), z, columns, dinp.accumulate);
    const dim3 grid(blocks_of(size, elementwise_threads), static_cast<uint32_t>(parts));
    launch({"channel_gate_weight", grid, elementwise_threads}, channel_gate_weight_kernel<S>, partial, dz, inp.as<S>(),
           z);
  });
  add_rows(dweight.as<float>(), partial, parts, size);
}

}  // namespace crossply
