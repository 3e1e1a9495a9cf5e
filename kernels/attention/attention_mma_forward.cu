// Attention's forward on tensor cores.
//
// attention.cu has the same loops in float multiply-adds. Tensor cores do about 15 times as many a clock, but only on
// tiles of 16 rows: one instruction takes 16 queries against 8 keys. At this speed shared memory would be too slow for
// the scores, and they stay in registers.
//
// A block of four warps takes 128 queries of one head, 32 to a warp, against tiles of 48 keys: a fragment of k or v,
// once read from shared memory, then serves two products, without which reading it would be the bound. (With 64 keys
// the registers do not suffice.) While one tile is worked on the next is on its way. Scores stay in registers, where
// the softmax is taken online, in base 2. Bound by the tensor cores: 4 D operations for each query and key that it
// sees, against 4 D bytes from L2 for each key and 128 queries.
//
// Not yet run on hardware: only in the emulator.
#include "kernels/attention/attention_mma.cuh"

namespace crossply {
namespace {

// At most 96 KiB of shared memory, for two blocks at once on GPUs for computing, and one on any from sm_80 on.
template <int width, bool masked>
struct Forward {
  static constexpr int warps = 4, m = width > 128 ? 1 : 2, queries = warps * 16 * m, threads = warps * warp_size;
  static constexpr int keys = width > 128 ? 32 : width > 32 ? 48 : 64, blocks_at_once = width > 64 ? 2 : 3;
  static constexpr size_t shared_bytes = (queries + 4 * keys) * width * sizeof(bf16) + mask_bytes<masked, queries>;
};

// What a warp keeps of its rows: two of each 16 are a lane's. max is of the scores times scale / ln 2, and sum that of
// the lane's own columns.
template <int m, int n>
struct AttentionSoftmax {
  float max[m][2], sum[m][2];
  Sums<m, n> out;

