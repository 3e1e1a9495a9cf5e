// Not yet run on hardware: only in the emulator.
#include "kernels/block/bias.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: dout once. A block takes 32 vectors of columns and every gridDim.y-th group of rows; a thread has
// some rows on their way at once.
constexpr int at_once = 4, rows_together = groups_of_rows * at_once;

template <int width, class S>
__global__ void __launch_bounds__(warp_size* groups_of_rows)
    bias_backward_kernel(float* partial, const S* dout, int64_t rows, int64_t O) {
  SHARED(sums, Array<Array<Array<float, warp_size>, width>, groups_of_rows>);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warp_size * width, o = first + threadIdx.x * width;
  const int lane = static_cast<int>(threadIdx.x), group = static_cast<int>(threadIdx.y);
  Floats<width> sum{};
  for (int64_t n = int64_t{blockIdx.y} * rows_together + group; n < rows; n += int64_t{gridDim.y} * rows_together) {
    Packed<width, S> x[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t row = n + k * groups_of_rows;
      x[k] = load_packed_if<width>(row < rows && o < O, dout, row * O + o);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const Floats<width> value = floats(x[k]);
#pragma unroll
      for (int i = 0; i < width; ++i) sum[i] += value[i];
    }
  }
#pragma unroll
  for (int i = 0; i < width; ++i) sums[group][i][lane] = sum[i];
  __syncthreads();
  for (int i = group; i < width; i += groups_of_rows) {
    float total = 0;
    for (int g = 0; g < groups_of_rows; ++g) total += sums[g][i][lane];
    if (o < O) partial[blockIdx.y * O + o + i] = total;
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void bias_backward_cuda(const Tensor& dbias, const Tensor& dout, int64_t O) {
  constexpr int64_t most = 8 * 132;  // blocks, as run at once on an H200
  const int64_t rows = dout.numel() / O;
  with_access(dout.dtype, O, {dout.data}, [&]<class S>(S, auto width) {
    const uint32_t tiles = blocks_of(O, warp_size * width);
    const int64_t down = std::clamp<int64_t>(rows / (2 * rows_together), 1, std::max<int64_t>(most / tiles, 1));
    float* partial = scratch<float>(down * O);
    launch({"bias_backward", dim3(tiles, static_cast<uint32_t>(down)), dim3(warp_size, groups_of_rows)},
           bias_backward_kernel<width, S>, partial, dout.as<S>(), rows, O);
    add_rows(dbias.as<float>(), partial, down, O);
  });
}

}  // namespace crossply
