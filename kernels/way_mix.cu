#include "kernels/way_mix.h"

#include "kernels/cuda.cuh"

namespace crossply {
namespace {

// A block takes `T` tokens at a time, a thread the same `width` columns of all of them, so that the sums over sources
// stay in registers. Bound by memory: the forward reads each source and writes each out once; the backward reads each
// source twice, the second time from the caches, reads the douts and writes the sources' gradients once.
constexpr int64_t most_sources = 256, most_ways = 8;
constexpr uint32_t most_threads = 512;  // with up to 128 registers each

template <class P>
struct Ways {
  P* way[most_ways];
};
template <class P>
struct Sources {
  P* source[most_sources];
};

// A WayMix in device memory. Kernels take these tables by value: they lie in constant memory.
template <class Storage>
struct Mix {
  Sources<const Storage> sources;
  Sources<const float> gains;
  Ways<const float> post;
  const Storage* weight;
  const float* base;
  const Storage* skip;
  int64_t N, C;
  int S, W;
};

template <int width>
using Columns = Floats<width>;
template <int T, int ways, int width>
using Tile = Array<Array<Columns<width>, ways>, T>;  // of T tokens

// The place of token n + t; of the last one, where there are no more: its results are then not used.
__device__ __forceinline__ int64_t row_of(int64_t n, int t, int64_t N) { return n + t < N ? n + t : N - 1; }

// coef(S,T,ways) in shared memory, of tokens n, n + 1, ...; 0 where there is no such way or token.
template <int T, int ways, class Storage>
__device__ void gather_coefficients(float* coef, const Mix<Storage>& m, int64_t n) {
  for (int e = static_cast<int>(threadIdx.x); e < m.S * T * ways; e += static_cast<int>(blockDim.x)) {
    const int w = e % ways, t = e / ways % T, s = e / (ways * T);
    const bool there = w < m.W && n + t < m.N;
    coef[e] = there ? to_float(m.weight[((n + t) * m.W + w) * m.S + s]) + m.base[w * m.S + s] : 0.f;
  }
}

// Columns c.. of all a_w.
template <int T, int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void mix(Tile<T, ways, width>& a, const float* coef, const Mix<Storage>& m, int64_t n,
                                    int64_t c, bool there) {
  constexpr int at_once = T * ways * width > 32 ? 2 : 4;
  a = {};
  if (!there) return;
#pragma unroll at_once
  for (int s = 0; s < m.S; ++s) {
    Columns<width> gain;
    if constexpr (prepost) gain = load<width>(m.gains.source[s] + c);
#pragma unroll
    for (int t = 0; t < T; ++t) {
      Columns<width> x = load<width>(m.sources.source[s] + row_of(n, t, m.N) * m.C + c);
      const Floats<ways> k = load<ways>(coef + (s * T + t) * ways);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if constexpr (prepost) x[i] *= gain[i];
#pragma unroll
        for (int w = 0; w < ways; ++w) a[t][w][i] += k[w] * x[i];
      }
    }
  }
}

// v[i] becomes its sum over the block's threads. room: n floats a warp; a barrier must follow before it is used again.
template <int n>
__device__ __forceinline__ void block_sums(float (&v)[n], float* room) {
  store_warp_sums<n>(room + threadIdx.x / warp_size * n, v);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) v[i] = 0;
  for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] += room[warp * n + i];
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Forward. Where a row has more columns than the block takes at once, the norm needs its a_w once more.

