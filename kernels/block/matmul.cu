// Not yet run on hardware: only in the emulator.
#include "kernels/block/matmul.h"

#include "kernels/block/gelu.h"
#include "kernels/block/matmul.cuh"

namespace crossply {
namespace {

// The whole tensor as rows of its last `columns`.
Matrix rows_of(const Tensor& tensor, int64_t columns) { return {tensor.data, tensor.dtype, columns}; }

// Tensor cores want sizes and strides of whole 16-byte accesses; without them cuBLASLt falls back to slower kernels. So
// a narrow bf16 matrix (rows, O), as of gates with 3 or 12 heads, is multiplied as one of P columns, O rounded up to a
// multiple of 8: in scratch, with zeros for what is not there. This moves 4 P bytes more for each row, beside the 2 C
// of the wide matrix: with 12 heads and C = 768, 64 beside 1,536. What it saves no GPU has measured yet.
constexpr int64_t columns_of_access = 8;
int64_t padded(int64_t columns) { return blocks_of(columns, columns_of_access) * columns_of_access; }
// The narrow rows take at most a quarter of the wide ones' memory.
bool is_worth_padding(const Tensor& narrow, int64_t O, int64_t C) {
  return narrow.dtype == Dtype::bf16 && O % columns_of_access != 0 && C % columns_of_access == 0 && 4 * padded(O) <= C;
}

// to[r, c] = from[r, c], or 0 outside of from (from_rows, from_columns), for n elements of rows of to_columns.
__global__ void copy_rows_kernel(bf16* to, uint32_t to_columns, const bf16* from, int64_t from_rows,
                                 uint32_t from_columns, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  const uint32_t row = static_cast<uint32_t>(i) / to_columns, column = static_cast<uint32_t>(i) % to_columns;
  const bool there = row < from_rows && column < from_columns;
  to[i] = there ? from[int64_t{row} * from_columns + column] : bf16{};
}
void copy_rows(bf16* to, int64_t to_rows, int64_t to_columns, const bf16* from, int64_t from_rows,
               int64_t from_columns) {
  CHECK_THAT(to_rows * to_columns < int64_t{1} << 32, "copy_rows: ", to_rows, " rows of ", to_columns, " are too many");
  launch_elementwise("copy_rows", to_rows * to_columns, 1, copy_rows_kernel, to, static_cast<uint32_t>(to_columns),
                     from, from_rows, static_cast<uint32_t>(from_columns));
}
// The matrix (rows, columns) as the upper left part of one of zeros.
Matrix padded_copy(const Tensor& of, int64_t rows, int64_t columns, int64_t to_rows, int64_t to_columns, int slot) {
  bf16* copy = scratch<bf16>(to_rows * to_columns, slot);
  copy_rows(copy, to_rows, to_columns, of.as<bf16>(), rows, columns);
  return {copy, Dtype::bf16, to_columns};
}
// Whether products do it: on older GPUs they are slower with it than without and a pass more, as others have measured.
bool does_gelu() { return compute_capability() >= 90; }

constexpr int narrow_slot = 0, weight_slot = 1, bias_slot = 2;  // all at once

// The bias, or an aligned copy of it. Models have aligned ones.
const void* aligned_bias(const Tensor& bias) {
  if (is_aligned16(bias.data)) return bias.data;
  void* copy = scratch<std::byte>(static_cast<int64_t>(bias.bytes()), bias_slot);
  copy_on_device(copy, bias.data, bias.bytes());
  return copy;
}

// Elements from tensor i of the list to the next one, as from each of n to the next; 0 for one alone.
int64_t distance(Tensors list, size_t i, size_t n) {
  if (n == 1) return 0;
  const auto bytes = static_cast<const std::byte*>(list[i + 1].data) - static_cast<const std::byte*>(list[i].data);
  return bytes / static_cast<int64_t>(size_of(list[i].dtype));
}

// How many products, from i on, are one: their weights have one shape and are equally far apart, biases too, and so is
// what they write or read of their own, being contiguous.
size_t count_together(Tensors rows, Tensors weights, Tensors biases, size_t i) {
  const auto goes_on = [&](Tensors list, size_t k) {
    return list[k].data > list[k - 1].data && distance(list, k - 1, 2) == distance(list, i, 2);
  };
  size_t end = i + 1;
  for (; end < rows.size() && weights[end].shape == weights[i].shape; ++end) {
    if (!goes_on(rows, end) || !goes_on(weights, end)) break;
    if (biases.empty() || (biases[end].data == nullptr && biases[i].data == nullptr)) continue;
    if (biases[end].data == nullptr || biases[i].data == nullptr || !goes_on(biases, end)) break;
    if (!is_aligned16(biases[end].data) || !is_aligned16(biases[i].data)) break;
  }
  return end - i;
}

}  // namespace

void matmul_forward_cuda(Tensors outs, const Tensor& inp, Tensors weights, int64_t rows, const Tensor& addend,
                         Tensors biases, const Tensor& activated, bool contiguous) {
  for (size_t i = 0, n; i < outs.size(); i += n) {
    const int64_t O = weights[i].dim(0), C = weights[i].dim(1), P = padded(O);
    const Tensor bias = biases.empty() ? Tensor{} : biases[i];
    CHECK_THAT(bias.data == nullptr || bias.dtype == outs[i].dtype, "a bias ", bias.str(), " for ", outs[i].str());
    n = 1;
    if (addend.data == nullptr && bias.data == nullptr && is_worth_padding(outs[i], O, C)) {
      CHECK_THAT(activated.data == nullptr, "a gelu of a product with ", O, " columns");
      bf16* wide = scratch<bf16>(rows * P, narrow_slot);
      const Matrix w = padded_copy(weights[i], O, C, P, C, weight_slot);
      multiply({wide, Dtype::bf16, P}, rows_of(inp, C), transposed(w), {rows, P, C}, nullptr);
      copy_rows(outs[i].as<bf16>(), rows, O, wide, rows, P);
      continue;
    }
    if (contiguous) n = count_together(outs, weights, biases, i);
    Matrix weight = transposed(rows_of(weights[i], C));
    weight.apart = distance(weights, i, n);
    const auto write = [&](const Tensor& to, const Gelu& gelu) {
      Matrix out = rows_of(to, O);
      out.apart = distance(outs, i, n);
      return multiply(out, rows_of(inp, C), weight, {rows, O, C, static_cast<int64_t>(n)}, addend.data,
                      {aligned_bias(bias), biases.empty() ? 0 : distance(biases, i, n)}, gelu);
    };
    if (activated.data != nullptr && does_gelu() && write(activated, {outs[i].data})) continue;
    write(outs[i], {});
    if (activated.data != nullptr) gelu_forward_cuda(activated, outs[i], GeluKind::tanh);
  }
}

void matmul_backward_input_cuda(const Grad& dinp, const Tensor& dout, const Tensor& weight, int64_t rows,
                                const Tensor& activates) {
  const int64_t O = weight.dim(0), C = weight.dim(1), P = padded(O);
  const void* plus = dinp.accumulate ? dinp.data : nullptr;
  if (is_worth_padding(dout, O, C)) {
    CHECK_THAT(activates.data == nullptr, "a gelu before a product with ", O, " columns");
    const Matrix d = padded_copy(dout, rows, O, rows, P, narrow_slot), w = padded_copy(weight, O, C, P, C, weight_slot);
    multiply(rows_of(dinp, C), d, w, {rows, C, P}, plus);
    return;
  }
  const auto write = [&](const Gelu& gelu) {
    return multiply(rows_of(dinp, C), rows_of(dout, O), rows_of(weight, C), {rows, C, O}, plus, {}, gelu);
  };
  if (activates.data != nullptr && does_gelu() && write({activates.data, true})) return;
  write({});
  if (activates.data != nullptr) gelu_backward_cuda({dinp, false}, dinp, activates, GeluKind::tanh);
}

void matmul_backward_weights_cuda(Tensors dweights, bool accumulate, Tensors douts, const Tensor& inp, int64_t rows,
                                  bool contiguous) {
  for (size_t i = 0, n; i < dweights.size(); i += n) {
    const Tensor& dweight = dweights[i];
    const int64_t O = dweight.dim(0), C = dweight.dim(1), P = padded(O);
    n = 1;
    if (!is_worth_padding(douts[i], O, C)) {
      if (contiguous) n = count_together(douts, dweights, {}, i);
      Matrix d = rows_of(dweight, C), dout = transposed(rows_of(douts[i], O));
      d.apart = distance(dweights, i, n), dout.apart = distance(douts, i, n);
      multiply(d, dout, rows_of(inp, C), {O, C, rows, static_cast<int64_t>(n)}, accumulate ? dweight.data : nullptr);
      continue;
    }
    const Matrix d = padded_copy(douts[i], rows, O, rows, P, narrow_slot);
    float* sums = scratch<float>(P * C, weight_slot);
    multiply({sums, Dtype::f32, C}, transposed(d), rows_of(inp, C), {P, C, rows}, nullptr);
    if (accumulate) add_rows(dweight.as<float>(), sums, 1, O * C);
    else copy_on_device(dweight.data, sums, dweight.bytes());
  }
}

void matmul_quantized_cuda(const Grad& out, const Quantized& a, const Quantized& b, bool fast, const Tensor& addend,
                           const Tensor& bias) {
  const int64_t M = a.numbers.dim(0), K = a.numbers.dim(1), N = b.numbers.dim(0);
  const auto factor = [K](const Quantized& q) {
    Matrix matrix = rows_of(q.numbers, K);
    matrix.inverse = q.inverse.as<float>();
    return matrix;
  };
  multiply(rows_of(out, N), factor(a), transposed(factor(b)), {M, N, K, 1, fast},
           out.accumulate ? out.data : addend.data, {aligned_bias(bias)});
}

}  // namespace crossply
