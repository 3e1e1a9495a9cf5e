// Not yet run on hardware: only in the emulator.
#include "kernels/depth/head_mix.h"

#include "kernels/block/matmul.cuh"

namespace crossply {
namespace {

// Mixtures, and the gradients of mixtures, of some tokens at a time are in scratch memory; between them are products,
// one for each head. A head's key and value are neighbours there, "stacked": so mixtures are read once for both, their
// gradients written once, and products are 2 D wide. The rest is bound by bytes: K rows of mixtures for the S rows of
// the sources, each written once and read once in the forward; in the backward twice, as their gradients.
constexpr int threads = 256;
constexpr int heads_at_once = 8;
enum Slot { mixture_slot, dm_slot, weight_slot, product_slot, stack_slot, partial_slot };  // as in head_mix_scratch

struct Flags {
  bool x[max_inputs];
};

// Tokens n0 to n0 + rows, whose part of everything with rows for tokens this is.
struct Chunk {
  int64_t n0, rows;
};

// The weights of eight heads from h0 on, to(S,8) in shared memory; 0 where there is no such head.
__device__ __forceinline__ void gather_weights(float* to, const float* weight /*(K,S)*/, int64_t h0,
                                               const HeadMixSize& z) {
  for (int64_t e = threadIdx.x; e < z.S * heads_at_once; e += blockDim.x) {
    const int64_t h = h0 + e % heads_at_once, s = e / heads_at_once;
    to[e] = h < z.K ? weight[h * z.S + s] : 0.f;
  }
}

// m (K, rows, C): a block takes eight heads of a token, a thread `width` columns of them, four sources at a time.
template <int width, class S>
__global__ void __launch_bounds__(threads, 2)
    mix_kernel(S* m, const Pointers<const S> u, const float* weight, HeadMixSize z, Chunk chunk) {
  constexpr int at_once = 4;
  float* factors = dynamic_shared<float>();  // (S,8)
  const int64_t n = blockIdx.x, h0 = int64_t{blockIdx.y} * heads_at_once, from = (chunk.n0 + n) * z.C;
  gather_weights(factors, weight + (z.shared ? 0 : chunk.n0 + n) * z.K * z.S, h0, z);
  __syncthreads();
  for (int64_t c = threadIdx.x * width; c < z.C; c += blockDim.x * width) {
    Array<Floats<width>, heads_at_once> sum = {};
#pragma unroll 1
    for (int s = 0; s < u.count; s += at_once) {
      Array<Packed<width, S>, at_once> raw;
#pragma unroll
      for (int k = 0; k < at_once; ++k) raw[k] = load_packed<width>(u.x[s + k < u.count ? s + k : s] + from + c);
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (s + k >= u.count) continue;
        const Floats<width> x = floats(raw[k]);
        const Floats<heads_at_once> factor = load<heads_at_once>(factors + (s + k) * heads_at_once);
#pragma unroll
        for (int h = 0; h < heads_at_once; ++h) {
#pragma unroll
          for (int i = 0; i < width; ++i) sum[h][i] += factor[h] * x[i];
        }
      }
    }
#pragma unroll
    for (int h = 0; h < heads_at_once; ++h)
      if (h0 + h < z.K) store<width>(m + ((h0 + h) * chunk.rows + n) * z.C + c, sum[h]);
  }
}

// Element i of (rows, K*D), a key's or, with `value`, a value's, in (rows, K, 2*D): both stacked.
__device__ __forceinline__ int64_t stacked(int64_t i, int64_t D, bool value) { return i + (i / D + value) * D; }

// Weights to project with: w (K*D, C) times the gain, into (K, 2*D, C).
template <class S>
__global__ void fold_kernel(S* to, const S* w, const float* gain, int64_t D, int64_t C, bool value, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i < n) from_float(to[stacked(i / C, D, value) * C + i % C], gain[i % C] * to_float(w[i]));
}

// both (rows, K, 2*D) from k and v (rows, K*D), or the other way. A thread copies `width` columns, a divisor of D.
template <int width, class S>
__global__ void stack_kernel(S* both, const S* k, const S* v, int64_t D, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  store<width>(both + stacked(i, D, false), load<width>(k + i));
  store<width>(both + stacked(i, D, true), load<width>(v + i));
}
template <int width, class S>
__global__ void unstack_kernel(S* k, S* v, const S* both, int64_t D, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  store<width>(k + i, load<width>(both + stacked(i, D, false)));
  store<width>(v + i, load<width>(both + stacked(i, D, true)));
}