template <int ways, int width, bool prepost, class Storage>
__global__ void __launch_bounds__(most_threads, 1)
way_mix_forward_kernel(Ways<Storage> outs, float* rstd, Mix<Storage> m, float eps) {
  float* room = dynamic_shared<float>();                   // for sums
  float* coef = room + blockDim.x / warp_size * most_ways;  // (S,ways)
  const int64_t n = blockIdx.x, step = static_cast<int64_t>(blockDim.x) * width, first = threadIdx.x * width;
  gather_coefficients<1, ways>(coef, m, n);
  __syncthreads();
  Tile<1, ways, width> a;
  float scale[ways] = {};
  if constexpr (prepost) {
    for (int64_t begin = 0; begin < m.C; begin += step) {
      mix<1, ways, width, prepost>(a, coef, m, n, begin + first, begin + first < m.C);
#pragma unroll
      for (int w = 0; w < ways; ++w) {
#pragma unroll
        for (int i = 0; i < width; ++i) scale[w] += a[0][w][i] * a[0][w][i];
      }
    }
    block_sums(scale, room);
#pragma unroll
    for (int w = 0; w < ways; ++w) {
      scale[w] = rsqrtf(scale[w] / static_cast<float>(m.C) + eps);
      if (threadIdx.x == 0 && w < m.W) rstd[n * m.W + w] = scale[w];
    }
  }
  for (int64_t c = first; c < m.C; c += step) {
    if (!prepost || m.C > step) mix<1, ways, width, prepost>(a, coef, m, n, c, true);
    Columns<width> skip;
    if constexpr (prepost) skip = load<width>(m.skip + n * m.C + c);
#pragma unroll
    for (int w = 0; w < ways; ++w) {
      if (w >= m.W) continue;
      Columns<width> y = a[0][w];
      if constexpr (prepost) {
        const Columns<width> post = load<width>(m.post.way[w] + c);
#pragma unroll
        for (int i = 0; i < width; ++i) y[i] = post[i] * y[i] * scale[w] + skip[i];
      }
      store<width>(outs.way[w] + n * m.C + c, y);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Backward.

// The sums over tokens of one block: dbase (W,S), then, if prepost, from the next multiple of 4, dpost (W,C) and dgains
// (S,C).
__device__ __host__ inline int64_t base_sums(int64_t W, int64_t S) { return (W * S + 3) / 4 * 4; }

template <class Storage>
struct Gradients {
  Sources<Storage> sources;
  Ways<const Storage> douts;
  Storage *weight, *skip;
  uint32_t acc[most_sources / 32];  // a bit for each source
  bool acc_skip;
};

// So many sources' products with da make up to 16 sums.
template <int T, int ways>
constexpr int sources_at_once = std::min(4, 16 / (T * ways));

// Its own columns of a row of sums, set at the block's first tokens.
template <int width>
__device__ __forceinline__ void add_to(float* sums, const Columns<width>& x, bool set) {
  Columns<width> sum = x;
  if (!set) {
    const Columns<width> before = load<width>(sums);
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] += before[i];
  }
  store<width>(sums, sum);
}

// mean(T,ways) = rstd^2 mean_c(dout post a), in shared memory; a: of the last columns. room: T*ways floats a warp.
template <int T, int ways, int width, class Storage>
__device__ __forceinline__ void norm_means(float* mean, Tile<T, ways, width>& a, const float* coef,
                                           const Gradients<Storage>& d, const Mix<Storage>& m, const float* rstd,
                                           int64_t n, float* room) {
  float sum[T * ways] = {};
  for (int64_t begin = 0; begin < m.C; begin += static_cast<int64_t>(blockDim.x) * width) {
    const int64_t c = begin + threadIdx.x * width;
    mix<T, ways, width, true>(a, coef, m, n, c, c < m.C);
    if (c >= m.C) continue;
#pragma unroll
    for (int w = 0; w < ways; ++w) {
      if (w >= m.W) continue;
      const Columns<width> post = load<width>(m.post.way[w] + c);
#pragma unroll
      for (int t = 0; t < T; ++t) {
        const Columns<width> dy = load<width>(d.douts.way[w] + row_of(n, t, m.N) * m.C + c);
#pragma unroll
        for (int i = 0; i < width; ++i) sum[t * ways + w] += dy[i] * post[i] * a[t][w][i];
      }
    }
  }
  store_warp_sums<T * ways>(room + threadIdx.x / warp_size * (T * ways), sum);
  __syncthreads();
  const int e = static_cast<int>(threadIdx.x), w = e % ways;
  if (e < T * ways && w < m.W) {
    float total = 0;
    for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp) total += room[static_cast<int>(warp) * T * ways + e];
    const float r = rstd[row_of(n, e / ways, m.N) * m.W + w];
    mean[e] = total * r * r / static_cast<float>(m.C);
  }
  __syncthreads();
}

// a becomes da: dout if plain; if not, from a_w, and dpost is added to.
template <int T, int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void way_gradients(Tile<T, ways, width>& a, float* dpost /*(W,C)*/,
                                              const float* mean /*(T,ways)*/, const Gradients<Storage>& d,
                                              const Mix<Storage>& m, const float* rstd, int64_t n, int64_t c,
                                              bool first) {
#pragma unroll
  for (int w = 0; w < ways; ++w) {
    if (w >= m.W) {
#pragma unroll
      for (int t = 0; t < T; ++t) a[t][w] = {};
      continue;
    }
    Columns<width> post, dp = {};
    if constexpr (prepost) post = load<width>(m.post.way[w] + c);
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const Columns<width> dy = load<width>(d.douts.way[w] + row_of(n, t, m.N) * m.C + c);
      if constexpr (prepost) {
        const float r = rstd[row_of(n, t, m.N) * m.W + w], along = mean[t * ways + w];
#pragma unroll
        for (int i = 0; i < width; ++i) {
          if (n + t < m.N) dp[i] += dy[i] * a[t][w][i] * r;
          a[t][w][i] = r * (dy[i] * post[i] - a[t][w][i] * along);
        }
      } else {
        a[t][w] = dy;
      }
    }
    if constexpr (prepost) add_to<width>(dpost + w * m.C + c, dp, first);
  }
}

