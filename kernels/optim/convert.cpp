#include "kernels/optim/convert.h"

#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {

void convert(const Tensor& out, const Tensor& inp, Stream stream) {
  const int64_t n = out.numel();
  CHECK_SHAPES(inp.numel() == n, out, inp);
  if (stream.backend == Backend::cuda) return convert_cuda(out, inp);
  bf16* to = out.as<bf16>();
  const float* from = inp.as<float>();
  if (stream.backend == Backend::reference) return convert_ref(to, from, n);
  parallel_for(n, 32768, [=](int64_t begin, int64_t end) { write_floats(to + begin, from + begin, end - begin); });
}

}  // namespace crossply
