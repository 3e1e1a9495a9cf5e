// Attention's forward on the warpgroup products of sm_90.
//
// In attention_mma_forward.cu a warp loads fragments of k and v into registers before each product, and every thread
// copies a part of the tiles. Here a product of four warps reads k and v from shared memory itself, and one thread asks
// for whole tiles. The warps then issue little but products and exponentials, and one warpgroup's exponentials overlap
// with another one's products.
//
// A block takes 128 queries of a head (192 with heads of 64) against tiles of 128 keys, with a warpgroup for each 64
// of them, and one whose first thread only asks for what comes next. Keys and values of a tile have barriers of their
// own, so that scores can begin when the keys are there. While a warpgroup takes the softmax of its scores, another
// one's products are on the tensor cores, for which they take turns. Scores stay in registers, and go into the second
// product from there.
//
// Bound by the tensor cores with D = 128: of 64 queries and 128 keys 1,024 clocks, against 512 for the exponentials;
// with D = 64 by both, 512 clocks each. From shared memory 896 and 405 clocks.
//
// Not yet run on hardware: only in the emulator.
#include <bit>

#include "kernels/attention/attention_hopper.cuh"

namespace crossply {
namespace {

template <int D>
struct Forward {
  static constexpr int groups = D == 128 ? 2 : 3, queries = 64 * groups, keys = 128, stages = 3;
  static constexpr int threads = (groups + 1) * warpgroup_size;
  static constexpr int tile = keys * D;  // elements
  static constexpr size_t barriers = 1 + 4 * stages;
  static constexpr size_t shared_bytes = (queries * D + 2 * stages * tile) * sizeof(bf16) + barriers * sizeof(Barrier);
};

#if CROSSPLY_HOPPER

template <int D>
struct Shared {
  using F = Forward<D>;
  bf16 *q = panel_memory(), *k_tiles = q + F::queries * D, *v_tiles = k_tiles + F::stages * F::tile;
  Barrier *q_full = reinterpret_cast<Barrier*>(v_tiles + F::stages * F::tile), *barriers = q_full + 1;
  int* back = reinterpret_cast<int*>(barriers + 4 * F::stages);  // (queries), if masked
  Ring<F::stages, F::tile> k{k_tiles, barriers, barriers + F::stages};
  Ring<F::stages, F::tile> v{v_tiles, barriers + 2 * F::stages, barriers + 3 * F::stages};

  __device__ void init() const {
    barrier_init(q_full, 1);
    k.init(1, F::groups * 4), v.init(1, F::groups * 4);
    barrier_init_fence();
  }
};

template <int D>
__device__ __forceinline__ void produce(const Shared<D>& m, const BlockPlace& place, int begin, int tiles,
                                        const TensorMap& q, const TensorMap& k, const TensorMap& v, int group) {
  using F = Forward<D>;
  const int kv = place.h / group;
  barrier_expect(m.q_full, F::queries * D * sizeof(bf16));
  copy_box(m.q, q, m.q_full, place.tile * F::queries, place.h, place.b);
  for (int i = 0; i <= tiles; ++i) {  // keys are needed before the values of the tile before, and released before them
    if (i < tiles) m.k.fill(i, k, begin + i * F::keys, kv, place.b);
    if (i > 0) m.v.fill(i - 1, v, begin + (i - 1) * F::keys, kv, place.b);
  }
}

// A warpgroup and its 64 queries.
template <int D, bool masked>
struct Consumer {
  using F = Forward<D>;
  static constexpr int columns = F::keys / 8;
  const Shared<D>& m;
  int group;                        // which of the block's
  int first;                        // the first tile of keys that it sees
  float factor;                     // scale / ln 2
  float max[2], sum[2], shrink[2];  // of the thread's two rows; max of scores times factor, sum of its own columns
  GroupSums<F::keys> scores;
  Array<Pairs, F::keys / 16> weights;
  GroupSums<D> out;

  __device__ Consumer(const Shared<D>& shared, int of_block, int first_tile, float of_scores)
      : m(shared), group(of_block), first(first_tile), factor(of_scores) {}

