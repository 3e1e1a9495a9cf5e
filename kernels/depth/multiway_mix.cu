// Not yet run on hardware: only in the emulator.
#include "kernels/depth/multiway_mix.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// A block takes a token, a thread `width` columns of it, so that the sums over sources stay in registers. Bound by
// memory: the forward reads each source and writes each out once; the backward writes each source's gradient once and
// reads each source once if plain, else twice, the second time from the caches.
constexpr int64_t max_sources = 256, max_ways = 4;
constexpr uint32_t max_threads = 512;  // with up to 128 registers each

template <class P>
struct Ways {
  P* way[max_ways];
};
template <class P>
struct SourcePointers {
  P* source[max_sources];
};

// A MultiwayMix in device memory. Kernels take these tables by value: they lie in constant memory.
template <class Storage>
struct Mix {
  SourcePointers<const Storage> sources;
  SourcePointers<const float> gains;
  Ways<const float> post;
  const Storage* weight;
  const float* base;
  const Storage* skip;
  int64_t N, C;
  int S, W;
};

template <int width>
using Columns = Floats<width>;
template <int ways, int width>
using MultiwayColumns = Array<Columns<width>, ways>;

// coef(S,ways) of token n from element `first` on, in shared memory; 0 where there is no such way.
template <int ways, class Storage>
__device__ void gather_coefficients(float* coef, const Mix<Storage>& m, int64_t n, uint32_t first = 0) {
  for (int e = static_cast<int>(first + threadIdx.x); e < m.S * ways; e += static_cast<int>(blockDim.x)) {
    const int w = e % ways, s = e / ways;
    coef[e] = w < m.W ? to_float(m.weight[(n * m.W + w) * m.S + s]) + m.base[w * m.S + s] : 0.f;
  }
}