  // Scores become weights, what was summed before is rescaled. A NaN is not the largest, but makes a weight of NaN.
  template <int64_t keys>
  __device__ __forceinline__ void take(Sums<m, keys>& s, float factor) {
#pragma unroll
    for (int i = 0; i < m; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = s[i][0][2 * half];
#pragma unroll
        for (int j = 0; j < keys; ++j) largest = fmaxf(largest, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
        const float before = max[i][half], now = fmaxf(before, largest_of_row(largest) * factor);
        const float shrink = exp2_fast(before - now);
        max[i][half] = now;
        sum[i][half] *= shrink;
#pragma unroll
        for (int j = 0; j < n; ++j) out[i][j][2 * half] *= shrink, out[i][j][2 * half + 1] *= shrink;
      }
#pragma unroll
    for (int j = 0; j < keys; ++j)
#pragma unroll
      for (int i = 0; i < m; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[i][j][c] = exp2_fast(s[i][j][c] * factor - max[i][c / 2]);
          sum[i][c / 2] += s[i][j][c];
        }
  }
};

// Block (x: head, y: queries from the last ones, which see the most keys and should begin first). factor: scale / ln 2.
template <int width, bool masked>
__global__ void __launch_bounds__(Forward<width, masked>::threads, Forward<width, masked>::blocks_at_once)
    attention_forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, AttentionSizes z,
                             float factor) {
  using F = Forward<width, masked>;
  constexpr int tile = F::keys * width;
  bf16 *q_tile = dynamic_shared<bf16>(), *k_tiles = q_tile + F::queries * width, *v_tiles = k_tiles + 2 * tile;
  [[maybe_unused]] int* back = reinterpret_cast<int*>(v_tiles + 2 * tile);  // (queries)
  const auto [b, h, first, left] = place_of_queries<F::queries>(z);
  const int D = static_cast<int>(z.D), pos = static_cast<int>(z.pos),
            seen = pos + first + (left < F::queries ? left : F::queries);
  const int begin = masked ? static_cast<int>(first_tile<F::keys>(z, b, pos + first)) : 0;
  int64_t next = z.key_head(b, h / z.group) + begin * z.key_stride;  // where the rows to be loaded next begin
  const auto load_keys = [&](int there, int buffer) {
    load_tile<width, F::keys, F::threads>(k_tiles + buffer * tile, k + next, z.key_stride, there, D);
    load_tile<width, F::keys, F::threads>(v_tiles + buffer * tile, v + next, z.key_stride, there, D);
    next += F::keys * z.key_stride;
    cp_async_commit();
  };
  q += z.query_head(b, h) + first * z.query_stride;
  load_tile<width, F::queries, F::threads>(q_tile, q, z.query_stride, left, D);
  load_keys(seen - begin, 0);
  if constexpr (masked) find_back<F::queries, F::threads>(back, z, b, first);

  const int warp_row = warp_of() * 16 * F::m;
  AttentionSoftmax<F::m, width / 8> rows;
#pragma unroll
  for (int i = 0; i < F::m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.max[i][half] = max_of_none, rows.sum[i][half] = 0;
#pragma unroll
    for (int j = 0; j < width / 8; ++j) rows.out[i][j] = Floats<4>{};
  }
  int buffer = 0;
  // Key c of the tile is there if c < there, and row r of the block sees it if c <= r + ahead; idle warps see none.
  int ahead = warp_row < left ? pos + first - begin : INT32_MIN / 2;
  for (int there = seen - begin; there > 0; there -= F::keys, ahead -= F::keys, buffer ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is there for all, and nobody reads the other one any more
    if (there > F::keys) load_keys(there - F::keys, buffer ^ 1);
    if (ahead + warp_row + 16 * F::m <= 0) continue;
    if (masked && ahead + warp_row - back[warp_row] >= F::keys) continue;  // they are before those that it sees
    Sums<F::m, F::keys / 8> s{};
    multiply_rows<width>(s, q_tile + warp_row * width, k_tiles + buffer * tile);
    if (ahead + warp_row < F::keys - 1) {
      const int lane = forgotten(lane_of()), column = lane % 4 * 2, limit = ahead + warp_row + lane / 4;
#pragma unroll
      for (int i = 0; i < F::m; ++i)
#pragma unroll
        for (int j = 0; j < F::keys / 8; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (j * 8 + column + c % 2 > limit + i * 16 + c / 2 * 8) s[i][j][c] = -INFINITY;
    }
    if constexpr (masked) {
      const int last_row = warp_row + 16 * F::m - 1;
      if (ahead + last_row - back[last_row] > 0) hide_before(s, back + warp_row, ahead + warp_row, -INFINITY);
    }
    rows.take(s, factor);
    multiply_weights<width>(rows.out, rounded(s), v_tiles + buffer * tile, 0);
  }

  const auto to = place_of_queries<F::queries>(z);
  const int lane = forgotten(lane_of()), row = warp_row + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < F::m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8;
      const float sum = sum_of_row(rows.sum[i][half]), share = 1 / sum;
      if (r >= to.left) continue;
      if (lse != nullptr && lane % 4 == 0)
        lse[(to.b * z.H + to.h) * z.T + to.first + r] = (rows.max[i][half] + log2f(sum)) * ln_of_2;
      bf16* y = out + z.query_head(to.b, to.h) + (to.first + r) * z.query_stride + column;
#pragma unroll
      for (int j = 0; j < width / 8; ++j)
        if (j * 8 < D) store_pair(y + j * 8, rows.out[i][j][2 * half] * share, rows.out[i][j][2 * half + 1] * share);
    }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void attention_forward_mma(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionSizes& z,
                           float scale) {
  with_tile_width(z.D, [&](auto width) {
    with_mask(z, [&](auto masked) {
      using F = Forward<width, masked>;
      const dim3 grid(static_cast<uint32_t>(z.B * z.H), blocks_of(z.T, F::queries));
      launch({"attention_forward_mma", grid, F::threads, F::shared_bytes}, attention_forward_kernel<width, masked>, out,
             lse, q, k, v, z, scale * log2_of_e);
    });
  });
}

}  // namespace crossply
