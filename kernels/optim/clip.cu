// Not yet run on hardware: only in the emulator.
#include "kernels/optim/clip.h"

#include <cmath>

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256, warps = threads / warp_size;

// One block.
__global__ void clip_factor_kernel(double* factor, const double* scale, const double* sums, int64_t count,
                                   const float* largest, int64_t n, double clip) {
  int spoilt = 0;
  for (int64_t i = threadIdx.x; i < count; i += threads) spoilt += !std::isfinite(sums[i]);
  for (int64_t i = threadIdx.x; i < n; i += threads) spoilt += !std::isfinite(largest[i]);
  spoilt = block_sum<warps>(spoilt);
  if (threadIdx.x != 0) return;
  double by = *scale;
  if (clip > 0) {
    const double most = clip / (by * sqrt(sums[0]) + 1e-6);
    if (most < 1) by *= most;
  }
  *factor = spoilt != 0 ? static_cast<double>(NAN) : by;
}

}  // namespace

void clip_factor_cuda(double* factor, const double* scale, const Tensor& sums, const Tensor& largest, double clip) {
  const float* others = data_or_null<float>(largest);
  launch({"clip_factor", 1, threads}, clip_factor_kernel, factor, scale, sums.as<double>(), sums.numel(), others,
         others != nullptr ? largest.numel() : 0, clip);
}

}  // namespace crossply
