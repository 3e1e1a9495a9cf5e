// LIMe's router in plain CUDA: the loops of route.h, the outer ones spread over threads. Read it before route.cu; the
// backward's order is that of route.md. Tests hold both to the same reference, and `bench gpu --only plain` times one
// against the other. Training never calls this file.
// Not yet run on hardware: only in the emulator.
#include "kernels/cuda/cuda.cuh"
#include "kernels/depth/route.h"

namespace crossply {
namespace {

constexpr int threads = 256, max_layers = 256;

// For kernels to take by value.
struct SourceLayers {
  int layer[max_layers];
  int count;
};
struct RouteReaderTable {
  const float* weight[max_layers];  // W_r[0, l K], or null: the mean
  float mean[max_layers];           // its weight
  int layer[max_layers];            // r
  int count;
};

// A thread has an element of out. The K threads of a token's heads at column d all read the same K elements of each
// source, and every one of their weights from memory.
template <class S>
__global__ void route_forward_kernel(S* out, const S* slab, const float* weight, SourceLayers sources, int64_t columns,
                                     int64_t N, int64_t K, int64_t D) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i % D, h = i / D % K, n = i / D / K;
  if (n >= N) return;
  float sum = 0;
  for (int s = 0; s < sources.count; ++s) {
    const S* x = slab + (sources.layer[s] * N + n) * K * D + d;
    for (int64_t from = 0; from < K; ++from) {
      if (weight == nullptr && from != h) continue;
      const float w =
          weight == nullptr ? 1 / static_cast<float>(sources.count) : weight[h * columns + sources.layer[s] * K + from];
      sum += w * to_float(x[from * D]);
    }
  }
  from_float(out[i], sum);
}

// One reader, with the gradient dy: a thread has an element of dW_r, K K in all, and adds up N D products for it, one
// after the other. So long a sum needs double to keep its digits. dweight: dW_r[0, l K].
template <class S>
__global__ void route_dweight_kernel(float* dweight, const S* own, const S* dy, int64_t columns, int64_t N, int64_t K,
                                     int64_t D) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, h = i / K, from = i % K;
  if (h >= K) return;
  double sum = 0;
  for (int64_t n = 0; n < N; ++n)
    for (int64_t d = 0; d < D; ++d) sum += to_float(dy[(n * K + h) * D + d]) * to_float(own[(n * K + from) * D + d]);
  dweight[h * columns + from] += static_cast<float>(sum);
}

// A thread has an element of dslice, and gathers it from all readers.
template <class S>
__global__ void route_dslice_kernel(S* dslice, const S* slab, RouteReaderTable readers, int64_t N, int64_t K,
                                    int64_t D) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i % D, from = i / D % K, n = i / D / K;
  if (n >= N) return;
  float sum = 0;
  for (int r = 0; r < readers.count; ++r) {
    const S* dy = slab + (readers.layer[r] * N + n) * K * D + d;
    const float* weight = readers.weight[r];
    for (int64_t h = 0; h < K; ++h) {
      if (weight == nullptr && from != h) continue;
      const float w = weight == nullptr ? readers.mean[r] : weight[h * (readers.layer[r] + 1) * K + from];
      sum += w * to_float(dy[h * D]);
    }
  }
  from_float(dslice[i], sum);
}

}  // namespace

void route_forward_plain(const Tensor& out, const Tensor& slab, const Router& router, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(router.sources.size() <= max_layers, "route_forward_plain: more than ", max_layers, " sources");
  SourceLayers sources;
  sources.count = 0;
  for (const int s : router.sources) sources.layer[sources.count++] = s;
  with_storage(out.dtype, [&]<class S>(S) {
    launch({"route_forward_plain", blocks_of(N * K * D, threads), threads}, route_forward_kernel<S>, out.as<S>(),
           slab.as<S>(), data_or_null<float>(router.weight), sources, router.weight.dim(1), N, K, D);
  });
}

void route_backward_plain(const Tensor& dslice, const Tensor& slab, const Tensor& dout,
                          const std::vector<Router>& routers, int layer, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(routers.size() <= max_layers, "route_backward_plain: more than ", max_layers, " layers");
  with_storage(dslice.dtype, [&]<class S>(S) {
    S* own = slab.as<S>() + layer * N * K * D;
    RouteReaderTable readers;
    readers.count = 0;
    for (int r = layer; r < static_cast<int>(routers.size()); ++r) {
      const Router& reader = routers[static_cast<size_t>(r)];
      if (!std::binary_search(reader.sources.begin(), reader.sources.end(), layer)) continue;
      const bool trained = reader.weight.data != nullptr;
      readers.weight[readers.count] = trained ? reader.weight.as<float>() + layer * K : nullptr;
      readers.mean[readers.count] = 1 / static_cast<float>(reader.sources.size());
      readers.layer[readers.count++] = r;
      if (reader.dweight.data == nullptr) continue;
      const S* dy = r == layer ? dout.as<S>() : slab.as<S>() + r * N * K * D;
      launch({"route_dweight_plain", blocks_of(K * K, threads), threads}, route_dweight_kernel<S>,
             reader.dweight.as<float>() + layer * K, own, dy, (r + 1) * K, N, K, D);
    }
    copy_on_device(own, dout.data, dout.bytes());  // own was read for the last time; dslice may be dout
    launch({"route_dslice_plain", blocks_of(N * K * D, threads), threads}, route_dslice_kernel<S>, dslice.as<S>(),
           slab.as<S>(), readers, N, K, D);
  });
}

}  // namespace crossply
