#include "kernels/block/cross_entropy.h"

#include <algorithm>
#include <type_traits>

#include "engine/node.h"
#include "kernels/block/cross_entropy_cpu.h"
#include "kernels/block/ops.h"
#include "kernels/cuda/cuda.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

// The loss of one row of logits z, (V). z becomes dz if asked for. e: (V), room for exponentials; may be z.
template <class S>
float loss_of(S* z, float* e, int32_t target, float scale, int64_t V, bool want_dz) {
  const float largest = largest_of(z, V), shifted = z[target] - largest;
  const double sum = exponentials_of(e, z, largest, V);
  if (want_dz) {
    const float factor = scale / static_cast<float>(sum), at_target = e[target] * factor - scale;
    for_vectors(0, V, [=](int64_t v, auto count) {
      Vec16 x;
      load(x, e + v, count);
      store(z + v, x * factor, count);
    });
    z[target] = at_target;
  }
  return static_cast<float>(std::log(sum)) - shifted;
}

// Without gradients when dinp is null.
template <class S>
void cross_entropy_forward_cpu(float* losses, S* dinp, const Grad& dweight, const S* inp, const S* weight,
                               const int32_t* targets, float scale, const float* row_weights, int64_t rows, int64_t V,
                               int64_t C, Stream stream) {
  const std::vector<int64_t>& scored = scored_rows(losses, dinp, targets, rows, C);
  for_logits(scored, dinp, dweight, inp, weight, V, C, stream, [=](const int64_t* row, int64_t count, S* z) {
    parallel_for(count, 16384 / V, [=](int64_t first, int64_t last) {
      float* e = std::is_same_v<S, float> ? nullptr : scratch_f32(static_cast<size_t>(V), 0);
      for (int64_t i = first; i < last; ++i) {
        if constexpr (std::is_same_v<S, float>) e = z + i * V;
        const float own = row_weights != nullptr ? scale * row_weights[row[i]] : scale;
        losses[row[i]] = loss_of(z + i * V, e, targets[row[i]], own, V, dinp != nullptr);
      }
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

int64_t cross_entropy_scratch(int64_t rows, int64_t V, int64_t C, Dtype dtype) {
  const int64_t most = std::min(rows, dtype == Dtype::bf16 ? chunk_rows<bf16>(V) : chunk_rows<float>(V));
  return most * (V + 2 * C) * static_cast<int64_t>(size_of(dtype));
}

// At most 1 GiB of logits, because every chunk reads the weight twice and updates its f32 gradient, which for few rows
// costs more than the products. Chunks are alike but for the last, of whole tiles of products; rows of whole vectors,
// also for 50,257 tokens.
LogitChunk logit_chunk(int64_t rows, int64_t V, Dtype dtype) {
  const auto each = static_cast<int64_t>(size_of(dtype)), width = 16 / each, stride = (V + width - 1) / width * width;
  const int64_t most = std::max<int64_t>((int64_t{1} << 30) / (stride * each), 1024), tile = 128;
  const int64_t alike = ceil_div(rows, std::max<int64_t>(ceil_div(rows, most), 1));
  return {std::min({rows, most, ceil_div(alike, tile) * tile}), stride};
}

void cross_entropy_forward(const Tensor& losses, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                           const Tensor& weight, const Tensor& targets, double scale, Stream stream,
                           const Tensor& row_weights) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel();
  const bool gradients = dinp.data != nullptr;
  CHECK_SHAPES(weight.shape.rank == 2 && inp.numel() == rows * C && losses.numel() == rows, losses, inp, weight,
               targets);
  CHECK_SHAPES(row_weights.data == nullptr || row_weights.numel() == rows, losses, row_weights);
  CHECK_SHAPES(!gradients || (dinp.numel() == rows * C && dweight.shape == weight.shape), dinp, dweight, inp, weight);
  const int32_t* target = targets.as<int32_t>();
  for (int64_t n = 0; stream.backend != Backend::cuda && n < rows; ++n)
    CHECK_THAT(target[n] >= -1 && target[n] < V, "target ", target[n], " of row ", n, " with V = ", V);
  dispatch(
      stream, inp.dtype,
      [&] { cross_entropy_forward_cuda(losses, dinp, dweight, inp, weight, targets, scale, row_weights); },
      [&]<class S>(S) {
        cross_entropy_forward_cpu(losses.as<float>(), data_or_null<S>(dinp), dweight, inp.as<S>(), weight.as<S>(),
                                  target, static_cast<float>(scale), data_or_null<float>(row_weights), rows, V, C,
                                  stream);
      },
      [&]<class T>(T) {
        const T *x = inp.as<T>(), *w = weight.as<T>();
        if (!gradients) return cross_entropy_forward_ref(losses.as<T>(), x, w, target, rows, V, C);
        if (!dweight.accumulate) std::fill_n(dweight.as<T>(), V * C, T(0));
        cross_entropy_forward_backward_ref(losses.as<T>(), dinp.as<T>(), dweight.as<T>(), x, w, target, scale, rows, V,
                                           C, data_or_null<T>(row_weights));
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct CrossEntropy : Node {
  Tensor weight() const { return matmul_weight(in[1], in[0]->dtype); }
  const char* op() const override { return "cross_entropy"; }
  void forward(const Step& step, Stream stream) override {
    const bool gradients = step.training;
    if (gradients) check_only_reader(0);
    cross_entropy_forward(output(), gradients ? dinput(0) : Tensor{}, gradients ? gradient(1, step) : Grad{}, input(0),
                          weight(), reads[0]->tensor, step.grad_scale, stream);
  }
  bool can_overwrite(size_t i) const override { return i == 1; }
  bool reads_bf16_copy(size_t i) const override { return i == 1 && in[0]->dtype == Dtype::bf16; }
  bool grad_in_forward() const override { return true; }
  void backward(const Step&, Stream) override {}  // done in the forward, while the logits were in cache
  double flops() const override {
    return 2.0 * static_cast<double>(in[0]->shape.numel()) * static_cast<double>(in[1]->shape[0]);
  }
  ScratchBytes scratch() const override {
    const LogitChunk chunk = logit_chunk(reads[0]->shape.numel(), in[1]->shape[0], in[0]->dtype);
    ScratchBytes bytes{};
    bytes[cross_entropy_slot] = static_cast<size_t>(chunk.rows * chunk.stride) * size_of(in[0]->dtype);
    return bytes;
  }
};

}  // namespace

Value* cross_entropy(Tape& t, const std::string& name, Value* inp, Value* weight, Value* targets) {
  CHECK_THAT(
      inp->shape[0] == targets->shape[0] && inp->shape[1] == targets->shape[1] && inp->shape[2] == weight->shape[1],
      name, ": inp ", inp->shape.str(), " weight ", weight->shape.str(), " targets ", targets->shape.str());
  auto node = make_node<CrossEntropy>(name, {inp, weight}, {t.result(name, targets->shape)});
  node->reads = {targets};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
