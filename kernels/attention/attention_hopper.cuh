// Attention by the products of a warpgroup: what its forward and its backward share. For sm_90, bf16 and heads of 64 or
// 128; all else is attention_mma.cuh's.
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

// Of queries (B, T, H, D), and of keys or values (B, S, K, D), of which rows beyond pos + T are not there.
inline TensorMap map_of_queries(const bf16* x, const AttentionSizes& z, int rows) {
  return tensor_map({x, z.D, z.T, z.H, z.B, z.query_stride, z.D, z.T * z.H * z.D}, rows);
}
inline TensorMap map_of_keys(const bf16* x, const AttentionSizes& z, int rows) {
  return tensor_map({x, z.D, z.pos + z.T, z.K, z.B, z.key_stride, z.D, z.S * z.K * z.D}, rows);
}

// A barrier's stage and parity at its use number i: of who waits until a stage is full; who waits until it is empty
// begins with the other parity, since all stages are.
template <int stages>
struct Ring {
  static __device__ __forceinline__ int stage(int i) { return i % stages; }
  static __device__ __forceinline__ uint32_t parity(int i) { return static_cast<uint32_t>(i / stages & 1); }
};

#if CROSSPLY_HOPPER
// By every warp of those that use a stage, when they are done with it.
__device__ __forceinline__ void release(Barrier* empty) {
  __syncwarp();
  if (threadIdx.x % warp_size == 0) barrier_arrive(empty);
}
#endif

// Blocks in the order in which they begin: heads in sections whose keys and values fit into the L2 cache together, in a
// section all heads of a tile of queries side by side, tiles from `first` on.
struct HeadTile {
  int64_t head;  // b * H + h, or b * K + kv
  int tile;
};
struct Sections {
  int64_t heads, at_once;  // of all batches; of a section
  int tiles;               // of each head

  __device__ HeadTile place(int64_t block) const {
    const int64_t section = block / (at_once * tiles), first = section * at_once;
    const int64_t within = block - first * tiles, count = heads - first < at_once ? heads - first : at_once;
    return {first + within % count, static_cast<int>(within / count)};
  }
};
// Of blocks that take a head of queries each, or one of keys with all its queries.
Sections sections_of_queries(const AttentionSizes& z, int tiles);
Sections sections_of_keys(const AttentionSizes& z, int tiles);

}  // namespace crossply
