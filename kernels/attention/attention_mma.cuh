// Attention on tensor cores: what its forward and its backward share. Tiles of rows of bf16 in shared memory, and a
// warp's products of them; and the arguments of all the CUDA backwards.
//
// The two products, multiply_rows and multiply_weights, are all that knows of the instructions. A warp holds sums
// (16 m, 8 n) as the instruction does (kernels/cuda/mma.cuh), and the weights of the second product are such sums, so
// that scores never leave the registers.
//
// Not yet run on hardware: only in the emulator.
#pragma once

#include <bit>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/cuda/mma.cuh"

namespace crossply {

template <class S>
struct AttentionBackward {
  S *dq, *dk, *dv;            // dq: (B,T,H,D); dk, dv: (B,T,K,D)
  const S *dout, *q, *k, *v;  // the same
  const float *lse, *delta;   // (B,H,T)
  float scale;
  bool accumulate_q, accumulate_k, accumulate_v;
};

// attention_mma_forward.cu and attention_mma_backward.cu: D a multiple of 8 up to 256, addresses of 16 bytes, a
// positive scale, less than 2^31 positions. lse may be null.
void attention_forward_mma(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionSizes& z,
                           float scale);
void attention_backward_mma(const AttentionBackward<bf16>& g, const AttentionSizes& z);

// Calls body(width), a constant: that of the narrowest tiles that hold D columns, the rest of which are zeros.
template <class F>
void with_tile_width(int64_t D, F&& body) {
  if (D <= 32) body(std::integral_constant<int, 32>{});
  else if (D <= 64) body(std::integral_constant<int, 64>{});
  else if (D <= 96) body(std::integral_constant<int, 96>{});
  else if (D <= 128) body(std::integral_constant<int, 128>{});
  else body(std::integral_constant<int, 256>{});
}

constexpr float log2_of_e = 1.44269504088896341f, ln_of_2 = 0.69314718055994531f;

// The maximum of no scores yet. A query may see no key of its block's first tiles. Its weights there, the exponentials
// of -INFINITY less the maximum, are 0 because this is finite. Beside -INFINITY they would be NaN.
constexpr float max_of_none = std::numeric_limits<float>::lowest();

// Where a block's loop over keys begins, by its first query. Tiles begin at multiples of `keys`, whatever is hidden.
template <int keys>
__device__ __forceinline__ int64_t first_tile(const AttentionSizes& z, int64_t b, int64_t position) {
  return z.lower(b, position) / keys * keys;
}

// -----------------------------------------------------------------------------------------------------------------
// Windows and documents. Each kernel is compiled twice, so causality alone pays nothing for them. A `masked` kernel
// keeps in shared memory how far the rows of its block see, or are seen: the query at position p sees the keys
// p - back .. p, and the key at j is seen by the queries j .. j + forth.

// Calls body(masked), a constant.
template <class F>
void with_mask(const AttentionSizes& z, F&& body) {
  if (z.causal_only()) body(std::false_type{});
  else body(std::true_type{});
}
template <bool masked, int rows>
constexpr size_t mask_bytes = masked ? rows * sizeof(int) : 0;

// Of query t; one that is not there sees the first key that the last one sees.
__device__ __forceinline__ int back_of(const AttentionSizes& z, int64_t b, int64_t t) {
  return static_cast<int>(z.pos + t - z.lower(b, z.pos + (t < z.T ? t : z.T - 1)));
}
// Of key j; one that is not there is seen by no query.
__device__ __forceinline__ int forth_of(const AttentionSizes& z, int64_t b, int64_t j) {
  return static_cast<int>(z.upper(b, j < z.T ? j : z.T - 1) - j);
}
// Of all rows of a block, from `first` on.
template <int rows, int threads>
__device__ __forceinline__ void find_back(int* back, const AttentionSizes& z, int64_t b, int first) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += threads) back[r] = back_of(z, b, first + r);
}
template <int rows, int threads>
__device__ __forceinline__ void find_forth(int* forth, const AttentionSizes& z, int64_t b, int first) {
  for (int r = static_cast<int>(threadIdx.x); r < rows; r += threads) forth[r] = forth_of(z, b, first + r);
}

// -----------------------------------------------------------------------------------------------------------------
// Tiles: `width` columns in chunks of 8 (16 bytes). The chunks of a row are permuted such that the same chunk of 8
// rows, which is what ldmatrix reads at a time, and 8 adjacent chunks of a row lie in different banks.

template <int width>
__device__ __forceinline__ int place_of(int row, int chunk) {
  static_assert(width % 32 == 0);
  return row * width + (chunk ^ (width % 64 == 0 ? row & 7 : row >> 1 & 3)) * 8;
}

__device__ __forceinline__ int lane_of() { return static_cast<int>(threadIdx.x) % warp_size; }
__device__ __forceinline__ int warp_of() { return static_cast<int>(threadIdx.x) / warp_size; }

// The block's threads begin to copy `rows` rows of D columns, `stride` apart, of which there are only `left`; what is
// missing, rows and columns, becomes 0.
template <int width, int rows, int threads>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* from, int64_t stride, int left, int D) {
  constexpr int chunks = width / 8, at_once = static_cast<int>(std::bit_floor(static_cast<unsigned>(threads / chunks)));
  static_assert(rows % at_once == 0);
  const int thread = forgotten(static_cast<int>(threadIdx.x)), row = thread / chunks, chunk = thread % chunks;
  if (thread >= at_once * chunks) return;
  const bool column = chunk * 8 < D;
  const bf16* source = from + (column ? row * stride + chunk * 8 : 0);
  const int64_t step = forgotten(column ? at_once * stride : 0);
#pragma unroll
  for (int i = 0; i < rows; i += at_once, source += step) {
    const bool there = column && row + i < left;
    cp_async<16>(tile + place_of<width>(row + i, chunk), there ? source : from, there);
  }
}

