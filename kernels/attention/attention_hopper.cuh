// Attention by the products of a warpgroup: what its forward and its backward share. For sm_90, bf16 and heads of 64 or
// 128; all else is attention_mma.cuh's.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/attention/attention_mma.cuh"
#include "kernels/cuda/hopper.cuh"

namespace crossply {

// Whether this GPU and this build have the instructions, and these shapes serve of those that attention_mma.cuh takes.
inline bool hopper_serves(const AttentionSizes& z) {
  return has_hopper() && (z.D == 64 || z.D == 128) && z.T >= 64 && z.S < INT32_MAX / 2;
}

// attention_hopper_forward.cu; like attention_forward_mma.
void attention_forward_hopper(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                              const AttentionSizes& z, float scale);
// attention_hopper_backward.cu; like attention_backward_mma.
void attention_backward_hopper(const AttentionBackward<bf16>& g, const AttentionSizes& z);

// Tensor maps of queries (B, T, H, D), and of keys or values (B, S, K, D), whose rows from pos + T on do not exist.
inline TensorMap map_of_queries(const bf16* x, const AttentionSizes& z, int rows) {
  return tensor_map({x, z.D, z.T, z.H, z.B, z.query_stride, z.D, z.T * z.H * z.D}, rows);
}
inline TensorMap map_of_keys(const bf16* x, const AttentionSizes& z, int rows) {
  return tensor_map({x, z.D, z.pos + z.T, z.K, z.B, z.key_stride, z.D, z.S * z.K * z.D}, rows);
}

// Blocks in the order in which they begin: heads in sections whose tiles fit into the L2 cache together, in a section
// all heads of a tile side by side, the longest tiles first.
struct BlockPlace {
  int b, h, tile;  // h: of a batch's heads
};
struct Sections {
  uint32_t heads, at_once;  // of all batches; of a section
  uint32_t heads_of_batch, tiles;
  bool last_first;  // of the tiles of a head

  uint32_t blocks() const { return heads * tiles; }

  // In 32 bits: a division of 64 takes some hundred instructions, at the beginning of every block.
  __device__ BlockPlace place(uint32_t block) const {
    const uint32_t section = block / (at_once * tiles), first = section * at_once;
    const uint32_t within = block - first * tiles, count = heads - first < at_once ? heads - first : at_once;
    const uint32_t head = first + within % count, tile = within / count;
    return {static_cast<int>(head / heads_of_batch), static_cast<int>(head % heads_of_batch),
            static_cast<int>(last_first ? tiles - 1 - tile : tile)};
  }
};
// Sections of blocks that take a tile of queries (the last see the most keys) or of keys (most queries see the first).
// Throw Exit::internal where a grid has no room for a block for each tile.
Sections sections_of_queries(const AttentionSizes& z, int64_t tiles);
Sections sections_of_keys(const AttentionSizes& z, int64_t tiles);

#if CROSSPLY_HOPPER

// A ring of stages, each with a tile of so many elements, which a producer fills and some warps use up, one by one.
template <int stages, int tile>
struct Ring {
  bf16* tiles;
  Barrier *full, *empty;  // (stages)

  // arrivals: of those who fill a stage.
  __device__ void init(uint32_t arrivals, uint32_t warps) const {
    for (int s = 0; s < stages; ++s) barrier_init(full + s, arrivals), barrier_init(empty + s, warps);
  }
  static __device__ __forceinline__ int stage(int i) { return i % stages; }
  static __device__ __forceinline__ uint32_t parity(int i) { return static_cast<uint32_t>(i / stages & 1); }
  __device__ __forceinline__ const bf16* at(int i) const { return tiles + stage(i) * tile; }

  __device__ __forceinline__ void wait_empty(int i) const { barrier_wait(empty + stage(i), parity(i) ^ 1); }
  // By one thread: tile number i is a box of this tensor.
  __device__ __forceinline__ void fill(int i, const TensorMap& map, int row, int head, int batch) const {
    wait_empty(i);
    barrier_expect(full + stage(i), tile * sizeof(bf16));
    copy_box(tiles + stage(i) * tile, map, full + stage(i), row, head, batch);
  }
  __device__ __forceinline__ void wait_full(int i) const { barrier_wait(full + stage(i), parity(i)); }
  // By each of the warps, when it is done with the tile.
  __device__ __forceinline__ void release(int i) const {
    __syncwarp();
    if (threadIdx.x % warp_size == 0) barrier_arrive(empty + stage(i));
  }
};

// hide_before and hide_behind of attention_mma.cuh, for the sums (64, N) of a warpgroup. back, forth: of its first row.
template <int64_t n>
__device__ __forceinline__ void hide_before(Array<float, n>& sums, const int* back, int ahead, float value) {
  const int lane = forgotten(lane_of()), row = warp_of() % 4 * 16 + lane / 4, column = lane % 4 * 2;
  const int first_seen[2] = {row + ahead - back[row] - column, row + 8 + ahead - back[row + 8] - column};
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (i / 4 * 8 + i % 2 < first_seen[i % 4 / 2]) sums[i] = value;
}
template <int64_t n>
__device__ __forceinline__ void hide_behind(Array<float, n>& sums, const int* forth, int behind) {
  const int lane = forgotten(lane_of()), row = warp_of() % 4 * 16 + lane / 4, column = lane % 4 * 2;
  const int last_seen[2] = {row - behind + forth[row] - column, row + 8 - behind + forth[row + 8] - column};
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (i / 4 * 8 + i % 2 > last_seen[i % 4 / 2]) sums[i] = 0;
}

// A warpgroup's 64 rows of a result, of which `left` are there; scale: of the thread's two rows.
template <int D>
__device__ __forceinline__ void store_rows(bf16* to, int64_t stride, const GroupSums<D>& d, const float (&scale)[2],
                                           int left, bool accumulate) {
  const int lane = forgotten(lane_of()), row = warp_of() % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= left) continue;
    bf16* y = to + (row + half * 8) * stride + column;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      store_or_accumulate<2>(y + j * 8, {d[4 * j + 2 * half] * scale[half], d[4 * j + 2 * half + 1] * scale[half]},
                             accumulate);
  }
}

#endif  // CROSSPLY_HOPPER

}  // namespace crossply
