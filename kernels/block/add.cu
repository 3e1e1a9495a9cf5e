// Not yet run on hardware: only in the emulator.
#include "kernels/block/add.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: three tensors, two where a gradient is copied.
template <int width, class S>
__global__ void add_forward_kernel(S* out, const S* a, const S* b, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(a + i);
  const Floats<width> y = load<width>(b + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] += y[k];
  store<width>(out + i, x);
}

template <int width, class S>
__global__ void accumulate_kernel(S* dinp, const S* dout, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i < n) store_or_accumulate<width>(dinp + i, load<width>(dout + i), accumulate);
}

template <int width, class S>
__global__ void add_scaled_forward_kernel(S* out, const S* a, const S* b, float factor, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(a + i);
  const Floats<width> y = load<width>(b + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] += factor * y[k];
  store<width>(out + i, x);
}

template <int width, class S>
__global__ void accumulate_scaled_kernel(S* dinp, const S* dout, float factor, bool accumulate, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) d[k] *= factor;
  store_or_accumulate<width>(dinp + i, d, accumulate);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void add_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, a.data, b.data}, [&]<class S>(S, auto width) {
    launch_elementwise("add_forward", n, width, add_forward_kernel<width, S>, out.as<S>(), a.as<S>(), b.as<S>());
  });
}

void accumulate_cuda(const Grad& dinp, const Tensor& dout) {
  const int64_t n = dinp.numel();
  with_access(dinp.dtype, n, {dinp.data, dout.data}, [&]<class S>(S, auto width) {
    launch_elementwise("accumulate", n, width, accumulate_kernel<width, S>, dinp.as<S>(), dout.as<S>(),
                       dinp.accumulate);
  });
}

void add_scaled_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b, double factor) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, a.data, b.data}, [&]<class S>(S, auto width) {
    launch_elementwise("add_scaled_forward", n, width, add_scaled_forward_kernel<width, S>, out.as<S>(), a.as<S>(),
                       b.as<S>(), static_cast<float>(factor));
  });
}

void accumulate_scaled_cuda(const Grad& dinp, const Tensor& dout, double factor) {
  const int64_t n = dinp.numel();
  with_access(dinp.dtype, n, {dinp.data, dout.data}, [&]<class S>(S, auto width) {
    launch_elementwise("accumulate_scaled", n, width, accumulate_scaled_kernel<width, S>, dinp.as<S>(), dout.as<S>(),
                       static_cast<float>(factor), dinp.accumulate);
  });
}

}  // namespace crossply
