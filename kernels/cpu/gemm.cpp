#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/cpu/gemm_split.h"
#include "kernels/cpu/vec.h"

namespace crossply {
namespace {

// A tile of c, tile_rows x tile_cols, stays in registers while k runs, beside a row of b and one element of a.
#if defined(__AVX512F__)
constexpr int64_t registers = 32, register_lanes = 16, lanes = 16;
#elif defined(__ARM_NEON)
constexpr int64_t registers = 32, register_lanes = 4, lanes = 8;
#elif defined(__AVX__)
constexpr int64_t registers = 16, register_lanes = 8, lanes = 8;
#else  // SSE2, which every x86-64 has
constexpr int64_t registers = 16, register_lanes = 4, lanes = 8;
#endif
constexpr int64_t tile_cols = 2 * lanes, parts = tile_cols / register_lanes;
constexpr int64_t tile_rows = (registers - 1 - parts) / parts;  // 14 with AVX-512, 2 with SSE2, else 6
constexpr int64_t l2_floats = 524288;                           // of 2 MiB
constexpr int64_t k_block = 256;             // a tile of a (tile_rows, k_block) stays in the L1 cache,
constexpr int64_t n_block = 1024;            // a packed block of b (k_block, n_block) in L2,
constexpr int64_t m_block = 24 * tile_rows;  // and a packed block of a (m_block, k_block) beside it
constexpr int64_t few_columns = lanes;       // of which half a tile would be empty
constexpr int64_t few = 384;                 // rows or columns whose blocks leave room for the next ones in L2

using Vec = float __attribute__((vector_size(lanes * sizeof(float))));
// Not Vec: g++ keeps a vector that is wider than a register in memory.
using Part = float __attribute__((vector_size(register_lanes * sizeof(float))));

// -----------------------------------------------------------------------------------------------------------------
// Transposing in registers.

template <size_t... I>
inline void zip(Vec& low, Vec& high, const Vec& a, const Vec& b, std::index_sequence<I...>) {
  low = __builtin_shufflevector(a, b, static_cast<int>(I / 2 + I % 2 * lanes)...);
  high = __builtin_shufflevector(a, b, static_cast<int>((I + lanes) / 2 + I % 2 * lanes)...);
}

// One step rotates the bits of an element's position (row, lane) by one place; log2(lanes) steps swap the two halves.
inline void transpose(std::array<Vec, lanes>& v) {
  for (int64_t step = 1; step < lanes; step *= 2) {
    std::array<Vec, lanes> w;
    for (int64_t i = 0; i < lanes / 2; ++i)
      zip(w[2 * i], w[2 * i + 1], v[i], v[i + lanes / 2], std::make_index_sequence<lanes>());
    v = w;
  }
}

// -----------------------------------------------------------------------------------------------------------------
// The tile kernel: c (R, tile_cols) from a (R, K) and b (K, tile_cols). `stride` is a's stride between rows if its k is
// contiguous (k_inner), and between k otherwise. The right half of b begins b_half after the left one. Of the columns,
// the first n are stored. Meanwhile one cache line of `ahead` is fetched for every other k, ahead_step after the last.

// Hides from the compiler how x was computed. Otherwise it keeps a stride for every row of a tile, in more registers
// than there are.
template <class T>
inline void opaque(T& x) {
  asm("" : "+r"(x));
}

template <int R, bool k_inner>
void multiply_tile(float* c, int64_t ldc, const float* a, int64_t stride, const float* b, int64_t ldb, int64_t b_half,
                   int64_t K, int64_t n, bool accumulate, const float* ahead, int64_t ahead_step) {
  // Three rows of a are reached from one pointer.
  constexpr int groups = k_inner ? (R + 2) / 3 : 1;
  const float* rows[groups];
#pragma GCC unroll 8
  for (int g = 0; g < groups; ++g) {
    rows[g] = a + 3 * g * stride;
    opaque(rows[g]);
  }
  Part sum[R][parts];
#pragma GCC unroll 14
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (Part& part : sum[i]) part = Part{};
  auto step = [&](int64_t d) __attribute__((always_inline)) {
    Part row[parts];
#pragma GCC unroll 4
    for (int p = 0; p < parts; ++p) {
      load(row[p], b + p * register_lanes / lanes * b_half + p * register_lanes % lanes);
      keep_in_register(row[p]);
    }
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      const float x = k_inner ? rows[i / 3][i % 3 * stride + d] : a[i];
#pragma GCC unroll 4
      for (int p = 0; p < parts; ++p) sum[i][p] += x * row[p];
    }
    b += ldb;
    if (!k_inner) a += stride;
  };
  for (int64_t k = K / 2; k > 0; --k) {  // by 4, clang 14 runs out of registers
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_step;
    step(0);
    step(1);
#pragma GCC unroll 8
    for (int g = 0; g < groups; ++g) rows[g] += 2;
  }
  if (K % 2) step(0);
  if (n == tile_cols) {
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      for (int p = 0; p < parts; ++p) {
        float* to = c + p * register_lanes;
        Part old{};
        if (accumulate) load(old, to);
        store(to, old + sum[i][p]);
      }
      c += ldc;
      opaque(c);
    }
    return;
  }
  float edge[R][tile_cols];
  std::memcpy(edge, sum, sizeof edge);
  for (int i = 0; i < R; ++i) {
    float* to = c + i * ldc;
    if (n >= lanes) {  // two vectors that overlap: both are read before either is written
      Vec left, right, old_left{}, old_right{};
      load(left, edge[i]);
      load(right, edge[i] + n - lanes);
      if (accumulate) load(old_left, to), load(old_right, to + n - lanes);
      store(to, old_left + left);
      store(to + n - lanes, old_right + right);
    } else {
      for (int64_t j = 0; j < n; ++j) to[j] = accumulate ? to[j] + edge[i][j] : edge[i][j];
    }
  }
}

