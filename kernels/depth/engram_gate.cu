// Not yet run on hardware: only in the emulator.
#include "kernels/depth/engram_gate.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int warps = 4, threads = warps * warp_size;

// Of a stream's q: gam, and the slope of gam by q.
struct Gated {
  float gam, slope;
};
__device__ __forceinline__ Gated gated(float q) {
  constexpr auto least = static_cast<float>(engram_least_logit);
  const bool clamped = fabsf(q) < least;
  const float root = sqrtf(clamped ? least : fabsf(q));
  const Logistic l = logistic(copysignf(root, q));
  return {l.s, clamped ? 0.f : l.s * l.rest / (2.f * root)};
}

// A warp takes a stream of a token. Bound by memory: the stream and its key are read, the value of all streams, too,
// and the stream is written; what the second pass reads again is in the L1.
template <int width, class S>
__global__ void engram_gate_forward_kernel(S* out, float* saved, const S* x, const S* kv, const float* wq,
                                           const float* wk, float eps, EngramGateSize z) {
  const int64_t row = row_of_lanes<threads>(warp_size), n = row / z.E, s = row % z.E;
  if (n >= z.N) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t at = row * z.C, key = (n * (z.E + 1) + s) * z.C, value = (n * (z.E + 1) + z.E) * z.C;
  float dot = 0, xx = 0, kk = 0;
  for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
    const Floats<width> a = load<width>(x + at + c), k = load<width>(kv + key + c), gq = load<width>(wq + s * z.C + c),
                        gk = load<width>(wk + s * z.C + c);
#pragma unroll
    for (int i = 0; i < width; ++i) dot += a[i] * (gq[i] * gk[i]) * k[i], xx += a[i] * a[i], kk += k[i] * k[i];
  }
  const float C = static_cast<float>(z.C), rx = 1.f / sqrtf(warp_sum(xx) / C + eps);
  const float rk = 1.f / sqrtf(warp_sum(kk) / C + eps);
  dot = warp_sum(dot);
  const float gam = gated(dot * rx * rk / sqrtf(C)).gam;
  for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
    Floats<width> a = load<width>(x + at + c);
    const Floats<width> v = load<width>(kv + value + c);
#pragma unroll
    for (int i = 0; i < width; ++i) a[i] += gam * v[i];
    store<width>(out + at + c, a);
  }
  if (lane == 0) store<4>(saved + row * engram_saved, Floats<4>{{dot, gam, rx, rk}});
}

// A warp takes a token: all its streams, and then the value's gradient, which is of all of them. factors (N, E): t rx
// rk.
template <int width, class S>
__global__ void engram_gate_backward_kernel(S* dx, bool dx_added, S* dkv, bool dkv_added, float* factors, const S* dout,
                                            const S* x, const S* kv, const float* wq, const float* wk,
                                            const float* saved, EngramGateSize z) {
  const int64_t n = row_of_lanes<threads>(warp_size);
  if (n >= z.N) return;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int64_t keys = n * (z.E + 1) * z.C, value = keys + z.E * z.C;
  const float C = static_cast<float>(z.C);
  for (int64_t s = 0; s < z.E; ++s) {
    const int64_t at = (n * z.E + s) * z.C, key = keys + s * z.C;
    float sum = 0;
    for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
      const Floats<width> dy = load<width>(dout + at + c), v = load<width>(kv + value + c);
#pragma unroll
      for (int i = 0; i < width; ++i) sum += dy[i] * v[i];
    }
    const Floats<4> of = load<4>(saved + (n * z.E + s) * engram_saved);
    const float dot = of[0], rx = of[2], rk = of[3];
    const float t = warp_sum(sum) * gated(dot * rx * rk / sqrtf(C)).slope / sqrtf(C);
    const float factor = t * rx * rk, of_x = factor * dot * rx * rx / C, of_k = factor * dot * rk * rk / C;
    if (lane == 0) factors[n * z.E + s] = factor;
    for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
      const Floats<width> dy = load<width>(dout + at + c), a = load<width>(x + at + c), k = load<width>(kv + key + c),
                          gq = load<width>(wq + s * z.C + c), gk = load<width>(wk + s * z.C + c);
      Floats<width> da, dk;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float w = factor * gq[i] * gk[i];
        da[i] = dy[i] + w * k[i] - of_x * a[i], dk[i] = w * a[i] - of_k * k[i];
      }
      store_or_accumulate<width>(dx + at + c, da, dx_added);
      store_or_accumulate<width>(dkv + key + c, dk, dkv_added);
    }
  }
  for (int64_t c = lane * width; c < z.C; c += warp_size * width) {
    Floats<width> dv{};
    for (int64_t s = 0; s < z.E; ++s) {
      const Floats<width> dy = load<width>(dout + (n * z.E + s) * z.C + c);
      const float gam = saved[(n * z.E + s) * engram_saved + 1];
#pragma unroll
      for (int i = 0; i < width; ++i) dv[i] += gam * dy[i];
    }
    store_or_accumulate<width>(dkv + value + c, dv, dkv_added);
  }
}