template <int width>
using Heads = Array<Floats<width>, heads_at_once>;
// So many sources, that their products with the heads and what is on its way fit into registers beside the heads.
template <int width>
constexpr int sources_at_once = width == 8 ? 2 : 4;

// A thread's columns of du_s for some sources from s on: = or += sum over the heads g of factor * g; and its part of
// product(sources,8) = <g, u_s>. All that comes from far is asked for before any of it is used.
template <int width, class S>
__device__ __forceinline__ void source_gradients(float* product, const Heads<width>& g, const float* factors /*(S,8)*/,
                                                 const Pointers<S>& du, const Flags& accumulate_sources,
                                                 bool accumulate, const Pointers<const S>& u, int s, int64_t at) {
  constexpr int at_once = sources_at_once<width>;
  Array<Packed<width, S>, at_once> x, before = {};
#pragma unroll
  for (int k = 0; k < at_once; ++k) {
    const int source = s + k < u.count ? s + k : s;
    x[k] = load_packed<width>(u.x[source] + at);
    if (accumulate || accumulate_sources.x[source]) before[k] = load_packed<width>(du.x[source] + at);
  }
#pragma unroll
  for (int k = 0; k < at_once; ++k) {
    if (s + k >= u.count) continue;
    const Floats<width> y = floats(x[k]);
    const Floats<heads_at_once> factor = load<heads_at_once>(factors + (s + k) * heads_at_once);
    Floats<width> sum = floats(before[k]);
#pragma unroll
    for (int h = 0; h < heads_at_once; ++h) {
#pragma unroll
      for (int i = 0; i < width; ++i) {
        sum[i] += factor[h] * g[h][i];
        product[k * heads_at_once + h] += g[h][i] * y[i];
      }
    }
    store<width>(du.x[s + k] + at, sum);
  }
}

// du_s and dweight from dm (K, rows, C): a block takes tokens one after the other, a thread `width` columns of eight
// heads at a time, for all sources: so dm is read once. More than eight heads round du_s once more for each eight.
// partial (blocks, K, S), if one weight is shared by all tokens: then the warps' products are sums over tokens.
template <int width, class S>
__global__ void __launch_bounds__(threads, 2)
    unmix_kernel(const Pointers<S> du, const Flags accumulate_sources, float* dweight, float* partial, const S* dm,
                 const Pointers<const S> u, const float* weight, HeadMixSize z, Chunk chunk) {
  constexpr int at_once = sources_at_once<width>, values = at_once * heads_at_once;
  const int of_heads = static_cast<int>(z.S) * heads_at_once, lane = static_cast<int>(threadIdx.x) % warp_size;
  const int size = static_cast<int>((z.K + heads_at_once - 1) / heads_at_once) * of_heads;
  float* factors = dynamic_shared<float>();  // (K/8,S,8)
  float* products = factors + size;          // (warps,K/8,S,8)
  float* own = products + static_cast<int>(threadIdx.x) / warp_size * size;
  for (int e = lane; e < size; e += warp_size) own[e] = 0;
  for (int64_t n = blockIdx.x; n < chunk.rows; n += gridDim.x) {
    const int64_t row = z.shared ? 0 : chunk.n0 + n;
    for (int64_t h0 = 0; h0 < z.K; h0 += heads_at_once)
      gather_weights(factors + h0 / heads_at_once * of_heads, weight + row * z.K * z.S, h0, z);
    __syncthreads();
    for (int64_t begin = 0; begin < z.C; begin += blockDim.x * width) {
      const int64_t c = begin + threadIdx.x * width, at = (chunk.n0 + n) * z.C + c;
      const bool there = c < z.C;
      for (int64_t h0 = 0; h0 < z.K; h0 += heads_at_once) {
        const int first = static_cast<int>(h0) / heads_at_once * of_heads;
        Heads<width> g = {};
#pragma unroll
        for (int h = 0; h < heads_at_once; ++h)
          if (there && h0 + h < z.K) g[h] = load<width>(dm + ((h0 + h) * chunk.rows + n) * z.C + c);
#pragma unroll 1
        for (int s = 0; s < u.count; s += at_once) {
          float product[values] = {};
          if (there) source_gradients<width>(product, g, factors + first, du, accumulate_sources, h0 > 0, u, s, at);
          const float sum = warp_sums<values>(product);
          const int e = s * heads_at_once + lane;
          if (lane < values && e < of_heads) own[first + e] += sum;
        }
      }
    }
    __syncthreads();
    if (z.shared && n + gridDim.x < chunk.rows) continue;
    float* dw = z.shared ? partial + blockIdx.x * z.K * z.S : dweight + row * z.K * z.S;
    for (int e = static_cast<int>(threadIdx.x); e < z.K * z.S; e += static_cast<int>(blockDim.x)) {
      const int h = e / static_cast<int>(z.S), s = e % static_cast<int>(z.S);
      const int from = h / heads_at_once * of_heads + s * heads_at_once + h % heads_at_once;
      float sum = 0;
      for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp) {
        sum += products[static_cast<int>(warp) * size + from];
        products[static_cast<int>(warp) * size + from] = 0;
      }
      dw[e] = sum;
    }
  }
}