using Tile = void (*)(float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t, int64_t, int64_t, bool,
                      const float*, int64_t);

template <bool k_inner, int... I>
constexpr std::array<Tile, tile_rows + 1> tiles_by_rows(std::integer_sequence<int, I...>) {
  return {nullptr, multiply_tile<I + 1, k_inner>...};
}
constexpr auto tiles_k_inner = tiles_by_rows<true>(std::make_integer_sequence<int, tile_rows>());
constexpr auto tiles_k_outer = tiles_by_rows<false>(std::make_integer_sequence<int, tile_rows>());

// -----------------------------------------------------------------------------------------------------------------
// Packing: both operands are stored as strips, each `lanes` lines wide (rows of a, columns of b) and K long.

// n lines from line 0 into one strip: to[k * lanes + line] = from[line * across + k * along]. Lines from n on, whose
// products are never stored, hold the last line again (if n is 0, the one before line 0), or what follows it if that
// can be read (line < readable).
void pack_strip(float* to, const float* from, int64_t across, int64_t along, int64_t n, int64_t readable, int64_t K) {
  if (across == 1 && readable >= lanes) {
    for (int64_t k = 0; k < K; ++k) std::memcpy(to + k * lanes, from + k * along, sizeof(Vec));
  } else if (across == 1) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t line = 0; line < lanes; ++line) to[k * lanes + line] = from[k * along + std::min(line, n - 1)];
    }
  } else {
    const auto row = [=](int64_t line) { return from + std::min(line, n - 1) * across; };
    int64_t k = 0;
    for (; k + lanes <= K; k += lanes) {
      std::array<Vec, lanes> v;
#pragma GCC unroll 16
      for (int64_t line = 0; line < lanes; ++line) load(v[static_cast<size_t>(line)], row(line) + k);
      transpose(v);
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) store(to + (k + i) * lanes, v[static_cast<size_t>(i)]);
    }
    for (; k < K; ++k) {
      for (int64_t line = 0; line < lanes; ++line) to[k * lanes + line] = row(line)[k];
    }
  }
}

