#include "kernels/block/layernorm.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// A warp takes a row. It keeps what it reads in shared memory, where each lane finds only its own numbers again, so
// that memory, which bounds both kernels, is read once: two tensors, three or four backward.
constexpr int most_warps = 8;

template <int width, class S>
__global__ void layernorm_forward_kernel(S* out, float* mean, float* rstd, const S* inp, int64_t rows, int64_t C,
                                         float eps) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (n >= rows) return;
  S* row = dynamic_shared<S>() + threadIdx.y * C;
  inp += n * C, out += n * C;
  float sum = 0, square = 0;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Floats<width> x = load<width>(inp + c);
    store<width, Space::shared>(row + c, x);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += x[i];
  }
  const float m = warp_sum(sum) / static_cast<float>(C);
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Floats<width> x = load<width>(row + c);
#pragma unroll
    for (int i = 0; i < width; ++i) square += (x[i] - m) * (x[i] - m);
  }
  const float r = rsqrtf(warp_sum(square) / static_cast<float>(C) + eps);
  if (threadIdx.x == 0) mean[n] = m, rstd[n] = r;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Floats<width> x = load<width>(row + c);
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = (x[i] - m) * r;
    store<width>(out + c, x);
  }
}

template <int width, class S>
__global__ void layernorm_backward_kernel(S* dinp, const S* dout, const S* inp, const float* mean, const float* rstd,
                                          int64_t rows, int64_t C, bool acc) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (n >= rows) return;
  S *kept_dy = dynamic_shared<S>() + 2 * threadIdx.y * C, *kept_x = kept_dy + C;
  dinp += n * C, dout += n * C, inp += n * C;
  const float m = mean[n], r = rstd[n];
  float along_one = 0, along_out = 0;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Floats<width> dy = load<width>(dout + c), x = load<width>(inp + c);
    store<width, Space::shared>(kept_dy + c, dy);
    store<width, Space::shared>(kept_x + c, x);
#pragma unroll
    for (int i = 0; i < width; ++i) along_one += dy[i], along_out += dy[i] * (x[i] - m);
  }
  along_one = warp_sum(along_one) / static_cast<float>(C);
  along_out = warp_sum(along_out) * r * r / static_cast<float>(C);
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Floats<width> d = load<width>(kept_dy + c);
    const Floats<width> x = load<width>(kept_x + c);
#pragma unroll
    for (int i = 0; i < width; ++i) d[i] = r * (d[i] - along_one - (x[i] - m) * along_out);
    store_or_add<width>(dinp + c, d, acc);
  }
}

// So many warps a block that three blocks of them have room in shared memory, or one, for rows that are very long.
struct Layout {
  uint32_t warps;
  size_t shared_bytes;
};
Layout layout_for(int64_t row_bytes) {
  constexpr int64_t goal = 64 * 1024;
  CHECK_THAT(row_bytes <= most_shared_bytes(), "layernorm: rows of ", row_bytes, " bytes exceed a GPU's shared memory");
  const int64_t warps = std::clamp<int64_t>(goal / row_bytes, 1, most_warps);
  return {static_cast<uint32_t>(warps), static_cast<size_t>(warps * row_bytes)};
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void layernorm_forward_cuda(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                            const Tensor& weight, const Tensor& bias, int64_t C, double eps) {
  CHECK_THAT(weight.data == nullptr && bias.data == nullptr, "not written yet");
  const int64_t rows = rstd.numel();
  const Layout layout = layout_for(C * static_cast<int64_t>(size_of(inp.dtype)));
  with_access(out.dtype, C, {out.data, inp.data}, [&]<class S>(S, auto width) {
    launch({"layernorm_forward", blocks_of(rows, layout.warps), dim3(warp_size, layout.warps), layout.shared_bytes},
           layernorm_forward_kernel<width, S>, out.as<S>(), mean.as<float>(), rstd.as<float>(), inp.as<S>(), rows, C,
           static_cast<float>(eps));
  });
}

void layernorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                             const Tensor& inp, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                             int64_t C) {
  CHECK_THAT(weight.data == nullptr && dweight.data == nullptr && dbias.data == nullptr, "not written yet");
  const int64_t rows = rstd.numel();
  const Layout layout = layout_for(2 * C * static_cast<int64_t>(size_of(inp.dtype)));
  with_access(dinp.dtype, C, {dinp.data, dout.data, inp.data}, [&]<class S>(S, auto width) {
    launch({"layernorm_backward", blocks_of(rows, layout.warps), dim3(warp_size, layout.warps), layout.shared_bytes},
           layernorm_backward_kernel<width, S>, dinp.as<S>(), dout.as<S>(), inp.as<S>(), mean.as<float>(),
           rstd.as<float>(), rows, C, dinp.add);
  });
}

}  // namespace crossply
