#include "kernels/optim/gradient_norm.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"

namespace crossply {
namespace {

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

void leaf_squares_cpu(double* to, const float* x, int64_t n) {
  parallel_for(leaves_of(n), 8, [=](int64_t begin, int64_t end) {
    for (int64_t l = begin; l < end; ++l) to[l] = block_sum(x + l * leaf, std::min(leaf, n - l * leaf));
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void leaf_squares(const Tensor& to, const Tensor& x, Stream stream) {
  const int64_t n = x.numel();
  CHECK_THAT(to.numel() == leaves_of(n), "to ", to.str(), ", x ", x.str());
  double* sums = to.as<double>();
  if (stream.backend == Backend::cuda) return leaf_squares_cuda(sums, x);
  if (stream.backend == Backend::cpu) return leaf_squares_cpu(sums, x.as<float>(), n);
  with_real(x.dtype, [&]<class T>(T) { leaf_squares_ref(sums, x.as<T>(), n); });
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

void ordered_sum(const Tensor& to, const Tensor& sums, const Tensor& order, Stream stream, const Tensor& weights) {
  CHECK_THAT(to.numel() == 1 && order.dtype == Dtype::i32, "to ", to.str(), ", order ", order.str());
  CHECK_THAT(weights.data == nullptr || weights.numel() == order.numel(), order.str(), ", weights ", weights.str());
  const double *from = sums.as<double>(), *by = data_or_null<double>(weights);
  if (stream.backend == Backend::cuda) return ordered_sum_cuda(to.as<double>(), from, order, by);
  const int32_t* at = order.as<int32_t>();
  double total = 0;
  for (int64_t k = 0; k < order.numel(); ++k) total += (by != nullptr ? by[k] : 1) * from[at[k]];
  *to.as<double>() = total;
}

}  // namespace crossply
