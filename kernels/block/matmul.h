// Matrix products with weights, over rows: linear layers that share their input, and their gradients.
//
//   out[n,o]  = sum_c inp[n,c] * weight[o,c]                                      for each weight and its out
//             + bias[o]                                                           where the weight has one
//             + addend[n,o]                                                       if there is one, for one weight only
//   activated[n,o] = gelu(out[n,o])                                               if there is one, for one weight only
//
//   dinp[n,c] = sum_o dout[n,o] * weight[o,c], summed over the weights            overwritten or accumulated
//             * gelu'(activates[n,c])                                             if there is one, one weight, set
//   dweight[o,c] = sum_n dout[n,o] * inp[n,c]                                     overwritten or accumulated
//
// weight, dweight: (O, C), rank 2. inp, dinp: (rows, C) and out, dout: (rows, O) after flattening, any rank. Nothing is
// saved. On the CPU all are f32, multiplied as stream.precision says, or all are bf16 but dweight, which is f32. No
// output may alias an input. On the CPU every result is independent of the thread count, bit for bit.
// bias: (O), f32 and added behind the product (kernels/block/bias.h), but on a GPU of the type of out, within it.
// A bf16 dinp of several weights is rounded once on the CPU, after each weight on a GPU. What is added to is rounded
// before on the CPU, not on a GPU. activated and activates: by tanh (kernels/block/gelu.h), of the type and shape of
// out and inp; on the CPU a pass of their own over what was rounded, on a GPU within the product: bf16 only, and its
// accuracy cuBLASLt's.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

// Tensors in a vector or in braces, for as long as a call takes.
struct Tensors : std::span<const Tensor> {
  Tensors(std::span<const Tensor> list) : span(list) {}
  Tensors(const std::vector<Tensor>& list) : span(list) {}
  Tensors(std::initializer_list<Tensor> list) : span(list.begin(), list.size()) {}
  Tensors() = default;
};

// biases: none, or one for each weight, of which those that are not there have no data. contiguous: the outs lie one
// behind the other (Node::contiguous_outputs); a GPU then multiplies with weights that are equally far apart at once.
void matmul_forward(Tensors outs, const Tensor& inp, Tensors weights, Stream stream, const Tensor& addend = {},
                    Tensors biases = {}, const Tensor& activated = {}, bool contiguous = false);
void matmul_backward_input(const Grad& dinp, Tensors douts, Tensors weights, Stream stream,
                           const Tensor& activates = {});
void matmul_backward_weight(const Grad& dweight, const Tensor& dout, const Tensor& inp, Stream stream);
// The gradients of several weights: all overwritten or all accumulated. contiguous: the douts are.
void matmul_backward_weights(Tensors dweights, bool accumulate, Tensors douts, const Tensor& inp, Stream stream,
                             bool contiguous = false);

// A matrix (rows, K) of numbers in eight bits, which stand for `inverse` times themselves (kernels/block/quantize.h).
struct Quantized {
  Tensor numbers;  // e4m3 or e5m2
  Tensor inverse;  // (1) f32
};
//   out[m,n] = sum_k a[m,k] * b[n,k] + addend[m,n] + bias[n]         overwritten or accumulated, then without an addend
//
// out: (M, N), bf16 or f32; addend: as out; bias: (N), bf16; a: (M, K); b: (N, K), e4m3. M, N, K: multiples of 16. On
// a GPU only, and one of compute capability 8.9 or more. fast: on sm_90 with sums of fewer bits, as Transformer
// Engine has it for what a forward computes.
void matmul_quantized(const Grad& out, const Quantized& a, const Quantized& b, bool fast, Stream stream,
                      const Tensor& addend = {}, const Tensor& bias = {});

// Device memory for cuBLASLt's algorithms: what those of Hopper ask for.
constexpr size_t matmul_workspace = size_t{32} << 20;

// kernels/block/matmul.cu
CUDA_TWIN void matmul_forward_cuda(Tensors outs, const Tensor& inp, Tensors weights, int64_t rows, const Tensor& addend,
                                   Tensors biases, const Tensor& activated, bool contiguous);
CUDA_TWIN void matmul_backward_input_cuda(const Grad& dinp, const Tensor& dout, const Tensor& weight, int64_t rows,
                                          const Tensor& activates);
CUDA_TWIN void matmul_backward_weights_cuda(Tensors dweights, bool accumulate, Tensors douts, const Tensor& inp,
                                            int64_t rows, bool contiguous);

CUDA_TWIN void matmul_quantized_cuda(const Grad& out, const Quantized& a, const Quantized& b, bool fast,
                                     const Tensor& addend, const Tensor& bias);

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
void matmul_backward_input_ref(T* dinp, const T* dout, const T* weight, int64_t rows, int64_t C, int64_t O,
                               bool accumulate) {
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t c = 0; c < C; ++c) {
      T sum = 0;
      for (int64_t o = 0; o < O; ++o) sum += dout[n * O + o] * weight[o * C + c];
      dinp[n * C + c] = accumulate ? dinp[n * C + c] + sum : sum;
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
