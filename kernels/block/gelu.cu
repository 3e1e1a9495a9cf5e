// Not yet run on hardware: only in the emulator.
#include "kernels/block/gelu.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// z = |x|, at most 12, or 9.9 by tanh; area = Phi(-z), moment = z phi(z). NaN stays NaN.
struct Tail {
  float z, area, moment;
};
template <GeluKind kind>
__device__ __forceinline__ Tail tail_of(float x) {
  constexpr float most = kind == GeluKind::erf ? 12.f : 9.9f;
  float z = fabsf(x);
  z = z > most ? most : z;
  if constexpr (kind == GeluKind::erf) {
    const float t = __fdividef(1.f, 1.f + 0.34f * z), bell = expf(-0.5f * z * z);
    float q;
    tail_polynomial(q, t - 0.5f);
    return {z, bell * t * q, z * bell * 0.398942280f};
  } else {
    float e, slope;
    tanh_parts(e, slope, z);
    e = expf(e);
    const float r = __fdividef(1.f, 1.f + e), area = e * r;
    return {z, area, z * slope * area * r};
  }
}

// Two tensors, three backward; of bf16 so few bytes an element that the arithmetic takes about as long as the memory.
template <GeluKind kind, int width, class S>
__global__ void gelu_forward_kernel(S* out, const S* inp, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(inp + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const Tail tail = tail_of<kind>(x[k]);
    x[k] = (x[k] < 0.f ? 0.f : x[k]) - tail.z * tail.area;
  }
  store<width>(out + i, x);
}

template <GeluKind kind, int width, class S>
__global__ void gelu_backward_kernel(S* dinp, const S* dout, const S* inp, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> x = load<width>(inp + i);
  Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const Tail tail = tail_of<kind>(x[k]);
    const float slope = tail.area - tail.moment;  // at -z; at z it is 1 minus that
    d[k] *= x[k] < 0.f ? slope : 1.f - slope;
  }
  store_or_accumulate<width>(dinp + i, d, accumulate);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void gelu_forward_cuda(const Tensor& out, const Tensor& inp, GeluKind kind) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, inp.data}, [&]<class S>(S, auto width) {
    const auto kernel = kind == GeluKind::erf ? gelu_forward_kernel<GeluKind::erf, width, S>
                                              : gelu_forward_kernel<GeluKind::tanh, width, S>;
    launch_elementwise("gelu_forward", n, width, kernel, out.as<S>(), inp.as<S>());
  });
}

void gelu_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, GeluKind kind) {
  const int64_t n = dinp.numel();
  with_access(dinp.dtype, n, {dinp.data, dout.data, inp.data}, [&]<class S>(S, auto width) {
    const auto kernel = kind == GeluKind::erf ? gelu_backward_kernel<GeluKind::erf, width, S>
                                              : gelu_backward_kernel<GeluKind::tanh, width, S>;
    launch_elementwise("gelu_backward", n, width, kernel, dinp.as<S>(), dout.as<S>(), inp.as<S>(), dinp.accumulate);
  });
}

}  // namespace crossply
