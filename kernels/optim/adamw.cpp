#include "kernels/optim/adamw.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {
namespace {

void adamw_row_cpu(float* params, float* m, float* v, bf16* narrow, const float* grads, const AdamwRow& row,
                   const AdamwScalars& scalars) {
  // Everything that is the same for all elements is folded in double: near step 1, 1 - beta2^step cancels in float.
  const double step = static_cast<double>(scalars.step);
  const float beta1 = static_cast<float>(scalars.beta1), beta2 = static_cast<float>(scalars.beta2);
  const float in1 = static_cast<float>(1 - scalars.beta1), in2 = static_cast<float>(1 - scalars.beta2);
  const float rate = static_cast<float>(row.lr / (1 - std::pow(scalars.beta1, step)));
  const float unbias = static_cast<float>(1 / std::sqrt(1 - std::pow(scalars.beta2, step)));
  const float decay = static_cast<float>(row.lr * row.weight_decay);
  const float scale = static_cast<float>(scalars.grad_scale), eps = static_cast<float>(scalars.eps);
  constexpr int64_t chunk = 1024;  // what narrow is rounded from is still in the cache
  for (int64_t first = row.begin; first < row.end; first += chunk) {
    const int64_t end = std::min(first + chunk, row.end);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) {
      const float g = scale * grads[i], m1 = beta1 * m[i] + in1 * g, v1 = beta2 * v[i] + in2 * g * g;
      m[i] = m1;
      v[i] = v1;
      params[i] -= decay * params[i] + rate * m1 / (std::sqrt(v1) * unbias + eps);
    }
    if (narrow != nullptr) write_floats(narrow + first, params + first, end - first);
  }
}

void adamw_update_cpu(float* params, float* m, float* v, bf16* narrow, const float* grads, int64_t n,
                      const std::vector<AdamwRow>& rows, const AdamwScalars& scalars) {
  parallel_for(n, 16384, [&](int64_t begin, int64_t end) {
    for (AdamwRow row : rows) {
      row.begin = std::max(row.begin, begin);
      row.end = std::min(row.end, end);
      if (row.begin < row.end) adamw_row_cpu(params, m, v, narrow, grads, row, scalars);
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry point: check shapes, choose the backend.

void adamw_update(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& narrow, const Tensor& grads,
                  const std::vector<AdamwRow>& rows, const AdamwScalars& scalars, Stream stream) {
  const int64_t n = params.numel();
  CHECK_THAT(m.numel() == n && v.numel() == n && grads.numel() == n, "adamw_update: params ", params.str(), " m ",
             m.str(), " v ", v.str(), " grads ", grads.str());
  CHECK_THAT(narrow.data == nullptr || (narrow.numel() == n && stream.backend != Backend::reference),
             "adamw_update: narrow ", narrow.str(), " params ", params.str());
  CHECK_THAT(scalars.step >= 1, "adamw_update: step ", scalars.step);
  int64_t last = 0;
  for (const AdamwRow& row : rows) {
    CHECK_THAT(last <= row.begin && row.begin <= row.end && row.end <= n, "adamw_update: row ", row.begin, " to ",
               row.end, " after ", last, ", params ", params.str());
    last = row.end;
  }
  if (stream.backend == Backend::cuda) return adamw_update_cuda(params, m, v, narrow, grads, rows, scalars);
  if (stream.backend == Backend::cpu)
    return adamw_update_cpu(params.as<float>(), m.as<float>(), v.as<float>(), data_or_null<bf16>(narrow),
                            grads.as<float>(), n, rows, scalars);
  with_real(params.dtype, [&](auto real) {
    using T = decltype(real);
    for (const AdamwRow& row : rows) adamw_row_ref(params.as<T>(), m.as<T>(), v.as<T>(), grads.as<T>(), row, scalars);
  });
}

}  // namespace crossply
