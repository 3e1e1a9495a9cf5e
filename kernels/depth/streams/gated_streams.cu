// Not yet run on hardware: only in the emulator.
#include "kernels/depth/streams/gated_streams.h"

#include "kernels/block/norm.cuh"
#include "kernels/depth/streams/hyper.cuh"

namespace crossply {

using namespace hyper;

namespace {

// All of these are bound by memory. What is E times as wide as the model moves, in units of N E C elements: norm 2
// forward and 3 back, mean 2 and 4, inject 2 and 1 or 2; beside them are the products' 4 and 9.

// -----------------------------------------------------------------------------------------------------------------
// Norm: a warp takes a stream of a token, or several that are short.

template <int held, int width, class S>
__global__ void __launch_bounds__(norm_warps* warp_size)
    gated_norm_forward_kernel(S* normed, float* rstd, const S* streams, const float* gain, NormRows rows, int E,
                              float eps) {
  const int64_t n = rows.of_thread(static_cast<int64_t>(blockIdx.x) * norm_warps + threadIdx.y), C = rows.C;
  const bool there = n < rows.count;
  const LaneVectors<held, width, S> x(streams + (there ? n : 0) * C, rows, there);
  float sum = 0;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    const Floats<width> value = x.at(v, c);
    sum += dot(value, value);
  });
  const float scale = rsqrtf(group_sum(sum, rows.lanes) / static_cast<float>(C) + eps);
  if (!there) return;
  if (static_cast<int>(threadIdx.x) % rows.lanes == 0) rstd[n] = scale;
  const float* w = gain + n % E * C;
  for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
    Floats<width> value = x.at(v, c);
    const Floats<width> g = load<width>(w + c);
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] *= scale * (1.f + g[i]);
    store<width>(normed + n * C + c, value);
  });
}

// Here the same lanes take all streams of a token, one after the other, so that each group of lanes has one row of sums
// for dgain (E*C) in shared memory; the block adds the groups' sums in order and writes a row of `partial`.
template <int held, int width, class S>
__global__ void __launch_bounds__(norm_backward_warps* warp_size)
    gated_norm_backward_kernel(S* dstreams, float* partial, const S* dnormed, const S* streams, const float* gain,
                               const float* rstd, NormRows rows, int E, bool accumulate) {
  const int64_t C = rows.C, groups = static_cast<int64_t>(blockDim.y) * warp_size >> rows.log_lanes;
  const RowSums<width> sums{dynamic_shared<float>() + rows.of_thread(threadIdx.y) * E * C, E * C};
  sums.clear(rows);
  __syncwarp();
  for (int64_t n0 = blockIdx.x * groups; n0 < rows.count; n0 += gridDim.x * groups) {
    const int64_t n = n0 + rows.of_thread(threadIdx.y);
    const bool there = n < rows.count;
    for (int i = 0; i < E; ++i) {
      const int64_t row = (there ? n : 0) * E + i;
      const float r = there ? rstd[row] : 0.f;
      const LaneVectors<held, width, S> dy(dnormed + row * C, rows, there), x(streams + row * C, rows, there),
          before(dstreams + row * C, rows, accumulate && there);
      float along = 0;
      for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
        const Floats<width> d = dy.at(v, c), value = x.at(v, c), w = load<width>(gain + i * C + c);
        Floats<width> g;
#pragma unroll
        for (int k = 0; k < width; ++k) {
          g[k] = d[k] * value[k];
          along += g[k] * (1.f + w[k]);
          g[k] *= r;
        }
        sums.add(i * C + c, g);
      });
      const float mean = group_sum(along, rows.lanes) * r * r / static_cast<float>(C);
      if (!there) continue;
      for_lane_vectors<held, width>(rows, [&](int v, int64_t c) {
        Floats<width> d = dy.at(v, c);
        const Floats<width> value = x.at(v, c), so_far = before.at(v, c), w = load<width>(gain + i * C + c);
#pragma unroll
        for (int k = 0; k < width; ++k) d[k] = so_far[k] + r * (d[k] * (1.f + w[k]) - value[k] * mean);
        store<width>(dstreams + row * C + c, d);
      });
    }
  }
  __syncthreads();
  write_group_sums(partial + blockIdx.x * E * C, RowSums<width>{dynamic_shared<float>(), E * C}, groups);
}

// -----------------------------------------------------------------------------------------------------------------
// Silu: narrow tensors.

template <int width, class S>
__global__ void gated_silu_forward_kernel(S* out, const S* inp, float factor, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(inp + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const float z = factor * x[k];
    x[k] = z * logistic(z).s;
  }
  store<width>(out + i, x);
}

