#include "kernels/block/cross_entropy.h"

#include "kernels/block/cross_entropy.cuh"
#include "kernels/block/matmul.cuh"

namespace crossply {
namespace {

// A block for each row of logits z (rows, V), rows `stride` apart: the loss, and z becomes dz if want_dz. The second
// pass finds the row in the L2 cache, so what bounds it is one read and one write of z. Rows with target -1 get 0 and
// zeros; a target that is no token gets NaN, as the host cannot look.
template <int width, class S>
__global__ void loss_kernel(float* losses, S* z, const int32_t* targets, float scale, int64_t V, int64_t stride,
                            bool want_dz) {
  SHARED(parts, SoftmaxParts);
  const int64_t n = blockIdx.x;
  const int32_t target = targets[n];
  z += n * stride;
  if (target < 0) {
    if (threadIdx.x == 0) losses[n] = target == -1 ? 0.f : nanf("");
    if (want_dz)
      for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) store<width>(z + v, Floats<width>{});
    return;
  }
  const float at_target = target < V ? to_float(z[target]) : nanf("");  // before anybody writes dz
  const Softmax all = softmax_of_row<width>(z, V, per_ln_2, parts);
  if (threadIdx.x == 0) losses[n] = ln_2 * (log2f(all.sum) - fmaf(per_ln_2, at_target, -all.largest));
  if (!want_dz) return;
  const float factor = scale / all.sum;
  for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) {
    Floats<width> x = load_logits<width>(z, v, V);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      x[i] = factor * exp2_fast(fmaf(per_ln_2, x[i], -all.largest));
      if (v + i == target) x[i] -= scale;
    }
    store<width>(z + v, x);
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void cross_entropy_forward_cuda(const Tensor& losses, const Tensor& dinp, const Tensor& dweight, const Tensor& inp,
                                const Tensor& weight, const Tensor& targets, double scale) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel();
  const bool want_dz = dinp.data != nullptr;
  with_storage(inp.dtype, [&]<class S>(S) {
    constexpr int width = widest<S>;
    const auto [most, stride] = logit_chunk(rows, V, inp.dtype);
    S* logits = scratch<S>(most * stride, cross_entropy_slot);
    const Matrix z{logits, inp.dtype, stride}, w{weight.data, weight.dtype, C};
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      const Matrix x{inp.as<S>() + begin * C, inp.dtype, C};
      multiply(z, x, transposed(w), {count, V, C}, nullptr);
      launch({"loss", static_cast<uint32_t>(count), row_threads}, loss_kernel<width, S>, losses.as<float>() + begin,
             logits, targets.as<int32_t>() + begin, static_cast<float>(scale), V, stride, want_dz);
      if (!want_dz) continue;
      multiply({dweight.data, dweight.dtype, C}, transposed(z), x, {V, C, count}, dweight.data);
      multiply({dinp.as<S>() + begin * C, dinp.dtype, C}, z, w, {count, C, V}, nullptr);
    }
  });
}

}  // namespace crossply
