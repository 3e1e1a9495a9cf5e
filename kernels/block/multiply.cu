// Not yet run on hardware: only in the emulator.
#include "kernels/block/multiply.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: three tensors, five backward.
template <int width, class S>
__global__ void multiply_forward_kernel(S* out, const S* a, const S* b, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(a + i);
  const Floats<width> y = load<width>(b + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] *= y[k];
  store<width>(out + i, x);
}

// All is read before anything is written: da may be a, and db b.
template <int width, class S>
__global__ void multiply_backward_kernel(S* da, S* db, const S* dout, const S* a, const S* b, bool accumulate_a,
                                         bool accumulate_b, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(a + i), y = load<width>(b + i);
  const Floats<width> d = load<width>(dout + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] *= d[k], y[k] *= d[k];
  store_or_accumulate<width>(da + i, y, accumulate_a);
  store_or_accumulate<width>(db + i, x, accumulate_b);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void multiply_forward_cuda(const Tensor& out, const Tensor& a, const Tensor& b) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, a.data, b.data}, [&]<class S>(S, auto width) {
    launch_elementwise("multiply_forward", n, width, multiply_forward_kernel<width, S>, out.as<S>(), a.as<S>(),
                       b.as<S>());
  });
}

void multiply_backward_cuda(const Grad& da, const Grad& db, const Tensor& dout, const Tensor& a, const Tensor& b) {
  const int64_t n = dout.numel();
  with_access(dout.dtype, n, {da.data, db.data, dout.data, a.data, b.data}, [&]<class S>(S, auto width) {
    launch_elementwise("multiply_backward", n, width, multiply_backward_kernel<width, S>, da.as<S>(), db.as<S>(),
                       dout.as<S>(), a.as<S>(), b.as<S>(), da.accumulate, db.accumulate);
  });
}

}  // namespace crossply
