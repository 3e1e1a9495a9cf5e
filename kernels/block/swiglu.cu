// Not yet run on hardware: only in the emulator.
#include "kernels/block/swiglu.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: three tensors.
template <int width, class S>
__global__ void swiglu_forward_kernel(S* out, const S* gate, const S* up, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> a = load<width>(gate + i), b = load<width>(up + i);
  Floats<width> y;
#pragma unroll
  for (int k = 0; k < width; ++k) y[k] = a[k] * logistic(a[k]).s * b[k];
  store<width>(out + i, y);
}

// Five tensors. All is read before anything is written: dgate may be gate, and dup up.
template <int width, class S>
__global__ void swiglu_backward_kernel(S* dgate, S* dup, const S* dout, const S* gate, const S* up,
                                       bool accumulate_gate, bool accumulate_up, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  const Floats<width> a = load<width>(gate + i), b = load<width>(up + i), dy = load<width>(dout + i);
  Floats<width> dg, du;
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const Logistic l = logistic(a[k]);
    const float d = dy[k] * l.s;
    dg[k] = d * b[k] * (1.f + a[k] * l.rest);
    du[k] = d * a[k];
  }
  store_or_accumulate<width>(dgate + i, dg, accumulate_gate);
  store_or_accumulate<width>(dup + i, du, accumulate_up);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void swiglu_forward_cuda(const Tensor& out, const Tensor& gate, const Tensor& up) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, gate.data, up.data}, [&]<class S>(S, auto width) {
    launch_elementwise("swiglu_forward", n, width, swiglu_forward_kernel<width, S>, out.as<S>(), gate.as<S>(),
                       up.as<S>());
  });
}

void swiglu_backward_cuda(const Grad& dgate, const Grad& dup, const Tensor& dout, const Tensor& gate,
                          const Tensor& up) {
  const int64_t n = dout.numel();
  with_access(dout.dtype, n, {dgate.data, dup.data, dout.data, gate.data, up.data}, [&]<class S>(S, auto width) {
    launch_elementwise("swiglu_backward", n, width, swiglu_backward_kernel<width, S>, dgate.as<S>(), dup.as<S>(),
                       dout.as<S>(), gate.as<S>(), up.as<S>(), dgate.accumulate, dup.accumulate);
  });
}

}  // namespace crossply
