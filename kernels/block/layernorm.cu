// Not yet run on hardware: only in the emulator.
#include "kernels/block/layernorm.h"

#include "kernels/block/norm.cuh"

namespace crossply {
namespace {

// Bound by memory: each row once. x - mean is computed anew where it is needed, in place of registers to keep it in.
template <int held, int width, class S>
__global__ void __launch_bounds__(norm_warps* warp_size)
    layernorm_forward_kernel(S* out, float* mean, float* rstd, const S* inp, const float* weight, const float* bias,
                             NormRows rows, float eps) {
  const int64_t n = rows.of_thread(static_cast<int64_t>(blockIdx.x) * norm_warps + threadIdx.y), C = rows.C;
  const bool there = n < rows.count;
  const LaneVectors<held, width, S> x(inp + (there ? n : 0) * C, rows, there);
  float sum = 0, square = 0;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    const Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += value[i];
  });
  const float m = group_sum(sum, rows.lanes) / static_cast<float>(C);
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    const Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) square += (value[i] - m) * (value[i] - m);
  });
  const float r = rsqrtf(group_sum(square, rows.lanes) / static_cast<float>(C) + eps);
  if (!there) return;
  if (static_cast<int>(threadIdx.x) % rows.lanes == 0) mean[n] = m, rstd[n] = r;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] = (value[i] - m) * r;
    if (weight != nullptr) {
      const Floats<width> w = load<width>(weight + c);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] *= w[i];
    }
    if (bias != nullptr) {
      const Floats<width> b = load<width>(bias + c);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] += b[i];
    }
    store<width>(out + n * C + c, value);
  });
}

// dweight, and dbias if `biased`, are summed up in shared memory, by each group of lanes for its rows; the block adds
// the groups' sums in order and writes one row of `partial` (blocks, C) and one of that for dbias, which follows it.
// Without weight there is none of them.
template <int held, int width, class S>
__global__ void __launch_bounds__(norm_backward_warps* warp_size, 3)
    layernorm_backward_kernel(S* dinp, float* partial, const S* dout, const S* inp, const float* weight,
                              const float* mean, const float* rstd, NormRows rows, bool biased, bool accumulate) {
  const int64_t C = rows.C, groups = static_cast<int64_t>(blockDim.y) * warp_size >> rows.log_lanes;
  const int64_t group = rows.of_thread(threadIdx.y);
  const RowSums<width> dw{dynamic_shared<float>() + group * C, C};
  const RowSums<width> db{dynamic_shared<float>() + (groups + group) * C, C};
  if (weight != nullptr) dw.clear(rows);
  if (biased) db.clear(rows);
  __syncwarp();
  for (int64_t n0 = blockIdx.x * groups; n0 < rows.count; n0 += gridDim.x * groups) {
    const int64_t n = n0 + group;
    const bool there = n < rows.count;
    const float m = there ? mean[n] : 0.f, r = there ? rstd[n] : 0.f;
    const int64_t at = (there ? n : 0) * C;
    const LaneVectors<held, width, S> dy(dout + at, rows, there), x(inp + at, rows, there),
        before(dinp + at, rows, accumulate && there);
    float one = 0, out = 0;
    for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
      Floats<width> d = dy.at(v, c), value = x.at(v, c);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] = (value[i] - m) * r;
      if (biased) db.add(c, d);
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
        Floats<width> g;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          g[i] = d[i] * value[i];
          d[i] *= w[i];
        }
        dw.add(c, g);
      }
#pragma unroll
      for (int i = 0; i < width; ++i) one += d[i], out += d[i] * value[i];
    });
    const float along_one = group_sum(one, rows.lanes) / static_cast<float>(C);
    const float along_out = group_sum(out, rows.lanes) / static_cast<float>(C);
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
      for (int i = 0; i < width; ++i) d[i] = sum_so_far[i] + r * (d[i] - along_one - (value[i] - m) * r * along_out);
      store<width>(dinp + at + c, d);
    });
  }
  if (weight == nullptr) return;
  __syncthreads();
  write_group_sums(partial + blockIdx.x * C, RowSums<width>{dynamic_shared<float>(), C}, groups);
  if (biased)
    write_group_sums(partial + (gridDim.x + blockIdx.x) * C, RowSums<width>{dynamic_shared<float>() + groups * C, C},
                     groups);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void layernorm_forward_cuda(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp,
                            const Tensor& weight, const Tensor& bias, int64_t C, double eps) {
  const int64_t rows = rstd.numel();
  with_storage(out.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(C, {out.data, inp.data, weight.data, bias.data}, [&](auto held, auto width, int lanes) {
      launch({"layernorm_forward", blocks_of(rows * lanes, norm_warps * warp_size), dim3(warp_size, norm_warps)},
             layernorm_forward_kernel<held, width, S>, out.as<S>(), mean.as<float>(), rstd.as<float>(), inp.as<S>(),
             data_or_null<float>(weight), data_or_null<float>(bias), NormRows(rows, C, lanes), static_cast<float>(eps));
    });
  });
}

void layernorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dbias, const Tensor& dout,
                             const Tensor& inp, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                             int64_t C) {
  const bool gain = weight.data != nullptr, biased = dbias.data != nullptr;
  with_storage(dinp.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(C, {dinp.data, dout.data, inp.data, weight.data}, [&](auto held, auto width, int lanes) {
      const NormRows rows(rstd.numel(), C, lanes);
      const int sums = gain + biased;
      const NormLaunch plan(rows, held, sums);
      float* partial = gain ? scratch<float>(sums * plan.blocks * C) : nullptr;
      launch({"layernorm_backward", plan.blocks, dim3(warp_size, plan.warps), plan.shared_bytes},
             layernorm_backward_kernel<held, width, S>, dinp.as<S>(), partial, dout.as<S>(), inp.as<S>(),
             data_or_null<float>(weight), mean.as<float>(), rstd.as<float>(), rows, biased, dinp.accumulate);
      if (gain) add_rows(dweight.as<float>(), partial, plan.blocks, C);
      if (biased) add_rows(dbias.as<float>(), partial + plan.blocks * C, plan.blocks, C);
    });
  });
}

}  // namespace crossply
