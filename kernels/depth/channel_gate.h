// A gate for each key/value head of a token, read off the first channels of what the layer reads (nanochat's gates of
// value embeddings). N tokens of C channels, of which the first G count:
//
//   out[n,k]      = factor * sigmoid(z),  z = sum_{g<G} weight[k,g] * inp[n,g]
//   dz            = dout * out * (1 - out / factor)
//   dinp[n,g]     = sum_k dz[n,k] * weight[k,g] for g < G, else 0       set, or added
//   dweight[k,g] += sum_n dz[n,k] * inp[n,g]                            always added
//
// inp, dinp: (..., C); out, dout: (..., K); weight, dweight: (K, G), G <= C; factor > 0, a constant. inp and dinp are
// f32 or bf16, the rest is f32. Nothing is saved but out. Nothing aliases. The sums over tokens go through a fixed
// number of partial sums, so they do not depend on the thread count.
#pragma once

#include <algorithm>
#include <cmath>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

void channel_gate_forward(const Tensor& out, const Tensor& inp, const Tensor& weight, double factor, Stream stream);
void channel_gate_backward(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& out,
                           const Tensor& inp, const Tensor& weight, double factor, Stream stream);

struct ChannelGateSize {
  int64_t N, C, K, G;
};

// kernels/depth/channel_gate.cu. In bytes by slot: dz, and of parts of the tokens their sums for dweight.
inline int64_t channel_gate_parts(int64_t N) { return std::clamp<int64_t>(N / 64, 1, 64); }
inline ScratchBytes channel_gate_scratch(const ChannelGateSize& z) {
  return {static_cast<size_t>(z.N * z.K) * sizeof(float),
          static_cast<size_t>(channel_gate_parts(z.N) * z.K * z.G) * sizeof(float)};
}
CUDA_TWIN void channel_gate_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, double factor,
                                         const ChannelGateSize& z);
CUDA_TWIN void channel_gate_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dout,
                                          const Tensor& out, const Tensor& inp, const Tensor& weight, double factor,
                                          const ChannelGateSize& z);

template <class T>
void channel_gate_forward_ref(T* out, const T* inp, const T* weight, double factor, const ChannelGateSize& s) {
  using std::exp;
  for (int64_t n = 0; n < s.N; ++n)
    for (int64_t k = 0; k < s.K; ++k) {
      T z = 0;
      for (int64_t g = 0; g < s.G; ++g) z += weight[k * s.G + g] * inp[n * s.C + g];
      out[n * s.K + k] = T(factor) / (T(1) + exp(-z));
    }
}

template <class T>
void channel_gate_backward_ref(T* dinp, T* dweight, const T* dout, const T* out, const T* inp, const T* weight,
                               double factor, const ChannelGateSize& s, bool accumulate) {
  for (int64_t n = 0; n < s.N; ++n) {
    if (!accumulate) std::fill_n(dinp + n * s.C, s.C, T(0));
    for (int64_t k = 0; k < s.K; ++k) {
      const T y = out[n * s.K + k], dz = dout[n * s.K + k] * y * (T(1) - y / T(factor));
      for (int64_t g = 0; g < s.G; ++g) {
        dinp[n * s.C + g] += dz * weight[k * s.G + g];
        dweight[k * s.G + g] += dz * inp[n * s.C + g];
      }
    }
  }
}

}  // namespace crossply
