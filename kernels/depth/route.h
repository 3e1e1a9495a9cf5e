// LIMe's router over the key/value heads of all layers. A slab (L, N, K, D) holds in block l what the projections of
// layer l wrote: K heads of width D for each of N = B*T rows. Keys (already rotated) and values have a slab each and
// share the weights, so these ops run once for each. kernels/depth/route.md derives the backward.
//
// Layer l reads, through its Router:
//   out[n,h,:] = sum_{s in sources} sum_h' W_l[h, s*K + h'] * slab[s,n,h',:]
//
// Backward of layer l, in the gather form that route.md derives: the blocks of the layers above hold their dout by now.
// The weights of all layers that read block l get their gradients for it here, not those of layer l alone. Then the
// block takes its own dout.
//   for each layer r >= l that reads l, with dout_l = dout and dout_r = slab[r]:
//     dW_r[h, l*K + h'] += <dout_r[:,h,:], slab[l,:,h',:]>                         the other columns are left alone
//     dslice[n,h',:]    += sum_h W_r[h, l*K + h'] * dout_r[n,h,:]                  from 0
//   slab[l] = dout
//
// out, dout, dslice: any shape that ends in K, D, such as (N, K, D) or (B, T, K, D); slab: L in front, (L, N, K, D) or
// (L, N, K*D). On the CPU all of these are f32 or all bf16; weights and their gradients are f32. Blocks of layers that
// are not read are not touched at all. dslice may alias dout, nothing else aliases.
// W_l = [0 | I] copies block l exactly, and so does dslice, as long as the other blocks are finite (but -0 becomes 0).
#pragma once

#include <algorithm>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// How layer l reads.
struct Router {
  Tensor weight;             // W_l (K, (l+1)*K), columns layer-major, head-minor. Without data nothing is trained, and
                             // each head is its plain mean over the sources; so sources {l} is the identity.
  std::vector<int> sources;  // the layers read: ascending, not empty, each <= l
  Tensor dweight;            // like weight; without data its gradient is not wanted. Backward only.
};

void route_forward(const Tensor& out, const Tensor& slab, const Router& router, Stream stream);
// routers: those of all L layers. The sum over n goes through a fixed number of partial sums, so it does not depend on
// the thread count.
void route_backward(const Tensor& dslice, const Tensor& slab, const Tensor& dout, const std::vector<Router>& routers,
                    int layer, Stream stream);

// On a GPU the backward takes the sums of dW over some tokens each, (max_sums, readers, K, K).
inline int64_t max_sums(int64_t N, int64_t D) { return std::clamp<int64_t>(N * D / 1024, 1, 528); }

// kernels/depth/route.cu
CUDA_TWIN void route_forward_cuda(const Tensor& out, const Tensor& slab, const Router& router, int64_t N, int64_t K,
                                  int64_t D);
CUDA_TWIN void route_backward_cuda(const Tensor& dslice, const Tensor& slab, const Tensor& dout,
                                   const std::vector<Router>& routers, int layer, int64_t N, int64_t K, int64_t D);
// kernels/depth/route_plain.cu: the same by plain loops, to read first. Tests and bench call it.
CUDA_TWIN decltype(route_forward_cuda) route_forward_plain;
CUDA_TWIN decltype(route_backward_cuda) route_backward_plain;

// W[h, s*K + from] with columns = (l+1)*K, or the mean's weight of a head on itself.
template <class T>
T route_weight(const T* weight, const std::vector<int>& sources, int64_t columns, int64_t K, int64_t h, int64_t s,
               int64_t from) {
  return weight != nullptr ? weight[h * columns + s * K + from] : T(1) / T(static_cast<double>(sources.size()));
}

template <class T>
void route_forward_ref(T* out, const T* slab, const T* weight, const std::vector<int>& sources, int64_t columns,
                       int64_t N, int64_t K, int64_t D) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t h = 0; h < K; ++h) {
      T* y = out + (n * K + h) * D;
      std::fill(y, y + D, T(0));
      for (int s : sources) {
        for (int64_t from = 0; from < K; ++from) {
          if (weight == nullptr && from != h) continue;
          const T w = route_weight(weight, sources, columns, K, h, s, from);
          const T* x = slab + ((s * N + n) * K + from) * D;
          for (int64_t d = 0; d < D; ++d) y[d] += w * x[d];
        }
      }
    }
  }
}

template <class T>
void route_backward_ref(T* dslice, T* slab, const T* dout, const std::vector<Router>& routers, int layer, int64_t N,
                        int64_t K, int64_t D) {
  const int64_t block = N * K * D;
  const std::vector<T> own(slab + layer * block, slab + (layer + 1) * block);
  std::copy(dout, dout + block, slab + layer * block);
  std::fill(dslice, dslice + block, T(0));
  for (int64_t r = layer; r < static_cast<int64_t>(routers.size()); ++r) {
    const Router& reader = routers[static_cast<size_t>(r)];
    if (!std::binary_search(reader.sources.begin(), reader.sources.end(), layer)) continue;
    const T* weight = reader.weight.data == nullptr ? nullptr : reader.weight.as<T>();
    T* dweight = reader.dweight.data == nullptr ? nullptr : reader.dweight.as<T>();
    const T* dy = slab + r * block;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t h = 0; h < K; ++h)
        for (int64_t from = 0; from < K; ++from) {
          if (weight == nullptr && from != h) continue;
          const T w = route_weight(weight, reader.sources, (r + 1) * K, K, h, layer, from);
          for (int64_t d = 0; d < D; ++d) {
            dslice[(n * K + from) * D + d] += w * dy[(n * K + h) * D + d];
            if (dweight != nullptr)
              dweight[h * (r + 1) * K + layer * K + from] += dy[(n * K + h) * D + d] * own[(n * K + from) * D + d];
          }
        }
  }
}

}  // namespace crossply
