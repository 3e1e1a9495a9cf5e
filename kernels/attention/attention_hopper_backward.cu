// Attention's backward on the warpgroup products of sm_90: two kernels with 7 products, as attention_mma_backward.cu
// has them, and for its reasons; each writes every element of its results once, in an order that nothing changes. What
// they gain over that file is what the forward gains: products read shared memory themselves, and one thread, not all,
// asks for tiles.
//
// A block takes 128 keys, or 128 queries, 64 to a warpgroup; a third warpgroup asks for the tiles of the others' rows.
// Scores and the gradients of the weights stay in registers, rounded to bf16, as the first factor of the last products;
// in the first kernel both are transposed, rows being keys. Its statistics of queries come through shared memory, by a
// warp of the third warpgroup: 0 weights for queries that are not there, since their lse is infinite.
//
// Bound by the tensor cores: in clocks, of a warpgroup's 64 rows, and beside them those for shared memory and for the
// exponentials: the first kernel 1,024 for 64 queries with D = 128 (896, 256), or for 128 with D = 64 (768, 512); the
// second one, for 128 keys, 1,536 (1,280, 512) and 768 (640, 512).
//
// Not yet run on hardware: only in the emulator.
#include "kernels/attention/attention_hopper.cuh"

namespace crossply {
namespace {

constexpr int groups = 2, block_rows = 64 * groups;
constexpr int threads = (groups + 1) * warpgroup_size;
[[maybe_unused]] constexpr int registers = 232, producer_registers = 40;

// Two stages would do if both warpgroups were at the same step. But they had better not be, and a tile is there again
// some 1,500 clocks after the last of them is done with the one before it.
// numbers: beside a tile of x.
template <int D, int rows_of_tile, int stages_of_x, int stages_of_y, int numbers_beside>
struct Sizes {
  static constexpr int rows = rows_of_tile, own = block_rows * D, tile = rows * D;  // own, tile: elements
  static constexpr int x_stages = stages_of_x, y_stages = stages_of_y, numbers = numbers_beside;
  static constexpr size_t shared_bytes = (2 * own + (x_stages + y_stages) * tile) * sizeof(bf16) +
                                         x_stages * numbers * sizeof(float) +
                                         (1 + 2 * (x_stages + y_stages)) * sizeof(Barrier);
};
template <int D>
using KeyBlock = Sizes<D, D == 128 ? 64 : 128, 3, 3, D == 128 ? 128 : 256>;
template <int D>
using QueryBlock = Sizes<D, 128, 3, D == 128 ? 2 : 3, 0>;

#if CROSSPLY_HOPPER

// Two matrices that stay, a and b, and two rings of tiles: x and y; and, of the first kernel, numbers beside x's tiles.
template <class Block>
struct Shared {
  bf16 *a = panel_memory(), *b = a + Block::own, *x_tiles = b + Block::own;
  bf16* y_tiles = x_tiles + Block::x_stages * Block::tile;
  float* beside = reinterpret_cast<float*>(y_tiles + Block::y_stages * Block::tile);  // (x_stages, numbers)
  Barrier *own_full = reinterpret_cast<Barrier*>(beside + Block::x_stages * Block::numbers), *of_x = own_full + 1;
  Barrier* of_y = of_x + 2 * Block::x_stages;
  int* sight = reinterpret_cast<int*>(of_y + 2 * Block::y_stages);  // (block_rows), if masked: back or forth
  Ring<Block::x_stages, Block::tile> x{x_tiles, of_x, of_x + Block::x_stages};
  Ring<Block::y_stages, Block::tile> y{y_tiles, of_y, of_y + Block::y_stages};

