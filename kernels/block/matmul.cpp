#include "kernels/block/matmul.h"

#include "engine/node.h"
#include "kernels/block/add.h"
#include "kernels/block/bias.h"
#include "kernels/block/ops.h"
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
  bool add;
};

template <class C, class T>
const std::vector<Product<C, T>>& typed(const std::vector<Call>& calls) {
  std::vector<Product<C, T>>& products = empty_list<Product<C, T>>();
  for (const Call& p : calls)
    products.push_back(
        {p.c.as<C>(), {p.a.tensor.as<T>(), p.a.row, p.a.col}, {p.b.tensor.as<T>(), p.b.row, p.b.col}, p.N, p.K, p.add});
  return products;
}

void multiply(const std::vector<Call>& calls, int64_t M, Stream stream) {
  if (calls.empty()) return;
  const bool b16 = calls[0].a.tensor.dtype == Dtype::bf16;
  if (b16 && calls[0].c.dtype == Dtype::bf16) gemm_rows_bf16(typed<bf16, bf16>(calls), M);
  else if (b16) gemm_rows_bf16(typed<float, bf16>(calls), M);
  else if (stream.products == Products::bf16x3) gemm_rows_bf16x3(typed<float, float>(calls), M);
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
                    Tensors biases) {
  const bool add = addend.data != nullptr;
  CHECK_THAT(outs.size() == weights.size() && (biases.empty() || biases.size() == weights.size()), outs.size(),
             " outputs of ", weights.size(), " weights and ", biases.size(), " biases");
  CHECK_THAT(!add || (outs.size() == 1 && addend.numel() == outs[0].numel() && addend.dtype == outs[0].dtype &&
                      addend.data != outs[0].data),
             addend.str(), " cannot be added to ", outs.size(), " outputs, the first ", outs[0].str());
  int64_t rows = 0;
  std::vector<Call>& calls = empty_list<Call>();
  for (size_t i = 0; i < outs.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    rows = count_rows(outs[i], inp, weights[i]);
    const Tensor bias = biases.empty() ? Tensor{} : biases[i];
    CHECK_SHAPES(bias.data == nullptr || bias.numel() == O, outs[i], weights[i], bias);
    if (stream.backend == Backend::cpu) calls.push_back({outs[i], {inp, C, 1}, {weights[i], 1, C}, O, C, false});
    else if (stream.backend == Backend::cuda) matmul_forward_cuda(outs[i], inp, weights[i], rows, addend, bias);
    else
      with_real(inp.dtype,
                [&]<class T>(T) { matmul_forward_ref(outs[i].as<T>(), inp.as<T>(), weights[i].as<T>(), rows, C, O); });
  }
  multiply(calls, rows, stream);
  if (stream.backend == Backend::cuda) return;
  if (add) add_forward(outs[0], outs[0], addend, stream);
  for (size_t i = 0; i < biases.size(); ++i)
    if (biases[i].data != nullptr) bias_forward(outs[i], biases[i], stream);
}

void matmul_backward_input(const Grad& dinp, Tensors douts, Tensors weights, Stream stream) {
  CHECK_THAT(douts.size() == weights.size(), douts.size(), " gradients of ", weights.size(), " weights");
  int64_t rows = 0;
  std::vector<Call>& calls = empty_list<Call>();
  for (size_t i = 0; i < douts.size(); ++i) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1);
    const Grad d{dinp, dinp.add || i > 0};
    rows = count_rows(douts[i], dinp, weights[i]);
    if (stream.backend == Backend::cpu) calls.push_back({d, {douts[i], O, 1}, {weights[i], C, 1}, C, O, d.add});
    else if (stream.backend == Backend::cuda) matmul_backward_input_cuda(d, douts[i], weights[i], rows);
    else
      with_real(dinp.dtype, [&]<class T>(T) {
        matmul_backward_input_ref(d.as<T>(), douts[i].as<T>(), weights[i].as<T>(), rows, C, O, d.add);
      });
  }
  multiply(calls, rows, stream);
}