// From g (K, 2*D, C), the products of dk and dv with the mixtures: dwk, dwv += g * gain, and dgain (blocks of rows, C),
// sums over some rows of g * w. A block as sum_of_groups needs it.
constexpr int64_t rows_of_finish = 64;
template <class S>
__global__ void finish_kernel(float* dgain, float* dwk, float* dwv, const float* g, const float* gain, const S* wk,
                              const S* wv, HeadMixSize z) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x, rows = 2 * z.K * z.D;
  const int64_t first = blockIdx.y * rows_of_finish, end = first + rows_of_finish;
  float sum = 0;
  for (int64_t r = first + threadIdx.y; r < (end < rows ? end : rows) && c < z.C; r += groups_of_rows) {
    const int64_t h = r / (2 * z.D), d = r % (2 * z.D);
    const bool value = d >= z.D;
    const int64_t at = (h * z.D + (value ? d - z.D : d)) * z.C + c;
    const float x = g[r * z.C + c], w = to_float((value ? wv : wk)[at]);
    (value ? dwv : dwk)[at] += x * gain[c];
    sum += x * w;
  }
  sum = sum_of_groups(sum);
  if (threadIdx.y == 0 && c < z.C) dgain[blockIdx.y * z.C + c] = sum;
}

// -----------------------------------------------------------------------------------------------------------------

template <class S>
S* take(Slot slot, const HeadMixSize& z) {
  return static_cast<S*>(scratch_bytes(head_mix_scratch(z, DtypeOf<S>::value)[slot], slot));
}

// Calls body(chunk) for some tokens after the other.
template <class F>
void for_chunks(const HeadMixSize& z, F&& body) {
  const int64_t rows = tokens_of_chunk(z);
  for (int64_t n0 = 0; n0 < z.N; n0 += rows) body(Chunk{n0, std::min(rows, z.N - n0)});
}

// Each head's part of (K, rows, C): mixtures, or weights, whose rows are 2*D.
template <class S>
Matrix heads_of(S* data, int64_t rows, const HeadMixSize& z) {
  return {data, DtypeOf<S>::value, z.C, false, rows * z.C};
}
// Each head's part of (rows, K, 2*D), keys and values of a chunk or their gradients.
template <class S>
Matrix stacked_heads(S* data, const HeadMixSize& z) {
  return {data, DtypeOf<S>::value, 2 * z.K * z.D, false, 2 * z.D};
}
// Calls body(width, n) for the n numbers of a chunk's keys.
template <class S, class F>
void with_stack(const Tensor& k, const Tensor& v, const HeadMixSize& z, const Chunk& chunk, F&& body) {
  with_width<S>(z.D, {k.data, v.data}, [&](auto width) { body(width, chunk.rows * z.K * z.D); });
}

template <class S>
Matrix fold(const HeadMix<Tensor>& of, const HeadMixSize& z) {
  S* to = take<S>(weight_slot, z);
  for (const bool value : {false, true})
    launch_elementwise("head_mix_fold", z.K * z.D * z.C, 1, fold_kernel<S>, to, (value ? of.wv : of.wk).as<S>(),
                       of.gain.as<float>(), z.D, z.C, value);
  return heads_of(to, 2 * z.D, z);
}

template <class S>
void mix(S* m, const HeadMix<Tensor>& of, const HeadMixSize& z, const Chunk& chunk) {
  with_width<S>(z.C, of.sources, [&](auto width) {
    const dim3 grid(static_cast<uint32_t>(chunk.rows), blocks_of(z.K, heads_at_once));
    const size_t shared = static_cast<size_t>(z.S * heads_at_once) * sizeof(float);
    launch({"head_mix", grid, threads_of_row(z.C, width, threads), shared}, mix_kernel<width, S>, m,
           pointers_to<const S>("head_mix", of.sources), of.weight.as<float>(), z, chunk);
  });
}

