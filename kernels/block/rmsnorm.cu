// Not yet run on hardware: only in the emulator.
#include "kernels/block/rmsnorm.h"

#include "kernels/block/norm.cuh"

namespace crossply {
namespace {

// The plain kernel gives a row to one thread: a load of a warp touches 32 cache lines for one element each. Here the
// lanes of a warp share the row and load 16 adjacent bytes each, and every line is used whole. The row stays in
// registers for the second pass. Each element is read once and written once: memory bounds it.
template <int held, int width, class S>
__global__ void __launch_bounds__(norm_warps* warp_size)
    rmsnorm_forward_kernel(S* out, float* rstd, const S* inp, const float* weight, NormRows rows, float eps) {
  const int64_t n = rows.of_thread(static_cast<int64_t>(blockIdx.x) * norm_warps + threadIdx.y), C = rows.C;
  const bool there = n < rows.count;
  const LaneVectors<held, width, S> x(inp + (there ? n : 0) * C, rows, there);
  float sum = 0;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    const Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += value[i] * value[i];
  });
  const float scale = rsqrtf(group_sum(sum, rows.lanes) / static_cast<float>(C) + eps);
  if (!there) return;
  if (static_cast<int>(threadIdx.x) % rows.lanes == 0) rstd[n] = scale;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] *= scale;
    if (weight != nullptr) {
      const Floats<width> w = load<width>(weight + c);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] *= w[i];
    }
    store<width>(out + n * C + c, value);
  });
}

// The plain backward reads dout and inp twice for dinp and a third time for dweight, which only C threads sum up. Here
// one read serves both gradients: the row stays in registers for dinp, and its share of dweight is added in shared
// memory. A block of many rows writes one row of sums: few bytes beside the rows, no atomics, the same bits every time.
//
// Each group of lanes sums up dweight for its own rows; the block adds the groups' sums in order and writes one row of
// `partial` (blocks, C). Without weight there is neither.
template <int held, int width, class S>
__global__ void __launch_bounds__(norm_backward_warps* warp_size)
    rmsnorm_backward_kernel(S* dinp, float* partial, const S* dout, const S* inp, const float* weight,
                            const float* rstd, NormRows rows, bool accumulate) {
  const int64_t C = rows.C, groups = static_cast<int64_t>(blockDim.y) * warp_size >> rows.log_lanes;
  const RowSums<width> sums{dynamic_shared<float>() + rows.of_thread(threadIdx.y) * C, C};
  if (weight != nullptr) sums.clear(rows);
  __syncwarp();
  for (int64_t n0 = blockIdx.x * groups; n0 < rows.count; n0 += gridDim.x * groups) {
    const int64_t n = n0 + rows.of_thread(threadIdx.y);
    const bool there = n < rows.count;
    const float r = there ? rstd[n] : 0.f;
    const int64_t at = (there ? n : 0) * C;
    const LaneVectors<held, width, S> dy(dout + at, rows, there), x(inp + at, rows, there),
        before(dinp + at, rows, accumulate && there);
    float dot = 0;
    for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
      const Floats<width> d = dy.at(v, c), value = x.at(v, c);
      Floats<width> g;
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] = d[i] * value[i];
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          dot += g[i] * w[i];
          g[i] *= r;
        }
        sums.add(c, g);
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) dot += g[i];
      }
    });
    const float mean = group_sum(dot, rows.lanes) * r * r / static_cast<float>(C);
    if (!there) continue;
    for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
      Floats<width> d = dy.at(v, c);
      const Floats<width> value = x.at(v, c), sum_so_far = before.at(v, c);
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
#pragma unroll
        for (int i = 0; i < width; ++i) d[i] *= w[i];
      }
#pragma unroll
      for (int i = 0; i < width; ++i) d[i] = sum_so_far[i] + r * (d[i] - value[i] * mean);
      store<width>(dinp + at + c, d);
    });
  }
  if (weight == nullptr) return;
  __syncthreads();
  write_group_sums(partial + blockIdx.x * C, RowSums<width>{dynamic_shared<float>(), C}, groups);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void rmsnorm_forward_cuda(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, int64_t C,
                          double eps) {
  const int64_t rows = rstd.numel();
  with_storage(out.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(C, {out.data, inp.data}, [&](auto held, auto width, int lanes) {
      launch({"rmsnorm_forward", blocks_of(rows * lanes, norm_warps * warp_size), dim3(warp_size, norm_warps)},
             rmsnorm_forward_kernel<held, width, S>, out.as<S>(), rstd.as<float>(), inp.as<S>(),
             data_or_null<float>(weight), NormRows(rows, C, lanes), static_cast<float>(eps));
    });
  });
}

void rmsnorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                           const Tensor& weight, const Tensor& rstd, int64_t C) {
  const bool gain = weight.data != nullptr;
  with_storage(dinp.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(C, {dinp.data, dout.data, inp.data}, [&](auto held, auto width, int lanes) {
      const NormRows rows(rstd.numel(), C, lanes);
      const NormLaunch plan(rows, held, gain ? 1 : 0);
      float* partial = gain ? scratch<float>(plan.blocks * C) : nullptr;
      launch({"rmsnorm_backward", plan.blocks, dim3(warp_size, plan.warps), plan.shared_bytes},
             rmsnorm_backward_kernel<held, width, S>, dinp.as<S>(), partial, dout.as<S>(), inp.as<S>(),
             data_or_null<float>(weight), rstd.as<float>(), rows, dinp.accumulate);
      if (gain) add_rows(dweight.as<float>(), partial, plan.blocks, C);
    });
  });
}

}  // namespace crossply
