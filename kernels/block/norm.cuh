// What the kernels of rmsnorm and layernorm share. A warp takes a row, or several that are short: `lanes` lanes, a
// power of two, take one, `width` columns a lane at a time, and hold it in registers where it has room there. Lanes
// whose row is beyond the last one take part in the sums of their warp.
// Not yet run on hardware: only in the emulator.
#pragma once

#include <bit>

#include "kernels/cuda/cuda.cuh"

namespace crossply {

constexpr int norm_warps = 8, norm_backward_warps = 4;  // of a block, the latter at most

struct NormRows {
  int64_t count, C;
  int lanes, log_lanes;
  NormRows(int64_t rows, int64_t columns, int lanes_of_row)
      : count(rows),
        C(columns),
        lanes(lanes_of_row),
        log_lanes(std::countr_zero(static_cast<unsigned>(lanes_of_row))) {}
  // With `width` columns a vector: the first column of this lane's first vector, and the distance to its next vector.
  template <int width>
  __device__ int64_t first() const {
    return static_cast<int>(threadIdx.x) % lanes * width;
  }
  template <int width>
  __device__ int64_t step() const {
    return int64_t{lanes} * width;
  }
  __device__ int64_t of_thread(int64_t warp) const { return (warp * warp_size + threadIdx.x) >> log_lanes; }
};

// Calls body(v, c) for a lane's vectors: the v-th begins at column c. held: how many they are at most, 0 for any.
template <int held, int width, class F>
__device__ __forceinline__ void for_lane_vectors(const NormRows& rows, F&& body) {
  const int64_t first = rows.first<width>(), step = rows.step<width>();
  if constexpr (held == 0) {
#pragma unroll 1
    for (int64_t c = first; c < rows.C; c += step) body(0, c);
  } else {
#pragma unroll
    for (int v = 0; v < held; ++v)
      if (first + v * step < rows.C) body(v, first + v * step);
  }
}

// A lane's vectors of a row, zeros if they are not wanted: in registers, or read again from the cache where held is 0.
template <int held, int width, class S>
struct LaneVectors {
  const S* row;
  bool wanted;
  Packed<width, S> x[held > 0 ? held : 1];
  __device__ LaneVectors(const S* begin, const NormRows& rows, bool want) : row(begin), wanted(want) {
    if constexpr (held > 0) {
      const int64_t first = rows.first<width>(), step = rows.step<width>();
#pragma unroll
      for (int v = 0; v < held; ++v)
        x[v] = load_packed_if<width>(wanted && first + v * step < rows.C, row, first + v * step);
    }
  }
  __device__ Floats<width> at(int v, int64_t c) const {
    if constexpr (held > 0) return floats(x[v]);
    else return load_if<width>(wanted, row, c);
  }
};

// Sums over rows (C), in shared memory. A vector's quarters lie apart, so that neighbours' are neighbours there.
template <int width>
struct RowSums {
  static constexpr int part = width < 4 ? width : 4, planes = width / part;
  float* at;
  int64_t C;
  __device__ int64_t place(int64_t c) const { return c % width / part * (C / planes) + c / width * part + c % part; }
  __device__ void add(int64_t c, const Floats<width>& x) const {  // to columns c and on
#pragma unroll
    for (int p = 0; p < planes; ++p) {
      float* to = at + p * (C / planes) + c / planes;
      Floats<part> sum = load<part>(to);
#pragma unroll
      for (int i = 0; i < part; ++i) sum[i] += x[p * part + i];
      store<part, Space::shared>(to, sum);
    }
  }
  __device__ void clear(const NormRows& rows) const {
    for (int64_t c = static_cast<int>(threadIdx.x) % rows.lanes; c < C; c += rows.lanes) at[c] = 0;
  }
};

// to[c] = the sum over the groups of lanes of what each has summed, in order; these are the first one's, the others'
// follow it. By the whole block, after it has waited.
template <int width>
__device__ __forceinline__ void write_group_sums(float* to, const RowSums<width>& first, int64_t groups) {
  const int64_t C = first.C;
  for (int64_t c = threadIdx.y * warp_size + threadIdx.x; c < C; c += blockDim.y * warp_size) {
    float sum = 0;
    for (int64_t g = 0; g < groups; ++g) sum += first.at[g * C + first.place(c)];
    to[c] = sum;
  }
}

// Calls body(held, width, lanes), the first two constants.
template <class S, class F>
void with_lane_vectors(int64_t C, std::initializer_list<const void*> tensors, F&& body) {
  with_width<S>(C, tensors, [&](auto width) {
    const int lanes = lanes_of_row(C / width);
    const int64_t vectors = blocks_of(C / width, lanes);
    if constexpr (width == widest<S>) {
      if (vectors == 1) return body(std::integral_constant<int, 1>{}, width, lanes);
      if (vectors <= 4) return body(std::integral_constant<int, 4>{}, width, lanes);
      if (vectors <= 8) return body(std::integral_constant<int, 8>{}, width, lanes);
    }
    body(std::integral_constant<int, 0>{}, width, lanes);
  });
}

// How a backward is launched that has this many sums over rows: so many warps as have room for theirs in shared memory,
// and so many blocks that each has rows to share the sums' cost. Throws Exit::usage where one warp has no room.
struct NormLaunch {
  uint32_t blocks, warps;
  size_t shared_bytes;
  NormLaunch(const NormRows& rows, int held, int sums) {
    constexpr int64_t room = 64 * 1024;
    const int64_t row_bytes = sums * rows.C * static_cast<int64_t>(sizeof(float));
    const int64_t warp_bytes = std::max<int64_t>(warp_size / rows.lanes * row_bytes, 1);
    if (sums > 0 && warp_bytes > max_shared_bytes())
      fail(Exit::usage, "the backward of a norm over C = ", rows.C, " columns needs ", warp_bytes,
           " bytes of shared memory, and a block of this GPU has ", max_shared_bytes(), "; C can be at most ",
           max_shared_bytes() / (sums * static_cast<int64_t>(sizeof(float))), ", or train on the CPU");
    warps = static_cast<uint32_t>(std::clamp<int64_t>(room / warp_bytes, 1, norm_backward_warps));
    shared_bytes = sums == 0 ? 0 : warps * static_cast<size_t>(warp_bytes);
    const int64_t groups = warps * warp_size / rows.lanes;
    const int64_t most = held == 1 ? 4 * 396 : 396;  // as run at once on an H200, more where a lane asks for little
    blocks = static_cast<uint32_t>(std::clamp<int64_t>(rows.count / (8 * groups), 1, most));
  }
};

}  // namespace crossply