void matmul_backward_weight(const Grad& dweight, const Tensor& dout, const Tensor& inp, Stream stream) {
  const int64_t O = dweight.dim(0), C = dweight.dim(1), rows = count_rows(dout, inp, dweight);
  if (stream.backend == Backend::cuda) return matmul_backward_weight_cuda(dweight, dout, inp, rows);
  if (stream.backend == Backend::cpu) {
    std::vector<Call>& calls = empty_list<Call>();
    calls.push_back({dweight, {dout, 1, O}, {inp, C, 1}, C, rows, dweight.add});
    return multiply(calls, O, stream);
  }
  with_real(dweight.dtype, [&]<class T>(T) {
    if (!dweight.add) std::fill_n(dweight.as<T>(), O * C, T(0));
    matmul_backward_weight_ref(dweight.as<T>(), dout.as<T>(), inp.as<T>(), rows, C, O);
  });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Linear : Node {  // in[0] is shared by the weights that follow, each with its out; then come the biases
  std::vector<std::pair<size_t, size_t>> with_bias;  // out, in
  std::vector<Tensor> outs, douts, weights, biases, narrow_biases;
  const char* op() const override { return "linear"; }
  void prepare() override {
    outs = tensors_of(out), douts = grads_of(out), weights.clear();
    for (size_t i = 0; i < out.size(); ++i) weights.push_back(factor_of(in[i + 1], in[0]->dtype));
    biases.assign(with_bias.empty() ? 0 : out.size(), {}), narrow_biases = biases;
    for (const auto& [o, i] : with_bias) biases[o] = in[i]->tensor, narrow_biases[o] = factor_of(in[i], in[0]->dtype);
  }
  void forward(const Step&, Stream stream) override {
    const bool narrow = stream.backend == Backend::cuda;
    matmul_forward(outs, input(0), weights, stream, tensor_of(addend), narrow ? narrow_biases : biases);
  }
  void backward(const Step& step, Stream stream) override {
    matmul_backward_input(gradient(0), douts, weights, stream);
    for (size_t i = 0; i < out.size(); ++i) matmul_backward_weight(gradient(i + 1, step), douts[i], input(0), stream);
    for (const auto& [o, i] : with_bias) bias_backward(dinput(i), douts[o], stream);
  }
  bool sets(size_t i) const override { return i > 0 && i <= out.size(); }
  bool reads_narrow(size_t i) const override { return i > 0 && i <= out.size() && in[0]->dtype == Dtype::bf16; }
  double flops() const override {
    double sum = 0;
    for (size_t i = 1; i <= out.size(); ++i)
      sum += 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[i]->shape[0]);
    return sum;
  }
};

}  // namespace

std::vector<Value*> linears(Tape& t, const std::string& name, Value* inp, const std::vector<Projection>& projections) {
  auto node = make_node<Linear>(name, {inp}, {});
  for (const Projection& p : projections) {
    const int64_t in = p.weight->shape[1], rows = inp->shape.numel() / in;
    CHECK_THAT(inp->shape.numel() % in == 0 && p.shape.numel() == rows * p.weight->shape[0], p.name, ": inp ",
               inp->shape.str(), " weight ", p.weight->shape.str(), " out ", p.shape.str());
    node->in.push_back(p.weight);
    node->out.push_back(t.activation(p.name, p.shape));
  }
  for (size_t o = 0; o < projections.size(); ++o) {
    Value* bias = projections[o].bias;
    if (bias == nullptr) continue;
    CHECK_THAT(bias->shape == Shape{projections[o].weight->shape[0]}, projections[o].name, ": bias ",
               bias->shape.str());
    node->with_bias.emplace_back(o, node->in.size());
    node->in.push_back(bias);
  }
  node->keep = {inp};
  node->can_add = projections.size() == 1;
  const std::vector<Value*> outs = node->out;
  t.record(std::move(node));
  return outs;
}

Value* linear(Tape& t, const std::string& name, Value* inp, Value* weight, Shape shape, Value* bias) {
  return linears(t, name, inp, {{name, weight, shape, bias}})[0];
}

}  // namespace ops
}  // namespace crossply