// Where the queries of a block (x: head, y: `queries` of them from the last ones, which see the most keys and so should
// begin first) are. Made anew at every call: a loop between two calls has better use for the registers.
struct QueryPlace {
  int64_t b, h;
  int first, left;  // how many there are from the first one on
};
template <int queries>
__device__ __forceinline__ QueryPlace place_of_queries(const AttentionSizes& z) {
  const uint32_t x = forgotten(blockIdx.x), y = forgotten(blockIdx.y), heads = static_cast<uint32_t>(z.H);
  const int first = static_cast<int>(gridDim.y - 1 - y) * queries;
  return {x / heads, x % heads, first, static_cast<int>(z.T) - first};
}

// The largest or the sum over the four lanes that hold a row.
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Two adjacent columns, rounded.
__device__ __forceinline__ void store_pair(bf16* to, float first, float second) {
  *reinterpret_cast<uint32_t*>(to) = pack(first, second);
}

template <int64_t m, int64_t n>
using Sums = Array<Array<Floats<4>, n>, m>;

// sums (16 m, 8 n) += a b^T, for a (16 m, width) and b (8 n, width), both tiles.
template <int width, int64_t m, int64_t n>
__device__ __forceinline__ void multiply_rows(Sums<m, n>& sums, const bf16* a, const bf16* b) {
  static_assert(n % 2 == 0);
  const int lane = forgotten(lane_of()), a_row = lane % 16, a_chunk = lane / 16, b_row = lane % 8 + lane / 16 * 8,
            b_chunk = lane / 8 % 2;
#pragma unroll(width > 64 ? 4 : 2)  // all at once, ptxas reads so far ahead that it runs out of registers
  for (int k = 0; k < width / 16; ++k) {
    Pairs a_pairs[m];
#pragma unroll
    for (int i = 0; i < m; ++i) a_pairs[i] = ldmatrix(a + place_of<width>(i * 16 + a_row, 2 * k + a_chunk));
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      const Pairs b_pairs = ldmatrix(b + place_of<width>(j * 16 + b_row, 2 * k + b_chunk));
#pragma unroll
      for (int i = 0; i < m; ++i) {
        mma_m16n8k16(sums[i][2 * j], a_pairs[i], b_pairs[0], b_pairs[1]);
        mma_m16n8k16(sums[i][2 * j + 1], a_pairs[i], b_pairs[2], b_pairs[3]);
      }
    }
  }
}

// Sets the sums (queries, keys) of keys before the first one that a query sees. The query in row r sees the tile's keys
// r + ahead - back[r] .. r + ahead.
template <int64_t m, int64_t n>
__device__ __forceinline__ void hide_before(Sums<m, n>& sums, const int* back, int ahead, float value) {
  const int lane = forgotten(lane_of()), row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8, first_seen = r + ahead - back[r] - column;
#pragma unroll
      for (int j = 0; j < n; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (j * 8 + c < first_seen) sums[i][j][2 * half + c] = value;
    }
}
// Clears the sums (keys, queries) of queries behind the last one that sees a key. The key in row r is seen by the
// tile's queries r - behind .. r - behind + forth[r].
template <int64_t m, int64_t n>
__device__ __forceinline__ void hide_behind(Sums<m, n>& sums, const int* forth, int behind) {
  const int lane = forgotten(lane_of()), row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + half * 8, last_seen = r - behind + forth[r] - column;
#pragma unroll
      for (int j = 0; j < n; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (j * 8 + c > last_seen) sums[i][j][2 * half + c] = 0;
    }
}

// Sums rounded to bf16, as a multiplies: columns 16 k .. of rows 16 i .. are [k][i].
template <int64_t m, int64_t columns>
using Weights = Array<Array<Pairs, m>, columns / 16>;

template <int64_t m, int64_t n>
__device__ __forceinline__ Weights<m, 8 * n> rounded(const Sums<m, n>& sums) {
  static_assert(n % 2 == 0);
  Weights<m, 8 * n> weights;
#pragma unroll
  for (int k = 0; k < n / 2; ++k)
#pragma unroll
    for (int i = 0; i < m; ++i) {
      const Floats<4>&left = sums[i][2 * k], &right = sums[i][2 * k + 1];
      weights[k][i] = {
          {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])}};
    }
  return weights;
}

// sums (16 m, 8 n) += weights b, for weights (16 m, 16 k) and the 8 n columns of b (16 k, width) from chunk `first` on.
template <int width, int64_t m, int64_t n, int64_t k>
__device__ __forceinline__ void multiply_weights(Sums<m, n>& sums, const Array<Array<Pairs, m>, k>& weights,
                                                 const bf16* b, int first) {
  static_assert(n % 2 == 0);
  const int lane = forgotten(lane_of()), b_row = lane % 16, b_chunk = lane / 16;
#pragma unroll
  for (int row = 0; row < k; ++row)
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      const Pairs b_pairs = ldmatrix_transposed(b + place_of<width>(row * 16 + b_row, first + 2 * j + b_chunk));
#pragma unroll
      for (int i = 0; i < m; ++i) {
        mma_m16n8k16(sums[i][2 * j], weights[row][i], b_pairs[0], b_pairs[1]);
        mma_m16n8k16(sums[i][2 * j + 1], weights[row][i], b_pairs[2], b_pairs[3]);
      }
    }
}

}  // namespace crossply