  // x_arrivals: of those who fill a tile of x and what is beside it.
  __device__ void init(uint32_t x_arrivals) const {
    barrier_init(own_full, 1);
    x.init(x_arrivals, groups * 4), y.init(1, groups * 4);
    barrier_init_fence();
  }
  __device__ __forceinline__ void load_own(const TensorMap& of_a, const TensorMap& of_b, int row, int head,
                                           int batch) const {
    barrier_expect(own_full, 2 * Block::own * sizeof(bf16));
    copy_box(a, of_a, own_full, row, head, batch), copy_box(b, of_b, own_full, row, head, batch);
  }
};

// d (64, N) = rows of own (the group's 64) times those of a tile (N, D), transposed.
template <int D, int N>
__device__ __forceinline__ void multiply_own(GroupSums<N>& d, const bf16* own, const bf16* tile, int group) {
#pragma unroll
  for (int c = 0; c < D; c += 16)
    wgmma<N>(d, descriptor_of_rows<block_rows>(shared_address(own), group * 64, c),
             descriptor_of_rows<N>(shared_address(tile), 0, c), c > 0);
  wgmma_commit();
}
// d (64, D) += weights (64, N) tile (N, D), or = at first.
template <int D, int N>
__device__ __forceinline__ void add_weighted(GroupSums<D>& d, const Array<Pairs, N / 16>& weights, const bf16* tile,
                                             bool first) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
    wgmma<D, true>(d, weights[k], descriptor_of_columns<N>(shared_address(tile), k * 16, 0), !first || k > 0);
  wgmma_commit();
}

// -----------------------------------------------------------------------------------------------------------------
// Gradients of keys and values.

template <int D>
using KeyShared = Shared<KeyBlock<D>>;

// lse / ln 2 and delta of the queries of a tile, by a warp.
template <int D>
__device__ __forceinline__ void load_statistics(const KeyShared<D>& m, const float* lse, const float* delta, int i,
                                                int left) {
  constexpr int queries = KeyBlock<D>::rows;
  const int s = m.x.stage(i);
  m.x.wait_empty(i);
  for (int c = lane_of(); c < queries; c += warp_size) {
    m.beside[s * 2 * queries + c] = c < left ? lse[c] * log2_of_e : INFINITY;
    m.beside[s * 2 * queries + queries + c] = c < left ? delta[c] : 0.f;
  }
  __syncwarp();
  if (lane_of() == 0) barrier_arrive(m.x.full + s);
}

template <int D, bool masked>
struct KeyConsumer {
  static constexpr int queries = KeyBlock<D>::rows;
  const KeyShared<D>& m;
  int group;
  float factor;  // scale / ln 2
  GroupSums<queries> p, ds;
  Array<Pairs, queries / 16> weights, gradients;  // p and ds, rounded
  GroupSums<D> dk, dv;

  __device__ KeyConsumer(const KeyShared<D>& shared, int of_block, float of_scores)
      : m(shared), group(of_block), factor(of_scores) {}

  __device__ __forceinline__ const float* statistics(int i) const {
    return m.beside + m.x.stage(i) * 2 * queries + forgotten(lane_of()) % 4 * 2;
  }
  // Tile i up to its weights, while their gradients are under way: so at the end of a loop's body, within which the
  // compiler would have those waited for before the exponentials. Query c of it is before key r if r > c + behind.
  // edge: the tile has queries that do not see all keys.
  template <bool edge>
  __device__ __forceinline__ void begin(int i, int behind) {
    m.x.wait_full(i);
    forget(p), forget(ds);
    wgmma_fence(p, ds);
    multiply_own<D, queries>(p, m.a, m.x.at(i), group);
    m.y.wait_full(i);
    multiply_own<D, queries>(ds, m.b, m.y.at(i), group);
    wgmma_wait<1>(p);
    const float* lse = statistics(i);
#pragma unroll
    for (int e = 0; e < queries / 2; ++e) p[e] = exp2_fast(p[e] * factor - lse[e / 4 * 8 + e % 2]);
    if constexpr (edge) {
      const int lane = forgotten(lane_of()), limit = behind + lane % 4 * 2 - warp_of() * 16 - lane / 4;
#pragma unroll
      for (int e = 0; e < queries / 2; ++e)
        if (e % 4 / 2 * 8 - e / 4 * 8 - e % 2 > limit) p[e] = 0;
      if constexpr (masked) hide_behind(p, m.sight + group * 64, behind - group * 64);
    }
  }
  // The rest of it.
  __device__ __forceinline__ void finish(int i) {
    wgmma_wait<0>(ds);
    const float* delta = statistics(i) + queries;
#pragma unroll
    for (int e = 0; e < queries / 2; e += 2) {
      const float* of = delta + e / 4 * 8;
      weights[e / 8][e % 8 / 2] = pack(p[e], p[e + 1]);
      gradients[e / 8][e % 8 / 2] = pack(p[e] * (ds[e] - of[0]), p[e + 1] * (ds[e + 1] - of[1]));
    }
    wgmma_fence(weights, gradients, dv, dk);
    add_weighted<D, queries>(dv, weights, m.y.at(i), i == 0);
    add_weighted<D, queries>(dk, gradients, m.x.at(i), i == 0);
    wgmma_wait<1>(dv, weights);
    m.y.release(i);
    wgmma_wait<0>(dk, gradients);
    m.x.release(i);
  }
};

#endif  // CROSSPLY_HOPPER

template <int D, bool masked>
__global__ void __launch_bounds__(threads, 1)
    attention_hopper_dkdv_kernel(AttentionBackward<bf16> g, const __grid_constant__ TensorMap q,
                                 const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                                 const __grid_constant__ TensorMap dout, AttentionSizes z, Sections sections,
                                 float factor) {
#if CROSSPLY_HOPPER
  constexpr int queries = KeyBlock<D>::rows;
  const KeyShared<D> m;
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warpgroup_size, 0);
  const BlockPlace place = sections.place(blockIdx.x);
  const int T = static_cast<int>(z.T), heads = static_cast<int>(z.group), first = place.tile * block_rows;
  if (threadIdx.x == 0) m.init(2);
  if constexpr (masked) find_forth<block_rows, threads>(m.sight, z, place.b, first);
  __syncthreads();
  const int seeing = masked ? block_rows + m.sight[block_rows - 1] : T - first;  // queries of each head
  const int tiles = (seeing + queries - 1) / queries;
  if (role == groups) {
    give_registers<producer_registers>();
    const int warp = warp_of() % 4;
    if (warp == 0 && lane_of() == 0) m.load_own(k, v, first, place.h, place.b);
    for (int i = 0; i < heads * tiles; ++i) {
      const int h = place.h * heads + i / tiles, t = first + i % tiles * queries;
      const int64_t row = (place.b * z.H + h) * z.T + t;
      if (warp == 0 && lane_of() == 0) m.x.fill(i, q, t, h, place.b), m.y.fill(i, dout, t, h, place.b);
      if (warp == 1) load_statistics<D>(m, g.lse + row, g.delta + row, i, T - t);
    }
    return;
  }
  take_registers<registers>();
  KeyConsumer<D, masked> c(m, role, factor);
  // So many queries see all of the group's keys that are not behind them.
  const int all_see = masked ? role * 64 + m.sight[role * 64] + 1 : INT32_MAX;
  barrier_wait(m.own_full, 0);
  c.template begin<true>(0, 0);
  for (int i = 1, tile = 1; i < heads * tiles; ++i, ++tile) {
    if (tile == tiles) tile = 0;
    c.finish(i - 1);
    if (tile * queries < block_rows - 1 || (masked && (tile + 1) * queries > all_see))
      c.template begin<true>(i, tile * queries);
    else c.template begin<false>(i, 0);
  }
  c.finish(heads * tiles - 1);
  const BlockPlace to = sections.place(forgotten(blockIdx.x));  // the loop had better use for its registers
  const int64_t row = to.tile * block_rows + role * 64, at = z.key_head(to.b, to.h) + row * z.key_stride;
  store_rows<D>(g.dk + at, z.key_stride, c.dk, {g.scale, g.scale}, static_cast<int>(z.T - row), g.accumulate_k);
  store_rows<D>(g.dv + at, z.key_stride, c.dv, {1.f, 1.f}, static_cast<int>(z.T - row), g.accumulate_v);
#endif
}

