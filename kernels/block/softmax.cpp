#include "kernels/block/softmax.h"

#include <functional>

#include "engine/node.h"
#include "kernels/block/ops.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {

void softmax_rows_cpu(float* out, const float* inp, int64_t rows, int64_t S) {
  for (int64_t n = 0; n < rows; ++n) {
    const float max = largest_of(inp + n * S, S);
#pragma omp simd
    for (int64_t m = n * S; m < (n + 1) * S; ++m) out[m] = inp[m] - max;
  }
#pragma omp simd
  for (int64_t i = 0; i < rows * S; ++i) out[i] = exp_f32(out[i]);
  for (int64_t n = 0; n < rows; ++n) {
    float* y = out + n * S;
    const float scale = 1.f / sum_of(y, S);
#pragma omp simd
    for (int64_t m = 0; m < S; ++m) y[m] *= scale;
  }
}

namespace {

// Multiplies values (S) by the mask of one row; they may be alpha itself. keys: scratch of S.
void prune(float* values, const float* alpha, uint64_t* keys, int64_t S, double top_p) {
  // Positive floats are ordered as their bits are, so that one integer holds weight and index.
  for (int64_t m = 0; m < S; ++m)
    keys[m] = static_cast<uint64_t>(std::bit_cast<uint32_t>(alpha[m])) << 32 | static_cast<uint32_t>(m);
  std::sort(keys, keys + S, std::greater<>());
  double before = 0;
  for (int64_t i = 0; i < S; ++i) {
    if (before > top_p + top_p_slack) values[static_cast<uint32_t>(keys[i])] *= 0.f;  // a product: NaN must stay
    before += static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(keys[i] >> 32)));
  }
}

// Makes the weights of a row, alpha, the pruned ones.
void prune_weights(float* alpha, uint64_t* keys, int64_t S, const Pruning& pruning) {
  prune(alpha, alpha, keys, S, pruning.top_p);
  if (!pruning.renormalize) return;
  const float scale = 1.f / sum_of(alpha, S);
#pragma omp simd
  for (int64_t m = 0; m < S; ++m) alpha[m] *= scale;
}

uint64_t* prune_keys(int64_t S) { return reinterpret_cast<uint64_t*>(scratch_f32(static_cast<size_t>(2 * S))); }

template <class X>
void softmax_forward_cpu(float* out, const X* inp, int64_t rows, int64_t S, const Pruning& pruning) {
  for_row_tiles(rows, S, [=](int64_t n, int64_t count) {
    float* floats = scratch_f32(static_cast<size_t>(count * S), 3);
    softmax_rows_cpu(out + n * S, read_floats(floats, inp + n * S, count * S), count, S);
    if (pruning.top_p >= 1) return;
    for (float* y = out + n * S; y < out + (n + count) * S; y += S) prune_weights(y, prune_keys(S), S, pruning);
  });
}

inline void softmax_backward_row(float* dinp, const float* da, const float* alpha, int64_t S, bool accumulate) {
  const float mean = dot_of(alpha, da, S);
  if (accumulate) {
#pragma omp simd
    for (int64_t m = 0; m < S; ++m) dinp[m] += alpha[m] * (da[m] - mean);
  } else {
#pragma omp simd
    for (int64_t m = 0; m < S; ++m) dinp[m] = alpha[m] * (da[m] - mean);
  }
}

template <class X>
void softmax_backward_cpu(X* dinp, const float* dout, const X* inp, int64_t rows, int64_t S, const Pruning& pruning,
                          bool accumulate) {
  for_row_tiles(rows, S, [=](int64_t n, int64_t count) {
    float* alpha = scratch_f32(static_cast<size_t>(count * S), 1);
    float* masked = scratch_f32(static_cast<size_t>(S), 2);
    float* floats = scratch_f32(static_cast<size_t>(count * S), 3);
    softmax_rows_cpu(alpha, read_floats(floats, inp + n * S, count * S), count, S);
    float* dz = begin_floats(floats, dinp + n * S, count * S, accumulate);
    for (int64_t i = 0; i < count; ++i) {
      const float* da = dout + (n + i) * S;
      if (pruning.top_p < 1 && pruning.renormalize) {
        prune_weights(alpha + i * S, prune_keys(S), S, pruning);
      } else if (pruning.top_p < 1) {
        std::copy_n(da, S, masked);
        prune(masked, alpha + i * S, prune_keys(S), S, pruning.top_p);
        da = masked;
      }
      softmax_backward_row(dz + i * S, da, alpha + i * S, S, accumulate);
    }
    write_floats(dinp + n * S, dz, count * S);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void softmax_forward(const Tensor& out, const Tensor& inp, const Pruning& pruning, Stream stream) {
  const auto [rows, S] = rows_of(inp);
  CHECK_SHAPES(out.numel() == inp.numel(), out, inp);
  dispatch(
      stream, inp.dtype, [&] { softmax_forward_cuda(out, inp, S, pruning); },
      [&]<class X>(X) { softmax_forward_cpu(out.as<float>(), inp.as<X>(), rows, S, pruning); },
      [&]<class T>(T) { softmax_forward_ref(out.as<T>(), inp.as<T>(), rows, S, pruning); });
}

void softmax_backward(const Grad& dinp, const Tensor& dout, const Tensor& inp, const Pruning& pruning, Stream stream) {
  const auto [rows, S] = rows_of(inp);
  CHECK_SHAPES(dinp.numel() == inp.numel() && dout.numel() == inp.numel(), dinp, dout, inp);
  dispatch(
      stream, inp.dtype, [&] { softmax_backward_cuda(dinp, dout, inp, S, pruning); },
      [&]<class X>(X) {
        softmax_backward_cpu(dinp.as<X>(), dout.as<float>(), inp.as<X>(), rows, S, pruning, dinp.accumulate);
      },
      [&]<class T>(T) {
        softmax_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), rows, S, pruning, dinp.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct Softmax : Node {
  Pruning pruning;
  const char* op() const override { return "softmax"; }
  void forward(const Step&, Stream stream) override { softmax_forward(output(), input(0), pruning, stream); }
  void backward(const Step&, Stream stream) override {
    softmax_backward(gradient(0), doutput(), input(0), pruning, stream);
  }
};

}  // namespace

Value* softmax(Tape& t, const std::string& name, Value* inp, double top_p, bool renormalize) {
  auto node = make_node<Softmax>(name, {inp}, {t.statistic(name, inp->shape)});
  node->pruning = {top_p, renormalize};
  node->backward_reads = {inp};
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
