#include "kernels/rmsnorm.h"

#include "kernels/cuda.cuh"

namespace crossply {
namespace {

// A warp takes a row, `width` columns a lane at a time; the second pass over the row finds it in the L1 cache.
constexpr int warps = 8;

template <int width, class S>
__global__ void rmsnorm_forward_kernel(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C,
                                       float eps) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  inp += n * C, out += n * C;
  float sum = 0;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Floats<width> x = load<width>(inp + c);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += x[i] * x[i];
  }
  const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(C) + eps);
  if (threadIdx.x == 0) rstd[n] = scale;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Floats<width> x = load<width>(inp + c);
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] *= scale;
    if (weight != nullptr) {
      const Floats<width> w = load<width>(weight + c);
#pragma unroll
      for (int i = 0; i < width; ++i) x[i] *= w[i];
    }
    store<width>(out + c, x);
  }
}

// Every warp sums up dweight (C) in shared memory over its rows; the block adds its warps' sums in order and writes one
// row of `partial` (blocks, C). Without weight there is neither.
template <int width, class S>
__global__ void rmsnorm_backward_kernel(S* dinp, float* partial, const S* dout, const S* inp, const float* weight,
                                        const float* rstd, int64_t rows, int64_t C, bool acc) {
  float* sums = dynamic_shared<float>() + threadIdx.y * C;
  if (weight != nullptr)
    for (int64_t c = threadIdx.x; c < C; c += warp_size) sums[c] = 0;
  __syncwarp();
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; n < rows;
       n += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const float r = rstd[n];
    const S *dy = dout + n * C, *x = inp + n * C;
    float dot = 0;
    for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
      const Floats<width> d = load<width>(dy + c), v = load<width>(x + c);
      Floats<width> w;
      if (weight != nullptr) w = load<width>(weight + c);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float g = d[i] * v[i];
        dot += weight != nullptr ? g * w[i] : g;
        if (weight != nullptr) sums[c + i] += g * r;
      }
    }
    const float mean = warp_sum(dot) * r * r / static_cast<float>(C);
    for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
      Floats<width> d = load<width>(dy + c), v = load<width>(x + c);
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
#pragma unroll
        for (int i = 0; i < width; ++i) d[i] *= w[i];
      }
#pragma unroll
      for (int i = 0; i < width; ++i) d[i] = r * (d[i] - v[i] * mean);
      store_or_add<width>(dinp + n * C + c, d, acc);
    }
  }
  if (weight == nullptr) return;
  __syncthreads();
  const float* first = dynamic_shared<float>();
  for (int64_t c = threadIdx.y * warp_size + threadIdx.x; c < C; c += blockDim.y * warp_size) {
    float sum = 0;
    for (uint32_t w = 0; w < blockDim.y; ++w) sum += first[w * C + c];
    partial[blockIdx.x * C + c] = sum;
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void rmsnorm_forward_cuda(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, int64_t C,
                          double eps) {
  const int64_t rows = rstd.numel();
  with_storage(out.dtype, [&](auto storage) {
    using S = decltype(storage);
    with_width<S>(C, {out.data, inp.data}, [&](auto width) {
      launch({"rmsnorm_forward", blocks_of(rows, warps), dim3(warp_size, warps)},
             rmsnorm_forward_kernel<width, S>, out.as<S>(), rstd.as<float>(), inp.as<S>(), data_or_null<float>(weight),
             rows, C, static_cast<float>(eps));
    });
  });
}

void rmsnorm_backward_cuda(const Tensor& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                           const Tensor& weight, const Tensor& rstd, int64_t C, bool acc) {
  const int64_t rows = rstd.numel();
  const bool gain = weight.data != nullptr;
  // So many warps as have room for their sums, and so many blocks that each has rows to share the sums' cost.
  const int64_t row_bytes = C * static_cast<int64_t>(sizeof(float));
  const auto rows_at_once = static_cast<uint32_t>(gain ? std::clamp<int64_t>(96 * 1024 / row_bytes, 1, warps) : warps);
  const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(rows / (8 * rows_at_once), 1, 528));
  float* partial = gain ? scratch<float>(blocks * C) : nullptr;
  with_storage(dinp.dtype, [&](auto storage) {
    using S = decltype(storage);
    with_width<S>(C, {dinp.data, dout.data, inp.data}, [&](auto width) {
      const size_t shared = gain ? rows_at_once * static_cast<size_t>(row_bytes) : 0;
      launch({"rmsnorm_backward", blocks, dim3(warp_size, rows_at_once), shared},
             rmsnorm_backward_kernel<width, S>, dinp.as<S>(), partial, dout.as<S>(), inp.as<S>(),
             data_or_null<float>(weight), rstd.as<float>(), rows, C, acc);
    });
  });
  if (gain) add_rows(dweight.as<float>(), partial, blocks, C);
}

}  // namespace crossply
