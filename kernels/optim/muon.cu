// Not yet run on hardware: only in the emulator.
#include "kernels/optim/muon.h"

#include "kernels/optim/rows.cuh"

namespace crossply {
namespace {

// Bound by memory: 16 bytes a parameter, 14 with u in bf16.
template <int width, class U>
__global__ void muon_momentum_kernel(U* u, float* m, const float* grads, const double* factor,
                                     const MuonNumbers* numbers, bool nesterov, int64_t n) {
  const int64_t i = first_of_thread<width>();
  if (i >= n || !std::isfinite(*factor)) return;
  const auto mu = static_cast<float>(numbers->momentum), in = static_cast<float>((1 - numbers->momentum) * *factor);
  Floats<width> of_m = load<width>(m + i), of_u;
  const Floats<width> g = load<width>(grads + i);
#pragma unroll
  for (int k = 0; k < width; ++k) {
    const float x = in * g[k], next = mu * of_m[k] + x;
    of_m[k] = next;
    of_u[k] = nesterov ? x + mu * next : next;
  }
  store<width>(m + i, of_m);
  store<width>(u + i, of_u);
}

// -----------------------------------------------------------------------------------------------------------------
// NorMuon: the squares of each row and its moment, then the factor of all, then the rows.

constexpr int threads = 256, warps = threads / warp_size;

// squares: (2, m): of each row, and of what it becomes.
template <class S>
__global__ void row_moments_kernel(double* squares, float* v, const S* o, int64_t m, int64_t n, double beta2,
                                   const double* factor) {
  if (!std::isfinite(*factor)) return;
  const int64_t row = blockIdx.x;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < n; j += threads) {
    const double x = to_float(o[row * n + j]);
    sum += x * x;
  }
  sum = block_sum<warps>(sum);
  if (threadIdx.x != 0) return;
  v[row] = static_cast<float>(beta2 * static_cast<double>(v[row]) + (1 - beta2) * sum / static_cast<double>(n));
  const double divisor = sqrt(static_cast<double>(v[row])) + 1e-10;
  squares[row] = sum, squares[m + row] = sum / (divisor * divisor);
}

// Of both halves of squares, to[0] and to[1]: a block each.
__global__ void sum_of_rows_kernel(double* to, const double* squares, int64_t m) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < m; i += threads) sum += squares[blockIdx.x * m + i];
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0) to[blockIdx.x] = sum;
}

template <class S>
__global__ void divide_rows_kernel(S* o, const float* v, const double* sums, int64_t n, const double* factor) {
  if (!std::isfinite(*factor)) return;
  const int64_t row = blockIdx.x;
  const double by = sqrt(sums[0]) / (sqrt(sums[1]) + 1e-10);
  const auto of_row = static_cast<float>(by / (sqrt(static_cast<double>(v[row])) + 1e-10));
  for (int64_t j = threadIdx.x; j < n; j += threads) from_float(o[row * n + j], of_row * to_float(o[row * n + j]));
}

// -----------------------------------------------------------------------------------------------------------------
// The step. Bound by memory: 12 bytes a parameter, 12 also with o and a copy in bf16.

struct OfRow {
  double lr_mul, weight_decay, scale;
  bool operator==(const OfRow&) const = default;
};

template <int width, class S>
__device__ __forceinline__ void step(float* params, bf16* bf16_copy, const S* o, int64_t i, float decay, float by,
                                     bool cautious) {
  Floats<width> p = load<width>(params + i);
  const Floats<width> direction = load<width>(o + i);
#pragma unroll
  for (int k = 0; k < width; ++k)
    p[k] -= (!cautious || direction[k] * p[k] >= 0 ? decay : 0.f) * p[k] + by * direction[k];
  store<width>(params + i, p);
  if (bf16_copy != nullptr) store<width>(bf16_copy + i, p);
}

template <int width, class S>
__global__ void muon_update_kernel(float* params, bf16* bf16_copy, const S* o, const double* factor,
                                   const MuonNumbers* numbers, const RowSpans<OfRow> spans, bool cautious) {
  if (!std::isfinite(*factor)) return;
  const int r = span_of_block(spans);
  const OfRow of = spans.span[r].of;
  const double rate = numbers->lr * of.lr_mul;
  const auto decay = static_cast<float>(rate * numbers->decay * of.weight_decay),
             by = static_cast<float>(rate * of.scale);
  for_span<width>(
      spans, r, [&](int64_t i) { step<width>(params, bf16_copy, o, i, decay, by, cautious); },
      [&](int64_t i) { step<1>(params, bf16_copy, o, i, decay, by, cautious); });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void muon_momentum_cuda(const Tensor& u, const Tensor& m, const Tensor& grads, const double* factor,
                        const MuonNumbers* numbers, bool nesterov) {
  const int64_t n = grads.numel();
  with_access(u.dtype, n, {u.data, m.data, grads.data}, [&]<class U>(U, auto width) {
    launch_elementwise("muon_momentum", n, width, muon_momentum_kernel<width, U>, u.as<U>(), m.as<float>(),
                       grads.as<float>(), factor, numbers, nesterov);
  });
}

void normalize_rows_cuda(const Tensor& o, const Tensor& v, double beta2, const double* factor) {
  const int64_t m = o.dim(0), n = o.dim(1);
  double* squares = scratch<double>(2 * m + 2);
  double* sums = squares + 2 * m;
  const auto rows = static_cast<uint32_t>(m);
  with_storage(o.dtype, [&]<class S>(S) {
    launch({"row_moments", rows, threads}, row_moments_kernel<S>, squares, v.as<float>(), o.as<S>(), m, n, beta2,
           factor);
    launch({"sum_of_rows", 2, threads}, sum_of_rows_kernel, sums, squares, m);
    launch({"divide_rows", rows, threads}, divide_rows_kernel<S>, o.as<S>(), v.as<float>(), sums, n, factor);
  });
}

void muon_update_cuda(const Tensor& params, const Tensor& bf16_copy, const Tensor& o, const double* factor,
                      const MuonNumbers* numbers, const std::vector<MuonRow>& rows, bool cautious) {
  // So that every fourth element of all of them is; bf16 arrays are half the others' size.
  const bool aligned = aligned16({params.data, bf16_copy.data, o.data});
  with_storage(o.dtype, [&]<class S>(S) {
    with_spans(
        rows, aligned ? 4 : 1,
        [](const MuonRow& row) {
          return OfRow{row.lr_mul, row.weight_decay, row.scale};
        },
        [&](const RowSpans<OfRow>& spans, uint32_t blocks) {
          launch({"muon_update", blocks, row_threads}, aligned ? muon_update_kernel<4, S> : muon_update_kernel<1, S>,
                 params.as<float>(), data_or_null<bf16>(bf16_copy), o.as<S>(), factor, numbers, spans, cautious);
        });
  });
}

}  // namespace crossply