template <int T, int width, class Storage>
__device__ __forceinline__ void skip_gradients(const Gradients<Storage>& d, int64_t n, int64_t N, int64_t C, int W,
                                               int64_t c) {
#pragma unroll
  for (int t = 0; t < T; ++t) {
    if (n + t >= N) continue;
    const int64_t at = (n + t) * C + c;
    Columns<width> sum = {};
    if (d.acc_skip) sum = load<width>(d.skip + at);
    for (int w = 0; w < W; ++w) {
      const Columns<width> dy = load<width>(d.douts.way[w] + at);
#pragma unroll
      for (int i = 0; i < width; ++i) sum[i] += dy[i];
    }
    store<width>(d.skip + at, sum);
  }
}

// One source's gradient at columns c.. of T tokens, its part of dgain, and product(T,ways) = da . gain * source.
template <int T, int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void source_gradients(float* product, const Tile<T, ways, width>& da, const float* coef,
                                                 float* dgain /*(C)*/, const Gradients<Storage>& d,
                                                 const Mix<Storage>& m, int s, int64_t n, int64_t c, bool first) {
  const bool acc = (d.acc[s / 32] >> (s % 32) & 1) != 0;
  Storage* dx = d.sources.source[s] + c;
  Columns<width> gain, dg = {};
  if constexpr (prepost) gain = load<width>(m.gains.source[s] + c);
#pragma unroll
  for (int t = 0; t < T; ++t) {
    const int64_t row = row_of(n, t, m.N) * m.C;
    const Columns<width> x = load<width>(m.sources.source[s] + row + c);
    Columns<width> v = {};
    const Floats<ways> k = load<ways>(coef + (s * T + t) * ways);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float scaled = prepost ? gain[i] * x[i] : x[i];
#pragma unroll
      for (int w = 0; w < ways; ++w) {
        product[t * ways + w] += da[t][w][i] * scaled;
        v[i] += k[w] * da[t][w][i];
      }
      if constexpr (prepost) {
        if (n + t < m.N) dg[i] += v[i] * x[i];
        v[i] *= gain[i];
      }
    }
    if (n + t >= m.N) continue;
    if (acc) {
      const Columns<width> before = load<width>(dx + row);
#pragma unroll
      for (int i = 0; i < width; ++i) v[i] += before[i];
    }
    store<width>(dx + row, v);
  }
  if constexpr (prepost) add_to<width>(dgain + c, dg, first);
}