// Columns c.. of all a_w of token n.
template <int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void mix(MultiwayColumns<ways, width>& a, const float* coef, const Mix<Storage>& m,
                                    int64_t n, int64_t c) {
  // So many sources are on their way.
  constexpr int at_once = ways * width > 32 ? 2 : prepost || ways * width > 16 ? 4 : 8;
  a = {};
#pragma unroll 1
  for (int first = 0; first < m.S; first += at_once) {
    Columns<width> x[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) x[i] = load_if<width>(first + i < m.S, m.sources.source[first + i], n * m.C + c);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int s = first + i;
      if (s >= m.S) break;
      if constexpr (prepost) {
        const Columns<width> gain = load<width>(m.gains.source[s] + c);
#pragma unroll
        for (int k = 0; k < width; ++k) x[i][k] *= gain[k];
      }
      const Floats<ways> k = load<ways>(coef + s * ways);
#pragma unroll
      for (int w = 0; w < ways; ++w) {
#pragma unroll
        for (int j = 0; j < width; ++j) a[w][j] += k[w] * x[i][j];
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

// Rounded up: what follows is where the widest accesses want it.
__device__ __host__ inline int64_t whole(int64_t floats) { return (floats + 7) / 8 * 8; }

// -----------------------------------------------------------------------------------------------------------------
// Forward. Where a row has more columns than the block takes at once, the norm needs its a_w once more.

template <int ways, int width, bool prepost, class Storage>
__global__ void __launch_bounds__(max_threads, 1)
    multiway_mix_forward_kernel(Ways<Storage> outs, float* rstd, Mix<Storage> m, float eps) {
  float* coef = dynamic_shared<float>();   // (S,ways)
  float* room = coef + whole(m.S * ways);  // (warps,ways)
  const int64_t n = blockIdx.x, step = static_cast<int64_t>(blockDim.x) * width, first = threadIdx.x * width;
  gather_coefficients<ways>(coef, m, n);
  __syncthreads();
  MultiwayColumns<ways, width> a;
  float scale[ways] = {};
  if constexpr (prepost) {
    for (int64_t c = first; c < m.C; c += step) {
      mix<ways, width, prepost>(a, coef, m, n, c);
#pragma unroll
      for (int w = 0; w < ways; ++w) {
#pragma unroll
        for (int i = 0; i < width; ++i) scale[w] += a[w][i] * a[w][i];
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
    if (!prepost || m.C > step) mix<ways, width, prepost>(a, coef, m, n, c);
    Columns<width> skip;
    if constexpr (prepost) skip = load<width>(m.skip + n * m.C + c);
#pragma unroll
    for (int w = 0; w < ways; ++w) {
      if (w >= m.W) continue;
      Columns<width> y = a[w];
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
// Backward. A block takes every gridDim.x-th token and sums up the parameters' gradients over them.

// The sums over tokens of one block: dbase (W,S), then, if prepost, from the next whole place, dpost (W,C) and dgains
// (S,C).
__device__ __host__ inline int64_t base_sums(int64_t W, int64_t S) { return whole(W * S); }

template <class Storage>
struct Gradients {
  SourcePointers<Storage> sources;
  Ways<const Storage> douts;
  Storage *weight, *skip;
  uint32_t accumulate[max_sources / 32];  // a bit for each source
  bool accumulate_skip;
};

// So many sources' products with da make up to 16 sums.
constexpr int sources_at_once = 4;

// mean(ways) = rstd^2 mean_c(dout post a) of token n, in shared memory; a: of the last columns. room: a float for each
// warp and way.
template <int ways, int width, class Storage>
__device__ __forceinline__ void norm_means(float* mean, MultiwayColumns<ways, width>& a, const float* coef,
                                           const Gradients<Storage>& d, const Mix<Storage>& m, const float* rstd,
                                           int64_t n, float* room) {
  float sum[ways] = {};
#pragma unroll 1
  for (int64_t c = threadIdx.x * width; c < m.C; c += static_cast<int64_t>(blockDim.x) * width) {
    mix<ways, width, true>(a, coef, m, n, c);
#pragma unroll
    for (int w = 0; w < ways; ++w) {
      if (w >= m.W) continue;
      const Columns<width> post = load<width>(m.post.way[w] + c), dy = load<width>(d.douts.way[w] + n * m.C + c);
#pragma unroll
      for (int i = 0; i < width; ++i) sum[w] += dy[i] * post[i] * a[w][i];
    }
  }
  store_warp_sums<ways>(room + threadIdx.x / warp_size * ways, sum);
  __syncthreads();
  const int w = static_cast<int>(threadIdx.x);
  if (w < m.W) {
    float total = 0;
    for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp) total += room[static_cast<int>(warp) * ways + w];
    const float r = rstd[n * m.W + w];
    mean[w] = total * r * r / static_cast<float>(m.C);
  }
  __syncthreads();
}

// a becomes da: dout if plain; if not, from a_w, and dpost is added to and dskip written.
template <int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void way_gradients(MultiwayColumns<ways, width>& a, float* dpost /*(W,C)*/,
                                              const float* mean /*(ways)*/, const Gradients<Storage>& d,
                                              const Mix<Storage>& m, const float* rstd, int64_t n, int64_t c,
                                              bool first) {
  Columns<width> dskip = {};
  if constexpr (prepost)
    if (d.accumulate_skip) dskip = load<width>(d.skip + n * m.C + c);
#pragma unroll
  for (int w = 0; w < ways; ++w) {
    if (w >= m.W) {
      a[w] = {};
      continue;
    }
    const Columns<width> dy = load<width>(d.douts.way[w] + n * m.C + c);
    if constexpr (prepost) {
      const Columns<width> post = load<width>(m.post.way[w] + c);
      const float r = rstd[n * m.W + w], along = mean[w];
      Columns<width> dp;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        dp[i] = dy[i] * a[w][i] * r;
        a[w][i] = r * (dy[i] * post[i] - a[w][i] * along);
        dskip[i] += dy[i];
      }
      store_or_accumulate<width, Space::any>(dpost + w * m.C + c, dp, !first);
    } else {
      a[w] = dy;
    }
  }
  if constexpr (prepost) store<width>(d.skip + n * m.C + c, dskip);
}

// The gradients of `group` sources from s on at columns c.. of token n, their part of dgains, and product(group,ways) =
// da . gain * source. All that comes from far is asked for before any of it is used.
template <int group, int ways, int width, bool prepost, class Storage>
__device__ __forceinline__ void source_gradients(float* product, const MultiwayColumns<ways, width>& da,
                                                 const float* coef, float* dgains /*(S,C)*/,
                                                 const Gradients<Storage>& d, const Mix<Storage>& m, int s, int64_t n,
                                                 int64_t c, bool first) {
  Array<Columns<width>, group> inp, before = {};
#pragma unroll
  for (int g = 0; g < group; ++g) {
    const int source = s + g < m.S ? s + g : s;
    inp[g] = load<width>(m.sources.source[source] + n * m.C + c);
    if (d.accumulate[source / 32] >> (source % 32) & 1) before[g] = load<width>(d.sources.source[source] + n * m.C + c);
  }
#pragma unroll
  for (int g = 0; g < group; ++g) {
    if (s + g >= m.S) continue;
    Columns<width> gain, v = {}, x = inp[g];
    if constexpr (prepost) gain = load<width>(m.gains.source[s + g] + c);
    const Floats<ways> k = load<ways>(coef + (s + g) * ways);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float scaled = prepost ? gain[i] * x[i] : x[i];
#pragma unroll
      for (int w = 0; w < ways; ++w) {
        product[g * ways + w] += da[w][i] * scaled;
        v[i] += k[w] * da[w][i];
      }
      if constexpr (prepost) {
        x[i] *= v[i];
        v[i] *= gain[i];
      }
      v[i] += before[g][i];
    }
    store<width>(d.sources.source[s + g] + n * m.C + c, v);
    if constexpr (prepost) store_or_accumulate<width, Space::any>(dgains + (s + g) * m.C + c, x, !first);
  }
}

// dweight of token n from the warps' products(S,ways), and dbase.
template <int ways, class Storage>
__device__ void write_weight_gradients(float* dbase, const float* products, const Gradients<Storage>& d,
                                       const Mix<Storage>& m, int64_t n, bool first) {
  const int size = m.S * ways;
  for (int e = static_cast<int>(threadIdx.x); e < m.W * m.S; e += static_cast<int>(blockDim.x)) {
    const int w = e / m.S, s = e % m.S;
    float product = 0;
    for (uint32_t warp = 0; warp < blockDim.x / warp_size; ++warp)
      product += products[static_cast<int>(warp) * size + s * ways + w];
    from_float(d.weight[n * m.W * m.S + e], product);
    dbase[e] = first ? product : dbase[e] + product;
  }
}

// partial: a row of `row` sums a block; sums_in_shared: they become that in shared memory, and go there at the end.
template <int ways, int width, bool prepost, class Storage>
__global__ void __launch_bounds__(way_warps<prepost>* warp_size, way_blocks<prepost>)
    multiway_mix_backward_kernel(Gradients<Storage> d, const float* rstd, Mix<Storage> m, float* partial, int64_t row,
                                 bool sums_in_shared) {
  constexpr int group = sources_at_once, values = group * ways;
  const int size = m.S * ways, warps = static_cast<int>(blockDim.x) / warp_size;
  float* coef = dynamic_shared<float>();         // (S,ways)
  float* products = coef + whole(size);          // (warps,S,ways)
  float* mean = products + whole(warps * size);  // (ways)
  float* room = mean + whole(ways);              // (warps,ways)
  float* own = products + static_cast<int>(threadIdx.x) / warp_size * size;
  partial += blockIdx.x * row;
  float* sums = sums_in_shared ? room + whole(warps * ways) : partial;
  float* dpost = sums + base_sums(m.W, m.S);
  float* dgains = dpost + m.W * m.C;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t step = static_cast<int64_t>(blockDim.x) * width;
  const int e = static_cast<int>(threadIdx.x);  // the coefficient that this thread asks for ahead, if there is one
  const bool has_coefficient = e < size && e % ways < m.W;
  const int place = has_coefficient ? e % ways * m.S + e / ways : 0;
  const float base = m.base[place];
  gather_coefficients<ways>(coef, m, blockIdx.x);
  for (int64_t n = blockIdx.x; n < m.N; n += gridDim.x) {
    const bool first = n == blockIdx.x;
    const int64_t next = n + gridDim.x < m.N ? n + gridDim.x : n;
    __syncthreads();
    const Storage next_weight = m.weight[next * m.W * m.S + place];  // under way while this token is worked on
    MultiwayColumns<ways, width> a = {};                             // a_w, then its gradient
    if constexpr (prepost) norm_means<ways, width>(mean, a, coef, d, m, rstd, n, room);
#pragma unroll 1
    for (int64_t begin = 0; begin < m.C; begin += step) {
      const int64_t c = begin + threadIdx.x * width;
      const bool there = c < m.C;
      if (there) {
        if constexpr (prepost)
          if (m.C > step) mix<ways, width, prepost>(a, coef, m, n, c);
        way_gradients<ways, width, prepost>(a, dpost, mean, d, m, rstd, n, c, first);
      }
#pragma unroll 1
      for (int s = 0; s < m.S; s += group) {
        float product[values] = {};
        if (there) source_gradients<group, ways, width, prepost>(product, a, coef, dgains, d, m, s, n, c, first);
        const float sum = warp_sums<values>(product);
        const int to = s * ways + lane;
        if (lane < values && to < size) own[to] = begin == 0 ? sum : own[to] + sum;
      }
    }
    __syncthreads();  // of the shared memory only the products are now still to be read
    write_weight_gradients<ways>(sums, products, d, m, n, first);
    if (has_coefficient) coef[e] = to_float(next_weight) + base;
    gather_coefficients<ways>(coef, m, next, blockDim.x);
  }
  if (!sums_in_shared) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < row; i += blockDim.x) partial[i] = sums[i];
}

struct ParameterGradients {
  float* base;
  Ways<float> post;
  SourcePointers<float> gains;
};

// Adds the blocks' sums, a row each.
__global__ void add_way_sums_kernel(ParameterGradients to, const float* partial, int64_t blocks, int64_t row, int W,
                                    int S, int64_t C) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  const float sum = sum_of_rows(partial, blocks, row, e);
  if (threadIdx.y > 0 || e >= row) return;
  if (e < W * S) to.base[e] += sum;
  const int64_t column = e - base_sums(W, S), k = column / C;
  if (column < 0) return;
  float* gradient = k < W ? to.post.way[k] : to.gains.source[k - W];
  gradient[column % C] += sum;
}

// -----------------------------------------------------------------------------------------------------------------

template <class P, size_t n, class List>
void fill_table(P* (&table)[n], const List& tensors) {
  CHECK_THAT(tensors.size() <= n, "multiway_mix: at most ", n, " sources on a GPU, got ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) table[i] = tensors[i].template as<std::remove_const_t<P>>();
}

template <class Storage>
Mix<Storage> table_of(const MultiwayMix<Tensor>& m, int64_t W, int64_t N, int64_t C) {
  Mix<Storage> table = {};
  fill_table(table.sources.source, m.sources);
  fill_table(table.gains.source, m.gains);
  fill_table(table.post.way, m.post);
  table.weight = m.weight.as<Storage>(), table.base = m.base.as<float>(), table.skip = data_or_null<Storage>(m.skip);
  table.N = N, table.C = C, table.S = static_cast<int>(m.sources.size()), table.W = static_cast<int>(W);
  return table;
}

// Whether 16 bytes at a time fit everything that is read by columns.
template <class Members>
bool wide_accesses(const Members& m, const std::vector<Tensor>& outs, int64_t C, bool gradients) {
  const bool whole = C % (16 / static_cast<int64_t>(size_of(outs[0].dtype))) == 0;
  if (!whole || !aligned16(m.sources) || !aligned16(outs) || !is_aligned16(m.skip)) return false;
  return gradients || (aligned16(m.gains) && aligned16(m.post));  // the parameters' gradients are written by elements
}

// Calls body(ways, wide) with constants.
template <class F>
void with_ways(int64_t W, bool wide, F&& body) {
  if (!wide) body(std::integral_constant<int, ways_of_thread(max_ways, false)>{}, std::false_type{});
  else if (W == 1) body(std::integral_constant<int, ways_of_thread(1, true)>{}, std::true_type{});
  else body(std::integral_constant<int, ways_of_thread(max_ways, true)>{}, std::true_type{});
}

template <int ways, int width, bool prepost, class Storage>
void launch_forward(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix<Tensor>& m, double eps,
                    int64_t N, int64_t C) {
  const Mix<Storage> table = table_of<Storage>(m, static_cast<int64_t>(outs.size()), N, C);
  Ways<Storage> to = {};
  fill_table(to.way, outs);
  const auto warps = static_cast<uint32_t>(way_warps_for(C, width, ways, max_threads / warp_size));
  const auto floats = static_cast<size_t>(whole(table.S * ways) + warps * ways);
  launch({"multiway_mix_forward", static_cast<uint32_t>(N), warps * warp_size, floats * sizeof(float)},
         multiway_mix_forward_kernel<ways, width, prepost, Storage>, to, data_or_null<float>(rstd), table,
         static_cast<float>(eps));
}

template <class Storage>
Gradients<Storage> table_of(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts) {
  Gradients<Storage> table = {};
  fill_table(table.sources.source, d.sources);
  fill_table(table.douts.way, douts);
  table.weight = d.weight.as<Storage>(), table.skip = data_or_null<Storage>(d.skip),
  table.accumulate_skip = d.skip.accumulate;
  for (size_t s = 0; s < d.sources.size(); ++s)
    if (d.sources[s].accumulate) table.accumulate[s / 32] |= 1u << s % 32;
  return table;
}

ParameterGradients parameter_table(const MultiwayMix<Grad, Tensor>& d) {
  ParameterGradients table = {};
  table.base = d.base.as<float>();
  fill_table(table.post.way, d.post);
  fill_table(table.gains.source, d.gains);
  return table;
}

template <int ways, int width, bool prepost, class Storage>
void launch_backward(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts, const Tensor& rstd,
                     const MultiwayMix<Tensor>& m, int64_t N, int64_t C) {
  const Mix<Storage> table = table_of<Storage>(m, static_cast<int64_t>(douts.size()), N, C);
  const int64_t S = table.S, size = S * ways;
  const auto [warps, at_once, blocks, row] = way_sums<prepost>(N, C, table.W, S, ways, width);
  const int64_t own_floats = whole(size) + whole(warps * size) + whole(ways) + whole(warps * ways);
  const int64_t room = std::min<int64_t>(200 * 1024, max_shared_bytes() - 1024) / at_once;
  const bool in_shared = (own_floats + row) * static_cast<int64_t>(sizeof(float)) <= room;
  const auto floats = static_cast<size_t>(in_shared ? own_floats + row : own_floats);
  float* partial = scratch<float>(blocks * row);
  launch({"multiway_mix_backward", static_cast<uint32_t>(blocks), static_cast<uint32_t>(warps * warp_size),
          floats * sizeof(float)},
         multiway_mix_backward_kernel<ways, width, prepost, Storage>, table_of<Storage>(d, douts),
         data_or_null<float>(rstd), table, partial, row, in_shared);
  launch({"add_way_sums", blocks_of(row, warp_size), dim3(warp_size, groups_of_rows)}, add_way_sums_kernel,
         parameter_table(d), partial, blocks, row, table.W, table.S, C);
}

}  // namespace

void multiway_mix_forward_cuda(const std::vector<Tensor>& outs, const Tensor& rstd, const MultiwayMix<Tensor>& m,
                               double eps, int64_t N, int64_t C) {
  const auto W = static_cast<int64_t>(outs.size());
  with_ways(W, wide_accesses(m, outs, C, false), [&](auto ways, auto wide) {
    with_storage(outs[0].dtype, [&]<class Storage>(Storage) {
      constexpr int width = wide ? widest<Storage> : 1;
      auto forward =
          m.post.empty() ? launch_forward<ways, width, false, Storage> : launch_forward<ways, width, true, Storage>;
      forward(outs, rstd, m, eps, N, C);
    });
  });
}

void multiway_mix_backward_cuda(const MultiwayMix<Grad, Tensor>& d, const std::vector<Tensor>& douts,
                                const Tensor& rstd, const MultiwayMix<Tensor>& m, int64_t N, int64_t C) {
  const auto W = static_cast<int64_t>(douts.size());
  const bool whole_rows = wide_accesses(m, douts, C, false) && wide_accesses(d, douts, C, true);
  with_ways(W, whole_rows, [&](auto ways, auto wide) {
    with_storage(douts[0].dtype, [&]<class Storage>(Storage) {
      constexpr int width = columns_of_thread(ways, wide, sizeof(Storage));
      auto backward =
          m.post.empty() ? launch_backward<ways, width, false, Storage> : launch_backward<ways, width, true, Storage>;
      backward(d, douts, rstd, m, N, C);
    });
  });
}

}  // namespace crossply
