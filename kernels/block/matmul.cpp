#include "kernels/block/matmul.h"

#include "kernels/block/add.h"
#include "kernels/block/bias.h"
#include "kernels/block/gelu.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_bf16.h"
#include "kernels/dispatch.h"

namespace crossply {

namespace {

// c (M, N) = a (M, K) * b (K, N), the latter two in either order, given by their strides.
struct Factor {
  Tensor tensor;
  int64_t row, col;
};
struct Call {
  Tensor c;
  Factor a, b;
  int64_t N, K;
  bool accumulate;
};

template <class C, class T>
const std::vector<GemmProduct<C, T>>& typed(const std::vector<Call>& calls) {
  std::vector<GemmProduct<C, T>>& products = empty_list<GemmProduct<C, T>>();
  for (const Call& p : calls)
    products.push_back({p.c.as<C>(),
                        {p.a.tensor.as<T>(), p.a.row, p.a.col},
                        {p.b.tensor.as<T>(), p.b.row, p.b.col},
                        p.N,
                        p.K,
                        p.accumulate});
  return products;
}

void multiply(const std::vector<Call>& calls, int64_t M, Stream stream) {
  if (calls.empty()) return;
  const bool b16 = calls[0].a.tensor.dtype == Dtype::bf16;
  if (b16 && calls[0].c.dtype == Dtype::bf16) gemm_rows_bf16(typed<bf16, bf16>(calls), M);
  else if (b16) gemm_rows_bf16(typed<float, bf16>(calls), M);
  else if (stream.precision == MatmulPrecision::bf16x3) gemm_rows_bf16x3(typed<float, float>(calls), M);
  else gemm_rows(typed<float, float>(calls), M);
}

// Rows of a product with this weight; CHECKs all shapes.
int64_t count_rows(const Tensor& out, const Tensor& inp, const Tensor& weight) {
  const int64_t O = weight.dim(0), C = weight.dim(1), rows = C > 0 ? inp.numel() / C : 0;
  CHECK_SHAPES(weight.shape.rank == 2 && O > 0 && C > 0 && inp.numel() == rows * C && out.numel() == rows * O, out, inp,
               weight);
  return rows;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void matmul_forward(Tensors outs, const Tensor& inp, Tensors weights, Stream stream, const Tensor& addend,
                    Tensors biases, const Tensor& activated, bool contiguous) {
  const bool with_addend = addend.data != nullptr;
  CHECK_THAT(outs.size() == weights.size() && (biases.empty() || biases.size() == weights.size()), outs.size(),
             " outputs of ", weights.size(), " weights and ", biases.size(), " biases");
  CHECK_THAT(!with_addend || (outs.size() == 1 && addend.numel() == outs[0].numel() && addend.dtype == outs[0].dtype &&
                              addend.data != outs[0].data),
             addend.str(), " cannot be added to ", outs.size(), " outputs, the first ", outs[0].str());
  CHECK_THAT(activated.data == nullptr || (outs.size() == 1 && !with_addend && activated.numel() == outs[0].numel()),
             activated.str(), " cannot be the gelu of ", outs.size(), " outputs, the first ", outs[0].str());
  int64_t rows = 0;
  std::vector<Call>& calls = empty_list<Call>();
  for (size_t i = 0; i < outs.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    rows = count_rows(outs[i], inp, weights[i]);
    const Tensor bias = biases.empty() ? Tensor{} : biases[i];
    CHECK_SHAPES(bias.data == nullptr || bias.numel() == O, outs[i], weights[i], bias);
    if (stream.backend == Backend::cpu) calls.push_back({outs[i], {inp, C, 1}, {weights[i], 1, C}, O, C, false});
    if (stream.backend == Backend::reference)
      with_real(inp.dtype,
                [&]<class T>(T) { matmul_forward_ref(outs[i].as<T>(), inp.as<T>(), weights[i].as<T>(), rows, C, O); });
  }
  if (stream.backend == Backend::cuda)
    return matmul_forward_cuda(outs, inp, weights, rows, addend, biases, activated, contiguous);
  multiply(calls, rows, stream);
  if (with_addend) add_forward(outs[0], outs[0], addend, stream);
  for (size_t i = 0; i < biases.size(); ++i)
    if (biases[i].data != nullptr) bias_forward(outs[i], biases[i], stream);
  if (activated.data != nullptr) gelu_forward(activated, outs[0], GeluKind::tanh, stream);
}

void matmul_backward_input(const Grad& dinp, Tensors douts, Tensors weights, Stream stream, const Tensor& activates) {
  CHECK_THAT(douts.size() == weights.size(), douts.size(), " gradients of ", weights.size(), " weights");
  CHECK_THAT(activates.data == nullptr || (douts.size() == 1 && !dinp.accumulate && activates.numel() == dinp.numel()),
             "of ", douts.size(), " products ", dinp.str(), " cannot be the gradient of ", activates.str());
  int64_t rows = 0;
  std::vector<Call>& calls = empty_list<Call>();
  for (size_t i = 0; i < douts.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    const Grad d{dinp, dinp.accumulate || i > 0};
    rows = count_rows(douts[i], dinp, weights[i]);
    if (stream.backend == Backend::cpu) calls.push_back({d, {douts[i], O, 1}, {weights[i], C, 1}, C, O, d.accumulate});
    else if (stream.backend == Backend::cuda) matmul_backward_input_cuda(d, douts[i], weights[i], rows, activates);
    else
      with_real(dinp.dtype, [&]<class T>(T) {
        matmul_backward_input_ref(d.as<T>(), douts[i].as<T>(), weights[i].as<T>(), rows, C, O, d.accumulate);
      });
  }
  multiply(calls, rows, stream);
  if (activates.data != nullptr && stream.backend != Backend::cuda)
    gelu_backward(dinp, dinp, activates, GeluKind::tanh, stream);
}

void matmul_backward_weights(Tensors dweights, bool accumulate, Tensors douts, const Tensor& inp, Stream stream,
                             bool contiguous) {
  CHECK_THAT(douts.size() == dweights.size(), douts.size(), " gradients of ", dweights.size(), " weights");
  if (stream.backend != Backend::cuda) {
    for (size_t i = 0; i < douts.size(); ++i) matmul_backward_weight({dweights[i], accumulate}, douts[i], inp, stream);
    return;
  }
  int64_t rows = 0;
  for (size_t i = 0; i < douts.size(); ++i) rows = count_rows(douts[i], inp, dweights[i]);
  matmul_backward_weights_cuda(dweights, accumulate, douts, inp, rows, contiguous);
}

void matmul_backward_weight(const Grad& dweight, const Tensor& dout, const Tensor& inp, Stream stream) {
  if (stream.backend == Backend::cuda)
    return matmul_backward_weights({dweight}, dweight.accumulate, {dout}, inp, stream);
  const int64_t O = dweight.dim(0), C = dweight.dim(1), rows = count_rows(dout, inp, dweight);
  if (stream.backend == Backend::cpu) {
    std::vector<Call>& calls = empty_list<Call>();
    calls.push_back({dweight, {dout, 1, O}, {inp, C, 1}, C, rows, dweight.accumulate});
    return multiply(calls, O, stream);
  }
  with_real(dweight.dtype, [&]<class T>(T) {
    if (!dweight.accumulate) std::fill_n(dweight.as<T>(), O * C, T(0));
    matmul_backward_weight_ref(dweight.as<T>(), dout.as<T>(), inp.as<T>(), rows, C, O);
  });
}

void matmul_quantized(const Grad& out, const Quantized& a, const Quantized& b, bool fast, Stream stream,
                      const Tensor& addend, const Tensor& bias) {
  const int64_t M = a.numbers.dim(0), K = a.numbers.dim(1), N = b.numbers.dim(0);
  CHECK_THAT(stream.backend == Backend::cuda, "products of eight bits are for GPUs");
  CHECK_SHAPES(a.numbers.shape.rank == 2 && b.numbers.shape == Shape({N, K}) && out.numel() == M * N, out, a.numbers,
               b.numbers);
  CHECK_THAT(M % 16 == 0 && N % 16 == 0 && K % 16 == 0, M, " x ", K, " by ", K, " x ", N);
  CHECK_SHAPES(addend.data == nullptr || (addend.numel() == M * N && addend.dtype == out.dtype && !out.accumulate), out,
               addend);
  CHECK_SHAPES(bias.data == nullptr || (bias.numel() == N && bias.dtype == Dtype::bf16), out, bias);
  matmul_quantized_cuda(out, a, b, fast, addend, bias);
}

}  // namespace crossply
