#include "kernels/route.h"

#include "kernels/cuda.cuh"

namespace crossply {
namespace {

// Both directions are a sum over layers of small products: out[n,o,:] = sum_t sum_i W_t[o,i] * block_t[n,i,:]. The
// backward takes the transposed W, and the correlations of blocks for the gradients of W besides.
//
// Heads are taken `heads` at a time, for which registers hold sums; the weights of heads beyond K are zero, and nothing
// is written for them. Bytes bound this as long as there are few heads: with K of them an element of a block costs K
// multiply-adds (and as many again in the correlation).
constexpr int most_layers = 256, threads = 128;
constexpr int64_t shared_limit = 48 * 1024;

struct Terms {
  const float* weight[most_layers];  // W_t[0,0], or null: scale times the identity
  float scale[most_layers];
  int16_t layer[most_layers];  // of the slab
  int count;
};

// A thread's columns: `width` of token n from p * width on, for heads [first, first + heads).
struct Place {
  int64_t n, at;  // at: of the token's first head
  int first;
};
template <int heads, int width>
__device__ Place place_of(uint32_t item, int64_t K, int64_t D) {
  const auto vectors = static_cast<uint32_t>(D / width), groups = static_cast<uint32_t>((K + heads - 1) / heads);
  const uint32_t token = item / (vectors * groups), rest = item % (vectors * groups);
  return {token, token * K * D + rest % vectors * width, static_cast<int>(rest / vectors * heads)};
}

template <int count, int heads, int width, class S>
__device__ __forceinline__ void add_inputs(Floats<width> (&sum)[heads], const S* x, int64_t D, const float* coef,
                                           int64_t stride) {
  Floats<width> in[count];
#pragma unroll
  for (int j = 0; j < count; ++j) in[j] = load<width>(x + j * D);
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const Floats<heads> w = load<heads>(coef + j * stride);
#pragma unroll
    for (int h = 0; h < heads; ++h)
#pragma unroll
      for (int i = 0; i < width; ++i) sum[h][i] += w[h] * in[j][i];
  }
}

// columns: of W, whose element [o,i] is at o * columns + i; or 0: W is the transpose of a layer's matrix with
// (layer + 1) * K columns. Some terms' weights at a time are in shared memory, [t][i][o]. Four inputs are loaded before
// the first is used.
template <int heads, int width, class S>
__global__ void __launch_bounds__(threads, 4)
    mix_kernel(S* out, const S* slab, const Terms terms, int terms_at_once, int64_t columns, int64_t N, int64_t K,
               int64_t D) {
  float* coef = dynamic_shared<float>();
  const int64_t stride = (K + heads - 1) / heads * heads;  // (K, stride) a term
  const Place place = place_of<heads, width>(blockIdx.x * threads + threadIdx.x, K, D);
  Floats<width> sum[heads];
#pragma unroll
  for (int h = 0; h < heads; ++h)
#pragma unroll
    for (int i = 0; i < width; ++i) sum[h][i] = 0;
  for (int first = 0; first < terms.count; first += terms_at_once) {
    const int last = first + terms_at_once < terms.count ? first + terms_at_once : terms.count;
    if (first > 0) __syncthreads();
    for (int t = first; t < last; ++t) {
      const float* w = terms.weight[t];
      if (w == nullptr) continue;
      const int64_t row = columns > 0 ? 1 : (terms.layer[t] + 1) * K;  // from an input to the next
      const int64_t column = columns > 0 ? columns : 1;
      for (auto e = static_cast<uint32_t>(threadIdx.x); e < K * stride; e += threads) {
        const uint32_t i = e / static_cast<uint32_t>(stride), o = e % static_cast<uint32_t>(stride);
        coef[(t - first) * K * stride + e] = o < K ? w[i * row + o * column] : 0.f;
      }
    }
    __syncthreads();
    if (place.n >= N) continue;
    for (int t = first; t < last; ++t) {
      const S* x = slab + terms.layer[t] * N * K * D + place.at;
      if (terms.weight[t] == nullptr) {
#pragma unroll
        for (int h = 0; h < heads; ++h) {
          if (place.first + h >= K) break;
          const Floats<width> in = load<width>(x + (place.first + h) * D);
#pragma unroll
          for (int i = 0; i < width; ++i) sum[h][i] += terms.scale[t] * in[i];
        }
        continue;
      }
      const float* w = coef + (t - first) * K * stride + place.first;
      int64_t i = 0;
      for (; i + 4 <= K; i += 4) add_inputs<4, heads, width>(sum, x + i * D, D, w + i * stride, stride);
      for (; i < K; ++i) add_inputs<1, heads, width>(sum, x + i * D, D, w + i * stride, stride);
    }
  }
  if (place.n >= N) return;
#pragma unroll
  for (int h = 0; h < heads; ++h)
    if (place.first + h < K) store<width>(out + place.at + (place.first + h) * D, sum[h]);
}

// The readers that want a gradient of their weights.
struct Readers {
  float* dweight[most_layers];  // W's element [0, layer * K]
  int16_t layer[most_layers];
  int count;
};

// The sums of n values over a warp's lanes, n a power of two: half of the values go at each step, until lane i holds
// those from i * n / 32 on; if there are fewer values than lanes, neighbours hold the same one.
template <int n, int lanes = warp_size / 2>
__device__ __forceinline__ void sum_and_scatter(float* x) {
  constexpr int left = n > 1 ? n / 2 : 1;
  const bool upper = n > 1 && threadIdx.x & lanes;
#pragma unroll
  for (int i = 0; i < left; ++i) {
    const float mine = upper ? x[i + left] : x[i], other = n > 1 && !upper ? x[i + left] : x[i];
    x[i] = mine + __shfl_xor_sync(~0u, other, lanes);
  }
  if constexpr (lanes > 1) sum_and_scatter<left, lanes / 2>(x);
}

// partial[chunk, reader, h, i] = sum over the chunk's tokens and columns of dout_r[n,h,:] * own[n,i,:], for a square of
// heads x heads of them: block (reader and square, chunk). own comes from the L2 cache for all readers but one.
template <int heads, int width, class S>
__global__ void __launch_bounds__(threads, 3)
    correlate_kernel(float* partial, const S* slab, const S* dout, const Readers readers, int layer, int64_t N,
                     int64_t K, int64_t D) {
  SHARED(sums, Array<Array<float, heads * heads>, threads / warp_size>);
  const auto groups = static_cast<int>((K + heads - 1) / heads);
  const int reader = static_cast<int>(blockIdx.x) % readers.count;
  const int square = static_cast<int>(blockIdx.x) / readers.count;
  const int first_h = square / groups * heads, first_i = square % groups * heads;
  const int64_t block = N * K * D;
  const S* own = slab + layer * block;
  const S* dy = readers.layer[reader] == layer ? dout : slab + readers.layer[reader] * block;
  const auto vectors = static_cast<uint32_t>(D / width);
  const int64_t items = N * vectors;
  float sum[heads * heads];
#pragma unroll
  for (int i = 0; i < heads * heads; ++i) sum[i] = 0;
  for (int64_t item = items * blockIdx.y / gridDim.y + threadIdx.x; item < items * (blockIdx.y + 1) / gridDim.y;
       item += threads) {
    const auto n = static_cast<uint32_t>(item) / vectors;
    const int64_t at = n * K * D + static_cast<uint32_t>(item) % vectors * width;
    Floats<width> x[heads];
#pragma unroll
    for (int i = 0; i < heads; ++i) {
      if (first_i + i < K) x[i] = load<width>(own + at + (first_i + i) * D);
      else x[i] = Floats<width>{};
    }
#pragma unroll
    for (int h = 0; h < heads; ++h) {
      if (first_h + h >= K) break;
      const Floats<width> y = load<width>(dy + at + (first_h + h) * D);
#pragma unroll
      for (int i = 0; i < heads; ++i)
#pragma unroll
        for (int c = 0; c < width; ++c) sum[h * heads + i] += y[c] * x[i][c];
    }
  }
  sum_and_scatter<heads * heads>(sum);
  constexpr int each = heads * heads / warp_size;  // results a lane, or none: then pairs of lanes hold one
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
#pragma unroll
  for (int i = 0; i < (each > 0 ? each : 1); ++i)
    sums[warp][lane * heads * heads / warp_size + i] = sum[i];
  __syncthreads();
  const int e = threadIdx.x, h = first_h + e / heads, i = first_i + e % heads;
  if (e >= heads * heads || h >= K || i >= K) return;
  float total = 0;
  for (int w = 0; w < threads / warp_size; ++w) total += sums[w][e];
  partial[((static_cast<int64_t>(blockIdx.y) * readers.count + reader) * K + h) * K + i] = total;
}

// dweight of all readers += the chunks' sums: a thread for each and one of eight interleaved groups of chunks.
constexpr int chunk_groups = 8;
__global__ void add_chunks_kernel(const Readers readers, const float* partial, int64_t chunks, int64_t K) {
  SHARED(sums, Array<Array<float, warp_size>, chunk_groups>);
  const int64_t size = readers.count * K * K, e = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  float sum = 0;
  if (e < size)
    for (int64_t c = threadIdx.y; c < chunks; c += chunk_groups) sum += partial[c * size + e];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || e >= size) return;
  for (int group = 1; group < chunk_groups; ++group) sum += sums[group][threadIdx.x];
  const int64_t reader = e / (K * K), h = e / K % K, i = e % K;
  readers.dweight[reader][h * (readers.layer[reader] + 1) * K + i] += sum;
}

