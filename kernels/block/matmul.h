// Matrix products with weights, over rows: linear layers that share their input, and their gradients.
//
//   out[n,o]  = sum_c inp[n,c] * weight[o,c]                                      for each weight and its out
//             + bias[o]                                                           where the weight has one
//             + addend[n,o]                                                       if there is one, for one weight only
//
//   dinp[n,c] = sum_o dout[n,o] * weight[o,c], summed over the weights            set or added
//   dweight[o,c] = sum_n dout[n,o] * inp[n,c]                                     set or added
//
// weight, dweight: (O, C), rank 2. inp, dinp: (rows, C) and out, dout: (rows, O) after flattening, any rank. Nothing is
// saved. On the CPU all are f32, multiplied as stream.products says, or all are bf16 but dweight, which is f32. No
// output may alias an input. On the CPU every result is independent of the thread count, bit for bit.
// bias: (O), f32 and added behind the product (kernels/block/bias.h), but on a GPU of the type of out, within it.
// A bf16 dinp of several weights is rounded once on the CPU, after each weight on a GPU. What is added to is rounded
// before on the CPU, not on a GPU.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// Tensors in a vector or in braces, for as long as a call takes.
struct Tensors : std::span<const Tensor> {
  Tensors(const std::vector<Tensor>& list) : span(list) {}
  Tensors(std::initializer_list<Tensor> list) : span(list.begin(), list.size()) {}
  Tensors() = default;
};

// biases: none, or one for each weight, of which those that are not there have no data.
void matmul_forward(Tensors outs, const Tensor& inp, Tensors weights, Stream stream, const Tensor& addend = {},
                    Tensors biases = {});
void matmul_backward_input(const Grad& dinp, Tensors douts, Tensors weights, Stream stream);
void matmul_backward_weight(const Grad& dweight, const Tensor& dout, const Tensor& inp, Stream stream);

// Device memory for cuBLASLt's algorithms: what those of Hopper ask for.
constexpr size_t matmul_workspace = size_t{32} << 20;

// kernels/block/matmul.cu, one weight at a time.
CUDA_TWIN void matmul_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t rows,
                                   const Tensor& addend, const Tensor& bias);
CUDA_TWIN void matmul_backward_input_cuda(const Grad& dinp, const Tensor& dout, const Tensor& weight, int64_t rows);
CUDA_TWIN void matmul_backward_weight_cuda(const Grad& dweight, const Tensor& dout, const Tensor& inp, int64_t rows);

template <class T>
void matmul_forward_ref(T* out, const T* inp, const T* weight, int64_t rows, int64_t C, int64_t O) {
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t o = 0; o < O; ++o) {
      T sum = 0;
      for (int64_t c = 0; c < C; ++c) sum += inp[n * C + c] * weight[o * C + c];
      out[n * O + o] = sum;
    }
  }
}

template <class T>
void matmul_backward_input_ref(T* dinp, const T* dout, const T* weight, int64_t rows, int64_t C, int64_t O, bool acc) {
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t c = 0; c < C; ++c) {
      T sum = 0;
      for (int64_t o = 0; o < O; ++o) sum += dout[n * O + o] * weight[o * C + c];
      dinp[n * C + c] = acc ? dinp[n * C + c] + sum : sum;
    }
  }
}

// Added.
template <class T>
void matmul_backward_weight_ref(T* dweight, const T* dout, const T* inp, int64_t rows, int64_t C, int64_t O) {
  for (int64_t o = 0; o < O; ++o) {
    for (int64_t c = 0; c < C; ++c) {
      T sum = 0;
      for (int64_t n = 0; n < rows; ++n) sum += dout[n * O + o] * inp[n * C + c];
      dweight[o * C + c] += sum;
    }
  }
}

}  // namespace crossply
