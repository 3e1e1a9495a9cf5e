#include "kernels/depth/head_scale.h"

#include <algorithm>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

template <class S>
void head_scale_forward_cpu(S* out, const S* inp, const float* factor, int64_t rows, int64_t K, int64_t D) {
  parallel_for(rows, grain / D, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float f = factor[n % K];
#pragma omp simd
      for (int64_t i = n * D; i < (n + 1) * D; ++i) out[i] = f * inp[i];
    }
  });
}

// The sums go through one partial sum for each head and block of tokens; the shape alone decides about the blocks.
template <class S>
void head_scale_backward_cpu(S* dinp, float* dfactor, const S* dout, const S* inp, const float* factor, int64_t rows,
                             int64_t K, int64_t D, bool accumulate) {
  const int64_t tokens = rows / K, blocks = std::clamp<int64_t>(tokens / 32, 1, 64);
  float* partial = scratch_f32(static_cast<size_t>(blocks * K));
  std::fill_n(partial, blocks * K, 0.f);
  parallel_for(blocks, rows * D <= grain ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t n = tokens * b / blocks * K; n < tokens * (b + 1) / blocks * K; ++n) {
        if (dfactor != nullptr) partial[b * K + n % K] += dot_of(dout + n * D, inp + n * D, D);
        const float f = factor[n % K];
#pragma omp simd
        for (int64_t i = n * D; i < (n + 1) * D; ++i) dinp[i] = accumulate ? dinp[i] + f * dout[i] : f * dout[i];
      }
  });
  for (int64_t i = 0; i < blocks * K && dfactor != nullptr; ++i) dfactor[i % K] += partial[i];
}

int64_t heads_of(const Tensor& tensor) { return tensor.shape.rank < 2 ? 0 : tensor.dim(tensor.shape.rank - 2); }

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void head_scale_forward(const Tensor& out, const Tensor& inp, const Tensor& factor, Stream stream) {
  const auto [rows, D] = rows_of(inp);
  const int64_t K = factor.numel();
  CHECK_SHAPES(out.numel() == inp.numel() && heads_of(inp) == K, out, inp, factor);
  dispatch(
      stream, inp.dtype, [&] { head_scale_forward_cuda(out, inp, factor, D); },
      [&]<class S>(S) { head_scale_forward_cpu(out.as<S>(), inp.as<S>(), factor.as<float>(), rows, K, D); },
      [&]<class T>(T) { head_scale_forward_ref(out.as<T>(), inp.as<T>(), factor.as<T>(), rows, K, D); });
}

void head_scale_backward(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                         const Tensor& factor, Stream stream) {
  const auto [rows, D] = rows_of(dinp);
  const int64_t K = factor.numel();
  const bool trained = dfactor.data != nullptr;
  CHECK_SHAPES(dout.numel() == dinp.numel() && heads_of(dinp) == K, dinp, dout, factor);
  CHECK_SHAPES(!trained || (dfactor.numel() == K && inp.numel() == dinp.numel()), dfactor, inp, dinp);
  dispatch(
      stream, dinp.dtype, [&] { head_scale_backward_cuda(dinp, dfactor, dout, inp, factor, D); },
      [&]<class S>(S) {
        head_scale_backward_cpu(dinp.as<S>(), data_or_null<float>(dfactor), dout.as<S>(), data_or_null<S>(inp),
                                factor.as<float>(), rows, K, D, dinp.accumulate);
      },
      [&]<class T>(T) {
        head_scale_backward_ref(dinp.as<T>(), data_or_null<T>(dfactor), dout.as<T>(), data_or_null<T>(inp),
                                factor.as<T>(), rows, K, D, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct HeadScale : Node {  // in: inp, factor
  const char* op() const override { return "head_scale"; }
  void forward(const Step&, Stream stream) override { head_scale_forward(output(), input(0), input(1), stream); }
  void backward(const Step&, Stream stream) override {
    head_scale_backward(gradient(0), grad_of(in[1]), doutput(), in[1]->grad != nullptr ? input(0) : Tensor{}, input(1),
                        stream);
  }
  bool only_accumulates(size_t i) const override { return i == 1; }
  double flops() const override { return static_cast<double>(in[0]->shape.numel()); }
};

}  // namespace

Value* head_scale(Tape& t, const std::string& name, Value* inp, Value* factor) {
  const Shape& shape = inp->shape;
  CHECK_THAT(
      shape.rank >= 2 && factor->shape == Shape{shape[shape.rank - 2]} && factor->dtype == accumulation_type(t.dtype()),
      name, ": inp ", shape.str(), " factor ", name_of(factor->dtype), factor->shape.str(),
      ": a factor (K), never bf16, scales the K heads of (..., K, D)");
  auto node = make_node<HeadScale>(name, {inp, factor}, {t.activation(name, shape)});
  node->backward_reads = {factor};
  if (factor->needs_grad) node->backward_reads.push_back(inp);
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
