// Not yet run on hardware: only in the emulator.
#include "kernels/optim/adamw.h"

#include "kernels/optim/rows.cuh"

namespace crossply {
namespace {

// Bound by memory: 28 bytes a parameter, 30 with bf16_copy.
struct OfRow {
  double lr_mul, weight_decay;
  float eps;
  bool operator==(const OfRow&) const = default;
};

// The factors of a span in this step.
struct SpanFactors {
  float factor, step_size, decay, unbias_v, eps;
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
    const float step = r.step_size * m1[k] / (sqrtf(v1[k]) * r.unbias_v + r.eps);
    p[k] -= (!s.cautious || step * p[k] >= 0 ? r.decay : 0.f) * p[k] + step;
  }
  store<width>(params + i, p);
  store<width>(m + i, m1);
  store<width>(v + i, v1);
  if (bf16_copy != nullptr) store<width>(bf16_copy + i, p);
}

template <int width>
__global__ void adamw_kernel(float* params, float* m, float* v, bf16* bf16_copy, const float* grads,
                             const AdamwNumbers* numbers, const RowSpans<OfRow> spans, const AdamwFactors factors) {
  const AdamwNumbers of_step = *numbers;
  if (!std::isfinite(of_step.factor)) return;
  const int r = span_of_block(spans);
  const double lr = of_step.lr * spans.span[r].of.lr_mul;
  const SpanFactors of{static_cast<float>(of_step.factor), static_cast<float>(lr * of_step.unbias_m),
                       static_cast<float>(lr * of_step.decay * spans.span[r].of.weight_decay),
                       static_cast<float>(of_step.unbias_v), spans.span[r].of.eps};
  for_span<width>(
      spans, r, [&](int64_t i) { update<width>(params, m, v, bf16_copy, grads, i, of, factors); },
      [&](int64_t i) { update<1>(params, m, v, bf16_copy, grads, i, of, factors); });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void adamw_update_cuda(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& bf16_copy,
                       const Tensor& grads, const AdamwNumbers* numbers, const std::vector<AdamwRow>& rows,
                       const AdamwConstants& constants) {
  const AdamwFactors factors = factors_of(constants);
  // So that every fourth element of all of them is; bf16_copy's is half the others' size.
  const bool aligned = aligned16({params.data, m.data, v.data, grads.data, bf16_copy.data});
  with_spans(
      rows, aligned ? 4 : 1,
      [&](const AdamwRow& row) {
        return OfRow{row.lr_mul, row.weight_decay, static_cast<float>(constants.eps * row.eps_mul)};
      },
      [&](const RowSpans<OfRow>& spans, uint32_t blocks) {
        launch({"adamw", blocks, row_threads}, aligned ? adamw_kernel<4> : adamw_kernel<1>, params.as<float>(),
               m.as<float>(), v.as<float>(), data_or_null<bf16>(bf16_copy), grads.as<float>(), numbers, spans, factors);
      });
}

}  // namespace crossply