// Strips that begin at lines cut(0), cut(1), ..., cut(strips).
template <class Cut>
void pack(float* to, const float* from, int64_t across, int64_t along, int64_t strips, Cut cut, int64_t readable,
          int64_t K) {
  // If lines are adjacent in memory, a few k at a time, so that memory is read in its own order.
  const int64_t k_step = across == 1 ? lanes : K;
  for (int64_t k = 0; k < K; k += k_step) {
    for (int64_t s = 0; s < strips; ++s)
      pack_strip(to + (s * K + k) * lanes, from + cut(s) * across + k * along, across, along, cut(s + 1) - cut(s),
                 readable - cut(s), std::min(k_step, K - k));
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Blocks and threads.

struct GemmPlan {
  int64_t M, N, K;
  bool pack_a, pack_b, accumulate;
  // Below a few microseconds of work, waking the threads does not pay.
  bool small() const { return M * N * K < 250000; }
};

// What tiles are to fetch into the L2 cache for those that follow: `columns` cache lines side by side, in `rows` rows.
struct Ahead {
  const float* data = nullptr;
  int64_t step = 0, rows = 0, columns = 0, row = 0;

  // The next `count` lines, one below the other; null if there are none.
  const float* take(int64_t count) {
    if (rows == 0 || columns == 0) return nullptr;
    const float* lines = data + row * step;
    row += count;
    if (row >= rows) row = 0, --columns, data += lanes;
    return lines;
  }
};

// Rows [i0, i1) and columns [j0, j1) of c, on one thread; j0 is a multiple of tile_cols.
void multiply_region(float* c, const Strided<float>& a, const Strided<float>& b, const GemmPlan& plan, int64_t i0,
                     int64_t i1, int64_t j0, int64_t j1) {
  const bool k_inner = a.col == 1 && !plan.pack_a;
  // Where a block of b is narrow it may be deep, so that c is read and written less often.
  const int64_t depth = even_blocks(plan.K, a.col == 1 && plan.N <= few ? 2 * k_block : k_block, lanes);
  const int64_t width = even_blocks(j1 - j0, n_block, tile_cols);
  const int64_t height = plan.pack_a ? m_block : i1 - i0;
  // With more columns the processor sees in time what comes next; a small a is in L2 already; rows a page apart are too
  // far apart; and the next block of a large a that is not row-major would drive the present one out of L2.
  const bool fetch =
      j1 - j0 <= few && (i1 - i0) * plan.K > l2_floats / 4 && (a.col == 1 ? a.row <= 4096 : i1 - i0 <= few);
  const bool far = (i1 - i0) * (j1 - j0) > l2_floats / 4;  // perhaps c is not in L2
  float* packed_b = plan.pack_b ? scratch_f32(static_cast<size_t>(depth * width), 4) : nullptr;
  float* packed_a = plan.pack_a ? scratch_f32(static_cast<size_t>(depth * m_block / tile_rows * lanes), 5) : nullptr;
  for (int64_t k0 = 0; k0 < plan.K; k0 += depth) {
    const int64_t K = std::min(depth, plan.K - k0);
    const bool accumulate = plan.accumulate || k0 > 0;
    const int64_t K_next = std::min(depth, plan.K - k0 - K);
    Ahead ahead_a, ahead_b;
    if (fetch && a.col != 1) ahead_a = {a.data + i0 + (k0 + K) * a.col, a.col, K_next, ceil_div(i1 - i0, lanes)};
    if (fetch && b.col == 1) ahead_b = {b.data + (k0 + K) * b.row + j0, b.row, K_next, ceil_div(j1 - j0, lanes)};
    for (int64_t jb = j0; jb < j1; jb += width) {
      const int64_t n = std::min(width, j1 - jb);
      if (plan.pack_b)
        pack(
            packed_b, b.data + k0 * b.row + jb * b.col, b.col, b.row, ceil_div(n, tile_cols) * 2,
            [n](int64_t s) { return std::min(s * lanes, n); }, plan.N - jb, K);
      for (int64_t ib = i0; ib < i1; ib += height) {
        const int64_t m = std::min(height, i1 - ib), tiles = ceil_div(m, tile_rows);
        const auto first_row = [m, tiles](int64_t t) { return m * t / tiles; };
        if (plan.pack_a)
          pack(packed_a, a.data + ib * a.row + k0 * a.col, a.row, a.col, tiles, first_row, plan.M - ib, K);
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t i = first_row(t), rows = first_row(t + 1) - i;
          const float* from = plan.pack_a ? packed_a + t * K * lanes : a.data + (ib + i) * a.row + k0 * a.col;
          const int64_t stride = plan.pack_a ? lanes : k_inner ? a.row : a.col;
          const Tile tile = (k_inner ? tiles_k_inner : tiles_k_outer)[static_cast<size_t>(rows)];
          if (fetch && a.col == 1 && t % 8 == 0) {  // so many tiles that one takes about a line of each row
            const int64_t next = first_row(std::min(t + 8, tiles)), end = first_row(std::min(t + 16, tiles));
            ahead_a = {a.data + (ib + next) * a.row + k0, a.row, end - next, ceil_div(K, lanes)};
          }
          for (int64_t j = 0; j < n; j += tile_cols) {
            float* tile_c = c + (ib + i) * plan.N + jb + j;
            const float* ahead = ahead_a.take(K / 2);
            int64_t step = ahead_a.step;
            if (!ahead) ahead = ahead_b.take(K / 2), step = b.row;
            if (!ahead) ahead = from, step = 0;
            if (far) {  // c comes while the sum is made
              for (float* to = tile_c; to < tile_c + rows * plan.N; to += plan.N)
                __builtin_prefetch(to, 1), __builtin_prefetch(to + lanes, 1);
            }
            const float* panel = plan.pack_b ? packed_b + j * K : b.data + k0 * b.row + jb + j;
            tile(tile_c, plan.N, from, stride, panel, plan.pack_b ? lanes : b.row, plan.pack_b ? K * lanes : lanes, K,
                 std::min(tile_cols, n - j), accumulate, ahead, step);
          }
        }
      }
    }
  }
}

// Packing costs about as much as a dozen multiplications: an operand that is met rarely is read where it is. A
// row-major a is fast enough that way, and so is a block of any a that L2 holds unpacked; columns that lie apart, or
// end inside a tile, are not. Nor are rows a multiple of 4 KiB apart, as in models whose width is one of 1024: the
// lines of a tile's rows share one set of the L1 cache, which holds fewer. A b as wide as a tile is as good as packed.
GemmPlan make_plan(const Strided<float>& a, const Strided<float>& b, int64_t M, int64_t N, int64_t K, bool accumulate) {
  const bool in_one_set = a.row % 1024 == 0 && K > lanes && M >= 2 * tile_rows;
  const bool pack_a = N > 128 && (a.col == 1 ? in_one_set : std::max(M, N) > few);
  const bool pack_b = b.col != 1 || N % tile_cols != 0 || (M >= 4 * tile_rows && b.row != tile_cols);
  return {M, N, K, pack_a, pack_b, accumulate};
}

// Into how many pieces the sum is cut; 1: it is not.
int64_t chunks_of(const GemmPlan& plan) { return plan.M * plan.N > 16384 ? 1 : chunks_of_sum(plan.K, 512); }

void multiply(float* c, const Strided<float>& a, const Strided<float>& b, const GemmPlan& plan) {
  share_rectangles(plan.M, plan.N, 1, tile_cols, 16, plan.small(), [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    multiply_region(c, a, b, plan, i0, i1, j0, j1);
  });
}

void multiply_in_chunks(float* c, const Strided<float>& a, const Strided<float>& b, const GemmPlan& plan,
                        int64_t chunks) {
  const auto part = [&](float* partial, int64_t k0, int64_t k1) {
    const GemmPlan piece{plan.M, plan.N, k1 - k0, plan.pack_a, plan.pack_b, false};
    multiply_region(partial, {a.data + k0 * a.col, a.row, a.col}, {b.data + k0 * b.row, b.row, b.col}, piece, 0, plan.M,
                    0, plan.N);
  };
  sum_in_chunks(c, plan.M * plan.N, plan.K, chunks, plan.small(), plan.accumulate, part);
}

// -----------------------------------------------------------------------------------------------------------------
// A few rows against the rows of b: dot products, without packing b, which would cost more than the product.

// c (R, n) from a (R, K) and b (n, K), R * Q dot products at a time, one vector of partial sums for each.
template <int R, class C, class T>
void dot_rows(C* c, int64_t ldc, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t n, int64_t K,
              bool accumulate) {
  constexpr int Q = static_cast<int>(lanes) / R;
  const int64_t K_vectors = K / lanes * lanes;
  for (int64_t j = 0; j < n; j += Q) {
    const T* row[Q];
    for (int q = 0; q < Q; ++q) row[q] = b + std::min(j + q, n - 1) * ldb;
    Vec sum[R][Q];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) {
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) sum[i][q] = Vec{};
    }
    for (int64_t k = 0; k < K_vectors; k += lanes) {
      Vec x[R];
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) load(x[i], a + i * lda + k);
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        Vec y;
        load(y, row[q] + k);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) sum[i][q] += x[i] * y;
      }
    }
    std::array<Vec, lanes> v;
    std::memcpy(&v, sum, sizeof v);
    transpose(v);
    Vec total{};
    for (const Vec& part : v) total += part;
    for (int i = 0; i < R; ++i) {
      for (int q = 0; q < std::min<int64_t>(Q, n - j); ++q) {
        float dot = total[i * Q + q];
        for (int64_t k = K_vectors; k < K; ++k) dot += a[i * lda + k] * row[q][k];
        C& to = c[i * ldc + j + q];
        to = accumulate ? to + dot : dot;
      }
    }
  }
}

