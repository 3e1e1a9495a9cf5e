// Not yet run on hardware: only in the emulator.
#include "kernels/optim/sum_slices.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: every slice once. As a binary counter: after slice s, partial[h] is a sum of 2^h slices for every
// bit h of s + 1 that is set. The levels are unrolled, so that partial is in registers; `levels`: S < 2^levels.
template <int width, int levels>
__global__ void sum_slices_kernel(float* to, const float* from, int S, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> partial[levels], sum;
  for (int s = 0; s < S; ++s) {
    sum = load<width>(from + s * n + i);
    const bool last = s + 1 == S;
    bool carry = true;
#pragma unroll
    for (int h = 0; h < levels; ++h) {
      if (!carry) continue;
      if ((s >> h) & 1) {
#pragma unroll
        for (int k = 0; k < width; ++k) sum[k] = partial[h][k] + sum[k];
      } else if (!last) {  // after the last slice, what is left of the larger parts is added too
        partial[h] = sum;
        carry = false;
      }
    }
  }
  store<width>(to + i, sum);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void sum_slices_cuda(const Tensor& to, const Tensor& from) {
  const int64_t n = to.numel();
  const int S = static_cast<int>(from.dim(0));
  const auto run = [&](auto levels) {
    with_width<float>(n, {to.data, from.data}, [&](auto width) {
      launch_elementwise("sum_slices", n, width, sum_slices_kernel<width, levels>, to.as<float>(), from.as<float>(), S);
    });
  };
  if (S < 16) run(std::integral_constant<int, 4>());
  else run(std::integral_constant<int, max_levels>());
}

}  // namespace crossply
