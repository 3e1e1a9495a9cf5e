#include "kernels/block/embedding.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

template <class S>
void embedding_forward_cpu(S* out, const float* weight, const int32_t* tokens, int64_t rows, int64_t C) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* row = weight + tokens[n] * C;
      for_vectors(0, C, [=](int64_t c, auto part) {
        Vec16 x;
        load(x, row + c, part);
        store(out + n * C + c, x, part);
      });
    }
  });
}

// The threads share the words, in lots: no two threads write the same row. The hash deals the frequent words, whose
// numbers are often neighbours, to different threads, but keeps four rows together, because rows that lie next to each
// other are fetched together and would travel between the cores.
constexpr int64_t lots = 64;
int64_t lot_of(int32_t token) { return (static_cast<uint32_t>(token >> 2) * 2654435769u) >> 26; }

template <class S>
void embedding_backward_cpu(float* dweight, const S* dout, const int32_t* tokens, int64_t rows, int64_t C) {
  parallel_for(lots, rows * C <= 32768 ? lots : 1, [=](int64_t begin, int64_t end) {
    constexpr int64_t chunk = 256;
    int64_t mine[chunk];
    for (int64_t first = 0; first < rows; first += chunk) {
      // First the list, then the work: a branch on the lot would be mispredicted at every second token.
      int64_t count = 0;
      for (int64_t n = first; n < std::min(first + chunk, rows); ++n) {
        const int64_t lot = lot_of(tokens[n]);
        mine[count] = n;
        count += lot >= begin && lot < end;
      }
      for (int64_t i = 0; i < count; ++i) {
        float* dw = dweight + tokens[mine[i]] * C;
        const S* dy = dout + mine[i] * C;
        for_vectors(0, C, [=](int64_t c, auto part) {
          Vec16 sum, x;
          load(sum, dw + c, part);
          load(x, dy + c, part);
          store(dw + c, sum + x, part);
        });
      }
    }
  });
}

void check_tokens(const int32_t* tokens, int64_t rows, int64_t V) {
  int32_t smallest = 0, largest = 0;
#pragma omp simd reduction(min : smallest) reduction(max : largest)
  for (int64_t n = 0; n < rows; ++n) {
    smallest = std::min(smallest, tokens[n]);
    largest = std::max(largest, tokens[n]);
  }
  CHECK_THAT(smallest >= 0 && (largest < V || rows == 0), "tokens from ", smallest, " to ", largest, ", V is ", V);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void embedding_forward(const Tensor& out, const Tensor& weight, const Tensor& tokens, Stream stream) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = tokens.numel();
  CHECK_SHAPES(weight.shape.rank == 2 && C > 0 && out.numel() == rows * C, out, weight, tokens);
  const int32_t* token = tokens.as<int32_t>();
  if (stream.backend != Backend::cuda) check_tokens(token, rows, V);
  dispatch(
      stream, out.dtype, [&] { embedding_forward_cuda(out, weight, tokens); },
      [&]<class S>(S) { embedding_forward_cpu(out.as<S>(), weight.as<float>(), token, rows, C); },
      [&]<class X>(X) { embedding_forward_ref(out.as<X>(), weight.as<X>(), token, rows, C); });
}

void embedding_backward(const Tensor& dweight, const Tensor& dout, const Tensor& tokens, Stream stream) {
  const int64_t V = dweight.dim(0), C = dweight.dim(1), rows = tokens.numel();
  CHECK_SHAPES(dweight.shape.rank == 2 && C > 0 && dout.numel() == rows * C, dweight, dout, tokens);
  const int32_t* token = tokens.as<int32_t>();
  if (stream.backend != Backend::cuda) check_tokens(token, rows, V);
  dispatch(
      stream, dout.dtype, [&] { embedding_backward_cuda(dweight, dout, tokens); },
      [&]<class S>(S) { embedding_backward_cpu(dweight.as<float>(), dout.as<S>(), token, rows, C); },
      [&]<class X>(X) { embedding_backward_ref(dweight.as<X>(), dout.as<X>(), token, rows, C); });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Embedding : Node {
  const char* op() const override { return "embedding"; }
  void forward(const Step&, Stream stream) override { embedding_forward(output(), input(0), reads[0]->tensor, stream); }
  void backward(const Step&, Stream stream) override {
    embedding_backward(dinput(0), doutput(), reads[0]->tensor, stream);
  }
  ScratchBytes scratch() const override { return embedding_scratch(reads[0]->shape.numel(), in[0]->shape[1]); }
};

}  // namespace

Value* embedding(Tape& t, const std::string& name, Value* tokens, Value* weight, Shape shape) {
  CHECK_THAT(tokens->dtype == Dtype::i32 && weight->shape.rank == 2, name, ": ", tokens->shape.str());
  if (shape.rank == 0) shape = {tokens->shape[0], tokens->shape[1], weight->shape[1]};
  CHECK_THAT(shape.numel() == tokens->shape.numel() * weight->shape[1], name, ": ", shape.str());
  auto node = make_node<Embedding>(name, {weight}, {t.activation(name, shape)});
  node->reads = {tokens};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
