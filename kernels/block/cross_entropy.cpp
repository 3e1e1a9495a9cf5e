#include "kernels/block/cross_entropy.h"

#include <algorithm>
#include <type_traits>

#include "engine/node.h"
#include "kernels/block/cross_entropy_cpu.h"
#include "kernels/block/ops.h"
#include "kernels/block/softcap_cpu.h"
#include "kernels/cuda/cuda.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

struct RowLoss {
  float loss, lse;
};

// Of one row of logits z, (V); dz gets their gradients, unless null. e: (V), room for exponentials. z, e and dz may be
// one row.
template <class S, class Z, class Slope>
RowLoss loss_of(S* dz, float* e, const Z* z, int32_t target, float scale, float z_loss, const Slope& slope, int64_t V) {
  const float largest = largest_of(z, V), shifted = z[target] - largest;
  const double sum = exponentials_of(e, z, largest, V);
  const auto log_sum = static_cast<float>(std::log(sum));
  const float lse = largest + log_sum;
  if (dz != nullptr) {
    float factor = scale / static_cast<float>(sum);
    if (z_loss > 0) factor *= 1 + 2 * z_loss * lse;
    const float at_target = (e[target] * factor - scale) * slope.at(target);
    for_vectors(0, V, [=](int64_t v, auto count) {
      Vec16 x;
      load(x, e + v, count);
      x *= factor;
      slope.multiply(x, v, count);
      store(dz + v, x, count);
    });
    dz[target] = at_target;
  }
  return {log_sum - shifted, lse};
}

// The same, where z is a row of logits as the product leaves them, and becomes dz if asked for.
template <class S>
RowLoss loss_of_row(S* z, int32_t target, float scale, const CrossEntropyOptions& options, int64_t V, bool want_dz) {
  const auto z_loss = static_cast<float>(options.z_loss);
  S* dz = want_dz ? z : nullptr;
  if (options.softcap > 0) {
    float* capped = scratch_f32(2 * static_cast<size_t>(V), 0);
    cap_row(capped, z, V, options.softcap);
    return loss_of(dz, capped + V, capped, target, scale, z_loss, CapSlope(capped, options.softcap), V);
  }
  float* e = nullptr;
  if constexpr (std::is_same_v<S, float>) e = z;
  else e = scratch_f32(static_cast<size_t>(V), 0);
  return loss_of(dz, e, z, target, scale, z_loss, NoSlope{}, V);
}

// Without gradients when dinp is null.
template <class S>
void cross_entropy_forward_cpu(float* losses, S* dinp, const Grad& dweight, const S* inp, const S* weight,
                               const int32_t* targets, float scale, const CrossEntropyOptions& options, int64_t rows,
                               int64_t V, int64_t C, Stream stream) {
  const std::vector<int64_t>& scored = scored_rows(losses, dinp, targets, rows, C);
  const auto* row_weights = data_or_null<float>(options.row_weights);
  auto* squares = data_or_null<float>(options.squares);
  for (int64_t n = 0; squares != nullptr && n < rows; ++n)
    if (targets[n] < 0) squares[n] = 0;
  for_logits(scored, dinp, dweight, inp, weight, V, C, stream, [=](const int64_t* row, int64_t count, S* z) {
    parallel_for(count, 16384 / V, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float own = row_weights != nullptr ? scale * row_weights[row[i]] : scale;
        const RowLoss of_row = loss_of_row(z + i * V, targets[row[i]], own, options, V, dinp != nullptr);
        losses[row[i]] = of_row.loss;
        if (squares != nullptr) squares[row[i]] = of_row.lse * of_row.lse;
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
                           const CrossEntropyOptions& options) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel();
  const bool gradients = dinp.data != nullptr;
  CHECK_SHAPES(weight.shape.rank == 2 && inp.numel() == rows * C && losses.numel() == rows, losses, inp, weight,
               targets);
  const Tensor &row_weights = options.row_weights, &squares = options.squares;
  CHECK_SHAPES(row_weights.data == nullptr || row_weights.numel() == rows, losses, row_weights);
  CHECK_SHAPES(squares.data == nullptr || squares.numel() == rows, losses, squares);
  CHECK_SHAPES(!gradients || (dinp.numel() == rows * C && dweight.shape == weight.shape), dinp, dweight, inp, weight);
  const int32_t* target = targets.as<int32_t>();
  for (int64_t n = 0; stream.backend != Backend::cuda && n < rows; ++n)
    CHECK_THAT(target[n] >= -1 && target[n] < V, "target ", target[n], " of row ", n, " with V = ", V);
  dispatch(
      stream, inp.dtype,
      [&] { cross_entropy_forward_cuda(losses, dinp, dweight, inp, weight, targets, scale, options); },
      [&]<class S>(S) {
        cross_entropy_forward_cpu(losses.as<float>(), data_or_null<S>(dinp), dweight, inp.as<S>(), weight.as<S>(),
                                  target, static_cast<float>(scale), options, rows, V, C, stream);
      },
      [&]<class T>(T) {
        if (gradients && !dweight.accumulate) std::fill_n(dweight.as<T>(), V * C, T(0));
        cross_entropy_ref<T>(
            losses.as<T>(), data_or_null<T>(dinp), data_or_null<T>(dweight), inp.as<T>(), weight.as<T>(), target, scale,
            rows, V, C,
            {data_or_null<T>(options.row_weights), data_or_null<T>(options.squares), options.softcap, options.z_loss});
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

// out: the losses, and with a z-loss the squares, which evaluation leaves as they are.
struct CrossEntropy : Node {
  double softcap = 0, z_loss = 0;
  Tensor weight() const { return matmul_weight(in[1], in[0]->dtype); }
  const char* op() const override { return "cross_entropy"; }
  std::string setting() const override { return str(softcap); }
  void forward(const Step& step, Stream stream) override {
    const bool gradients = step.training;
    if (gradients) check_only_reader(0);
    CrossEntropyOptions options{.softcap = softcap, .z_loss = z_loss};
    if (gradients && z_loss > 0) options.squares = out[1]->tensor;
    cross_entropy_forward(output(), gradients ? dinput(0) : Tensor{}, gradients ? gradient(1, step) : Grad{}, input(0),
                          weight(), reads[0]->tensor, step.grad_scale, stream, options);
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

// squares: null without a z-loss.
Value* record_cross_entropy(Tape& t, const std::string& name, const LogitHead& head, Value* targets, Value* squares,
                            double z_loss) {
  const Shape &inp = head.inp->shape, &weight = head.weight->shape, &rows = targets->shape;
  CHECK_THAT(inp[0] == rows[0] && inp[1] == rows[1] && inp[2] == weight[1], name, ": inp ", inp.str(), " weight ",
             weight.str(), " targets ", rows.str());
  auto node = make_node<CrossEntropy>(name, {head.inp, head.weight}, present({t.result(name, rows), squares}));
  node->reads = {targets};
  node->softcap = head.softcap, node->z_loss = z_loss;
  return t.record(std::move(node));
}

}  // namespace

Value* cross_entropy(Tape& t, const std::string& name, const LogitHead& head, Value* targets) {
  return record_cross_entropy(t, name, head, targets, nullptr, 0);
}

LossAndSquares cross_entropy_with_z(Tape& t, const std::string& name, const LogitHead& head, Value* targets,
                                    double z_loss) {
  Value* squares = t.result(name + ".squares", targets->shape);
  return {record_cross_entropy(t, name, head, targets, squares, z_loss), squares};
}

}  // namespace ops
}  // namespace crossply
