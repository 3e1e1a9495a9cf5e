#include "kernels/block/quantize.h"

#include "kernels/dispatch.h"

namespace crossply {

void quantize(const Tensor& to, const Tensor& to_transposed, const Tensor& amax, const Tensor& x, const Tensor& scale,
              Stream stream) {
  const auto [rows, C] = rows_of(x);
  CHECK_SHAPES(to.data == nullptr || to.numel() == x.numel(), to, x);
  CHECK_SHAPES(to_transposed.data == nullptr || to_transposed.shape == Shape({C, rows}), to_transposed, x);
  CHECK_SHAPES(amax.numel() == 1 && scale.numel() == 1, amax, scale);
  if (stream.backend == Backend::cuda) return quantize_cuda(to, to_transposed, amax, x, scale);
  with_fp8(to, to_transposed, [&, rows = rows, C = C]<class S>(S) {
    quantize_ref(data_or_null<S>(to), data_or_null<S>(to_transposed), amax.as<float>(), x.as<bf16>(),
                 *scale.as<float>(), rows, C);
  });
}

}  // namespace crossply
