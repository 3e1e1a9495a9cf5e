// Not yet run on hardware: only in the emulator.
#include "kernels/block/quantize.h"

#include "kernels/cuda/cuda.cuh"
#if CROSSPLY_CUDA
#include <cuda_fp8.h>
#endif

namespace crossply {
namespace {

// Bound by memory: 2 bytes read and 1 or 2 written an element. A block takes a tile of 128 rows and 64 columns, a
// thread 4 rows and 8 columns of it, with 4 loads of 16 bytes on their way at once; 8 threads read 128 bytes of a row.
constexpr int across = 8, down = 4, lanes_of_columns = 8, tile_columns = lanes_of_columns * across, tile_rows = 128;
constexpr int threads = tile_rows / down * lanes_of_columns, warps = threads / warp_size;

// The transposed tile is kept as words of 4 rows: where that of a column and a group of 4 rows lies. A warp's 32 words
// lie in 32 banks when it writes them (every eighth column, 4 groups) and when it reads (4 columns, every fourth
// group).
constexpr int groups = tile_rows / down, pitch = groups + 1;
constexpr int place_end = tile_columns * pitch + (tile_columns - 1) / 32 * 4;
__device__ __forceinline__ int place(int column, int group) { return column * pitch + column / 32 * 4 + group; }

template <int n>
struct alignas(4 * n) Words {
  uint32_t x[n];
};

// Four numbers in a word, the first one in its lowest byte.
template <class S>
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
#if CROSSPLY_CUDA
  constexpr auto type = std::is_same_v<S, e4m3> ? __NV_E4M3 : __NV_E5M2;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, type);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, type);
  return low | high << 16;
#else
  return S(a).bits | S(b).bits << 8 | S(c).bits << 16 | static_cast<uint32_t>(S(d).bits) << 24;
#endif
}

// The first `count` of 8 numbers at p + at, zeros for the others; in one access if whole, where 8 are there or none.
template <bool whole>
__device__ __forceinline__ Packed<across, bf16> load_first(const bf16* p, int64_t at, int count) {
  if constexpr (whole) {
    return load_packed_if<across>(count > 0, p, at);
  } else {
    Packed<across, bf16> raw = {};
#pragma unroll
    for (int i = 0; i < across; ++i)
      if (i < count) raw.x[i / 2] |= static_cast<uint32_t>(p[at + i].bits) << (i % 2 * 16);
    return raw;
  }
}
// p[at + i] for the first `count` bytes of the words, in the same way.
template <bool whole, class S, int n>
__device__ __forceinline__ void store_first(S* p, int64_t at, int count, const Words<n>& words) {
  if constexpr (whole) {
    if (count <= 0) return;
    check_alignment<Words<n>>(p + at);
    *reinterpret_cast<Words<n>*>(p + at) = words;
  } else {
#pragma unroll
    for (int i = 0; i < 4 * n; ++i)
      if (i < count) p[at + i].bits = static_cast<uint8_t>(words.x[i / 4] >> (i % 4 * 8));
  }
}

// whole: no access of 16 elements of a column, or of 8 of a row, is cut off by an end.
template <class S, bool whole>
__global__ void __launch_bounds__(threads)
    quantize_kernel(S* to, S* to_transposed, uint32_t* amax, const bf16* x, const float* scale, int64_t rows, int64_t C,
                    uint32_t tiles_across) {
  SHARED(tile, Array<uint32_t, place_end>);
  SHARED(maxima, Array<uint32_t, warps>);
  const int64_t first_row = int64_t{blockIdx.x / tiles_across} * tile_rows;
  const int64_t first_column = int64_t{blockIdx.x % tiles_across} * tile_columns;
  // In the tile, from here on: its ends, and the thread's first row and column.
  const int end_row = static_cast<int>(std::min<int64_t>(rows - first_row, tile_rows));
  const int end_column = static_cast<int>(std::min<int64_t>(C - first_column, tile_columns));
  const int thread = static_cast<int>(threadIdx.x), group = thread / lanes_of_columns, row = group * down;
  const int column = thread % lanes_of_columns * across;
  const int64_t at = (first_row + row) * C + first_column + column;

  Packed<across, bf16> raw[down];
#pragma unroll
  for (int k = 0; k < down; ++k) raw[k] = load_first<whole>(x, at + k * C, row + k < end_row ? end_column - column : 0);
  const float by = *scale;
  uint32_t most = 0;  // sizes are ordered as their bits: numbers, infinity, NaN
  Words<2> bytes[down];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Floats<4> value[down];
#pragma unroll
    for (int k = 0; k < down; ++k) {
      value[k] = floats(Packed<4, bf16>{raw[k].x[2 * half], raw[k].x[2 * half + 1]});
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        most = std::max(most, __float_as_uint(value[k][i]) & 0x7FFFFFFF);
        value[k][i] *= by;
      }
      bytes[k].x[half] = pack<S>(value[k][0], value[k][1], value[k][2], value[k][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[place(column, group) + (4 * half + i) * pitch] = pack<S>(value[0][i], value[1][i], value[2][i], value[3][i]);
  }
  if (to != nullptr) {
#pragma unroll
    for (int k = 0; k < down; ++k)
      store_first<whole>(to, at + k * C, row + k < end_row ? end_column - column : 0, bytes[k]);
  }
  for (int lanes = warp_size / 2; lanes > 0; lanes /= 2) most = std::max(most, __shfl_xor_sync(~0u, most, lanes));
  if (thread % warp_size == 0) maxima[thread / warp_size] = most;
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < warps; ++warp) most = std::max(most, maxima[warp]);
    atomicMax(amax, most);
  }
  if (to_transposed != nullptr) {
    // 8 threads write 128 bytes of a column.
    constexpr int words = 4, at_once = groups / words, columns = threads / at_once;
    const int word = thread % at_once * words;
#pragma unroll
    for (int part = 0; part < tile_columns / columns; ++part) {
      const int own = part * columns + thread / at_once;
      Words<words> four;
#pragma unroll
      for (int i = 0; i < words; ++i) four.x[i] = tile[place(own, word) + i];
      store_first<whole>(to_transposed, (first_column + own) * rows + first_row + word * down,
                         own < end_column ? end_row - word * down : 0, four);
    }
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void quantize_cuda(const Tensor& to, const Tensor& to_transposed, const Tensor& amax, const Tensor& x,
                   const Tensor& scale) {
  const int64_t C = x.dim(x.shape.rank - 1), rows = x.numel() / C;
  if (rows == 0) return;
  const uint32_t tiles_across = blocks_of(C, tile_columns), blocks = blocks_of(rows, tile_rows) * tiles_across;
  const bool whole = C % across == 0 && (to_transposed.data == nullptr || rows % 16 == 0) &&
                     aligned16({to.data, to_transposed.data, x.data});
  with_fp8(to, to_transposed, [&]<class S>(S) {
    launch({"quantize", blocks, threads}, whole ? quantize_kernel<S, true> : quantize_kernel<S, false>,
           data_or_null<S>(to), data_or_null<S>(to_transposed), reinterpret_cast<uint32_t*>(amax.as<float>()),
           x.as<bf16>(), scale.as<float>(), rows, C, tiles_across);
  });
}

}  // namespace crossply