// -----------------------------------------------------------------------------------------------------------------
// Gradients of queries.

#if CROSSPLY_HOPPER

template <int D, bool masked>
struct QueryConsumer {
  using F = QueryBlock<D>;
  const Shared<F>& m;
  int group;
  float factor;            // scale / ln 2
  float lse[2], delta[2];  // of the thread's two rows; lse / ln 2
  GroupSums<F::rows> p, ds;
  Array<Pairs, F::rows / 16> gradients;  // ds, rounded
  GroupSums<D> dq;

  __device__ QueryConsumer(const Shared<F>& shared, int of_block, float of_scores)
      : m(shared), group(of_block), factor(of_scores) {}

  // From those of the group's first row; `left` rows are there.
  __device__ __forceinline__ void load_statistics(const float* of_lse, const float* of_delta, int left) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_of() % 4 * 16 + lane_of() / 4 + half * 8;
      lse[half] = r < left ? of_lse[r] * log2_of_e : INFINITY;
      delta[half] = r < left ? of_delta[r] : 0.f;
    }
  }
  // With heads of 64 there are registers for a tile's last product to go on beside the next one's first.
  static constexpr bool overlaps = D == 64;

  // Tile i up to its weights, as in KeyConsumer. Its key c is behind the group's row r if c > r + ahead.
  template <bool edge>
  __device__ __forceinline__ void begin(int i, int ahead) {
    m.x.wait_full(i);
    forget(p), forget(ds);
    wgmma_fence(p, ds);
    multiply_own<D, F::rows>(p, m.a, m.x.at(i), group);
    m.y.wait_full(i);
    multiply_own<D, F::rows>(ds, m.b, m.y.at(i), group);
    if constexpr (overlaps) {
      wgmma_wait<2>(dq, gradients);
      if (i > 0) m.x.release(i - 1);
    }
    wgmma_wait<1>(p);
    const int lane = forgotten(lane_of()), limit = ahead + warp_of() % 4 * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < F::rows / 2; ++e) {
      p[e] = exp2_fast(p[e] * factor - lse[e % 4 / 2]);
      if (edge && e / 4 * 8 + e % 2 - e % 4 / 2 * 8 > limit) p[e] = 0;
    }
    if constexpr (edge && masked) hide_before(p, m.sight + group * 64, ahead, 0);
  }
  // The rest of it.
  __device__ __forceinline__ void finish(int i) {
    wgmma_wait<0>(ds);
    m.y.release(i);
#pragma unroll
    for (int e = 0; e < F::rows / 2; e += 2) {
      const float of_row = delta[e % 4 / 2];
      gradients[e / 8][e % 8 / 2] = pack(p[e] * (ds[e] - of_row), p[e + 1] * (ds[e + 1] - of_row));
    }
    wgmma_fence(gradients, dq);
    add_weighted<D, F::rows>(dq, gradients, m.x.at(i), i == 0);
    if constexpr (overlaps) return;
    wgmma_wait<0>(dq, gradients);
    m.x.release(i);
  }
};