// -----------------------------------------------------------------------------------------------------------------

void add_term(Terms& terms, const Router& router, int64_t layer, int64_t source, int64_t K) {
  const bool trained = router.weight.data != nullptr;
  terms.weight[terms.count] = trained ? router.weight.as<float>() + source * K : nullptr;
  terms.scale[terms.count] = 1.f / static_cast<float>(router.sources.size());
  terms.layer[terms.count++] = static_cast<int16_t>(layer);
}

// Calls body(heads, width), constants.
template <class S, class F>
void with_heads(int64_t K, int64_t D, std::initializer_list<const void*> tensors, F&& body) {
  with_width<S>(D, tensors, [&](auto width) {
    if (K <= 4) body(std::integral_constant<int, 4>{}, width);
    else body(std::integral_constant<int, 8>{}, width);
  });
}

template <class S>
void mix(S* out, const S* slab, const Terms& terms, int64_t columns, int64_t N, int64_t K, int64_t D) {
  with_heads<S>(K, D, {out, slab}, [&](auto heads, auto width) {
    const int64_t groups = blocks_of(K, heads), items = N * groups * (D / width);
    const int64_t term_bytes = K * groups * heads * static_cast<int64_t>(sizeof(float));
    CHECK_THAT(items < int64_t{1} << 31 && term_bytes < 200 * 1024, "route: ", N, " tokens of ", K,
               " heads are too many for a GPU");
    const int64_t at_once = std::clamp<int64_t>(shared_limit / term_bytes, 1, terms.count);
    launch({"route_mix", blocks_of(items, threads), threads, static_cast<size_t>(at_once * term_bytes)},
           mix_kernel<heads, width, S>, out, slab, terms, static_cast<int>(at_once), columns, N, K, D);
  });
}

