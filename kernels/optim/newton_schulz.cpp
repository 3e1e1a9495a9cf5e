#include "kernels/optim/newton_schulz.h"

#include "engine/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_bf16.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"
#include "kernels/optim/gradient_norm.h"

namespace crossply {
namespace {

// Scratch slots; the products take 4 to 6 and 8.
constexpr int slot_a = 0, slot_map = 1, slot_panel = 2, slot_product = 3;
// Rows of a symmetric product that are computed at once, of which only the columns up to the last of them are.
constexpr int64_t panel_rows = 128;
// Smaller matrices are shared out among the threads; larger ones are multiplied by all threads.
constexpr int64_t large_enough = int64_t{1} << 21;

template <class T>
T* scratch(int64_t count, int slot) {
  const auto floats = static_cast<size_t>(ceil_div(count * static_cast<int64_t>(sizeof(T)), 4));
  return reinterpret_cast<T*>(scratch_f32(floats, slot));
}

// c (M, N) = a b, in f32.
template <class T>
void multiply(float* c, const Strided<T>& a, const Strided<T>& b, int64_t M, int64_t N, int64_t K,
              MatmulPrecision precision) {
  auto& list = empty_list<GemmProduct<float, T>>();
  list.push_back({c, a, b, N, K, false});
  if constexpr (std::is_same_v<T, bf16>) gemm_rows_bf16(list, M);
  else if (precision == MatmulPrecision::bf16x3) gemm_rows_bf16x3(list, M);
  else gemm_rows(list, M);
}

// The upper triangle of x (n, n) from the lower one.
template <class T>
void mirror(T* x, int64_t n) {
  constexpr int64_t tile = 32;  // both sides of it stay in the cache
  parallel_for(ceil_div(n, tile), 4, [=](int64_t begin, int64_t end) {
    for (int64_t i0 = begin * tile; i0 < std::min(end * tile, n); i0 += tile)
      for (int64_t j0 = i0; j0 < n; j0 += tile)
        for (int64_t i = i0; i < std::min(i0 + tile, n); ++i)
          for (int64_t j = std::max(j0, i + 1); j < std::min(j0 + tile, n); ++j) x[i * n + j] = x[j * n + i];
  });
}

// out (n, n) = beta of + alpha a b, where the product is symmetric: only its lower triangle is computed. of: null, or
// as out. Row i of the product begins at a.data + i * a.row.
template <class T>
void symmetric_product(T* out, int64_t n, int64_t K, float alpha, const Strided<T>& a, const Strided<T>& b, float beta,
                       const T* of, MatmulPrecision precision) {
  float* panel = scratch_f32(static_cast<size_t>(std::min(n, panel_rows) * n), slot_panel);
  for (int64_t first = 0; first < n; first += panel_rows) {
    const int64_t end = std::min(first + panel_rows, n);
    multiply(panel, {a.data + first * a.row, a.row, a.col}, b, end - first, end, K, precision);
    parallel_for(end - first, 16, [=](int64_t begin, int64_t last) {
      for (int64_t i = begin; i < last; ++i) {
        const float* sums = panel + i * end;
        T* row = out + (first + i) * n;
        if (of == nullptr)
          for (int64_t j = 0; j <= first + i; ++j) row[j] = alpha * sums[j];
        else
          for (int64_t j = 0; j <= first + i; ++j)
            row[j] = beta * static_cast<float>(of[(first + i) * n + j]) + alpha * sums[j];
      }
    });
  }
  mirror(out, n);
}

double sum_of_squares(const bf16* x, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += leaf) {
    double sum = 0;
    for (int64_t i = begin; i < std::min(begin + leaf, n); ++i) {
      const double value = static_cast<float>(x[i]);
      sum += value * value;
    }
    total += sum;
  }
  return total;
}

double sum_of_squares(const float* x, int64_t n) {
  double* sums = scratch<double>(leaves_of(n), slot_panel);
  leaf_squares({sums, Dtype::f64, Shape{leaves_of(n)}}, {const_cast<float*>(x), Dtype::f32, Shape{n}}, Stream{});
  double total = 0;
  for (int64_t l = 0; l < leaves_of(n); ++l) total += sums[l];
  return total;
}

// x = factor x + y, of which y may be null.
template <class T>
void scale_and_add(T* x, double factor, const float* y, int64_t n) {
  const auto by = static_cast<float>(factor);
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
    if (y == nullptr)
      for (int64_t i = begin; i < end; ++i) x[i] = by * static_cast<float>(x[i]);
    else
      for (int64_t i = begin; i < end; ++i) x[i] = by * static_cast<float>(x[i]) + y[i];
  });
}

