// Not yet run on hardware: only in the emulator.
#include "kernels/block/softcap.h"

#include "kernels/block/softcap.cuh"

namespace crossply {
namespace {

template <int width, class S>
__global__ void softcap_forward_kernel(S* out, const S* inp, Capped cap, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n) return;
  Floats<width> x = load<width>(inp + i);
#pragma unroll
  for (int k = 0; k < width; ++k) x[k] = cap(x[k]);
  store<width>(out + i, x);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void softcap_forward_cuda(const Tensor& out, const Tensor& inp, double cap) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, inp.data}, [&]<class S>(S, auto width) {
    launch_elementwise("softcap_forward", n, width, softcap_forward_kernel<width, S>, out.as<S>(), inp.as<S>(),
                       Capped(cap));
  });
}

}  // namespace crossply
