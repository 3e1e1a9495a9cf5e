// How the matrix products of gemm.cpp and gemm_bf16.cpp are shared out to threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cpu/cpu.h"

namespace crossply {

// Cuts c (M, N) into as many rectangles as there are threads, so that the largest is as small, and as square, as
// possible; calls body(i0, i1, j0, j1) for each that is not empty. They begin at multiples of the units. Packing a row
// or a column for a rectangle costs as much as multiplying `packing` elements. small: on the calling thread alone.
template <class F>
void share_rectangles(int64_t M, int64_t N, int64_t row_unit, int64_t col_unit, int64_t packing, bool small, F&& body) {
  const int64_t threads = small || omp_in_parallel() ? 1 : omp_get_max_threads();
  const int64_t rows = ceil_div(M, row_unit), cols = ceil_div(N, col_unit);
  int64_t best = INT64_MAX, down = 1;
  for (int64_t d = 1; d <= threads; ++d) {
    if (threads % d) continue;
    const int64_t m = ceil_div(rows, d) * row_unit, n = ceil_div(cols, threads / d) * col_unit;
    const int64_t cost = m * n + packing * (m + n);
    if (cost < best) best = cost, down = d;
  }
  const int64_t across = threads / down;
  parallel_for(threads, 1, [=, &body](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t y = t / across, i0 = rows * y / down * row_unit;
      const int64_t i1 = std::min(rows * (y + 1) / down * row_unit, M);
      const int64_t x = t % across, j0 = cols * x / across * col_unit;
      const int64_t j1 = std::min(cols * (x + 1) / across * col_unit, N);
      if (i0 < i1 && j0 < j1) body(i0, i1, j0, j1);
    }
  });
}

// Whether each thread gets so many rows that taking them through several products repays packing all columns itself.
inline bool enough_rows(int64_t M) { return !omp_in_parallel() && M >= 256 * omp_get_max_threads(); }

// Calls body(i0, i1) for every thread's share of M rows, which begins at a multiple of the unit.
template <class F>
void share_rows(int64_t M, int64_t unit, F&& body) {
  const int64_t threads = omp_get_max_threads(), rows = ceil_div(M, unit);
  parallel_for(threads, 1, [=, &body](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) body(rows * t / threads * unit, std::min(rows * (t + 1) / threads * unit, M));
  });
}

// Into how many chunks, none shorter than `least`, a sum of K is cut; the same for any number of threads.
inline int64_t chunks_of_sum(int64_t K, int64_t least) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(K / least, 1, 16))));
}

// A long sum into a small c leaves too few tiles to share out, so the sum itself is cut into chunks: body(partial, k0,
// k1) sets partial (size) to the sum over [k0, k1). c, overwritten or accumulated, is their sum in order. Uses scratch
// slot 6. small: on the calling thread alone.
template <class F>
void sum_in_chunks(float* c, int64_t size, int64_t K, int64_t chunks, bool small, bool accumulate, F&& body) {
  float* partial = scratch_f32(static_cast<size_t>(chunks * size), 6);
  parallel_for(chunks, small ? chunks : 1, [=, &body](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) body(partial + t * size, K * t / chunks, K * (t + 1) / chunks);
  });
  for (int64_t t = 0; t < chunks; ++t) {
    const float* from = partial + t * size;
    const bool sum = accumulate || t > 0;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) c[i] = sum ? c[i] + from[i] : from[i];
  }
}

}  // namespace crossply
