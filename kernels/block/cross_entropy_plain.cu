// The loss head in plain CUDA: the loops of cross_entropy.h, the outer ones spread over threads. Read it before
// cross_entropy.cu. Tests hold both to the same reference, and `bench gpu --only plain` times one against the other.
// Training never calls this file.
//
// The logits of all rows are in memory together: 16,384 tokens of 50,304 take 3 GiB.
// Not yet run on hardware: only in the emulator.
#include "kernels/block/cross_entropy.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256;  // of a block

// A thread has a logit: a row of inp times a row of weight. Nothing that it reads serves another logit, unless it is
// still in a cache.
template <class S>
__global__ void cross_entropy_logits_kernel(float* z, const S* inp, const S* weight, int64_t rows, int64_t V,
                                            int64_t C) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = i / V, v = i % V;
  if (n >= rows) return;
  float sum = 0;
  for (int64_t c = 0; c < C; ++c) sum += to_float(inp[n * C + c]) * to_float(weight[v * C + c]);
  z[i] = sum;
}

struct PlainOptions {
  const float* row_weights;
  float* squares;
  float softcap, z_loss;
};

// A thread has a row of logits z, which it reads three times: for the largest, the sum, and the gradients dz, which
// take the place of the logits; with a cap once more, before that. A target that is no token makes the loss NaN.
__global__ void cross_entropy_loss_kernel(float* losses, float* z, const int32_t* targets, float scale,
                                          PlainOptions options, int64_t rows, int64_t V, bool want_dz) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  const int32_t target = targets[n];
  z += n * V;
  const float c = options.softcap;
  for (int64_t v = 0; c > 0 && v < V; ++v) z[v] = c * tanhf(z[v] / c);
  float max = z[0];
  double exps = 0;  // so many terms in one float would lose digits
  for (int64_t v = 1; v < V; ++v) max = z[v] > max ? z[v] : max;
  for (int64_t v = 0; v < V; ++v) exps += expf(z[v] - max);
  const auto sum = static_cast<float>(exps);
  if (target == -1) losses[n] = 0;
  else losses[n] = target >= 0 && target < V ? logf(sum) - (z[target] - max) : nanf("");
  const float lse = max + logf(sum), boost = options.z_loss > 0 ? 1 + 2 * options.z_loss * lse : 1;
  if (options.squares != nullptr) options.squares[n] = target < 0 ? 0.f : lse * lse;
  if (options.row_weights != nullptr) scale *= options.row_weights[n];
  for (int64_t v = 0; want_dz && v < V; ++v) {
    const float t = c > 0 ? z[v] / c : 0, slope = 1 - t * t;
    z[v] = target < 0 ? 0.f : scale * (boost * expf(z[v] - max) / sum - (v == target ? 1.f : 0.f)) * slope;
  }
}

// A thread has an element of dinp.
template <class S>
__global__ void cross_entropy_dinp_kernel(S* dinp, const float* dz, const S* weight, int64_t rows, int64_t V,
                                          int64_t C) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = i / C, c = i % C;
  if (n >= rows) return;
  float sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += dz[n * V + v] * to_float(weight[v * C + c]);
  from_float(dinp[i], sum);
}

// A thread has an element of dweight.
template <class S>
__global__ void cross_entropy_dweight_kernel(float* dweight, const float* dz, const S* inp, int64_t rows, int64_t V,
                                             int64_t C, bool accumulate) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, v = i / C, c = i % C;
  if (v >= V) return;
  float sum = accumulate ? dweight[i] : 0.f;
  for (int64_t n = 0; n < rows; ++n) sum += dz[n * V + v] * to_float(inp[n * C + c]);
  dweight[i] = sum;
}

}  // namespace

void cross_entropy_forward_plain(const Tensor& losses, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                                 const Tensor& weight, const Tensor& targets, double scale,
                                 const CrossEntropyOptions& options) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel();
  const bool want_dz = dinp.data != nullptr;
  float* z = scratch<float>(rows * V);
  with_storage(inp.dtype, [&]<class S>(S) {
    launch({"cross_entropy_logits_plain", blocks_of(rows * V, threads), threads}, cross_entropy_logits_kernel<S>, z,
           inp.as<S>(), weight.as<S>(), rows, V, C);
    launch({"cross_entropy_loss_plain", blocks_of(rows, threads), threads}, cross_entropy_loss_kernel,
           losses.as<float>(), z, targets.as<int32_t>(), static_cast<float>(scale),
           PlainOptions{data_or_null<float>(options.row_weights), data_or_null<float>(options.squares),
                        static_cast<float>(options.softcap), static_cast<float>(options.z_loss)},
           rows, V, want_dz);
    if (!want_dz) return;
    launch({"cross_entropy_dinp_plain", blocks_of(rows * C, threads), threads}, cross_entropy_dinp_kernel<S>,
           dinp.as<S>(), z, weight.as<S>(), rows, V, C);
    launch({"cross_entropy_dweight_plain", blocks_of(V * C, threads), threads}, cross_entropy_dweight_kernel<S>,
           dweight.as<float>(), z, inp.as<S>(), rows, V, C, dweight.accumulate);
  });
}

}  // namespace crossply