template <class S>
void unmix(const HeadMix<Grad, Tensor>& d, const S* dm, const HeadMix<Tensor>& of, const HeadMixSize& z,
           const Chunk& chunk) {
  Flags accumulate{};
  for (size_t s = 0; s < d.sources.size(); ++s) accumulate.x[s] = d.sources[s].accumulate;
  with_width<S>(aligned16(of.sources) ? z.C : 1, d.sources, [&](auto width) {
    const uint32_t block = threads_of_row(z.C, width, threads);
    const int64_t blocks = std::min<int64_t>(chunk.rows, 264 * threads / block);  // as run at once on an H200
    float* partial = z.shared ? scratch<float>(blocks * z.K * z.S, partial_slot) : nullptr;
    const size_t floats = (1 + block / warp_size) * blocks_of(z.K, heads_at_once) * heads_at_once * z.S;
    CHECK_THAT(floats * sizeof(float) <= static_cast<size_t>(max_shared_bytes()), "head_mix_backward: ", z.K,
               " mixtures of ", z.S, " sources are too many for a GPU");
    launch({"head_mix_unmix", static_cast<uint32_t>(blocks), block, floats * sizeof(float)}, unmix_kernel<width, S>,
           pointers_to<S>("head_mix_unmix", d.sources), accumulate, d.weight.as<float>(), partial, dm,
           pointers_to<const S>("head_mix", of.sources), of.weight.as<float>(), z, chunk);
    if (z.shared) add_rows(d.weight.as<float>(), partial, blocks, z.K * z.S);
  });
}

}  // namespace

void head_mix_forward_cuda(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m, const HeadMixSize& z) {
  check_inputs("head_mix_forward", m.sources.size());
  with_storage(k.dtype, [&]<class S>(S) {
    S *mixtures = take<S>(mixture_slot, z), *both = take<S>(stack_slot, z);
    const Matrix w = fold<S>(m, z);
    for_chunks(z, [&](const Chunk& chunk) {
      const ProductSize size{chunk.rows, 2 * z.D, z.C, z.K};
      mix(mixtures, m, z, chunk);
      multiply(stacked_heads(both, z), heads_of(mixtures, chunk.rows, z), transposed(w), size, nullptr);
      with_stack<S>(k, v, z, chunk, [&](auto width, int64_t n) {
        const int64_t at = chunk.n0 * z.K * z.D;
        launch_elementwise("head_mix_unstack", n, width, unstack_kernel<width, S>, k.as<S>() + at, v.as<S>() + at, both,
                           z.D);
      });
    });
  });
}

void head_mix_backward_cuda(const HeadMix<Grad, Tensor>& d, const Tensor& dk, const Tensor& dv,
                            const HeadMix<Tensor>& m, const HeadMixSize& z) {
  check_inputs("head_mix_backward", m.sources.size());
  float* g = take<float>(product_slot, z);
  if (z.shared) fill_device_memory(d.weight.data, 0, d.weight.bytes());
  with_storage(dk.dtype, [&]<class S>(S) {
    S *mixtures = take<S>(mixture_slot, z), *dm = take<S>(dm_slot, z), *both = take<S>(stack_slot, z);
    const Matrix w = fold<S>(m, z), dheads = stacked_heads(both, z);
    for_chunks(z, [&](const Chunk& chunk) {
      const ProductSize of_weight{2 * z.D, z.C, chunk.rows, z.K}, of_mixture{chunk.rows, z.C, 2 * z.D, z.K};
      with_stack<S>(dk, dv, z, chunk, [&](auto width, int64_t n) {
        const int64_t at = chunk.n0 * z.K * z.D;
        launch_elementwise("head_mix_stack", n, width, stack_kernel<width, S>, both, dk.as<S>() + at, dv.as<S>() + at,
                           z.D);
      });
      mix(mixtures, m, z, chunk);
      multiply(heads_of(g, 2 * z.D, z), transposed(dheads), heads_of(mixtures, chunk.rows, z), of_weight,
               chunk.n0 > 0 ? g : nullptr);
      multiply(heads_of(dm, chunk.rows, z), dheads, w, of_mixture, nullptr);
      unmix<S>(d, dm, m, z, chunk);
    });
    const dim3 grid(blocks_of(z.C, warp_size), blocks_of(2 * z.K * z.D, rows_of_finish));
    float* partial = scratch<float>(grid.y * z.C, partial_slot);
    launch({"head_mix_finish", grid, dim3(warp_size, groups_of_rows)}, finish_kernel<S>, partial, d.wk.as<float>(),
           d.wv.as<float>(), g, m.gain.as<float>(), m.wk.as<S>(), m.wv.as<S>(), z);
    add_rows(d.gain.as<float>(), partial, grid.y, z.C);
  });
}

}  // namespace crossply
