#include "kernels/gemm_bf16.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cpu.h"
#include "kernels/gemm_bf16_tile.h"

namespace crossply {
namespace {

#if CROSSPLY_MATRIX_UNITS

// In bf16, of both parts. A panel of a (32, k_block) stays in the L1 cache beside the panel of b it meets, a packed
// block of b in the L2 cache with room for a and c to pass through.
constexpr int64_t k_block = 512, b_block = 512 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }
// The size of the fewest equal blocks, none above `limit`, that cover n; a multiple of `unit`, as is limit.
int64_t even_blocks(int64_t n, int64_t limit, int64_t unit) { return round_up(ceil_div(n, ceil_div(n, limit)), unit); }

template <class C, class T>
struct Task {
  C* c;
  Lines<T> a, b;
  int64_t M, N, K;
  bool add;
  // Below a few microseconds of work, waking the threads does not pay.
  bool small() const { return M * N * K < 2000000; }
};

// How a region of c is cut. `depth` k are multiplied at once, `outer` k of b are packed at once.
struct Blocks {
  int64_t depth, outer, width, height;
};
template <class C, class T>
Blocks cut(const Task<C, T>& p, int64_t m, int64_t n) {
  const int64_t depth = even_blocks(p.K, k_block / parts<T>, step_k), K = round_up(p.K, step_k) * parts<T>;
  // Float sums wait in c itself.
  if (std::is_same_v<C, float>) {
    const int64_t width = even_blocks(n, 1024, panel_lines);
    const int64_t outer = even_blocks(ceil_div(p.K, depth), std::max<int64_t>(1, b_block / (width * depth * parts<T>)), 1);
    return {depth, outer * depth, width, m};
  }
  if (K <= 4096)
    return {depth, round_up(p.K, depth), even_blocks(n, std::max<int64_t>(128, b_block / K / 32 * 32), panel_lines), m};
  return {depth, 2 * depth, even_blocks(n, 384, panel_lines), even_blocks(m, 512, panel_lines)};
}

// Rows [i0, i1) and columns [j0, j1) of c, on one thread; i0 and j0 are multiples of panel_lines.
template <class C, class T>
MATRIX_TARGET void multiply_region(const Task<C, T>& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const bool amx = matrix_unit() == MatrixUnit::amx;
  const Blocks block = cut(p, i1 - i0, j1 - j0);
  const int64_t panel_size = panel_lines * block.outer * parts<T>;
  const int64_t panels = block.width / panel_lines;
  const bool in_place = std::is_same_v<T, bf16> && p.a.k_inner() && p.K % step_k == 0 && j1 - j0 <= 128;
  const int64_t sums_kept = block.outer < p.K ? ceil_div(block.height, panel_lines) : 1;
  bf16* packed_b = reinterpret_cast<bf16*>(scratch_f32(static_cast<size_t>(panels * panel_size / 2), 4));
  float* sums = scratch_f32(
      static_cast<size_t>(sums_kept * panels * sums_size + panel_lines * block.depth * parts<T> / 2), 5);
  bf16* packed_a = reinterpret_cast<bf16*>(sums + sums_kept * panels * sums_size);
  if (amx) begin_tiles();
  for (int64_t jb = j0; jb < j1; jb += block.width) {
    const int64_t je = std::min(j1, jb + block.width);
    for (int64_t ib = i0; ib < i1; ib += block.height) {
      const int64_t ie = std::min(i1, ib + block.height);
      for (int64_t ko = 0; ko < p.K; ko += block.outer) {
        const int64_t ke = std::min(p.K, ko + block.outer);
        for (int64_t j = jb; j < je; j += panel_lines)
          pack_panel<T, true>(packed_b + (j - jb) / panel_lines * panel_size, {p.b.at(j, ko), p.b.across, p.b.along},
                              std::min(panel_lines, je - j), ke - ko);
        for (int64_t i = ib; i < ie; i += panel_lines) {
          const int64_t m = std::min(panel_lines, ie - i);
          float* row_sums = sums + (sums_kept > 1 ? (i - ib) / panel_lines : 0) * panels * sums_size;
          for (int64_t k = ko; k < ke; k += block.depth) {
            const int64_t K = std::min(block.depth, ke - k);
            const Lines<T> from{p.a.at(i, k), p.a.across, p.a.along};
            RowPanel a{packed_a, step_k, 2 * parts<T> * tile_size};
            if (in_place && m == panel_lines) a = {reinterpret_cast<const bf16*>(from.data), from.across, step_k};
            else pack_panel<T, false>(packed_a, from, m, K);
            const bool first = k == 0, last = k + K == p.K;
            for (int64_t j = jb; j < je; j += panel_lines) {
              const int64_t n = std::min(panel_lines, je - j), panel = (j - jb) / panel_lines;
              const bf16* b = packed_b + panel * panel_size + (k - ko) * panel_lines * parts<T>;
              C* c = p.c + i * p.N + j;
              float* to = row_sums + panel * sums_size;
              int64_t ld = panel_lines;
              bool add = !first;
              const bool direct = std::is_same_v<C, float> && m == panel_lines && n == panel_lines;
              if (direct) to = reinterpret_cast<float*>(c), ld = p.N, add |= p.add;
              if (amx) multiply_amx<parts<T>>(to, ld, a, b, ceil_div(K, step_k), add);
              else multiply_avx512(to, ld, a, b, ceil_div(K, step_k), add);
              if (!direct && last) finish_sums(c, p.N, to, m, n, p.add);
            }
          }
        }
      }
    }
  }
  if (amx) end_tiles();
}

// Cuts c into as many rectangles as there are threads, so that the largest is as small, and as square, as possible.
template <class C, class T>
void multiply_rectangles(const Task<C, T>& p) {
  const int64_t threads = p.small() || omp_in_parallel() ? 1 : omp_get_max_threads();
  const int64_t rows = ceil_div(p.M, panel_lines), cols = ceil_div(p.N, panel_lines);
  int64_t best = INT64_MAX, down = 1;
  for (int64_t d = 1; d <= threads; ++d) {
    if (threads % d) continue;
    const int64_t m = ceil_div(rows, d), n = ceil_div(cols, threads / d);
    const int64_t cost = m * n + 4 * (m + n);  // multiplying, and packing both operands
    if (cost < best) best = cost, down = d;
  }
  const int64_t across = threads / down;
  parallel_for(threads, 1, [=, &p](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t y = t / across, i0 = rows * y / down * panel_lines;
      const int64_t i1 = std::min(rows * (y + 1) / down * panel_lines, p.M);
      const int64_t x = t % across, j0 = cols * x / across * panel_lines;
      const int64_t j1 = std::min(cols * (x + 1) / across * panel_lines, p.N);
      if (i0 < i1 && j0 < j1) multiply_region(p, i0, i1, j0, j1);
    }
  });
}

