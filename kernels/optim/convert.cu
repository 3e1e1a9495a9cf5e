// Not yet run on hardware: only in the emulator.
#include "kernels/optim/convert.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Bound by memory: 6 bytes an element.
template <int width>
__global__ void convert_kernel(bf16* out, const float* inp, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i < n) store<width>(out + i, load<width>(inp + i));
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void convert_cuda(const Tensor& out, const Tensor& inp) {
  const int64_t n = out.numel();
  with_width<bf16>(n, {out.data, inp.data}, [&](auto width) {
    launch_elementwise("convert", n, width, convert_kernel<width>, out.as<bf16>(), inp.as<float>());
  });
}

}  // namespace crossply
