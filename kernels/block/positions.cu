// Not yet run on hardware: only in the emulator.
#include "kernels/block/positions.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: inp and out, or dout; the table comes from the cache for all sequences but the first. n: T * C, the
// numbers of a sequence, which are neighbours in memory as their rows of the table are.
template <int width, class S>
__global__ void positions_forward_kernel(S* out, const S* inp, const float* weight, int64_t B, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> w = load<width>(weight + i);
  for (int64_t b = blockIdx.y; b < B; b += gridDim.y) {
    Floats<width> x = load<width>(inp + b * n + i);
#pragma unroll
    for (int k = 0; k < width; ++k) x[k] += w[k];
    store<width>(out + b * n + i, x);
  }
}

constexpr int at_once = 4;  // sequences, on their way before the first is added

template <int width, class S>
__global__ void positions_backward_kernel(float* dweight, const S* dout, int64_t B, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> sum = load<width>(dweight + i);
  for (int64_t first = 0; first < B; first += at_once) {
    Packed<width, S> x[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) x[k] = load_packed_if<width>(first + k < B, dout, (first + k) * n + i);
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const Floats<width> value = floats(x[k]);
#pragma unroll
      for (int l = 0; l < width; ++l) sum[l] += value[l];
    }
  }
  store<width>(dweight + i, sum);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void positions_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t pos) {
  const int64_t B = inp.dim(0), n = inp.dim(1) * inp.dim(2);
  const float* table = weight.as<float>() + pos * inp.dim(2);
  with_access(out.dtype, n, {out.data, inp.data, table}, [&]<class S>(S, auto width) {
    const dim3 grid(blocks_of(n, elementwise_threads * width), static_cast<uint32_t>(std::min<int64_t>(B, 65535)));
    launch({"positions_forward", grid, elementwise_threads}, positions_forward_kernel<width, S>, out.as<S>(),
           inp.as<S>(), table, B, n);
  });
}

void positions_backward_cuda(const Tensor& dweight, const Tensor& dout) {
  const int64_t B = dout.dim(0), n = dout.dim(1) * dout.dim(2);
  with_access(dout.dtype, n, {dweight.data, dout.data}, [&]<class S>(S, auto width) {
    launch_elementwise("positions_backward", n, width, positions_backward_kernel<width, S>, dweight.as<float>(),
                       dout.as<S>(), B);
  });
}

}  // namespace crossply
