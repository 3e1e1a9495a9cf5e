#include "kernels/head_mix.h"

#include "kernels/cuda.cuh"

namespace crossply {
namespace {

// Mixtures, and the gradients of mixtures, of some tokens at a time are in scratch memory in f32; between them are
// products, plain ones of tiles in shared memory, which bound all of this. The kernels before and after the products
// are bound by bytes: K rows of floats for the S rows of the sources.
constexpr int most_sources = 256, threads = 256, warps = threads / warp_size;
constexpr int heads_at_once = 8;

template <class S>
struct Sources {
  S* x[most_sources];
  int count;
};

struct Flags {
  bool x[most_sources];
};

// Tokens n0 to n0 + rows, whose part of everything with rows for tokens this is.
struct Chunk {
  int64_t n0, rows;
};

// m (K, rows, C): eight heads of `width` columns of a token to a thread; a block row for every eight heads.
template <int width, class S>
__global__ void __launch_bounds__(threads, 2)
    mix_kernel(float* m, const Sources<const S> u, const float* weight, HeadMixSize z, Chunk chunk) {
  const int64_t vectors = z.C / width, item = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  const int64_t n = item / vectors, c = item % vectors * width, h0 = int64_t{blockIdx.y} * heads_at_once;
  if (n >= chunk.rows) return;
  const float* w = weight + ((z.shared ? 0 : chunk.n0 + n) * z.K + h0) * z.S;
  Floats<width> sum[heads_at_once];
#pragma unroll
  for (int h = 0; h < heads_at_once; ++h) sum[h] = Floats<width>{};
#pragma unroll 1
  for (int s = 0; s < u.count; ++s) {
    const Floats<width> x = load<width>(u.x[s] + (chunk.n0 + n) * z.C + c);
#pragma unroll
    for (int h = 0; h < heads_at_once; ++h) {
      if (h0 + h >= z.K) break;
      const float factor = w[h * z.S + s];
#pragma unroll
      for (int i = 0; i < width; ++i) sum[h][i] += factor * x[i];
    }
  }
#pragma unroll
  for (int h = 0; h < heads_at_once; ++h)
    if (h0 + h < z.K) store<width>(m + ((h0 + h) * chunk.rows + n) * z.C + c, sum[h]);
}

// -----------------------------------------------------------------------------------------------------------------
// Products of each head's matrices, out[i,j] = sum_k a[i,k] * b[k,j], whose elements come from one of these. A head's
// keys and values are one matrix with 2D columns, and their weights one with 2D rows.

struct Floats2d {  // (heads, rows, columns)
  float* data;
  int64_t rows, columns;
  bool add;
  __device__ float at(int64_t h, int64_t r, int64_t c) const { return data[(h * rows + r) * columns + c]; }
  __device__ void put(int64_t h, int64_t r, int64_t c, float x) const {
    float& to = data[(h * rows + r) * columns + c];
    to = add ? to + x : x;
  }
};

template <class S>
struct Heads {  // (heads, tokens, 2D)
  S *k, *v;     // of the chunk's first token
  int64_t K, D;
  __device__ S& element(int64_t h, int64_t n, int64_t d) const {
    const int64_t head = (n * K + h) * D;
    return d < D ? k[head + d] : v[head + d - D];
  }
  __device__ float at(int64_t h, int64_t n, int64_t d) const { return to_float(element(h, n, d)); }
  __device__ void put(int64_t h, int64_t n, int64_t d, float x) const { from_float(element(h, n, d), x); }
};

template <class S>
struct Weights {  // (heads, 2D, C), times the gain
  const S *wk, *wv;
  const float* gain;
  int64_t D, C;
  __device__ float at(int64_t h, int64_t d, int64_t c) const {
    return gain[c] * to_float(d < D ? wk[(h * D + d) * C + c] : wv[(h * D + d - D) * C + c]);
  }
};

constexpr int tile = 64, depth = 16, padded = tile + 4;

// to[k][i] of a tile that begins at (i0, k0), zero outside of (rows, inner). along_k: neighbours in memory differ in k.
template <bool along_k, class Load>
__device__ __forceinline__ void load_tile(Array<Array<float, padded>, depth>& to, int64_t i0, int64_t k0, int64_t rows,
                                          int64_t inner, Load&& load_element) {
#pragma unroll
  for (int e = 0; e < tile * depth / threads; ++e) {
    const int at = e * threads + static_cast<int>(threadIdx.x);
    const int i = along_k ? at / depth : at % tile, k = along_k ? at % depth : at / tile;
    to[k][i] = i0 + i < rows && k0 + k < inner ? load_element(i0 + i, k0 + k) : 0.f;
  }
}

// A block computes a tile of 64 x 64 of head blockIdx.z's product, a thread 4 x 4 of it.
template <bool a_transposed, bool b_transposed, class A, class B, class Out>
__global__ void __launch_bounds__(threads, 2)
    product_kernel(const Out out, const A a, const B b, int64_t rows, int64_t columns, int64_t inner) {
  SHARED(left, Array<Array<float, padded>, depth>);
  SHARED(right, Array<Array<float, padded>, depth>);
  const int64_t h = blockIdx.z, i0 = int64_t{blockIdx.y} * tile, j0 = int64_t{blockIdx.x} * tile;
  const int i = static_cast<int>(threadIdx.x) / 16 * 4, j = static_cast<int>(threadIdx.x) % 16 * 4;
  Floats<4> sum[4] = {};
  for (int64_t k0 = 0; k0 < inner; k0 += depth) {
    load_tile<!a_transposed>(left, i0, k0, rows, inner, [&](int64_t r, int64_t k) {
      return a_transposed ? a.at(h, k, r) : a.at(h, r, k);
    });
    load_tile<b_transposed>(right, j0, k0, columns, inner, [&](int64_t c, int64_t k) {
      return b_transposed ? b.at(h, c, k) : b.at(h, k, c);
    });
    __syncthreads();
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      const Floats<4> x = load<4>(&left[k][i]), y = load<4>(&right[k][j]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] += x[r] * y[c];
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (i0 + i + r < rows && j0 + j + c < columns) out.put(h, i0 + i + r, j0 + j + c, sum[r][c]);
}

// -----------------------------------------------------------------------------------------------------------------

// du_s and dweight from dm (K, rows, C): a block takes tokens one after the other, a warp the sources that are its own.
// partial (blocks, K, S), if one weight is shared by all tokens; sums (K, S) in shared memory then.
template <int width, class S>
__global__ void __launch_bounds__(threads, 2)
    unmix_kernel(const Sources<S> du, const Flags acc_of, float* dweight, float* partial, const float* dm,
                 const Sources<const S> u, const float* weight, HeadMixSize z, Chunk chunk) {
  float* sums = dynamic_shared<float>();
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  for (int64_t i = threadIdx.x; i < z.K * z.S && z.shared; i += threads) sums[i] = 0;
  __syncthreads();
  for (int64_t n = blockIdx.x; n < chunk.rows; n += gridDim.x) {
    const float* w = weight + (z.shared ? 0 : chunk.n0 + n) * z.K * z.S;
    float* dw = z.shared ? sums : dweight + (chunk.n0 + n) * z.K * z.S;
    for (int s = warp; s < u.count; s += warps) {
      const S* x = u.x[s] + (chunk.n0 + n) * z.C;
      S* dx = du.x[s] + (chunk.n0 + n) * z.C;
      const bool acc = acc_of.x[s];
      for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
        Floats<width> total = acc ? load<width>(dx + c) : Floats<width>{};
#pragma unroll 4
        for (int64_t h = 0; h < z.K; ++h) {
          const Floats<width> g = load<width>(dm + (h * chunk.rows + n) * z.C + c);
          const float factor = w[h * z.S + s];
#pragma unroll
          for (int i = 0; i < width; ++i) total[i] += factor * g[i];
        }
        store<width>(dx + c, total);
      }
      for (int64_t h0 = 0; h0 < z.K; h0 += heads_at_once) {
        float dot[heads_at_once] = {};
        for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
          const Floats<width> y = load<width>(x + c);
#pragma unroll
          for (int h = 0; h < heads_at_once; ++h) {
            if (h0 + h >= z.K) break;
            const Floats<width> g = load<width>(dm + ((h0 + h) * chunk.rows + n) * z.C + c);
#pragma unroll
            for (int i = 0; i < width; ++i) dot[h] += g[i] * y[i];
          }
        }
#pragma unroll
        for (int h = 0; h < heads_at_once; ++h) {
          if (h0 + h >= z.K) break;
          const float sum = warp_sum(dot[h]);
          if (lane == 0) dw[(h0 + h) * z.S + s] = z.shared ? dw[(h0 + h) * z.S + s] + sum : sum;
        }
      }
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < z.K * z.S && z.shared; i += threads) partial[blockIdx.x * z.K * z.S + i] = sums[i];
}

// From g (K, 2D, C), the products of dk and dv with the mixtures: dwk, dwv += g * gain, dgain += sum over rows of
// g * w. A thread for each column and one of eight interleaved groups of rows.
constexpr int row_groups = 8;
template <class S>
__global__ void finish_kernel(float* dgain, float* dwk, float* dwv, const float* g, const float* gain, const S* wk,
                              const S* wv, HeadMixSize z) {
  SHARED(sums, Array<Array<float, warp_size>, row_groups>);
  const int64_t c = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  float sum = 0;
  for (int64_t r = threadIdx.y; r < 2 * z.K * z.D && c < z.C; r += row_groups) {
    const int64_t h = r / (2 * z.D), d = r % (2 * z.D);
    const int64_t at = (h * z.D + d % z.D) * z.C + c;
    const float x = g[r * z.C + c];
    (d < z.D ? dwk : dwv)[at] += x * gain[c];
    sum += x * to_float((d < z.D ? wk : wv)[at]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= z.C) return;
  for (int group = 1; group < row_groups; ++group) sum += sums[group][threadIdx.x];
  dgain[c] += sum;
}

// -----------------------------------------------------------------------------------------------------------------

template <class S>
Sources<S> table_of(const std::vector<Tensor>& tensors) {
  Sources<S> table;
  table.count = 0;
  for (const Tensor& t : tensors) table.x[table.count++] = t.as<std::remove_const_t<S>>();
  return table;
}

// Calls body(width): the widest access to rows of C that all sources allow.
template <class S, class F>
void with_source_width(int64_t C, const std::vector<Tensor>& u, const std::vector<Tensor>& du, F&& body) {
  bool whole = true;
  for (const std::vector<Tensor>* tensors : {&u, &du})
    for (const Tensor& t : *tensors) whole &= reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  with_width<S>(whole ? C : 1, {}, body);
}

// Calls body(chunk) for some tokens after the other: enough for all of a GPU, and few enough for their mixtures to
// stay in the L2 cache.
template <class F>
void for_chunks(const HeadMixSize& z, F&& body) {
  const int64_t rows = std::clamp<int64_t>((int64_t{1} << 23) / (z.K * z.C), 64, 1024);
  for (int64_t n0 = 0; n0 < z.N; n0 += rows) body(Chunk{n0, std::min(rows, z.N - n0)});
}
float* chunk_scratch(const HeadMixSize& z, int slot) {
  return scratch<float>(z.K * std::min<int64_t>(z.N, 1024) * z.C, slot);
}

template <class S>
void mix(float* m, const HeadMix& of, const HeadMixSize& z, const Chunk& chunk) {
  with_source_width<S>(z.C, of.sources, {}, [&](auto width) {
    const dim3 grid(blocks_of(chunk.rows * (z.C / width), threads), blocks_of(z.K, heads_at_once));
    launch({"head_mix", grid, threads}, mix_kernel<width, S>, m, table_of<const S>(of.sources), of.weight.as<float>(),
           z, chunk);
  });
}

template <bool a_transposed, bool b_transposed, class A, class B, class Out>
void product(const Out& out, const A& a, const B& b, int64_t heads, int64_t rows, int64_t columns, int64_t inner) {
  const dim3 grid(blocks_of(columns, tile), blocks_of(rows, tile), static_cast<uint32_t>(heads));
  launch({"head_mix_product", grid, threads}, product_kernel<a_transposed, b_transposed, A, B, Out>, out, a, b, rows,
         columns, inner);
}

template <class S>
void unmix(const HeadMix& d, const float* dm, const HeadMix& of, const std::vector<bool>& acc, const HeadMixSize& z,
           const Chunk& chunk) {
  Flags add{};
  std::copy(acc.begin(), acc.end(), add.x);
  const int64_t blocks = std::min<int64_t>(chunk.rows, 264);
  const size_t shared = z.shared ? static_cast<size_t>(z.K * z.S) * sizeof(float) : 0;
  float* partial = z.shared ? scratch<float>(blocks * z.K * z.S, 3) : nullptr;
  with_source_width<S>(z.C, of.sources, d.sources, [&](auto width) {
    launch({"head_mix_unmix", static_cast<uint32_t>(blocks), threads, shared}, unmix_kernel<width, S>,
           table_of<S>(d.sources), add, d.weight.as<float>(), partial, dm, table_of<const S>(of.sources),
           of.weight.as<float>(), z, chunk);
  });
  if (z.shared) add_rows(d.weight.as<float>(), partial, blocks, z.K * z.S);
}

}  // namespace

void head_mix_forward_cuda(const Tensor& k, const Tensor& v, const HeadMix& m, const HeadMixSize& z) {
  CHECK_THAT(z.S <= most_sources, "head_mix_forward: ", z.S, " sources are too many for a GPU");
  float* mixtures = chunk_scratch(z, 0);
  with_storage(k.dtype, [&](auto storage) {
    using S = decltype(storage);
    const Weights<S> weights{m.wk.as<S>(), m.wv.as<S>(), m.gain.as<float>(), z.D, z.C};
    for_chunks(z, [&](const Chunk& chunk) {
      const int64_t first = chunk.n0 * z.K * z.D;
      mix<S>(mixtures, m, z, chunk);
      product<false, true>(Heads<S>{k.as<S>() + first, v.as<S>() + first, z.K, z.D},
                           Floats2d{mixtures, chunk.rows, z.C, false}, weights, z.K, chunk.rows, 2 * z.D, z.C);
    });
  });
}

void head_mix_backward_cuda(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m,
                            const std::vector<bool>& acc, const HeadMixSize& z) {
  CHECK_THAT(z.S <= most_sources && (!z.shared || z.K * z.S < 50000), "head_mix_backward: ", z.S,
             " sources are too many for a GPU");
  float *mixtures = chunk_scratch(z, 0), *dm = chunk_scratch(z, 1), *g = scratch<float>(2 * z.K * z.D * z.C, 2);
  if (z.shared) fill_device_memory(d.weight.data, 0, d.weight.bytes());
  with_storage(dk.dtype, [&](auto storage) {
    using S = decltype(storage);
    const S *wk = m.wk.as<S>(), *wv = m.wv.as<S>();
    const float* gain = m.gain.as<float>();
    for_chunks(z, [&](const Chunk& chunk) {
      const int64_t first = chunk.n0 * z.K * z.D, rows = chunk.rows;
      const Heads<S> dkv{dk.as<S>() + first, dv.as<S>() + first, z.K, z.D};
      mix<S>(mixtures, m, z, chunk);
      product<true, false>(Floats2d{g, 2 * z.D, z.C, chunk.n0 > 0}, dkv, Floats2d{mixtures, rows, z.C, false}, z.K,
                           2 * z.D, z.C, rows);
      product<false, false>(Floats2d{dm, rows, z.C, false}, dkv, Weights<S>{wk, wv, gain, z.D, z.C}, z.K, rows, z.C,
                            2 * z.D);
      unmix<S>(d, dm, m, acc, z, chunk);
    });
    launch({"head_mix_finish", blocks_of(z.C, warp_size), dim3(warp_size, row_groups)}, finish_kernel<S>,
           d.gain.as<float>(), d.wk.as<float>(), d.wv.as<float>(), g, gain, wk, wv, z);
  });
}

}  // namespace crossply
