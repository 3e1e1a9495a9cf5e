#include "kernels/optim/adamw.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

void adamw_row_cpu(float* params, float* m, float* v, bf16* narrow, const float* grads, const AdamwRow& row,
                   AdamwFactors s) {
  const float rate = static_cast<float>(row.lr / s.bias_m), decay = static_cast<float>(row.lr * row.weight_decay);
  constexpr int64_t chunk = 1024;  // what narrow is rounded from is still in the cache
  for (int64_t first = row.begin; first < row.end; first += chunk) {
    const int64_t end = std::min(first + chunk, row.end);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) {
      const float g = s.scale * grads[i], m1 = s.beta1 * m[i] + s.in1 * g, v1 = s.beta2 * v[i] + s.in2 * g * g;
      m[i] = m1;
      v[i] = v1;
      params[i] -= decay * params[i] + rate * m1 / (std::sqrt(v1) * s.unbias_v + s.eps);
    }
    if (narrow != nullptr) write_floats(narrow + first, params + first, end - first);
  }
}

void adamw_update_cpu(float* params, float* m, float* v, bf16* narrow, const float* grads, int64_t n,
                      const std::vector<AdamwRow>& rows, const AdamwScalars& scalars) {
  const AdamwFactors factors = factors_of(scalars);
  parallel_for(n, 16384, [&](int64_t begin, int64_t end) {
    for (AdamwRow row : rows) {
      row.begin = std::max(row.begin, begin);
      row.end = std::min(row.end, end);
      if (row.begin < row.end) adamw_row_cpu(params, m, v, narrow, grads, row, factors);
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry point.

void adamw_update(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& narrow, const Tensor& grads,
                  const std::vector<AdamwRow>& rows, const AdamwScalars& scalars, Stream stream) {
  const int64_t n = params.numel();
  CHECK_SHAPES(m.numel() == n && v.numel() == n && grads.numel() == n, params, m, v, grads);
  CHECK_SHAPES(narrow.data == nullptr || (narrow.numel() == n && stream.backend != Backend::reference), narrow, params);
  CHECK_THAT(scalars.step >= 1, scalars.step);
  int64_t last = 0;
  for (const AdamwRow& row : rows) {
    CHECK_THAT(last <= row.begin && row.begin <= row.end && row.end <= n, "row ", row.begin, " to ", row.end, " after ",
               last, ", params ", params.str());
    last = row.end;
  }
  if (stream.backend == Backend::cuda) return adamw_update_cuda(params, m, v, narrow, grads, rows, scalars);
  if (stream.backend == Backend::cpu)
    return adamw_update_cpu(params.as<float>(), m.as<float>(), v.as<float>(), data_or_null<bf16>(narrow),
                            grads.as<float>(), n, rows, scalars);
  with_real(params.dtype, [&]<class T>(T) {
    for (const AdamwRow& row : rows) adamw_row_ref(params.as<T>(), m.as<T>(), v.as<T>(), grads.as<T>(), row, scalars);
  });
}

}  // namespace crossply
