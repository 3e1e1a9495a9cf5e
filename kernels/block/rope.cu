// Not yet run on hardware: only in the emulator.
#include "kernels/block/rope.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// A thread takes `width` pairs of one head. The heads of a token are neighbours in a block, so that all but the first
// find the table's row in the L1 cache. Bound by memory: two tensors, three where the gradient is added.
constexpr int threads = 256;

// heads: B T H, so few that 32 bits divide them: in 64 bits that would take most of a thread's instructions. sign = 1
// turns forward, -1 back. All of a pair is read before any of it is written: out may be inp.
template <int width, class S>
__global__ void __launch_bounds__(threads, 5)
    rope_kernel(S* out, const S* inp, const float* table, int64_t heads, int64_t T, int64_t H, int64_t D, int64_t pos,
                float sign, bool accumulate) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, h = D / 2;
  if (n >= heads) return;
  const uint32_t t = static_cast<uint32_t>(n) / static_cast<uint32_t>(H) % static_cast<uint32_t>(T);
  const float* row = table + (pos + t) * D;
  for (int64_t j = threadIdx.x * width; j < h; j += blockDim.x * width) {
    const int64_t i = n * D + j;
    const Floats<width> x = load<width>(inp + i), y = load<width>(inp + i + h);
    const Floats<width> c = load<width>(row + j), s = load<width>(row + h + j);
    Floats<width> x_turned, y_turned;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      x_turned[k] = x[k] * c[k] - y[k] * (sign * s[k]);
      y_turned[k] = y[k] * c[k] + x[k] * (sign * s[k]);
    }
    store_or_accumulate<width>(out + i, x_turned, accumulate);
    store_or_accumulate<width>(out + i + h, y_turned, accumulate);
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void rope_cuda(const Grad& out, const Tensor& inp, const Tensor& table, int64_t pos, float sign) {
  const int64_t T = inp.dim(1), H = inp.dim(2), D = inp.dim(3), heads = inp.dim(0) * T * H;
  CHECK_THAT(heads < int64_t{1} << 32, "rope: ", inp.str(), " has too many heads for a GPU: use a smaller batch");
  with_access(out.dtype, D / 2, {out.data, inp.data, table.data}, [&]<class S>(S, auto width) {
    const auto across = static_cast<uint32_t>(std::min<int64_t>(D / 2 / width, threads)), down = threads / across;
    launch({"rope", blocks_of(heads, down), dim3(across, down)}, rope_kernel<width, S>, out.as<S>(), inp.as<S>(),
           table.as<float>(), heads, T, H, D, pos, sign, out.accumulate);
  });
}

}  // namespace crossply