#endif  // CROSSPLY_HOPPER

template <int D, bool masked>
__global__ void __launch_bounds__(threads, 1)
    attention_hopper_dq_kernel(AttentionBackward<bf16> g, const __grid_constant__ TensorMap q,
                               const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                               const __grid_constant__ TensorMap dout, AttentionSizes z, Sections sections,
                               float factor) {
#if CROSSPLY_HOPPER
  using F = QueryBlock<D>;
  const Shared<F> m;
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warpgroup_size, 0);
  const BlockPlace place = sections.place(blockIdx.x);
  const int first = place.tile * block_rows;
  if (threadIdx.x == 0) m.init(1);
  if constexpr (masked) find_back<block_rows, threads>(m.sight, z, place.b, first);
  __syncthreads();
  // Tiles of keys are as long as those of queries.
  const int begin = masked ? (first - m.sight[0]) / F::rows : 0, tiles = place.tile + 1 - begin;
  if (role == groups) {
    give_registers<producer_registers>();
    if (threadIdx.x % warpgroup_size != 0) return;
    const int kv = place.h / static_cast<int>(z.group);
    m.load_own(q, dout, first, place.h, place.b);
    for (int i = 0; i < tiles; ++i) {
      const int key = (begin + i) * F::rows;
      m.x.fill(i, k, key, kv, place.b), m.y.fill(i, v, key, kv, place.b);
    }
    return;
  }
  take_registers<registers>();
  QueryConsumer<D, masked> c(m, role, factor);
  const int64_t statistics = (place.b * z.H + place.h) * z.T + first + role * 64;
  c.load_statistics(g.lse + statistics, g.delta + statistics, static_cast<int>(z.T) - first - role * 64);
  barrier_wait(m.own_full, 0);
  const auto ahead = [&](int i) { return (tiles - 1 - i) * F::rows + role * 64; };
  // All of the group's queries see the keys of a tile with no more ahead that are not behind them.
  const int all_see = masked ? m.sight[role * 64 + 63] - 63 : INT32_MAX;
  c.template begin<true>(0, ahead(0));
  for (int i = 1; i < tiles; ++i) {
    c.finish(i - 1);
    if (i + 1 < tiles && ahead(i) <= all_see) c.template begin<false>(i, 0);
    else c.template begin<true>(i, ahead(i));
  }
  c.finish(tiles - 1);
  wgmma_wait<0>(c.dq, c.gradients);
  const BlockPlace to = sections.place(forgotten(blockIdx.x));
  const int64_t row = to.tile * block_rows + role * 64;
  store_rows<D>(g.dq + z.query_head(to.b, to.h) + row * z.query_stride, z.query_stride, c.dq, {g.scale, g.scale},
                static_cast<int>(z.T - row), g.accumulate_q);
#endif
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void attention_backward_hopper(const AttentionBackward<bf16>& g, const AttentionSizes& z) {
  const auto run = [&](auto width, auto masked) {
    constexpr int D = width, queries = KeyBlock<D>::rows;
    const int64_t tiles = blocks_of(z.T, block_rows);
    const TensorMap k = map_of_keys(g.k, z, block_rows), v = map_of_keys(g.v, z, block_rows);
    const float factor = g.scale * log2_of_e;
    const Sections keys = sections_of_keys(z, tiles), rows = sections_of_queries(z, tiles);
    constexpr size_t beside = mask_bytes<masked, block_rows>;
    launch({"attention_dkdv_hopper", keys.blocks(), threads, KeyBlock<D>::shared_bytes + beside},
           attention_hopper_dkdv_kernel<D, masked>, g, map_of_queries(g.q, z, queries), k, v,
           map_of_queries(g.dout, z, queries), z, keys, factor);
    launch({"attention_dq_hopper", rows.blocks(), threads, QueryBlock<D>::shared_bytes + beside},
           attention_hopper_dq_kernel<D, masked>, g, map_of_queries(g.q, z, block_rows), k, v,
           map_of_queries(g.dout, z, block_rows), z, rows, factor);
  };
  with_mask(z, [&](auto masked) {
    if (z.D == 64) run(std::integral_constant<int, 64>{}, masked);
    else run(std::integral_constant<int, 128>{}, masked);
  });
}

}  // namespace crossply