// A thread for each number of a gain, a block of the grid's y for a part of the tokens: sums of t rx rk x k.
template <class S>
__global__ void engram_gate_parts_kernel(float* partial, const float* factors, const S* x, const S* kv,
                                         EngramGateSize z) {
  const int64_t i = first_of_thread<1>();
  if (i >= z.E * z.C) return;
  const int64_t s = i / z.C, c = i % z.C;
  float sum = 0;
  for (int64_t n = z.N * blockIdx.y / gridDim.y; n < z.N * (blockIdx.y + 1) / gridDim.y; ++n)
    sum += factors[n * z.E + s] * to_float(x[n * z.E * z.C + i]) * to_float(kv[(n * (z.E + 1) + s) * z.C + c]);
  partial[blockIdx.y * z.E * z.C + i] = sum;
}

__global__ void engram_gate_gains_kernel(float* dwq, float* dwk, const float* partial, int64_t parts, const float* wq,
                                         const float* wk, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  float sum = 0;
  for (int64_t p = 0; p < parts; ++p) sum += partial[p * n + i];
  dwq[i] += wk[i] * sum, dwk[i] += wq[i] * sum;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void engram_gate_forward_cuda(const Tensor& out, const Tensor& saved, const EngramGateInputs& in, double eps,
                              const EngramGateSize& z) {
  with_access(in.x.dtype, z.C, {out.data, in.x.data, in.kv.data, in.wq.data, in.wk.data}, [&]<class S>(S, auto width) {
    launch({"engram_gate_forward", blocks_of(z.N * z.E, warps), threads}, engram_gate_forward_kernel<width, S>,
           out.as<S>(), saved.as<float>(), in.x.as<S>(), in.kv.as<S>(), in.wq.as<float>(), in.wk.as<float>(),
           static_cast<float>(eps), z);
  });
}

void engram_gate_backward_cuda(const Grad& dx, const Grad& dkv, const Tensor& dwq, const Tensor& dwk,
                               const Tensor& dout, const EngramGateInputs& in, const Tensor& saved,
                               const EngramGateSize& z) {
  const int64_t parts = engram_gate_parts(z.N), size = z.E * z.C;
  float *factors = scratch<float>(z.N * z.E), *partial = scratch<float>(parts * size, 1);
  with_access(in.x.dtype, z.C, {dx.data, dkv.data, dout.data, in.x.data, in.kv.data, in.wq.data, in.wk.data},
              [&]<class S>(S, auto width) {
                launch({"engram_gate_backward", blocks_of(z.N, warps), threads}, engram_gate_backward_kernel<width, S>,
                       dx.as<S>(), dx.accumulate, dkv.as<S>(), dkv.accumulate, factors, dout.as<S>(), in.x.as<S>(),
                       in.kv.as<S>(), in.wq.as<float>(), in.wk.as<float>(), saved.as<float>(), z);
              });
  with_storage(in.x.dtype, [&]<class S>(S) {
    const dim3 grid(blocks_of(size, elementwise_threads), static_cast<uint32_t>(parts));
    launch({"engram_gate_parts", grid, elementwise_threads}, engram_gate_parts_kernel<S>, partial, factors,
           in.x.as<S>(), in.kv.as<S>(), z);
  });
  launch_elementwise("engram_gate_gains", size, 1, engram_gate_gains_kernel, dwq.as<float>(), dwk.as<float>(), partial,
                     parts, in.wq.as<float>(), in.wk.as<float>());
}

}  // namespace crossply