  __device__ __forceinline__ void issue_scores(int i) {
    const uint32_t q = shared_address(m.q), k = shared_address(m.k.at(i));
#pragma unroll
    for (int d = 0; d < D; d += 16)
      wgmma<F::keys>(scores, descriptor_of_rows<F::queries>(q, group * 64, d), descriptor_of_rows<F::keys>(k, 0, d),
                     d > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_out(int i) {
    const uint32_t v = shared_address(m.v.at(i));
    m.v.wait_full(i);
#pragma unroll
    for (int k = 0; k < F::keys / 16; ++k)
      wgmma<D, true>(out, weights[k], descriptor_of_columns<F::keys>(v, k * 16, 0), i > first || k > 0);
    wgmma_commit();
  }
  // Key c of the tile is behind the group's row r if c > r + ahead.
  __device__ __forceinline__ void mask(int ahead) {
    const int lane = forgotten(lane_of()), limit = ahead + warp_of() % 4 * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < F::keys / 2; ++i)
      if (i / 4 * 8 + i % 2 - i % 4 / 2 * 8 > limit) scores[i] = -INFINITY;
    if constexpr (masked) hide_before(scores, m.back + group * 64, ahead, -INFINITY);
  }
  // Scores become weights; a NaN is not the largest, but makes a weight of NaN.
  __device__ __forceinline__ void take_softmax() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (int j = 0; j < columns; ++j)
        largest = fmaxf(largest, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      const float now = fmaxf(max[half], largest_of_row(largest) * factor);
      shrink[half] = exp2_fast(max[half] - now);
      max[half] = now;
      sum[half] *= shrink[half];
    }
#pragma unroll
    for (int i = 0; i < F::keys / 2; ++i) {
      scores[i] = exp2_fast(scores[i] * factor - max[i % 4 / 2]);
      sum[i % 4 / 2] += scores[i];
    }
  }
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int k = 0; k < F::keys / 16; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[k][r] = pack(scores[8 * k + 2 * r], scores[8 * k + 2 * r + 1]);
  }

  // A turn on the tensor cores: number 1 + group is this warpgroup's.
  __device__ __forceinline__ void begin_turn() const { named_barrier_wait(1 + group, 2 * warpgroup_size); }
  __device__ __forceinline__ void end_turn(bool last) const {
    if (!last || group + 1 < F::groups) named_barrier_arrive(1 + (group + 1) % F::groups, 2 * warpgroup_size);
  }

  __device__ __forceinline__ void give_first_turn() const {
    if (group == 0) named_barrier_arrive(1, 2 * warpgroup_size);
  }
  // Tile i, which only the block's other warpgroups see. It is there before it is released, since until then others
  // may still use the one before it in its place.
  __device__ __forceinline__ void pass(int i) const {
    begin_turn();
    end_turn(false);
    m.k.wait_full(i);
    m.k.release(i);
    m.v.wait_full(i);
    m.v.release(i);
  }
  // edge: the tile has keys that not all queries see.
  __device__ __forceinline__ void begin(bool edge, int ahead, bool last) {
    max[0] = max[1] = max_of_none, sum[0] = sum[1] = 0;
    barrier_wait(m.q_full, 0);
    m.k.wait_full(first);
    begin_turn();
    forget(scores);
    wgmma_fence(scores);
    issue_scores(first);
    end_turn(last);
    wgmma_wait<0>(scores);
    m.k.release(first);
    if (edge) mask(ahead);
    take_softmax();
    if (!last) m.k.wait_full(first + 1);
    pack_weights();
  }
  // Scores of tile i, while the one before it is added to out. The next tile's keys are waited for between the
  // exponentials and out: with no loop there, the compiler would have out waited for first.
  template <bool edge>
  __device__ __forceinline__ void step(int i, int ahead, bool last) {
    begin_turn();
    forget(scores);
    wgmma_fence(scores, weights, out);
    issue_scores(i);
    issue_out(i - 1);
    end_turn(last);
    wgmma_wait<1>(scores);
    m.k.release(i);
    if constexpr (edge) mask(ahead);
    take_softmax();
    if (!last) m.k.wait_full(i + 1);
    wgmma_wait<0>(out, weights);
    m.v.release(i - 1);
#pragma unroll
    for (int j = 0; j < D / 2; ++j) out[j] *= shrink[j % 4 / 2];
    pack_weights();
  }
  __device__ __forceinline__ void end(int i) {
    wgmma_fence(weights, out);
    issue_out(i);
    wgmma_wait<0>(out, weights);
  }