// Into how many pieces the sum is cut; 1: it is not.
template <class C, class T>
int64_t chunks_of(const Task<C, T>& p) {
  if (!std::is_same_v<C, float> || p.M * p.N > 65536) return 1;
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(p.K / 1024, 1, 16))));
}

// A long sum into a small c leaves too few tiles to share out, so the sum itself is cut into chunks, as many for any
// number of threads. The partial results are added in order.
template <class T>
void multiply_chunks(const Task<float, T>& p, int64_t chunks) {
  const int64_t size = p.M * p.N;
  float* partial = scratch_f32(static_cast<size_t>(chunks * size), 6);
  parallel_for(chunks, p.small() ? chunks : 1, [=, &p](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t k0 = p.K * t / chunks, k1 = p.K * (t + 1) / chunks;
      const Task<float, T> part{partial + t * size, {p.a.at(0, k0), p.a.across, p.a.along},
                                   {p.b.at(0, k0), p.b.across, p.b.along}, p.M, p.N, k1 - k0, false};
      multiply_region(part, 0, p.M, 0, p.N);
    }
  });
  for (int64_t t = 0; t < chunks; ++t) {
    const float* from = partial + t * size;
    const bool add = p.add || t > 0;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) p.c[i] = add ? p.c[i] + from[i] : from[i];
  }
}

template <class C, class T>
void multiply(const Task<C, T>& p) {
  if constexpr (std::is_same_v<C, float>) {
    if (const int64_t chunks = chunks_of(p); chunks > 1) return multiply_chunks(p, chunks);
  }
  multiply_rectangles(p);
}