template <int width, class S>
__global__ void gated_silu_backward_kernel(S* dinp, const S* dout, const S* inp, float factor, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> x = load<width>(inp + i);
  Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const Logistic l = logistic(factor * x[k]);
    d[k] *= factor * l.s * (1.f + factor * x[k] * l.rest);
  }
  store<width>(dinp + i, d);
}

// -----------------------------------------------------------------------------------------------------------------
// Mean, and the inject's forward: a thread takes `width` columns of a token in all streams. n counts the numbers of one
// stream of all tokens.

template <int width, class S>
__global__ void gated_mean_forward_kernel(S* out, const S* normed, const S* logits, int E, int64_t C, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const int64_t at = i / C * E * C + i % C;
  Floats<width> sum = {};
#pragma unroll 4
  for (int e = 0; e < E; ++e) {
    const Floats<width> x = load<width>(normed + at + e * C), l = load<width>(logits + at + e * C);
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] += logistic(l[k]).s * x[k];
  }
#pragma unroll
  for (int k = 0; k < width; ++k) sum[k] /= static_cast<float>(E);
  store<width>(out + i, sum);
}

template <int width, class S>
__global__ void gated_mean_backward_kernel(S* dnormed, S* dlogits, const S* dout, const S* normed, const S* logits,
                                           int E, int64_t C, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const int64_t at = i / C * E * C + i % C;
  Floats<width> g = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) g[k] /= static_cast<float>(E);
#pragma unroll 4
  for (int e = 0; e < E; ++e) {
    Floats<width> x = load<width>(normed + at + e * C), l = load<width>(logits + at + e * C);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const Logistic s = logistic(l[k]);
      l[k] = x[k] * s.s * s.rest * g[k];
      x[k] = s.s * g[k];
    }
    store<width>(dnormed + at + e * C, x);
    store<width>(dlogits + at + e * C, l);
  }
}

__device__ __forceinline__ float inject_weight(float logit, int E) {
  return 2.f * logistic(logit / static_cast<float>(E)).s;
}

template <int width, class S>
__global__ void gated_inject_forward_kernel(S* next, const S* streams, const S* logits, const S* y, int E, int64_t C,
                                            int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const int64_t token = i / C, at = token * E * C + i % C;
  const Floats<width> in = load<width>(y + i);
#pragma unroll 4
  for (int e = 0; e < E; ++e) {
    Floats<width> x = load<width>(streams + at + e * C);
    add_scaled(x, inject_weight(to_float(logits[token * E + e]), E), in);
    store<width>(next + at + e * C, x);
  }
}

// A warp takes a token.
template <int exact, int width, class S>
__global__ void __launch_bounds__(warps* warp_size)
    gated_inject_backward_kernel(S* dstreams, S* dlogits, S* dy, const S* dnext, const S* logits, const S* y,
                                 int64_t rows, int given_E, int64_t C, bool accumulate, bool accumulate_y) {
  constexpr int most = max_of<exact>;
  const int E = number_of_streams<exact>(given_E);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  float w[most], dots[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {
    w[i] = i < E ? inject_weight(to_float(logits[n * E + i]), E) : 0.f;
    dots[i] = 0;
  }
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Columns<width> in = load<width>(y + n * C + c);
    Array<Columns<width>, most> g;
    load_streams<most, width>(g, dnext + n * E * C, E, C, c);
    Columns<width> sum = {};
#pragma unroll
    for (int i = 0; i < most; ++i) {
      dots[i] += dot(g[i], in);
      add_scaled(sum, w[i], g[i]);
      if (i < E && dstreams != dnext) store_or_accumulate<width>(dstreams + (n * E + i) * C + c, g[i], accumulate);
    }
    store_or_accumulate<width>(dy + n * C + c, sum, accumulate_y);
  }
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const float sum = warp_sum(dots[i]) * w[i] * (2.f - w[i]) / static_cast<float>(2 * E);
    if (i < E && threadIdx.x == 0) from_float(dlogits[n * E + i], sum);
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void gated_norm_forward_cuda(const Tensor& normed, const Tensor& rstd, const Tensor& streams, const Tensor& gain,
                             double eps, const StreamsSize& z) {
  with_storage(streams.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(z.C, {normed.data, streams.data}, [&](auto held, auto width, int lanes) {
      const NormRows rows(z.rows * z.E, z.C, lanes);
      launch({"gated_norm_forward", blocks_of(rows.count * lanes, norm_warps * warp_size), dim3(warp_size, norm_warps)},
             gated_norm_forward_kernel<held, width, S>, normed.as<S>(), rstd.as<float>(), streams.as<S>(),
             gain.as<float>(), rows, static_cast<int>(z.E), static_cast<float>(eps));
    });
  });
}

