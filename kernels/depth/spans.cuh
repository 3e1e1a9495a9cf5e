// Dots of a source's rows with those of many others, and rows in spans, on a GPU: what the mixtures over depth have in
// common (depth_mix.cu, query_mix.cu).
// Not yet run on hardware: only in the emulator.
#pragma once

#include <vector>

#include "kernels/cuda/cuda.cuh"

namespace crossply {

// Readers come in groups of four: their loads are under way together, and their dots are added up together.
constexpr int group = 4;

// The warp's sums of its dots with the readers from r on, overwritten or accumulated: sums[warp][reader].
__device__ __forceinline__ void add_dots(float* sums, float (&dots)[group], int r, int readers, bool set) {
  const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
  const float dot = warp_sums<group>(dots);
  if (lane >= group || r + lane >= readers) return;
  float& sum = sums[warp * readers + r + lane];
  sum = set ? dot : sum + dot;
}
__device__ __forceinline__ float sum_of_warps(const float* sums, int r, int readers) {
  float sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; ++w) sum += sums[w * readers + r];
  return sum;
}

// Columns c.. of row n of p (N,C), as far as there are such: zeros beyond, or if not there.
template <bool whole, class S>
__device__ __forceinline__ Floats<widest<S>> load_span(bool there, const S* p, int64_t n, int64_t c, int64_t C) {
  if constexpr (whole) {
    return load_if<widest<S>>(there && c < C, p, n * C + c);
  } else {
    Floats<widest<S>> x;
#pragma unroll
    for (int i = 0; i < widest<S>; ++i) x[i] = there && c + i < C ? to_float(p[n * C + c + i]) : 0.f;
    return x;
  }
}
template <bool whole, class S>
__device__ __forceinline__ void store_span(S* row, int64_t c, int64_t C, const Floats<widest<S>>& x) {
  if constexpr (whole) {
    store<widest<S>>(row + c, x);
  } else {
#pragma unroll
    for (int i = 0; i < widest<S>; ++i)
      if (c + i < C) from_float(row[c + i], x[i]);
  }
}

// A block's row n of a gather over readers. totals (C), in shared memory, = (accumulate ? dinp : 0) + sum_r weight_r *
// dout_r, and sums[warp][r] = the warp's part of <dout_r, inp>. Wait (__syncthreads) before reading either.
template <bool whole, class S, class Readers>
__device__ __forceinline__ void gather_row(float* totals, float* sums, const S* inp, const S* dinp,
                                           const Readers& readers, int64_t n, int64_t C, bool accumulate) {
  const int64_t step = blockDim.x * widest<S>, own = threadIdx.x * widest<S>;
  for (int64_t begin = 0; begin < C; begin += step) {
    const int64_t c = begin + own;
    const Floats<widest<S>> x = load_span<whole>(true, inp, n, c, C);
    Floats<widest<S>> total = load_span<whole>(accumulate, dinp, n, c, C);
#pragma unroll 1
    for (int r = 0; r < readers.count; r += group) {
      Floats<widest<S>> dy[group];
      float w[group], dots[group] = {};
#pragma unroll
      for (int j = 0; j < group; ++j) {
        const bool there = r + j < readers.count;
        w[j] = there ? readers.weights[r + j][n * readers.stride[r + j]] : 0.f;
        dy[j] = load_span<whole>(there, readers.dout[r + j], n, c, C);
      }
#pragma unroll
      for (int j = 0; j < group; ++j) {
#pragma unroll
        for (int i = 0; i < widest<S>; ++i) dots[j] += dy[j][i] * x[i], total[i] += w[j] * dy[j][i];
      }
      add_dots(sums, dots, r, readers.count, begin == 0);
    }
    // Where C is ragged there is no register left for an address in shared memory.
    if (c < C) store<widest<S>, whole ? Space::shared : Space::any>(totals + c, total);
  }
}

// Rows whose squared lengths are known.
template <class S>
struct NormedSources {
  const S* x[max_inputs];
  const float* squares[max_inputs];  // (N) each
  int count;

  NormedSources(const char* name, const std::vector<Tensor>& sources, const std::vector<Tensor>& squares_of)
      : count(static_cast<int>(sources.size())) {
    check_inputs(name, sources.size());
    for (size_t s = 0; s < sources.size(); ++s) x[s] = sources[s].as<S>(), squares[s] = squares_of[s].as<float>();
  }
};

// A warp's row: out[n,:] = sum_s w[s] * sources.x[s][n,:].
template <bool whole, class S>
__device__ __forceinline__ void mix_row_of_warp(S* out, const float* w, const NormedSources<S>& sources, int64_t n,
                                                int64_t C) {
  const int count = sources.count, lane = static_cast<int>(threadIdx.x);
  for (int64_t c = lane * widest<S>; c < C; c += warp_size * widest<S>) {
    Floats<widest<S>> total;
#pragma unroll
    for (int i = 0; i < widest<S>; ++i) total[i] = -0.f;  // plus the first product is that, -0 as well
    for (int first = 0; first < count; first += group) {
      Floats<widest<S>> x[group];
#pragma unroll
      for (int j = 0; j < group; ++j) x[j] = load_span<whole>(first + j < count, sources.x[first + j], n, c, C);
#pragma unroll
      for (int j = 0; j < group; ++j) {
        if (first + j >= count) break;
#pragma unroll
        for (int i = 0; i < widest<S>; ++i) total[i] += w[first + j] * x[j][i];
      }
    }
    store_span<whole>(out + n * C, c, C, total);
  }
}

// C, or one column if the readers' gradients allow no wide accesses.
template <class Reader>
int64_t columns_of(const std::vector<Reader>& readers, int64_t C) {
  return std::all_of(readers.begin(), readers.end(), [](const auto& r) { return is_aligned16(r.dout); }) ? C : 1;
}

// Calls body(whole), a constant: whether C columns of all the tensors allow accesses of 16 bytes.
template <class S, class F>
void with_whole(int64_t C, std::initializer_list<const void*> tensors, F&& body) {
  with_width<S>(C, tensors, [&](auto width) { body(std::bool_constant<(width > 1)>{}); });
}

}  // namespace crossply
