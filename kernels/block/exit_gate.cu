// Not yet run on hardware: only in the emulator.
#include "kernels/block/exit_gate.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int exit_threads = 128;

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// A thread has a token.
template <class S>
__global__ void exit_weights_kernel(ExitRows<float> p, ExitRows<S> z, int exits, int64_t N) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  float left = 0;  // ln S
  for (int t = 0; t + 1 < exits; ++t) {
    const float x = to_float(z.row[t][n]);
    p.row[t][n] = expf(left - softplus(-x));
    left -= softplus(x);
  }
  p.row[exits - 1][n] = expf(left);
}

// A thread has a token, from its last exit to the first.
template <class S>
__global__ void exit_loss_kernel(float* losses, ExitRows<S> dz, ExitRows<float> ce, ExitRows<S> z,
                                 const int32_t* targets, float beta, float scale, int exits, int64_t N, bool want_dz) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  const bool scored = targets[n] != -1;  // what is no token has a loss of NaN
  float left[max_exits];                 // ln S of each exit
  left[0] = 0;
  for (int t = 0; t + 1 < exits; ++t) left[t + 1] = left[t] - softplus(to_float(z.row[t][n]));
  float after = 0;  // the sum of p a over later exits
  for (int t = exits - 1; t >= 0; --t) {
    const bool last = t == exits - 1;
    const float log_lam = last ? 0.f : -softplus(-to_float(z.row[t][n])), log_p = left[t] + log_lam;
    const float own = expf(log_p) * (ce.row[t][n] + beta * log_p), lam = expf(log_lam);
    if (want_dz && !last) {
      const float stay = expf(left[t + 1] - left[t]), d = scale * (stay * own - lam * after);
      from_float(dz.row[t][n], scored ? d : 0.f);
    }
    after += own;
  }
  losses[n] = scored ? after : 0.f;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void exit_weights_cuda(const std::vector<Tensor>& p, const std::vector<Tensor>& z) {
  const int64_t N = p[0].numel();
  with_storage(z[0].dtype, [&]<class S>(S) {
    launch({"exit_weights", blocks_of(N, exit_threads), exit_threads}, exit_weights_kernel<S>, rows_of_exits<float>(p),
           rows_of_exits<S>(z), static_cast<int>(p.size()), N);
  });
}

void exit_loss_cuda(const Tensor& losses, const std::vector<Tensor>& dz, const std::vector<Tensor>& ce,
                    const std::vector<Tensor>& z, const Tensor& targets, double beta, double scale) {
  const int64_t N = losses.numel();
  with_storage(z[0].dtype, [&]<class S>(S) {
    launch({"exit_loss", blocks_of(N, exit_threads), exit_threads}, exit_loss_kernel<S>, losses.as<float>(),
           rows_of_exits<S>(dz), rows_of_exits<float>(ce), rows_of_exits<S>(z), targets.as<int32_t>(),
           static_cast<float>(beta), static_cast<float>(scale), static_cast<int>(ce.size()), N, !dz.empty());
  });
}

}  // namespace crossply
