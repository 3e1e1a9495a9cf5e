// Attention's backward on tensor cores, in two kernels, each of which writes every element of its results once: dk and
// dv by blocks of keys, which add up over the queries and the heads of their group, and dq by blocks of queries. So
// does attention.cu in float multiply-adds, of which tensor cores do about 15 times as many a clock; the plain backward
// keeps all p and ds in memory instead.
//
// Both make the scores and the gradients of the weights anew, so that there are 7 products instead of 5. That is the
// price of sums in a fixed order without atomics. The other ways: dq in parts, one for each block of 128 keys, are
// T / 256 times dq in f32 on average, written and read, which at T = 2048 takes as long as the two products and needs
// memory that grows with the square of T; blocks of keys that take turns in adding to dq wait for each other.
//
// Weights and their gradients stay in the registers in which the tensor cores leave them, transposed in the first
// kernel, so that they are the left operand of the next product. Bound by the tensor cores (14 D operations for each
// query and key that it sees), and about as much by reading fragments from shared memory where D is 128: a warp has
// registers for the sums of only 16 keys, so that a fragment of q or dout serves one product in the first kernel. In
// the second it serves two.
//
// Not yet run on hardware: only in the emulator.
#include "kernels/attention/attention_mma.cuh"

namespace crossply {
namespace {

// Up to D = 64 at most 49 KiB of shared memory, else 97 KiB, but 129 KiB for D = 128 unless in small blocks, which are
// for the GPUs that do not have so much.
template <int width, bool small, bool masked>
struct KeyBlock {
  static constexpr int warps = width == 96 || (width == 128 && !small) ? 8 : 4, threads = warps * warp_size;
  static constexpr int m = width > 64 ? 1 : 2, keys = warps * 16 * m;
  static constexpr int queries = width <= 64 ? 32 : width <= 128 ? 64 : 16;
  static constexpr int columns = width < 128 ? width : 128;  // of dk and dv; a block for each part of the columns
  static constexpr size_t shared_bytes =
      (2 * keys + 4 * queries) * width * sizeof(bf16) + 4 * queries * sizeof(float) + mask_bytes<masked, keys>;
};

// As place_of_queries.
struct KeyPlace {
  int64_t b, kv;
  int first;
};
template <int keys>
__device__ __forceinline__ KeyPlace place_of_keys(const AttentionSizes& z) {
  const uint32_t x = forgotten(blockIdx.x), heads = static_cast<uint32_t>(z.K);
  return {x / heads, x % heads, static_cast<int>(forgotten(blockIdx.y)) * keys};
}

// Block (x: head of k and v, y: keys, from the first ones, which most queries see, z: columns). factor: scale / ln 2.
template <int width, bool small, bool masked>
__global__ void __launch_bounds__(KeyBlock<width, small, masked>::threads, width > 64 ? 1 : 2)
    attention_dkdv_kernel(AttentionBackward<bf16> g, AttentionSizes z, float factor) {
  using F = KeyBlock<width, small, masked>;
  constexpr int tile = F::queries * width, n = F::queries / 8, columns = F::columns / 8;
  bf16 *k_tile = dynamic_shared<bf16>(), *v_tile = k_tile + F::keys * width, *q_tiles = v_tile + F::keys * width;
  bf16* dout_tiles = q_tiles + 2 * tile;
  float* stats = reinterpret_cast<float*>(dout_tiles + 2 * tile);  // (2, lse and delta, queries)
  const int D = static_cast<int>(z.D), T = static_cast<int>(z.T), group = static_cast<int>(z.group);
  [[maybe_unused]] int* forth = reinterpret_cast<int*>(stats + 4 * F::queries);  // (keys)
  const KeyPlace place = place_of_keys<F::keys>(z);
  const int first = place.first, last = first + F::keys < T ? first + F::keys - 1 : T - 1;
  const int end = masked ? static_cast<int>(z.upper(place.b, last)) + 1 : T;  // of the queries that see the block
  int head = 0, t = first;  // of the tile of queries to be loaded next: from the first key on, head by head
  const auto load_queries = [&](int buffer) {
    const KeyPlace p = place_of_keys<F::keys>(z);
    const int64_t h = p.kv * z.group + head, at = z.query_head(p.b, h) + t * z.query_stride;
    const int left = T - t, thread = static_cast<int>(threadIdx.x), c = thread % F::queries;
    load_tile<width, F::queries, F::threads>(q_tiles + buffer * tile, g.q + at, z.query_stride, left, D);
    load_tile<width, F::queries, F::threads>(dout_tiles + buffer * tile, g.dout + at, z.query_stride, left, D);
    if (thread < 2 * F::queries) {
      const float* from = (thread < F::queries ? g.lse : g.delta) + (p.b * z.H + h) * z.T + t;
      cp_async<4>(stats + 2 * buffer * F::queries + thread, c < left ? from + c : from, c < left);
    }
    cp_async_commit();
    t += F::queries;
    if (t >= end) t = first, ++head;
  };
  const int64_t at = z.key_head(place.b, place.kv) + first * z.key_stride;
  load_tile<width, F::keys, F::threads>(k_tile, g.k + at, z.key_stride, T - first, D);
  load_tile<width, F::keys, F::threads>(v_tile, g.v + at, z.key_stride, T - first, D);
  load_queries(0);
  if constexpr (masked) find_forth<F::keys, F::threads>(forth, z, place.b, first);

  const int warp_row = warp_of() * 16 * F::m, part = static_cast<int>(blockIdx.z) * columns;
  Sums<F::m, columns> dk{}, dv{};
  const int first_seen = first + warp_row < T ? warp_row : INT32_MAX;  // a warp without keys sees no queries
  bool more = true;
  // Query c of the tile sees key r of the block if r <= c + behind.
  for (int behind = 0, following, buffer = 0; more; behind = following, buffer ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is there for all, and nobody reads the other one any more
    following = t - first, more = head < group;
    if (more) load_queries(buffer ^ 1);
    if (behind + F::queries <= first_seen) continue;
    const int last_row = warp_row + 16 * F::m - 1;
    if (masked && behind > last_row + forth[last_row]) continue;  // they are behind those that see the warp's keys
    const bf16 *q_tile = q_tiles + buffer * tile, *dout_tile = dout_tiles + buffer * tile;
    const float* lse = stats + 2 * buffer * F::queries + lane_of() % 4 * 2;
    Sums<F::m, n> p{}, ds{};
    multiply_rows<width>(p, k_tile + warp_row * width, q_tile);
#pragma unroll
    for (int j = 0; j < n; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float of_query = lse[j * 8 + c] * log2_of_e;
#pragma unroll
        for (int r = 0; r < F::m; ++r)
          p[r][j][c] = exp2_fast(p[r][j][c] * factor - of_query),
          p[r][j][c + 2] = exp2_fast(p[r][j][c + 2] * factor - of_query);
      }
    if (behind < last_row) {
      const int lane = forgotten(lane_of()), limit = behind + lane % 4 * 2 - warp_row - lane / 4;
#pragma unroll
      for (int r = 0; r < F::m; ++r)
#pragma unroll
        for (int j = 0; j < n; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (r * 16 + c / 2 * 8 > limit + j * 8 + c % 2) p[r][j][c] = 0;
    }
    if constexpr (masked)
      if (behind + F::queries - 1 > warp_row + forth[warp_row]) hide_behind(p, forth + warp_row, behind - warp_row);
    multiply_weights<width>(dv, rounded(p), dout_tile, part);
    multiply_rows<width>(ds, v_tile + warp_row * width, dout_tile);
#pragma unroll
    for (int j = 0; j < n; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float delta = lse[F::queries + j * 8 + c];
#pragma unroll
        for (int r = 0; r < F::m; ++r)
          ds[r][j][c] = p[r][j][c] * (ds[r][j][c] - delta),
          ds[r][j][c + 2] = p[r][j][c + 2] * (ds[r][j][c + 2] - delta);
      }
    multiply_weights<width>(dk, rounded(ds), q_tile, part);
  }

  const KeyPlace to = place_of_keys<F::keys>(z);
  const int lane = forgotten(lane_of()), row = to.first + warp_row + lane / 4, column = part * 8 + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < F::m; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = row + r * 16 + half * 8;
      if (key >= T) continue;
      const int64_t y = z.key_head(to.b, to.kv) + key * z.key_stride + column;
#pragma unroll
      for (int j = 0; j < columns; ++j)
        if (part * 8 + j * 8 < D) {
          store_or_accumulate<2>(g.dk + y + j * 8, {dk[r][j][2 * half] * g.scale, dk[r][j][2 * half + 1] * g.scale},
                                 g.accumulate_k);
          store_or_accumulate<2>(g.dv + y + j * 8, {dv[r][j][2 * half], dv[r][j][2 * half + 1]}, g.accumulate_v);
        }
    }
}

// At most 96 KiB of shared memory.
template <int width, bool masked>
struct QueryBlock {
  static constexpr int warps = 4, m = width > 128 ? 1 : 2, queries = warps * 16 * m, threads = warps * warp_size;
  static constexpr int keys = width > 128 ? 16 : 32;
  static constexpr size_t shared_bytes = (2 * queries + 4 * keys) * width * sizeof(bf16) + mask_bytes<masked, queries>;
};

// Block (x: head, y: queries from the last ones). factor: scale / ln 2.
template <int width, bool masked>
__global__ void __launch_bounds__(QueryBlock<width, masked>::threads, 2)
    attention_dq_kernel(AttentionBackward<bf16> g, AttentionSizes z, float factor) {
  using F = QueryBlock<width, masked>;
  constexpr int tile = F::keys * width, n = F::keys / 8;
  bf16 *q_tile = dynamic_shared<bf16>(), *dout_tile = q_tile + F::queries * width;
  bf16 *k_tiles = dout_tile + F::queries * width, *v_tiles = k_tiles + 2 * tile;
  [[maybe_unused]] int* back = reinterpret_cast<int*>(v_tiles + 2 * tile);  // (queries)
  const auto [b, h, first, left] = place_of_queries<F::queries>(z);
  const int D = static_cast<int>(z.D), seen = first + (left < F::queries ? left : F::queries);
  const int begin = masked ? static_cast<int>(first_tile<F::keys>(z, b, first)) : 0;
  // Where the rows to be loaded next begin.
  int64_t next = z.key_head(b, static_cast<uint32_t>(h) / static_cast<uint32_t>(z.group)) + begin * z.key_stride;
  const auto load_keys = [&](int there, int buffer) {
    load_tile<width, F::keys, F::threads>(k_tiles + buffer * tile, g.k + next, z.key_stride, there, D);
    load_tile<width, F::keys, F::threads>(v_tiles + buffer * tile, g.v + next, z.key_stride, there, D);
    next += F::keys * z.key_stride;
    cp_async_commit();
  };
  const int64_t at = z.query_head(b, h) + first * z.query_stride;
  load_tile<width, F::queries, F::threads>(q_tile, g.q + at, z.query_stride, left, D);
  load_tile<width, F::queries, F::threads>(dout_tile, g.dout + at, z.query_stride, left, D);
  load_keys(seen - begin, 0);
  if constexpr (masked) find_back<F::queries, F::threads>(back, z, b, first);

  const int warp_row = warp_of() * 16 * F::m;
  float lse[F::m][2], delta[F::m][2];
#pragma unroll
  for (int i = 0; i < F::m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_row + lane_of() / 4 + i * 16 + half * 8;
      const int64_t row = (b * z.H + h) * z.T + first + r;
      lse[i][half] = r < left ? g.lse[row] * log2_of_e : 0;
      delta[i][half] = r < left ? g.delta[row] : 0;
    }
  Sums<F::m, width / 8> dq{};
  int buffer = 0;
  // Key c of the tile is there if c < there, and row r of the block sees it if c <= r + ahead; idle warps see none.
  int ahead = warp_row < left ? first - begin : INT32_MIN / 2;
  for (int there = seen - begin; there > 0; there -= F::keys, ahead -= F::keys, buffer ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is there for all, and nobody reads the other one any more
    if (there > F::keys) load_keys(there - F::keys, buffer ^ 1);
    if (ahead + warp_row + 16 * F::m <= 0) continue;
    if (masked && ahead + warp_row - back[warp_row] >= F::keys) continue;  // they are before those that it sees
    Sums<F::m, n> p{}, ds{};
    multiply_rows<width>(p, q_tile + warp_row * width, k_tiles + buffer * tile);
    multiply_rows<width>(ds, dout_tile + warp_row * width, v_tiles + buffer * tile);
#pragma unroll
    for (int i = 0; i < F::m; ++i)
#pragma unroll
      for (int j = 0; j < n; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          ds[i][j][c] = exp2_fast(p[i][j][c] * factor - lse[i][c / 2]) * (ds[i][j][c] - delta[i][c / 2]);
    if (ahead + warp_row < F::keys - 1) {
      const int lane = forgotten(lane_of()), column = lane % 4 * 2, limit = ahead + warp_row + lane / 4;
#pragma unroll
      for (int i = 0; i < F::m; ++i)
#pragma unroll
        for (int j = 0; j < n; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (j * 8 + column + c % 2 > limit + i * 16 + c / 2 * 8) ds[i][j][c] = 0;
    }
    if constexpr (masked) {
      const int last_row = warp_row + 16 * F::m - 1;
      if (ahead + last_row - back[last_row] > 0) hide_before(ds, back + warp_row, ahead + warp_row, 0);
    }
    multiply_weights<width>(dq, rounded(ds), k_tiles + buffer * tile, 0);
  }

  const auto to = place_of_queries<F::queries>(z);
  const int lane = forgotten(lane_of()), row = warp_row + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < F::m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8;
      if (r >= to.left) continue;
      bf16* y = g.dq + z.query_head(to.b, to.h) + (to.first + r) * z.query_stride + column;
#pragma unroll
      for (int j = 0; j < width / 8; ++j)
        if (j * 8 < D)
          store_or_accumulate<2>(y + j * 8, {dq[i][j][2 * half] * g.scale, dq[i][j][2 * half + 1] * g.scale},
                                 g.accumulate_q);
    }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

template <int width, bool small, bool masked>
void launch_dkdv(const AttentionBackward<bf16>& g, const AttentionSizes& z) {
  using F = KeyBlock<width, small, masked>;
  const dim3 grid(static_cast<uint32_t>(z.B * z.K), blocks_of(z.T, F::keys), blocks_of(z.D, F::columns));
  launch({"attention_dkdv_mma", grid, F::threads, F::shared_bytes}, attention_dkdv_kernel<width, small, masked>, g, z,
         g.scale * log2_of_e);
}

template <int width, bool masked>
void launch_backward(const AttentionBackward<bf16>& g, const AttentionSizes& z) {
  using Large = KeyBlock<width, false, masked>;
  // Each sum is the same in blocks of either size.
  if constexpr (width == 128)
    if (z.T <= KeyBlock<width, true, masked>::keys || max_shared_bytes() < int64_t{Large::shared_bytes})
      launch_dkdv<width, true, masked>(g, z);
    else launch_dkdv<width, false, masked>(g, z);
  else launch_dkdv<width, false, masked>(g, z);
  using F = QueryBlock<width, masked>;
  const dim3 grid(static_cast<uint32_t>(z.B * z.H), blocks_of(z.T, F::queries));
  launch({"attention_dq_mma", grid, F::threads, F::shared_bytes}, attention_dq_kernel<width, masked>, g, z,
         g.scale * log2_of_e);
}

void attention_backward_mma(const AttentionBackward<bf16>& g, const AttentionSizes& z) {
  with_tile_width(z.D, [&](auto width) { with_mask(z, [&](auto masked) { launch_backward<width, masked>(g, z); }); });
}

}  // namespace crossply