  // to, lse: where the group's first query is, of which `left` are there; lse may be null.
  __device__ __forceinline__ void store(bf16* to, float* lse, int64_t stride, int left) const {
    const int lane = forgotten(lane_of()), row = warp_of() % 4 * 16 + lane / 4;
    float share[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_row(sum[half]);
      share[half] = 1 / total;
      const int r = row + half * 8;
      if (lse != nullptr && lane % 4 == 0 && r < left) lse[r] = (max[half] + log2f(total)) * ln_of_2;
    }
    store_rows<D>(to, stride, out, share, left, false);
  }
};

#endif  // CROSSPLY_HOPPER

// factor: scale / ln 2.
template <int D, bool masked>
__global__ void __launch_bounds__(Forward<D>::threads, 1)
    attention_hopper_kernel(bf16* out, float* lse, const __grid_constant__ TensorMap q,
                            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, AttentionSizes z,
                            Sections sections, float factor) {
#if CROSSPLY_HOPPER
  using F = Forward<D>;
  constexpr int registers = D == 128 ? 240 : 160, producer_registers = D == 128 ? 24 : 32;
  const Shared<D> m;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / warpgroup_size, 0);
  const BlockPlace place = sections.place(blockIdx.x);
  if (threadIdx.x == 0) m.init();
  if constexpr (masked) find_back<F::queries, F::threads>(m.back, z, place.b, place.tile * F::queries);
  __syncthreads();
  // Keys are counted from the first tile's first one.
  const int position = static_cast<int>(z.pos) + place.tile * F::queries;
  const int first_key = masked ? (position - m.back[0]) / F::keys * F::keys : 0;
  const int first = position - first_key, last = static_cast<int>(z.pos + z.T) - 1 - first_key;
  const int all = (first + F::queries - 1 < last ? first + F::queries - 1 : last) / F::keys + 1;  // tiles of keys
  if (group == F::groups) {
    give_registers<producer_registers>();
    if (threadIdx.x % warpgroup_size == 0) produce<D>(m, place, first_key, all, q, k, v, static_cast<int>(z.group));
    return;
  }
  take_registers<registers>();
  // Query r of the group sees the keys up to r + begin. Tiles that all of them see, and those that any sees.
  const int begin = first + group * 64;
  const int clear = (begin + 1) / F::keys, seen = (begin + 63) / F::keys + 1, tiles = seen < all ? seen : all;
  // The tiles before `passed` are hidden from all of them, those from `whole` on hide no key that is not behind one.
  int passed = 0, whole = 0;
  if constexpr (masked) {
    const int* back = m.back + group * 64;
    passed = (begin - back[0]) / F::keys, whole = (begin + 63 - back[63] + F::keys - 1) / F::keys;
  }
  Consumer<D, masked> c(m, group, passed, factor);
  c.give_first_turn();
  int i = 0;
  for (; i < passed; ++i) c.pass(i);
  c.begin(i < whole || i >= clear, begin - i * F::keys, i + 1 == all);
  for (++i; i < whole && i < tiles; ++i) c.template step<true>(i, begin - i * F::keys, i + 1 == all);
  for (; i < clear && i < tiles; ++i) c.template step<false>(i, 0, i + 1 == all);
  for (; i < tiles; ++i) c.template step<true>(i, begin - i * F::keys, i + 1 == all);
  for (; i < all; ++i) c.begin_turn(), c.end_turn(i + 1 == all);
  c.end(tiles - 1);
  const BlockPlace to = sections.place(forgotten(blockIdx.x));  // the loop had better use for its registers
  const int64_t row = to.tile * F::queries + group * 64;
  c.store(out + z.query_head(to.b, to.h) + row * z.query_stride,
          lse != nullptr ? lse + (to.b * z.H + to.h) * z.T + row : nullptr, z.query_stride,
          static_cast<int>(z.T - row));
#endif
}

// So many heads at once as have what they read together, so many bytes each, in 32 MB of L2.
int64_t heads_at_once(int64_t bytes) {
  constexpr int64_t cached = 32 << 20;
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(cached / bytes, 1))));
}

Sections sections_of(int64_t B, int64_t heads_of_batch, int64_t at_once, int64_t tiles, bool last_first) {
  const int64_t heads = B * heads_of_batch;
  CHECK_THAT(heads * tiles <= INT32_MAX, "attention: ", heads, " heads of ", tiles, " tiles are too many for a grid");
  const auto small = [](int64_t n) { return static_cast<uint32_t>(n); };
  return {small(heads), small(std::min(at_once, heads)), small(heads_of_batch), small(tiles), last_first};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

Sections sections_of_queries(const AttentionSizes& z, int64_t tiles) {
  const int64_t bytes = 2 * (z.pos + z.T) * z.D * int64_t{sizeof(bf16)};
  return sections_of(z.B, z.H, heads_at_once(bytes) * z.group, tiles, true);
}
Sections sections_of_keys(const AttentionSizes& z, int64_t tiles) {
  const int64_t bytes = 2 * z.group * z.T * z.D * int64_t{sizeof(bf16)};
  return sections_of(z.B, z.K, heads_at_once(bytes), tiles, false);
}

void attention_forward_hopper(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                              const AttentionSizes& z, float scale) {
  const auto run = [&](auto width, auto masked) {
    constexpr int D = width;
    using F = Forward<D>;
    const Sections sections = sections_of_queries(z, blocks_of(z.T, F::queries));
    constexpr size_t bytes = F::shared_bytes + mask_bytes<masked, F::queries>;
    launch({"attention_forward_hopper", sections.blocks(), F::threads, bytes}, attention_hopper_kernel<D, masked>, out,
           lse, map_of_queries(q, z, F::queries), map_of_keys(k, z, F::keys), map_of_keys(v, z, F::keys), z, sections,
           scale * log2_of_e);
  };
  with_mask(z, [&](auto masked) {
    if (z.D == 64) run(std::integral_constant<int, 64>{}, masked);
    else run(std::integral_constant<int, 128>{}, masked);
  });
}

}  // namespace crossply
