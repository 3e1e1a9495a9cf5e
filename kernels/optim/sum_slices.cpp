#include "kernels/optim/sum_slices.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t chunk = 1024;  // elements whose partial sums stay in the first cache

// As a binary counter: after slice s, partial[h] is a sum of 2^h slices for every bit h of s + 1 that is set.
void sum_chunk(float* to, const float* from, int64_t S, int64_t stride, int64_t n) {
  alignas(64) float partial[max_levels][chunk], sum[chunk];
  const auto add = [&](const float* left) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = left[i] + sum[i];
  };
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  for (int64_t s = 0; s < S; ++s) {
    std::memcpy(sum, from + s * stride, bytes);
    int h = 0;
    for (; (s >> h) & 1; ++h) add(partial[h]);
    if (s + 1 < S) std::memcpy(partial[h], sum, bytes);
    else
      for (++h; h < max_levels; ++h)  // S is no power of two: what is left of the larger parts
        if ((s >> h) & 1) add(partial[h]);
  }
  std::memcpy(to, sum, bytes);
}

void sum_slices_cpu(float* to, const float* from, int64_t S, int64_t n) {
  parallel_for(n, 16 * chunk, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += chunk) sum_chunk(to + i, from + i, S, n, std::min(chunk, end - i));
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry point.

void sum_slices(const Tensor& to, const Tensor& from, Stream stream) {
  const int64_t n = to.numel(), S = from.dim(0);
  CHECK_SHAPES(from.shape.rank == 2 && from.dim(1) == n && S >= 1 && S < (1 << max_levels), to, from);
  if (stream.backend == Backend::cuda) return sum_slices_cuda(to, from);
  if (stream.backend == Backend::cpu) return sum_slices_cpu(to.as<float>(), from.as<float>(), S, n);
  with_real(to.dtype, [&]<class T>(T) { sum_slices_ref(to.as<T>(), from.as<T>(), S, n); });
}

}  // namespace crossply
