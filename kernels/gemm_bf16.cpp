#include "kernels/gemm_bf16.h"

#include <algorithm>
#include <bit>
#include <type_traits>
#include <vector>

#include "kernels/cpu.h"
#include "kernels/gemm_bf16_tile.h"

namespace crossply {
namespace {

#if CROSSPLY_MATRIX_UNITS

// In bf16, of both parts. A panel of a (32, k_block), 40 KiB, stays in an L1 cache of 48; a packed block of b, 1 MiB,
// in half of an L2 cache of 2 (more was slower: a and c pass through it too).
constexpr int64_t k_block = 640, b_block = 512 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }
// The size of the fewest equal blocks, none above `limit`, that cover n; a multiple of `unit`, as is limit.
int64_t even_blocks(int64_t n, int64_t limit, int64_t unit) { return round_up(ceil_div(n, ceil_div(n, limit)), unit); }

template <class T>
struct Factors {
  Lines<T> a, b;
  int64_t K;
};
// c, set or added to, from the sum of several products.
template <class C, class T>
struct Task {
  C* c;
  std::vector<Factors<T>> terms;
  int64_t M, N;
  bool add;
  // As many k as the packed panels of all the terms hold.
  int64_t padded_K() const {
    int64_t K = 0;
    for (const Factors<T>& term : terms) K += round_up(term.K, step_k);
    return K;
  }
  // Below a few microseconds of work, waking the threads does not pay.
  bool small() const { return M * N * padded_K() < 2000000; }
};

// A piece of one term's k that is multiplied at once; `at` is its place among the padded k.
struct Piece {
  size_t term;
  int64_t k, K, at;
};
// How the work on n columns is cut. The pieces from outer[o] to outer[o + 1] of b are packed at once.
struct Blocks {
  std::vector<Piece> pieces;
  std::vector<size_t> outer;
  int64_t depth, outer_K, width;
};
template <class C, class T>
Blocks cut(const Task<C, T>& p, int64_t n) {
  // If k is short, all of it is packed at once, so that a bf16 c is finished panel by panel. Else the sums wait, in c
  // or in scratch, and a wide block reads a more rarely.
  const int64_t all = p.padded_K(), room = b_block / parts<T>;
  const bool whole = std::is_same_v<C, bf16> && all <= 1024;
  const int64_t width = even_blocks(n, whole ? room / all / panel_lines * panel_lines : 1024, panel_lines);
  Blocks block{{}, {0}, 0, std::min(all, std::max(k_block / parts<T>, room / width)), width};
  int64_t at = 0, packed = 0;
  for (size_t t = 0; t < p.terms.size(); ++t) {
    const int64_t K = p.terms[t].K, depth = even_blocks(K, k_block / parts<T>, step_k);
    block.depth = std::max(block.depth, depth);
    for (int64_t k = 0; k < K; k += depth) {
      const int64_t part = std::min(depth, K - k), padded = round_up(part, step_k);
      if (at > 0 && packed + padded > block.outer_K) block.outer.push_back(block.pieces.size()), packed = 0;
      block.pieces.push_back({t, k, part, at});
      at += padded, packed += padded;
    }
  }
  block.outer.push_back(block.pieces.size());
  return block;
}

// Rows of bf16 are read where they are, unless they are so far apart (multiples of 2 KiB) that their pieces drive each
// other out of the L1 cache.
inline bool reads_in_place(const Lines<bf16>& a, int64_t K) {
  return a.k_inner() && K % step_k == 0 && a.across % 1024 != 0;
}
inline bool reads_in_place(const Lines<float>&, int64_t) { return false; }

struct Phase {
  bool first, last, amx;
};
// The 32 rows from i on (those before i_end) and n columns from j0 on, for one piece of k, of which b is packed.
template <class C, class T>
MATRIX_TARGET void multiply_row_panel(const Task<C, T>& p, const Piece& piece, Phase phase, const bf16* b,
                                      int64_t panel_size, bf16* packed_a, float* sums, int64_t i, int64_t i_end,
                                      int64_t j0, int64_t columns) {
  const Lines<T>& a = p.terms[piece.term].a;
  const int64_t m = std::min(panel_lines, i_end - i), next_m = std::min(panel_lines, i_end - i - m);
  const int64_t steps = ceil_div(piece.K, step_k), panels = ceil_div(columns, panel_lines);
  const Lines<T> from{a.at(i, piece.k), a.across, a.along}, next{a.at(i + m, piece.k), a.across, a.along};
  RowPanel rows{packed_a, step_k, 2 * parts<T> * tile_size};
  if (reads_in_place(a, piece.K) && m == panel_lines)
    rows = {reinterpret_cast<const bf16*>(from.data), a.across, step_k};
  else
    pack_rows(packed_a, from, m, piece.K);
  for (int64_t panel = 0; panel < panels; ++panel, b += panel_size) {
    const int64_t n = std::min(panel_lines, columns - panel * panel_lines);
    C* c = p.c + i * p.N + j0 + panel * panel_lines;
    // Float sums wait in c, those of whole panels without a detour through scratch. Others wait in scratch, unless they
    // are complete after this piece.
    const bool wide = std::is_same_v<C, float>, direct = wide && m == panel_lines && n == panel_lines;
    const bool keep = !wide && !(phase.first && phase.last), c_add = p.add || (wide && !phase.first);
    float* to = direct ? reinterpret_cast<float*>(c) : sums + (keep ? panel * sums_size : 0);
    const int64_t ld = direct ? p.N : panel_lines;
    const bool add = direct ? c_add : keep && !phase.first;
    if (phase.amx) {
      if (next_m > 0) prefetch_lines(next, next_m, piece.K, panel, panels);
      const void* ahead = keep ? static_cast<const void*>(to + sums_size) : c + panel_lines;
      const int64_t ahead_row = keep ? panel_lines * 4 : p.N * static_cast<int64_t>(sizeof(C));
      multiply_amx<parts<T>>(to, ld, rows, b, steps, add, static_cast<const char*>(ahead), ahead_row);
    } else {
      multiply_avx512(to, ld, rows, b, steps, add);
    }
    if (!direct && (wide || phase.last)) finish_sums(c, p.N, to, m, n, c_add);
  }
}

// Rows [i0, i1) and columns [j0, j1) of c, on one thread; i0 and j0 are multiples of panel_lines.
template <class C, class T>
MATRIX_TARGET void multiply_region(const Task<C, T>& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const bool amx = matrix_unit() == MatrixUnit::amx;
  const Blocks block = cut(p, j1 - j0);
  const int64_t panels = block.width / panel_lines, panel_size = panel_lines * block.outer_K * parts<T>;
  const int64_t sums_kept = std::is_same_v<C, float> ? 0 : block.outer.size() > 2 ? ceil_div(i1 - i0, panel_lines) : 1;
  bf16* packed_b = reinterpret_cast<bf16*>(scratch_f32(static_cast<size_t>(panels * panel_size / 2), 4));
  const int64_t packed_a_size = panel_lines * block.depth * parts<T>;
  bf16* packed_a = reinterpret_cast<bf16*>(
      scratch_f32(static_cast<size_t>(packed_a_size / 2 + (1 + sums_kept * panels) * sums_size), 5));
  float* sums = reinterpret_cast<float*>(packed_a + packed_a_size);
  if (amx) begin_tiles();
  for (int64_t jb = j0; jb < j1; jb += block.width) {
    const int64_t width = std::min(j1 - jb, block.width);
    for (size_t o = 0; o + 1 < block.outer.size(); ++o) {
      const Piece *begin = block.pieces.data() + block.outer[o], *end = block.pieces.data() + block.outer[o + 1];
      const auto packed = [=](const Piece* piece) {
        return packed_b + (piece->at - begin->at) * panel_lines * parts<T>;
      };
      for (const Piece* piece = begin; piece < end; ++piece) {
        const Lines<T>& b = p.terms[piece->term].b;
        pack_panels<T, true>(packed(piece), panel_size, {b.at(jb, piece->k), b.across, b.along}, width, piece->K);
      }
      for (int64_t i = i0; i < i1; i += panel_lines) {
        float* row_sums = sums + (sums_kept > 1 ? (i - i0) / panel_lines : 0) * panels * sums_size;
        for (const Piece* piece = begin; piece < end; ++piece) {
          const bool first = piece->at == 0, last = piece == &block.pieces.back();
          multiply_row_panel(p, *piece, {first, last, amx}, packed(piece), panel_size, packed_a, row_sums, i, i1, jb,
                             width);
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
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(p.terms[0].K / 1024, 1, 16))));
}

// A long sum into a small c leaves too few tiles to share out, so the sum itself is cut into chunks, as many for any
// number of threads. The partial results are added in order.
template <class T>
void multiply_chunks(const Task<float, T>& p, int64_t chunks) {
  const int64_t size = p.M * p.N;
  float* partial = scratch_f32(static_cast<size_t>(chunks * size), 6);
  parallel_for(chunks, p.small() ? chunks : 1, [=, &p](int64_t begin, int64_t end) {
    const Factors<T>& x = p.terms[0];
    for (int64_t t = begin; t < end; ++t) {
      const int64_t k0 = x.K * t / chunks, k1 = x.K * (t + 1) / chunks;
      const Factors<T> part{{x.a.at(0, k0), x.a.across, x.a.along}, {x.b.at(0, k0), x.b.across, x.b.along}, k1 - k0};
      multiply_region(Task<float, T>{partial + t * size, {part}, p.M, p.N, false}, 0, p.M, 0, p.N);
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
  for (const From& p : products) {
    if (p.K == 0 && !p.add) std::fill_n(p.c, M * p.N, C(0.f));
    if (M == 0 || p.N == 0 || p.K == 0) continue;
    const Factors<T> factors{{p.a.data, p.a.row, p.a.col}, {p.b.data, p.b.col, p.b.row}, p.K};
    if (std::is_same_v<C, bf16> && p.add && !tasks.empty() && tasks.back().c == p.c)
      tasks.back().terms.push_back(factors);
    else
      tasks.push_back({p.c, {factors}, M, p.N, p.add});
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

// The products from `p` to `end`, which are one sum in c.
template <class C>
void multiply_in_float(const Product16<C>* p, const Product16<C>* end, int64_t M) {
  int64_t most = 0;
  for (const Product16<C>* q = p; q < end; ++q) most = std::max(most, q->K);
  float* c = scratch_f32(static_cast<size_t>((M + p->N) * most + M * p->N), 8);
  float *a = c + M * p->N, *b = a + M * most, *sums = c;
  if constexpr (std::is_same_v<C, float>) sums = p->c;
  else if (p->add) convert(c, p->c, M * p->N);
  for (const Product16<C>* q = p; q < end; ++q)
    gemm(sums, widen(a, q->a, M, q->K), widen(b, q->b, q->K, q->N), M, q->N, q->K, q->add);
  if constexpr (!std::is_same_v<C, float>) convert(p->c, c, M * p->N);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

template <class C>
void gemm_rows_bf16(const std::vector<Product16<C>>& products, int64_t M) {
  if (matrix_unit() != MatrixUnit::none) return multiply_on_units<C>(products, M);
  for (size_t i = 0, end; i < products.size(); i = end) {
    for (end = i + 1; end < products.size() && products[end].add && products[end].c == products[i].c;) ++end;
    multiply_in_float(products.data() + i, products.data() + end, M);
  }
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