// dweight of the tokens from the warps' products(S,T,ways), and dbase.
template <int T, int ways, class Storage>
__device__ void write_weight_gradients(float* dbase, const float* products, const Gradients<Storage>& d,
                                       const Mix<Storage>& m, int64_t n, bool first) {
  const int size = m.S * T * ways;
  for (int e = static_cast<int>(threadIdx.x); e < m.W * m.S; e += static_cast<int>(blockDim.x)) {
    const int w = e / m.S, s = e % m.S;
    float sum = first ? 0.f : dbase[e];
    for (int t = 0; t < T && n + t < m.N; ++t) {
      float product = 0;
      for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp)
        product += products[static_cast<int>(warp) * size + (s * T + t) * ways + w];
      from_float(d.weight[(n + t) * m.W * m.S + e], product);
      sum += product;
    }
    dbase[e] = sum;
  }
}

// partial: a row of `row` sums a block; sums_in_shared: they become that in shared memory, and go there at the end.
template <int T, int ways, int width, bool prepost, class Storage>
__global__ void __launch_bounds__(most_threads, 1)
way_mix_backward_kernel(Gradients<Storage> d, const float* rstd, Mix<Storage> m, float* partial, int64_t row,
                        bool sums_in_shared) {
  constexpr int group = sources_at_once<T, ways>, values = group * T * ways;
  const int size = m.S * T * ways, warps = static_cast<int>(blockDim.x) / warp_size;
  float* coef = dynamic_shared<float>();          // (S,T,ways), rounded up to whole accesses
  float* room = coef + (size + 7) / 8 * 8;        // (warps,T,ways)
  float* mean = room + warps * T * ways;          // (T,ways)
  float* products = mean + T * ways;              // (warps,S,T,ways)
  float* shared_sums = products + (warps * size + 7) / 8 * 8;
  float* own = products + static_cast<int>(threadIdx.x) / warp_size * size;
  partial += blockIdx.x * row;
  float* sums = sums_in_shared ? shared_sums : partial;
  float* dpost = sums + base_sums(m.W, m.S);
  float* dgains = dpost + m.W * m.C;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t step = static_cast<int64_t>(blockDim.x) * width;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * T; n < m.N; n += static_cast<int64_t>(gridDim.x) * T) {
    const bool first = n == static_cast<int64_t>(blockIdx.x) * T;
    __syncthreads();  // what the tokens before have left in shared memory has been read
    gather_coefficients<T, ways>(coef, m, n);
    __syncthreads();
    Tile<T, ways, width> a = {};  // a_w, then its gradient
    if constexpr (prepost) norm_means<T, ways, width>(mean, a, coef, d, m, rstd, n, room);
    for (int64_t begin = 0; begin < m.C; begin += step) {
      const int64_t c = begin + threadIdx.x * width;
      const bool there = c < m.C;
      if (there) {
        if constexpr (prepost)
          if (m.C > step) mix<T, ways, width, prepost>(a, coef, m, n, c, true);
        way_gradients<T, ways, width, prepost>(a, dpost, mean, d, m, rstd, n, c, first);
        if constexpr (prepost) skip_gradients<T, width>(d, n, m.N, m.C, m.W, c);
      }
      for (int s = 0; s < m.S; s += group) {
        float product[values] = {};
        if (there) {
#pragma unroll
          for (int g = 0; g < group; ++g)
            if (s + g < m.S)
              source_gradients<T, ways, width, prepost>(product + g * T * ways, a, coef, dgains + (s + g) * m.C, d, m,
                                                        s + g, n, c, first);
        }
        const float sum = warp_sums<values>(product);
        const int e = s * T * ways + lane;
        if (lane < values && e < size) own[e] = begin == 0 ? sum : own[e] + sum;
      }
    }
    __syncthreads();
    write_weight_gradients<T, ways>(sums, products, d, m, n, first);
  }
  if (!sums_in_shared) return;
  __syncthreads();
  for (int64_t e = threadIdx.x; e < row; e += blockDim.x) partial[e] = sums[e];
}

struct ParameterGradients {
  float* base;
  Ways<float> post;
  Sources<float> gains;
};

