#include "kernels/matmul.h"

#include "kernels/gemm.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void matmul_forward(const Tensor& out, const Tensor& inp, const Tensor& weight, Stream stream) {
  const int64_t O = weight.dim(0), C = weight.dim(1), rows = C > 0 ? inp.numel() / C : 0;
  CHECK_THAT(weight.shape.rank == 2 && O > 0 && C > 0 && inp.numel() == rows * C && out.numel() == rows * O,
             "matmul_forward: out ", out.str(), " inp ", inp.str(), " weight ", weight.str());
  if (stream.backend == Backend::cpu)
    return gemm(out.as<float>(), {inp.as<float>(), C, 1}, {weight.as<float>(), 1, C}, rows, O, C, false);
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    matmul_forward_ref(out.as<T>(), inp.as<T>(), weight.as<T>(), rows, C, O);
  });
}

void matmul_backward_input(const Tensor& dinp, const Tensor& dout, const Tensor& weight, bool acc, Stream stream) {
  const int64_t O = weight.dim(0), C = weight.dim(1), rows = C > 0 ? dinp.numel() / C : 0;
  CHECK_THAT(weight.shape.rank == 2 && O > 0 && C > 0 && dinp.numel() == rows * C && dout.numel() == rows * O,
             "matmul_backward_input: dinp ", dinp.str(), " dout ", dout.str(), " weight ", weight.str());
  if (stream.backend == Backend::cpu)
    return gemm(dinp.as<float>(), {dout.as<float>(), O, 1}, {weight.as<float>(), C, 1}, rows, C, O, acc);
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    matmul_backward_input_ref(dinp.as<T>(), dout.as<T>(), weight.as<T>(), rows, C, O, acc);
  });
}

void matmul_backward_weight(const Tensor& dweight, const Tensor& dout, const Tensor& inp, Stream stream) {
  const int64_t O = dweight.dim(0), C = dweight.dim(1), rows = C > 0 ? inp.numel() / C : 0;
  CHECK_THAT(dweight.shape.rank == 2 && O > 0 && C > 0 && inp.numel() == rows * C && dout.numel() == rows * O,
             "matmul_backward_weight: dweight ", dweight.str(), " dout ", dout.str(), " inp ", inp.str());
  if (stream.backend == Backend::cpu)
    return gemm(dweight.as<float>(), {dout.as<float>(), 1, O}, {inp.as<float>(), C, 1}, O, C, rows, true);
  with_real(dweight.dtype, [&](auto real) {
    using T = decltype(real);
    matmul_backward_weight_ref(dweight.as<T>(), dout.as<T>(), inp.as<T>(), rows, C, O);
  });
}

}  // namespace crossply
