#include "kernels/matmul.h"

#include "kernels/gemm.h"

namespace crossply {

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

namespace {

// Rows of a product with this weight; CHECKs all shapes.
int64_t count_rows(const char* name, const Tensor& out, const Tensor& inp, const Tensor& weight) {
  const int64_t O = weight.dim(0), C = weight.dim(1), rows = C > 0 ? inp.numel() / C : 0;
  CHECK_THAT(weight.shape.rank == 2 && O > 0 && C > 0 && inp.numel() == rows * C && out.numel() == rows * O, name,
             ": out ", out.str(), " inp ", inp.str(), " weight ", weight.str());
  return rows;
}

}  // namespace

void matmul_forward(const std::vector<Tensor>& outs, const Tensor& inp, const std::vector<Tensor>& weights,
                    Stream stream) {
  CHECK_THAT(outs.size() == weights.size(), "matmul_forward: ", outs.size(), " outputs of ", weights.size(),
             " weights");
  int64_t rows = 0;
  std::vector<Product> products;
  for (size_t i = 0; i < outs.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    rows = count_rows("matmul_forward", outs[i], inp, weights[i]);
    if (stream.backend == Backend::cpu) {
      products.push_back({outs[i].as<float>(), {inp.as<float>(), C, 1}, {weights[i].as<float>(), 1, C}, O, C, false});
      continue;
    }
    with_real(inp.dtype, [&](auto real) {
      using T = decltype(real);
      matmul_forward_ref(outs[i].as<T>(), inp.as<T>(), weights[i].as<T>(), rows, C, O);
    });
  }
  gemm_rows(products, rows);
}

void matmul_backward_input(const Tensor& dinp, const std::vector<Tensor>& douts, const std::vector<Tensor>& weights,
                           bool acc, Stream stream) {
  CHECK_THAT(douts.size() == weights.size(), "matmul_backward_input: ", douts.size(), " gradients of ", weights.size(),
             " weights");
  int64_t rows = 0;
  std::vector<Product> products;
  for (size_t i = 0; i < douts.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    const bool add = acc || i > 0;
    rows = count_rows("matmul_backward_input", douts[i], dinp, weights[i]);
    if (stream.backend == Backend::cpu) {
      products.push_back({dinp.as<float>(), {douts[i].as<float>(), O, 1}, {weights[i].as<float>(), C, 1}, C, O, add});
      continue;
    }
    with_real(dinp.dtype, [&](auto real) {
      using T = decltype(real);
      matmul_backward_input_ref(dinp.as<T>(), douts[i].as<T>(), weights[i].as<T>(), rows, C, O, add);
    });
  }
  gemm_rows(products, rows);
}

void matmul_backward_weight(const Tensor& dweight, const Tensor& dout, const Tensor& inp, Stream stream) {
  const int64_t O = dweight.dim(0), C = dweight.dim(1), rows = count_rows("matmul_backward_weight", dout, inp, dweight);
  if (stream.backend == Backend::cpu)
    return gemm(dweight.as<float>(), {dout.as<float>(), 1, O}, {inp.as<float>(), C, 1}, O, C, rows, true);
  with_real(dweight.dtype, [&](auto real) {
    using T = decltype(real);
    matmul_backward_weight_ref(dweight.as<T>(), dout.as<T>(), inp.as<T>(), rows, C, O);
  });
}

}  // namespace crossply