// Adds the blocks' sums: a thread for each element of a row and one of eight interleaved groups of blocks.
constexpr int block_groups = 8;
__global__ void add_way_sums_kernel(ParameterGradients to, const float* partial, int64_t blocks, int64_t row, int W,
                                    int S, int64_t C) {
  SHARED(sums, Array<Array<float, warp_size>, block_groups>);
  const int64_t e = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  float sum = 0;
  if (e < row)
    for (int64_t b = threadIdx.y; b < blocks; b += block_groups) sum += partial[b * row + e];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || e >= row) return;
  for (int group = 1; group < block_groups; ++group) sum += sums[group][threadIdx.x];
  if (e < W * S) to.base[e] += sum;
  const int64_t column = e - base_sums(W, S), k = column / C;
  if (column < 0) return;
  (k < W ? to.post.way[k] : to.gains.source[k - W])[column % C] += sum;
}

// -----------------------------------------------------------------------------------------------------------------

template <class P, size_t n>
void fill_table(P* (&table)[n], const std::vector<Tensor>& tensors) {
  CHECK_THAT(tensors.size() <= n, "way_mix: at most ", n, " sources on a GPU, got ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) table[i] = tensors[i].as<std::remove_const_t<P>>();
}

template <class Storage>
Mix<Storage> table_of(const WayMix& m, int64_t W, int64_t N, int64_t C) {
  Mix<Storage> table = {};
  fill_table(table.sources.source, m.sources);
  fill_table(table.gains.source, m.gains);
  fill_table(table.post.way, m.post);
  table.weight = m.weight.as<Storage>(), table.base = m.base.as<float>(), table.skip = data_or_null<Storage>(m.skip);
  table.N = N, table.C = C, table.S = static_cast<int>(m.sources.size()), table.W = static_cast<int>(W);
  return table;
}

// Whether 16 bytes at a time fit everything that is read by columns.
bool wide_accesses(const WayMix& m, const std::vector<Tensor>& outs, int64_t C, bool gradients) {
  bool whole = C % (16 / static_cast<int64_t>(size_of(outs[0].dtype))) == 0;
  auto check = [&](const Tensor& t) { whole &= reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
  for (const Tensor& t : m.sources) check(t);
  for (const Tensor& t : outs) check(t);
  check(m.skip);
  if (gradients) return whole;  // those of the parameters are written by elements
  for (const Tensor& t : m.gains) check(t);
  for (const Tensor& t : m.post) check(t);
  return whole;
}

// Calls body(ways, wide) with constants: ways that are enough for W.
template <class F>
void with_ways(int64_t W, bool wide, F&& body) {
  auto with = [&](auto ways) { body(ways, std::true_type{}); };
  if (!wide) body(std::integral_constant<int, 8>{}, std::false_type{});
  else if (W == 1) with(std::integral_constant<int, 1>{});
  else if (W <= 4) with(std::integral_constant<int, 4>{});
  else with(std::integral_constant<int, 8>{});
}

// So many warps as have columns to do, if their shared memory of `floats` each is there.
uint32_t warps_for(int64_t C, int width, int64_t floats) {
  constexpr int64_t room = 160 * 1024 / sizeof(float);
  const int64_t warps = (C + width * warp_size - 1) / (width * warp_size);
  return static_cast<uint32_t>(std::clamp<int64_t>(std::min(warps, room / floats), 1, most_threads / warp_size));
}

template <int ways, int width, bool prepost, class Storage>
void launch_forward(const std::vector<Tensor>& outs, const Tensor& rstd, const WayMix& m, int64_t N, int64_t C) {
  const Mix<Storage> table = table_of<Storage>(m, static_cast<int64_t>(outs.size()), N, C);
  Ways<Storage> to = {};
  fill_table(to.way, outs);
  const uint32_t warps = warps_for(C, width, most_ways);
  const size_t shared = (warps * most_ways + static_cast<size_t>(table.S) * ways) * sizeof(float);
  launch({"way_mix_forward", static_cast<uint32_t>(N), warps * warp_size, shared},
         way_mix_forward_kernel<ways, width, prepost, Storage>, to, data_or_null<float>(rstd), table,
         static_cast<float>(m.eps));
}

template <int T, int ways, int width, bool prepost, class Storage>
void launch_backward(const WayMix& d, const std::vector<Tensor>& douts, const Tensor& rstd, const WayMix& m,
                     const WayAcc& acc, int64_t N, int64_t C) {
  const Mix<Storage> table = table_of<Storage>(m, static_cast<int64_t>(douts.size()), N, C);
  Gradients<Storage> to = {};
  fill_table(to.sources.source, d.sources);
  fill_table(to.douts.way, douts);
  to.weight = d.weight.as<Storage>(), to.skip = data_or_null<Storage>(d.skip), to.acc_skip = acc.skip;
  for (size_t s = 0; s < acc.sources.size(); ++s)
    if (acc.sources[s]) to.acc[s / 32] |= 1u << s % 32;
  ParameterGradients parameters = {};
  parameters.base = d.base.as<float>();
  fill_table(parameters.post.way, d.post);
  fill_table(parameters.gains.source, d.gains);

  const int64_t S = table.S, W = table.W, size = S * T * ways;
  const uint32_t warps = warps_for(C, width, size + T * ways);
  // A row of sums costs as much as some tokens: with such rows no more blocks than run at once.
  const int64_t row = base_sums(W, S) + (prepost ? (W + S) * C : 0), tiles = (N + T - 1) / T;
  const int64_t at_once = std::max<int64_t>(1, (prepost ? 16 : 64) / warps);  // a multiprocessor
  const auto blocks = static_cast<uint32_t>(std::min(tiles, 132 * at_once));
  const auto own_floats = static_cast<size_t>((size + 7) / 8 * 8 + (warps + 1) * T * ways + (warps * size + 7) / 8 * 8);
  const size_t with_sums = (own_floats + static_cast<size_t>(row)) * sizeof(float);
  const bool in_shared = with_sums <= 200 * 1024 / static_cast<size_t>(std::min<int64_t>(at_once, 16));
  float* partial = scratch<float>(blocks * row);
  launch({"way_mix_backward", blocks, warps * warp_size, in_shared ? with_sums : own_floats * sizeof(float)},
         way_mix_backward_kernel<T, ways, width, prepost, Storage>, to, data_or_null<float>(rstd), table, partial, row,
         in_shared);
  launch({"add_way_sums", blocks_of(row, warp_size), dim3(warp_size, block_groups)}, add_way_sums_kernel, parameters,
         partial, static_cast<int64_t>(blocks), row, table.W, table.S, C);
}

}  // namespace

void way_mix_forward_cuda(const std::vector<Tensor>& outs, const Tensor& rstd, const WayMix& m, int64_t N, int64_t C) {
  const auto W = static_cast<int64_t>(outs.size());
  with_ways(W, wide_accesses(m, outs, C, false), [&](auto ways, auto wide) {
    with_storage(outs[0].dtype, [&](auto storage) {
      using Storage = decltype(storage);
      constexpr int width = wide ? widest<Storage> : 1;
      auto forward = m.post.empty() ? launch_forward<ways, width, false, Storage>
                                    : launch_forward<ways, width, true, Storage>;
      forward(outs, rstd, m, N, C);
    });
  });
}

void way_mix_backward_cuda(const WayMix& d, const std::vector<Tensor>& douts, const Tensor& rstd, const WayMix& m,
                           const WayAcc& acc, int64_t N, int64_t C) {
  const auto W = static_cast<int64_t>(douts.size());
  const bool whole = wide_accesses(m, douts, C, false) && wide_accesses(d, douts, C, true);
  with_ways(W, whole, [&](auto ways, auto wide) {
    with_storage(douts[0].dtype, [&](auto storage) {
      using Storage = decltype(storage);
      // Several tokens share the gains and what is added to their gradients; up to 32 registers hold their da.
      constexpr int width = wide ? widest<Storage> : 1, narrower = wide ? 4 : 1, tokens = ways == 1 ? 4 : 8 / ways;
      auto backward = m.post.empty() ? launch_backward<1, ways, width, false, Storage>
                                     : launch_backward<tokens, ways, narrower, true, Storage>;
      backward(d, douts, rstd, m, acc, N, C);
    });
  });
}

}  // namespace crossply