void gated_norm_backward_cuda(const Grad& dstreams, const Tensor& dgain, const Tensor& dnormed, const Tensor& streams,
                              const Tensor& gain, const Tensor& rstd, const StreamsSize& z) {
  with_storage(streams.dtype, [&]<class S>(S) {
    with_lane_vectors<S>(z.C, {dstreams.data, dnormed.data, streams.data}, [&](auto held, auto width, int lanes) {
      const NormRows rows(z.rows, z.C, lanes);
      const NormLaunch plan(rows, held, static_cast<int>(z.E));
      float* partial = scratch<float>(plan.blocks * z.E * z.C);
      launch({"gated_norm_backward", plan.blocks, dim3(warp_size, plan.warps), plan.shared_bytes},
             gated_norm_backward_kernel<held, width, S>, dstreams.as<S>(), partial, dnormed.as<S>(), streams.as<S>(),
             gain.as<float>(), rstd.as<float>(), rows, static_cast<int>(z.E), dstreams.accumulate);
      add_rows(dgain.as<float>(), partial, plan.blocks, z.E * z.C);
    });
  });
}

void gated_silu_forward_cuda(const Tensor& out, const Tensor& inp, double factor) {
  with_access(inp.dtype, inp.numel(), {out.data, inp.data}, [&]<class S>(S, auto width) {
    launch_elementwise("gated_silu_forward", inp.numel(), width, gated_silu_forward_kernel<width, S>, out.as<S>(),
                       inp.as<S>(), static_cast<float>(factor));
  });
}

void gated_silu_backward_cuda(const Tensor& dinp, const Tensor& dout, const Tensor& inp, double factor) {
  with_access(inp.dtype, inp.numel(), {dinp.data, dout.data, inp.data}, [&]<class S>(S, auto width) {
    launch_elementwise("gated_silu_backward", inp.numel(), width, gated_silu_backward_kernel<width, S>, dinp.as<S>(),
                       dout.as<S>(), inp.as<S>(), static_cast<float>(factor));
  });
}

void gated_mean_forward_cuda(const Tensor& out, const Tensor& normed, const Tensor& logits, const StreamsSize& z) {
  with_access(out.dtype, z.C, {out.data, normed.data, logits.data}, [&]<class S>(S, auto width) {
    launch_elementwise("gated_mean_forward", z.rows * z.C, width, gated_mean_forward_kernel<width, S>, out.as<S>(),
                       normed.as<S>(), logits.as<S>(), static_cast<int>(z.E), z.C);
  });
}

void gated_mean_backward_cuda(const Tensor& dnormed, const Tensor& dlogits, const Tensor& dout, const Tensor& normed,
                              const Tensor& logits, const StreamsSize& z) {
  with_access(dout.dtype, z.C, {dnormed.data, dlogits.data, dout.data, normed.data, logits.data},
              [&]<class S>(S, auto width) {
                launch_elementwise("gated_mean_backward", z.rows * z.C, width, gated_mean_backward_kernel<width, S>,
                                   dnormed.as<S>(), dlogits.as<S>(), dout.as<S>(), normed.as<S>(), logits.as<S>(),
                                   static_cast<int>(z.E), z.C);
              });
}

void gated_inject_forward_cuda(const Tensor& next, const Tensor& streams, const Tensor& logits, const Tensor& y,
                               const StreamsSize& z) {
  with_access(next.dtype, z.C, {next.data, streams.data, y.data}, [&]<class S>(S, auto width) {
    launch_elementwise("gated_inject_forward", z.rows * z.C, width, gated_inject_forward_kernel<width, S>, next.as<S>(),
                       streams.as<S>(), logits.as<S>(), y.as<S>(), static_cast<int>(z.E), z.C);
  });
}

void gated_inject_backward_cuda(const Grad& dstreams, const Tensor& dlogits, const Grad& dy, const Tensor& dnext,
                                const Tensor& logits, const Tensor& y, const StreamsSize& z) {
  with_instance(dnext.dtype, z.E, z.C, {dstreams.data, dy.data, dnext.data, y.data},
                [&]<class S>(S, auto exact, auto wide) {
                  constexpr int width = width_with_sums<exact, wide, S>;
                  launch({"gated_inject_backward", blocks_of(z.rows, warps), dim3(warp_size, warps)},
                         gated_inject_backward_kernel<exact, width, S>, dstreams.as<S>(), dlogits.as<S>(), dy.as<S>(),
                         dnext.as<S>(), logits.as<S>(), y.as<S>(), z.rows, static_cast<int>(z.E), z.C,
                         dstreams.accumulate, dy.accumulate);
                });
}

}  // namespace crossply