template <class T>
void newton_schulz_cpu(T* x, int64_t m, int64_t n, const NewtonSchulz& iteration, MatmulPrecision precision) {
  const int64_t small = std::min(m, n), large = std::max(m, n);
  scale_and_add(x, 1 / std::max(iteration.safety * std::sqrt(sum_of_squares(x, m * n)), 1e-7), nullptr, m * n);
  T* a = scratch<T>(small * small, slot_a);
  T* map = scratch<T>(small * small, slot_map);
  float* product = scratch_f32(static_cast<size_t>(m * n), slot_product);
  const Strided<T> rows = m <= n ? Strided<T>{x, n, 1} : Strided<T>{x, 1, n};  // X, or its transpose
  for (const auto& step : iteration.steps) {
    const Strided<T> square{a, small, 1};
    symmetric_product<T>(a, small, large, 1, rows, Strided<T>{x, rows.col, rows.row}, 0, nullptr, precision);
    symmetric_product<T>(map, small, small, static_cast<float>(step[2]), square, square, static_cast<float>(step[1]), a,
                         precision);
    const Strided<T> by{map, small, 1}, whole{x, n, 1};
    if (m <= n) multiply(product, by, whole, m, n, small, precision);
    else multiply(product, whole, by, m, n, small, precision);
    scale_and_add(x, step[0], product, m * n);
  }
}

void newton_schulz_cpu(const Tensor& x, const NewtonSchulz& iteration, MatmulPrecision precision) {
  with_storage(x.dtype, [&]<class T>(T) { newton_schulz_cpu(x.as<T>(), x.dim(0), x.dim(1), iteration, precision); });
}

bool is_large(const Shape& x) { return x.numel() * std::min(x[0], x[1]) >= large_enough; }

}  // namespace

NewtonSchulz newton_schulz_of(const std::string& name, int64_t count) {
  NewtonSchulz iteration;
  if (name == "jordan") {
    iteration.steps.assign(5, {3.4445, -4.7750, 2.0315});
  } else {
    CHECK_THAT(name == "polar_express", name);
    iteration.steps = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                       {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                       {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                       {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
                       {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
    iteration.safety = 1.02;
  }
  if (count > 0) iteration.steps.resize(static_cast<size_t>(count), iteration.steps.back());
  return iteration;
}

int64_t newton_schulz_scratch(const std::vector<Shape>& matrices, Dtype dtype, int64_t threads) {
  const auto each = static_cast<int64_t>(size_of(dtype));
  int64_t one = 0, shared_out = 0;  // of a large one, by all threads; of the others, for each thread
  for (const Shape& x : matrices) {
    const int64_t small = std::min(x[0], x[1]);
    const int64_t bytes = 2 * each * small * small + 4 * (std::min(small, panel_rows) * small + x.numel());
    int64_t& most = is_large(x) ? one : shared_out;
    most = std::max(most, bytes);
  }
  return std::max(one, threads * shared_out);
}

// -----------------------------------------------------------------------------------------------------------------
// Entry point.

void newton_schulz(const std::vector<Tensor>& matrices, const NewtonSchulz& iteration, Stream stream) {
  for (const Tensor& x : matrices) CHECK_THAT(x.shape.rank == 2 && x.numel() > 0, x.str());
  if (stream.backend == Backend::cuda) return newton_schulz_cuda(matrices, iteration);
  if (stream.backend == Backend::reference) {
    for (const Tensor& x : matrices)
      with_real(x.dtype, [&]<class T>(T) { newton_schulz_ref(x.as<T>(), x.dim(0), x.dim(1), iteration); });
    return;
  }
  for (const Tensor& x : matrices)
    if (is_large(x.shape)) newton_schulz_cpu(x, iteration, stream.precision);
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < matrices.size(); ++i)
    if (!is_large(matrices[i].shape)) newton_schulz_cpu(matrices[i], iteration, stream.precision);
}

}  // namespace crossply