template <class C, class T>
void multiply_all(const std::vector<Task<C, T>>& tasks, int64_t M) {
  const int64_t threads = omp_get_max_threads(), least = 256;  // rows of a thread that repay packing all of b
  bool alone = tasks.size() == 1 || M < least * threads || omp_in_parallel();
  for (const Task<C, T>& p : tasks) alone |= chunks_of(p) > 1;  // the same bits either way
  if (alone) {
    for (const Task<C, T>& p : tasks) multiply(p);
    return;
  }
  const int64_t panels = ceil_div(M, panel_lines);
  parallel_for(threads, 1, [=, &tasks](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (const Task<C, T>& p : tasks)
        multiply_region(p, panels * t / threads * panel_lines, std::min(panels * (t + 1) / threads * panel_lines, M), 0,
                        p.N);
  });
}

template <class C, class From>
void multiply_on_units(const std::vector<From>& products, int64_t M) {
  using T = std::remove_cvref_t<decltype(*From::a.data)>;
  std::vector<Task<C, T>> tasks;
  for (const auto& p : products) {
    if (p.K == 0 && !p.add) std::fill_n(p.c, M * p.N, C(0.f));
    if (M > 0 && p.N > 0 && p.K > 0)
      tasks.push_back({p.c, {p.a.data, p.a.row, p.a.col}, {p.b.data, p.b.col, p.b.row}, M, p.N, p.K, p.add});
  }
  if (!tasks.empty()) multiply_all(tasks, M);
}

#else

template <class C, class From>
void multiply_on_units(const std::vector<From>&, int64_t) {}

#endif

// -----------------------------------------------------------------------------------------------------------------
// Without units: by way of float.

template <class To, class From>
void convert(To* to, const From* from, int64_t n) {
  parallel_for(n, 32768, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] = from[i];
  });
}
// A copy without gaps between the lines, of which there are `rows` if they are rows, else `cols`.
Strided widen(float* to, const Strided16& from, int64_t rows, int64_t cols) {
  const bool row_major = from.col == 1;
  const int64_t lines = row_major ? rows : cols, length = row_major ? cols : rows;
  const int64_t apart = row_major ? from.row : from.col;
  if (apart == length) convert(to, from.data, lines * length);
  else for (int64_t i = 0; i < lines; ++i) convert(to + i * length, from.data + i * apart, length);
  return {to, row_major ? length : 1, row_major ? 1 : length};
}

template <class C>
void multiply_in_float(const Product16<C>& p, int64_t M) {
  float* a = scratch_f32(static_cast<size_t>(M * p.K + p.K * p.N + M * p.N), 8);
  float *b = a + M * p.K, *c = b + p.K * p.N;
  const Strided wide_a = widen(a, p.a, M, p.K), wide_b = widen(b, p.b, p.K, p.N);
  if constexpr (std::is_same_v<C, float>) return gemm(p.c, wide_a, wide_b, M, p.N, p.K, p.add);
  if (p.add) convert(c, p.c, M * p.N);
  gemm(c, wide_a, wide_b, M, p.N, p.K, p.add);
  convert(p.c, c, M * p.N);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

template <class C>
void gemm_rows_bf16(const std::vector<Product16<C>>& products, int64_t M) {
  if (matrix_unit() != MatrixUnit::none) return multiply_on_units<C>(products, M);
  for (const Product16<C>& p : products) multiply_in_float(p, M);
}
template void gemm_rows_bf16(const std::vector<Product16<float>>&, int64_t);
template void gemm_rows_bf16(const std::vector<Product16<bf16>>&, int64_t);

template <class C>
void gemm_bf16(C* c, const Strided16& a, const Strided16& b, int64_t M, int64_t N, int64_t K, bool add) {
  gemm_rows_bf16<C>({{c, a, b, N, K, add}}, M);
}
template void gemm_bf16(float*, const Strided16&, const Strided16&, int64_t, int64_t, int64_t, bool);
template void gemm_bf16(bf16*, const Strided16&, const Strided16&, int64_t, int64_t, int64_t, bool);

void gemm_rows_bf16x3(const std::vector<Product>& products, int64_t M) {
  if (matrix_unit() == MatrixUnit::amx) multiply_on_units<float>(products, M);
  else gemm_rows(products, M);
}

void gemm_bf16x3(float* c, const Strided& a, const Strided& b, int64_t M, int64_t N, int64_t K, bool add) {
  gemm_rows_bf16x3({{c, a, b, N, K, add}}, M);
}

}  // namespace crossply