// c (M,N) from a (M,K) and b (N,K), both read where they are, for so few columns that half a tile would be empty
// and packing b not pay. In blocks of K, of which four rows of a stay in the L1 cache while those of b pass.
void multiply_few_columns(float* c, const Strided<float>& a, const Strided<float>& b, const GemmPlan& plan) {
  constexpr int64_t block = 1024, group = 4;
  const int64_t groups = ceil_div(plan.M, group);
  parallel_for(groups, plan.small() ? groups : 1, [=, &a, &b, &plan](int64_t begin, int64_t end) {
    for (int64_t i = begin * group; i < std::min(end * group, plan.M); i += group)
      for (int64_t k = 0; k < plan.K; k += block) {
        const auto rows = [&](auto dot_kernel, int64_t first) {
          dot_kernel(c + first * plan.N, plan.N, a.data + first * a.row + k, a.row, b.data + k, b.col, plan.N,
                     std::min(block, plan.K - k), plan.accumulate || k > 0);
        };
        if (i + group <= plan.M) rows(dot_rows<group, float, float>, i);
        else
          for (int64_t rest = i; rest < plan.M; ++rest) rows(dot_rows<1, float, float>, rest);
      }
  });
}
// The same sum wherever such a product is made.
bool has_few_columns(const Strided<float>& a, const Strided<float>& b, int64_t N) {
  return N <= few_columns && a.col == 1 && b.row == 1;
}

