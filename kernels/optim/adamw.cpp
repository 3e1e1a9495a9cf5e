#include "kernels/optim/adamw.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"
#include "kernels/optim/rows.h"

namespace crossply {
namespace {

template <bool cautious>
void adamw_row_cpu(float* params, float* m, float* v, bf16* bf16_copy, const float* grads, const AdamwNumbers& numbers,
                   const AdamwRow& row, AdamwFactors s, double eps) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const double lr = numbers.lr * row.lr_mul;
  const float step_size = f(lr * numbers.unbias_m), decay = f(lr * numbers.decay * row.weight_decay);
  const float factor = f(numbers.factor), unbias_v = f(numbers.unbias_v);
  s.eps = f(eps * row.eps_mul);
  constexpr int64_t chunk = 1024;  // what bf16_copy is rounded from is still in the cache
  for (int64_t first = row.begin; first < row.end; first += chunk) {
    const int64_t end = std::min(first + chunk, row.end);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) {
      const float g = factor * grads[i], m1 = s.beta1 * m[i] + s.in1 * g, v1 = s.beta2 * v[i] + s.in2 * g * g;
      m[i] = m1;
      v[i] = v1;
      if constexpr (cautious) {
        const float step = step_size * m1 / (std::sqrt(v1) * unbias_v + s.eps);
        params[i] -= (step * params[i] >= 0 ? decay : 0.f) * params[i] + step;
      } else {
        params[i] -= decay * params[i] + step_size * m1 / (std::sqrt(v1) * unbias_v + s.eps);
      }
    }
    if (bf16_copy != nullptr) write_floats(bf16_copy + first, params + first, end - first);
  }
}

void adamw_update_cpu(float* params, float* m, float* v, bf16* bf16_copy, const float* grads,
                      const AdamwNumbers& numbers, int64_t n, const std::vector<AdamwRow>& rows,
                      const AdamwConstants& constants) {
  const AdamwFactors factors = factors_of(constants);
  for_parts_of_rows(rows, n, [&](const AdamwRow& row) {
    with_flag(factors.cautious, [&](auto cautious) {
      adamw_row_cpu<cautious>(params, m, v, bf16_copy, grads, numbers, row, factors, constants.eps);
    });
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry point.

void adamw_update(const Tensor& params, const Tensor& m, const Tensor& v, const Tensor& bf16_copy, const Tensor& grads,
                  const Tensor& numbers, const std::vector<AdamwRow>& rows, const AdamwConstants& constants,
                  Stream stream) {
  const int64_t n = params.numel();
  CHECK_SHAPES(m.numel() == n && v.numel() == n && grads.numel() == n, params, m, v, grads);
  CHECK_SHAPES(bf16_copy.data == nullptr || (bf16_copy.numel() == n && stream.backend != Backend::reference), bf16_copy,
               params);
  CHECK_THAT(numbers.bytes() == sizeof(AdamwNumbers), numbers.str());
  check_rows(rows, n);
  const auto* of_step = reinterpret_cast<const AdamwNumbers*>(numbers.as<double>());
  if (stream.backend == Backend::cuda)
    return adamw_update_cuda(params, m, v, bf16_copy, grads, of_step, rows, constants);
  if (!std::isfinite(of_step->factor)) return;
  if (stream.backend == Backend::cpu)
    return adamw_update_cpu(params.as<float>(), m.as<float>(), v.as<float>(), data_or_null<bf16>(bf16_copy),
                            grads.as<float>(), *of_step, n, rows, constants);
  with_real(params.dtype, [&]<class T>(T) {
    for (const AdamwRow& row : rows)
      adamw_row_ref(params.as<T>(), m.as<T>(), v.as<T>(), grads.as<T>(), *of_step, row, constants);
  });
}

}  // namespace crossply
