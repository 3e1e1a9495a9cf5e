#include "kernels/optim/muon.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"
#include "kernels/optim/rows.h"

namespace crossply {
namespace {

template <class U>
void muon_momentum_cpu(U* u, float* m, const float* grads, int64_t n, double factor, double momentum, bool nesterov) {
  const auto mu = static_cast<float>(momentum), in = static_cast<float>((1 - momentum) * factor);
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = in * grads[i], next = mu * m[i] + g;
      m[i] = next;
      u[i] = nesterov ? g + mu * next : next;
    }
  });
}

template <class S>
void normalize_rows_cpu(S* o, float* v, int64_t m, int64_t n, double beta2) {
  double before = 0, after = 0;
  for (int64_t i = 0; i < m; ++i) {
    double squares = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double x = static_cast<float>(o[i * n + j]);
      squares += x * x;
    }
    before += squares;
    v[i] = static_cast<float>(beta2 * static_cast<double>(v[i]) + (1 - beta2) * squares / static_cast<double>(n));
    const double divisor = std::sqrt(static_cast<double>(v[i])) + 1e-10;
    after += squares / (divisor * divisor);
  }
  const double by = std::sqrt(before) / (std::sqrt(after) + 1e-10);
  for (int64_t i = 0; i < m; ++i) {
    const auto factor = static_cast<float>(by / (std::sqrt(static_cast<double>(v[i])) + 1e-10));
    for (int64_t j = 0; j < n; ++j) o[i * n + j] = factor * static_cast<float>(o[i * n + j]);
  }
}

template <class S>
void muon_row_cpu(float* params, bf16* copy, const S* o, const MuonNumbers& numbers, const MuonRow& row,
                  bool cautious) {
  const double rate = numbers.lr * row.lr_mul;
  const auto decay = static_cast<float>(rate * numbers.decay * row.weight_decay);
  const auto step = static_cast<float>(rate * row.scale);
  constexpr int64_t chunk = 1024;  // what the bf16 copy is rounded from is still in the cache
  for (int64_t first = row.begin; first < row.end; first += chunk) {
    const int64_t end = std::min(first + chunk, row.end);
    for (int64_t i = first; i < end; ++i) {
      const auto direction = static_cast<float>(o[i]);
      const float decays = !cautious || direction * params[i] >= 0 ? decay : 0.f;
      params[i] -= decays * params[i] + step * direction;
    }
    if (copy != nullptr) write_floats(copy + first, params + first, end - first);
  }
}

// Where the step's factor and numbers are.
const double* factor_at(const Tensor& factor) {
  CHECK_THAT(factor.numel() == 1, factor.str());
  return factor.as<double>();
}

const MuonNumbers* numbers_at(const Tensor& numbers) {
  CHECK_THAT(numbers.bytes() == sizeof(MuonNumbers), numbers.str());
  return reinterpret_cast<const MuonNumbers*>(numbers.as<double>());
}

}  // namespace

double muon_scale_of(const std::string& name, int64_t m, int64_t n) {
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n);
  if (name == "rms") return 0.2 * std::sqrt(std::max(rows, columns));
  if (name == "original") return std::sqrt(std::max(1.0, rows / columns));
  CHECK_THAT(name == "spectral", name);
  return std::sqrt(rows / columns);
}

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void muon_momentum(const Tensor& u, const Tensor& m, const Tensor& grads, const Tensor& factor, const Tensor& numbers,
                   bool nesterov, Stream stream) {
  const int64_t n = grads.numel();
  CHECK_SHAPES(u.numel() == n && m.numel() == n, u, m, grads);
  if (stream.backend == Backend::cuda)
    return muon_momentum_cuda(u, m, grads, factor_at(factor), numbers_at(numbers), nesterov);
  const double by = *factor_at(factor), momentum = numbers_at(numbers)->momentum;
  if (!std::isfinite(by)) return;
  if (stream.backend == Backend::cpu)
    return with_storage(u.dtype, [&]<class S>(S) {
      muon_momentum_cpu(u.as<S>(), m.as<float>(), grads.as<float>(), n, by, momentum, nesterov);
    });
  with_real(grads.dtype,
            [&]<class T>(T) { muon_momentum_ref(u.as<T>(), m.as<T>(), grads.as<T>(), n, by, momentum, nesterov); });
}

void normalize_rows(const Tensor& o, const Tensor& v, double beta2, const Tensor& factor, Stream stream) {
  CHECK_SHAPES(o.shape.rank == 2 && v.numel() == o.dim(0), o, v);
  if (stream.backend == Backend::cuda) return normalize_rows_cuda(o, v, beta2, factor_at(factor));
  if (!std::isfinite(*factor_at(factor))) return;
  if (stream.backend == Backend::cpu)
    return with_storage(o.dtype,
                        [&]<class S>(S) { normalize_rows_cpu(o.as<S>(), v.as<float>(), o.dim(0), o.dim(1), beta2); });
  with_real(o.dtype, [&]<class T>(T) { normalize_rows_ref(o.as<T>(), v.as<T>(), o.dim(0), o.dim(1), beta2); });
}

void muon_update(const Tensor& params, const Tensor& bf16_copy, const Tensor& o, const Tensor& factor,
                 const Tensor& numbers, const std::vector<MuonRow>& rows, bool cautious, Stream stream) {
  const int64_t n = params.numel();
  CHECK_SHAPES(o.numel() == n && (bf16_copy.data == nullptr || bf16_copy.numel() == n), params, bf16_copy, o);
  check_rows(rows, n);
  if (stream.backend == Backend::cuda)
    return muon_update_cuda(params, bf16_copy, o, factor_at(factor), numbers_at(numbers), rows, cautious);
  if (!std::isfinite(*factor_at(factor))) return;
  const MuonNumbers& of_step = *numbers_at(numbers);
  if (stream.backend == Backend::cpu)
    return with_storage(o.dtype, [&]<class S>(S) {
      for_parts_of_rows(rows, n, [&](const MuonRow& row) {
        muon_row_cpu(params.as<float>(), data_or_null<bf16>(bf16_copy), o.as<S>(), of_step, row, cautious);
      });
    });
  with_real(params.dtype, [&]<class T>(T) {
    for (const MuonRow& row : rows) muon_update_ref(params.as<T>(), o.as<T>(), of_step, row, cautious);
  });
}

}  // namespace crossply
