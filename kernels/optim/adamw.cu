// Not yet run on hardware: only in the emulator.
#include "kernels/optim/adamw.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// A block takes a piece of one span: a row, or several without a gap that have the same learning rate and decay. Bound
// by memory: 28 bytes a parameter, 30 with bf16_copy.
constexpr int threads = 256;
constexpr int64_t piece = 4096;

struct RowSpan {
  int64_t begin, end;
  uint32_t first_block;
  double lr_mul, weight_decay;
};
// An argument by value, so that nothing is copied and waited for; at most 4 KiB together with the others.
constexpr int max_spans = 96;
struct RowSpans {
  RowSpan span[max_spans];
  int count;
};

// The factors of a span in this step.
struct SpanFactors {
  float factor, step_size, decay, unbias_v;
};

template <int width>
__device__ __forceinline__ void update(float* params, float* m, float* v, bf16* bf16_copy, const float* grads,
                                       int64_t i, const SpanFactors& r, const AdamwFactors& s) {
  Floats<width> p = load<width>(params + i), m1 = load<width>(m + i), v1 = load<width>(v + i);
  const Floats<width> g = load<width>(grads + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const float x = r.factor * g[k];
    m1[k] = s.beta1 * m1[k] + s.in1 * x;
    v1[k] = s.beta2 * v1[k] + s.in2 * x * x;
    const float step = r.step_size * m1[k] / (sqrtf(v1[k]) * r.unbias_v + s.eps);
    p[k] -= (!s.cautious || step * p[k] >= 0 ? r.decay : 0.f) * p[k] + step;
  }
  store<width>(params + i, p);
  store<width>(m + i, m1);
  store<width>(v + i, v1);
  if (bf16_copy != nullptr) store<width>(bf16_copy + i, p);
}

template <int width>
__global__ void adamw_kernel(float* params, float* m, float* v, bf16* bf16_copy, const float* grads,
                             const AdamwNumbers* numbers, const RowSpans spans, const AdamwFactors factors) {
  const AdamwNumbers of_step = *numbers;
  if (!std::isfinite(of_step.factor)) return;
  int r = 0;  // the last span that begins at this block or before
  for (int beyond = spans.count; beyond - r > 1;) {
    const int middle = (r + beyond) / 2;
    if (spans.span[middle].first_block <= blockIdx.x) r = middle;
    else beyond = middle;
  }
  const int64_t begin = spans.span[r].begin, end = spans.span[r].end;
  const double lr = of_step.lr * spans.span[r].lr_mul;
  const SpanFactors of{static_cast<float>(of_step.factor), static_cast<float>(lr * of_step.unbias_m),
                       static_cast<float>(lr * of_step.decay * spans.span[r].weight_decay),
                       static_cast<float>(of_step.unbias_v)};
  const int64_t first = begin / width * width + static_cast<int64_t>(blockIdx.x - spans.span[r].first_block) * piece;
  const int64_t last = first + piece < end ? first + piece : end;
  for (int64_t i = first + threadIdx.x * width; i < last; i += threads * width) {
    if (i >= begin && i + width <= end) {
      update<width>(params, m, v, bf16_copy, grads, i, of, factors);
    } else {  // an end within a vector
      for (int64_t k = i < begin ? begin : i; k < i + width && k < end; ++k)
        update<1>(params, m, v, bf16_copy, grads, k, of, factors);
    }
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void adamw_update_cuda(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& bf16_copy,
                       const Tensor& grads, const AdamwNumbers* numbers, const std::vector<AdamwRow>& rows,
                       const AdamwConstants& constants) {
  const AdamwFactors factors = factors_of(constants);
  // So that every fourth element of all of them is; bf16_copy's is half the others' size.
  const bool aligned = aligned16({params.data, m.data, v.data, grads.data, bf16_copy.data});
  const int64_t width = aligned ? 4 : 1;
  RowSpans spans{};
  uint32_t blocks = 0;
  const auto launch_spans = [&] {
    if (spans.count > 0)
      launch({"adamw", blocks, threads}, aligned ? adamw_kernel<4> : adamw_kernel<1>, params.as<float>(), m.as<float>(),
             v.as<float>(), data_or_null<bf16>(bf16_copy), grads.as<float>(), numbers, spans, factors);
    spans.count = 0, blocks = 0;
  };
  for (size_t i = 0; i < rows.size();) {
    const AdamwRow& row = rows[i];
    int64_t end = row.end;
    const auto goes_on = [&](const AdamwRow& next) {
      return next.begin == end && next.lr_mul == row.lr_mul && next.weight_decay == row.weight_decay;
    };
    for (++i; i < rows.size() && goes_on(rows[i]); ++i) end = rows[i].end;
    if (row.begin == end) continue;
    if (spans.count == max_spans) launch_spans();
    spans.span[spans.count++] = {row.begin, end, blocks, row.lr_mul, row.weight_decay};
    blocks += blocks_of(end - row.begin / width * width, piece);
  }
  launch_spans();
}

}  // namespace crossply