template <class S>
void correlate(const Readers& readers, const S* slab, const S* dout, int layer, int64_t N, int64_t K, int64_t D) {
  with_heads<S>(K, D, {slab, dout}, [&](auto heads, auto width) {
    const int64_t items = N * (D / width), chunks = std::clamp<int64_t>(items / (8 * threads), 1, 512);
    const int64_t groups = blocks_of(K, heads);
    CHECK_THAT(items < int64_t{1} << 31, "route_backward: ", N, " tokens are too many for a GPU");
    float* partial = scratch<float>(chunks * readers.count * K * K);
    const dim3 grid(static_cast<uint32_t>(readers.count * groups * groups), static_cast<uint32_t>(chunks));
    launch({"route_correlate", grid, threads}, correlate_kernel<heads, width, S>, partial, slab, dout, readers, layer,
           N, K, D);
    launch({"route_add_chunks", blocks_of(readers.count * K * K, warp_size), dim3(warp_size, chunk_groups)},
           add_chunks_kernel, readers, partial, chunks, K);
  });
}

}  // namespace

void route_forward_cuda(const Tensor& out, const Tensor& slab, const Router& router, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(router.sources.size() <= most_layers, "route_forward: more than ", most_layers, " sources on a GPU");
  Terms terms;
  terms.count = 0;
  for (int s : router.sources) add_term(terms, router, s, s, K);
  with_storage(out.dtype, [&](auto storage) {
    using S = decltype(storage);
    mix(out.as<S>(), slab.as<S>(), terms, router.weight.dim(1), N, K, D);
  });
}

// The block's own layer becomes dout between its last use and the mix, so that dslice may be dout.
void route_backward_cuda(const Tensor& dslice, const Tensor& slab, const Tensor& dout,
                         const std::vector<Router>& routers, int layer, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(routers.size() <= most_layers, "route_backward: more than ", most_layers, " layers on a GPU");
  Terms terms;
  Readers readers;
  terms.count = readers.count = 0;
  for (size_t r = static_cast<size_t>(layer); r < routers.size(); ++r) {
    const Router& router = routers[r];
    if (!std::binary_search(router.sources.begin(), router.sources.end(), layer)) continue;
    add_term(terms, router, static_cast<int64_t>(r), layer, K);
    if (router.dweight.data == nullptr) continue;
    readers.dweight[readers.count] = router.dweight.as<float>() + layer * K;
    readers.layer[readers.count++] = static_cast<int16_t>(r);
  }
  with_storage(dslice.dtype, [&](auto storage) {
    using S = decltype(storage);
    S* own = slab.as<S>() + layer * dout.numel();
    if (readers.count > 0) correlate(readers, slab.as<S>(), dout.as<S>(), layer, N, K, D);
    copy_on_device(own, dout.as<S>(), dout.bytes());
    mix(dslice.as<S>(), slab.as<S>(), terms, 0, N, K, D);
  });
}

}  // namespace crossply