template <class C, class T>
void multiply_few_rows(C* c, const Strided<T>& a, const Strided<T>& b, const GemmPlan& plan) {
  const int64_t n_step = 64;  // rows of b that stay in cache while the rows of a pass
  const int64_t steps = ceil_div(plan.N, n_step);
  parallel_for(steps, plan.small() ? steps : 1, [=, &a, &b, &plan](int64_t begin, int64_t end) {
    for (int64_t j = begin * n_step; j < std::min(end * n_step, plan.N); j += n_step) {
      const int64_t n = std::min(n_step, plan.N - j);
      int64_t i = 0;
      auto rows = [&](auto dot_kernel, int64_t count) {
        for (; i + count <= plan.M; i += count)
          dot_kernel(c + i * plan.N + j, plan.N, a.data + i * a.row, a.row, b.data + j * b.col, b.col, n, plan.K,
                     plan.accumulate);
      };
      rows(dot_rows<4, C, T>, 4);
      rows(dot_rows<2, C, T>, 2);
      rows(dot_rows<1, C, T>, 1);
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void gemm(float* c, const Strided<float>& a, const Strided<float>& b, int64_t M, int64_t N, int64_t K,
          bool accumulate) {
  if (K == 0 && !accumulate) std::fill_n(c, M * N, 0.f);
  if (M == 0 || N == 0 || K == 0) return;
  const GemmPlan plan = make_plan(a, b, M, N, K, accumulate);
  if (M <= 16 && a.col == 1 && b.row == 1) return multiply_few_rows(c, a, b, plan);
  if (has_few_columns(a, b, N)) return multiply_few_columns(c, a, b, plan);
  if (const int64_t chunks = chunks_of(plan); chunks > 1) return multiply_in_chunks(c, a, b, plan, chunks);
  multiply(c, a, b, plan);
}

template <class C>
void gemm_few_rows(C* c, const Strided<bf16>& a, const Strided<bf16>& b, int64_t M, int64_t N, int64_t K) {
  multiply_few_rows(c, a, b, GemmPlan{M, N, K, false, false, false});
}
template void gemm_few_rows(float*, const Strided<bf16>&, const Strided<bf16>&, int64_t, int64_t, int64_t);
template void gemm_few_rows(bf16*, const Strided<bf16>&, const Strided<bf16>&, int64_t, int64_t, int64_t);

void gemm_rows(const std::vector<GemmProduct<float, float>>& products, int64_t M) {
  if (products.empty()) return;
  bool alone = products.size() == 1 || !enough_rows(M);
  for (const auto& p : products)
    alone |= chunks_of({M, p.N, p.K, false, false, false}) > 1 || has_few_columns(p.a, p.b, p.N);  // the same bits
  if (alone) {
    for (const auto& p : products) gemm(p.c, p.a, p.b, M, p.N, p.K, p.accumulate);
    return;
  }
  share_rows(M, 1, [&](int64_t i0, int64_t i1) {
    for (const auto& p : products)
      multiply_region(p.c, p.a, p.b, make_plan(p.a, p.b, M, p.N, p.K, p.accumulate), i0, i1, 0, p.N);
  });
}

}  // namespace crossply
