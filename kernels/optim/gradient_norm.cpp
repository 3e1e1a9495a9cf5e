#include "kernels/optim/gradient_norm.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/cpu.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

// The lanes are written out, so that the order of the additions is in this code and not in the compiler's choice; four
// vectors of them hide the latency of the addition.
double block_sum(const float* x, int64_t n) {
  constexpr int64_t lanes = 32;
  double sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma omp simd
    for (int64_t k = 0; k < lanes; ++k) sums[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  }
  for (int64_t k = 0; i + k < n; ++k) sums[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

double sum_of_squares_cpu(const float* x, int64_t n) {
  constexpr int64_t most = 256;
  const int64_t blocks = std::clamp<int64_t>(n / 8192, 1, most);
  std::array<double, most> partial;
  parallel_for(blocks, n <= grain ? blocks : 1, [&partial, x, n, blocks](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = n * b / blocks, last = n * (b + 1) / blocks;
      partial[static_cast<size_t>(b)] = block_sum(x + first, last - first);
    }
  });
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[static_cast<size_t>(b)];
  return total;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void sum_of_squares(const Tensor& to, const Tensor& x, Stream stream) {
  double* sum = to.as<double>();
  if (stream.backend == Backend::cuda) return sum_of_squares_cuda(sum, x);
  if (stream.backend == Backend::cpu) *sum = sum_of_squares_cpu(x.as<float>(), x.numel());
  else with_real(x.dtype, [&]<class T>(T) { *sum = sum_of_squares_ref(x.as<T>(), x.numel()); });
}

void add_sum(const Tensor& to, const Tensor& x, Stream stream) {
  double* sum = to.as<double>();
  if (stream.backend == Backend::cuda) return add_sum_cuda(sum, x);
  with_real(x.dtype, [&]<class T>(T) {
    const T* from = x.as<T>();
    double total = 0;
    for (int64_t i = 0; i < x.numel(); ++i) total += static_cast<double>(from[i]);
    *sum += total;
  });
}

}  // namespace crossply
