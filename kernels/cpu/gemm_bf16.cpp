#include "kernels/cpu/gemm_bf16.h"

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cpu/gemm_bf16_tile.h"
#include "kernels/cpu/gemm_split.h"

namespace crossply {
namespace {

#if CROSSPLY_MATRIX_UNITS

// In bf16, of both parts. A panel of a (32, k_block), 32 KiB, stays in an L1 cache of 48; a packed block of b, 512 KiB,
// in an L2 cache of 2 MiB (twice that was slower by a tenth: a and c pass through it too).
constexpr int64_t k_block = 512, b_block = 256 * 1024;

// In bytes: operands that fit into the L2 cache together, beside what is packed, are probably there. Fetching them
// ahead, and packing them among the products, would cost small models a tenth.
constexpr int64_t cache_size = 768 * 1024;

template <class T>
struct GemmOperands {
  Lines<T> a, b;
  int64_t K;
};
// c, overwritten or accumulated into, from the sum of several products.
template <class C, class T>
struct Task {
  C* c;
  std::span<const GemmOperands<T>> terms;
  int64_t M, N;
  bool accumulate;
  // As many k as the packed panels of all the terms hold.
  int64_t padded_K() const {
    int64_t K = 0;
    for (const GemmOperands<T>& term : terms) K += round_up(term.K, step_k);
    return K;
  }
  // In bytes, of all operands.
  int64_t size() const { return M * N * int64_t{sizeof(C)} + (M + N) * padded_K() * int64_t{sizeof(T)}; }
  // Below a few microseconds of work, waking the threads does not pay.
  bool small() const { return M * N * padded_K() < 2000000; }
};

// A piece of one term's k that is multiplied at once; `at` is its place among the padded k.
struct Piece {
  size_t term;
  int64_t k, K, at;
};
// How a thread's work on n columns is cut. The pieces from outer[o] to outer[o + 1] of b are packed at once.
struct Blocks {
  std::vector<Piece> pieces;
  std::vector<size_t> outer;
  int64_t depth, outer_K, width;
};
template <class C, class T>
const Blocks& cut(const Task<C, T>& p, int64_t n) {
  static thread_local Blocks block;  // so that only the first step allocates
  // If k is short, all of it is packed at once, so that a bf16 c is finished panel by panel. Else the sums wait, in a
  // float c or in scratch, and a wide block reads a more rarely.
  const int64_t all = p.padded_K(), room = b_block / parts<T>;
  const bool whole = std::is_same_v<C, bf16> && all <= 1024;
  const int64_t widest = whole ? room / all / panel_lines * panel_lines : 1024;
  const int64_t width = even_blocks(n, widest, panel_lines);
  // Float sums are added to c once in outer_K, which must therefore not depend on the thread's share of the columns.
  const int64_t outer_K = room / even_blocks(p.N, widest, panel_lines);
  block.pieces.clear(), block.outer.assign(1, 0);
  block.depth = 0, block.outer_K = std::min(all, std::max(k_block / parts<T>, outer_K)), block.width = width;
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

// Rows that are packed at once where k is not contiguous: 256 bytes of bf16 for each k, because single lines from as
// many pages as there are k arrive slowly.
constexpr int64_t rows_together = 4;

// How many products before c is written its memory is fetched. It takes 200 ns, as long as a product of 192 k, but
// lines that are still on their way when they are written cost most: 3 products were slower than none.
constexpr int64_t products_ahead = 16;

// What becomes of the sums of one piece of k.
struct Phase {
  bool first, last;  // of the pieces whose sums wait in scratch for each other
  bool accumulate;   // c's old value to the sums, when they are complete
  bool amx, cold;    // operands larger than a cache
};

// The 32 rows from i on (those before i_end) and the columns from j0 on, for one piece of k, of which b is packed.
template <class C, class T>
MATRIX_TARGET void multiply_row_panel(const Task<C, T>& p, Phase phase, const PairRows& rows, const bf16* b,
                                      int64_t panel_size, int64_t steps, float* sums, float* done, int64_t i,
                                      int64_t i_end, int64_t j0, int64_t columns, Aside<C, T>& aside) {
  const int64_t m = std::min(panel_lines, i_end - i), next_m = std::min(panel_lines, i_end - i - m);
  const int64_t panels = ceil_div(columns, panel_lines), ahead = std::min(products_ahead, panels);
  const bool f32_output = std::is_same_v<C, float>, whole = phase.first && phase.last;
  for (int64_t panel = 0; panel < panels; ++panel, b += panel_size) {
    const int64_t n = std::min(panel_lines, columns - panel * panel_lines), c_size = sizeof(C);
    C* c = p.c + i * p.N + j0 + panel * panel_lines;
    // Whole panels of floats that one piece completes need no detour, unless the units would have to wait for old ones.
    const bool direct =
        f32_output && whole && m == panel_lines && n == panel_lines && !(phase.accumulate && phase.cold);
    float* to = direct ? reinterpret_cast<float*>(c) : whole ? done + panel % 2 * sums_size : sums + panel * sums_size;
    const int64_t ld = direct ? p.N : panel_lines;
    const bool here = panel + ahead < panels;
    const C* later = here ? c + ahead * panel_lines : c + m * p.N + (ahead - panels) * panel_lines;
    const int64_t later_m = !phase.last || !phase.cold ? 0 : here ? m : next_m;
    aside.share_c({reinterpret_cast<const char*>(later), later_m, p.N * c_size, panel_lines * c_size}, steps);
    const bool accumulate = direct ? phase.accumulate : !phase.first;
    if (phase.amx) {
      multiply_amx<parts<T>>(to, ld, rows, b, steps, accumulate, aside);
    } else {
      for (int64_t s = 0; s < steps; ++s) aside.step();
      multiply_pairs<2>({to, ld, tile_lines}, rows, {b, tile_size, 2 * tile_size}, panel_lines, steps, accumulate);
    }
    aside.finish.rows(panel_lines);
    if (phase.last && !direct) aside.finish = {c, to, p.N, m, n, phase.accumulate};
  }
  aside.finish.rows(panel_lines);
}

// Some rows of a, and a piece of k: what is packed at once; nothing if m is not above 0.
struct Item {
  int64_t i, m;
  const Piece* piece;
};

// Rows [i0, i1) and columns [j0, j1) of c, on one thread; i0 and j0 are multiples of panel_lines.
template <class C, class T>
MATRIX_TARGET void multiply_region(const Task<C, T>& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const bool amx = matrix_unit() == MatrixUnit::amx, f32_output = std::is_same_v<C, float>;
  const bool cold = p.size() > cache_size;
  const Blocks& block = cut(p, j1 - j0);
  const int64_t panels = block.width / panel_lines, panel_size = panel_lines * block.outer_K * parts<T>;
  const int64_t group = p.terms[0].a.k_inner() ? 1 : rows_together, group_rows = group * panel_lines;
  const int64_t sums_kept = !f32_output && block.outer.size() > 2 ? ceil_div(i1 - i0, panel_lines) : group;
  bf16* packed_b = reinterpret_cast<bf16*>(scratch_f32(static_cast<size_t>(panels * panel_size / 2), 4));
  const int64_t a_panel = panel_lines * block.depth * parts<T>;
  bf16* packed_a = reinterpret_cast<bf16*>(
      scratch_f32(static_cast<size_t>(group * a_panel + (2 + sums_kept * panels) * sums_size), 5));
  bf16* next_a = packed_a + group * a_panel;
  float *done = reinterpret_cast<float*>(next_a + group * a_panel), *sums = done + 2 * sums_size;
  Aside<C, T> aside;
  const auto lines_of = [&](const Item& x) {
    const Lines<T>& a = p.terms[x.piece->term].a;
    return Lines<T>{x.m > 0 ? a.at(x.i, x.piece->k) : a.data, a.across, a.along};
  };
  const auto in_place = [&](const Item& x) { return reads_in_place(lines_of(x), x.piece->K) && x.m == panel_lines; };
  const auto packing_of = [&](const Item& x, bf16* to) {
    return Packing<T, false>{to, a_panel, lines_of(x), x.m <= 0 || in_place(x) ? 0 : x.m, x.piece->K};
  };
  begin_tiles();
  for (int64_t jb = j0; jb < j1; jb += block.width) {
    const int64_t width = std::min(j1 - jb, block.width);
    for (size_t o = 0; o + 1 < block.outer.size(); ++o) {
      const Piece *begin = block.pieces.data() + block.outer[o], *end = block.pieces.data() + block.outer[o + 1];
      const auto packed = [=](const Piece* piece) {
        return packed_b + (piece->at - begin->at) * panel_lines * parts<T>;
      };
      for (const Piece* piece = begin; piece < end; ++piece) {
        const Lines<T>& b = p.terms[piece->term].b;
        const Lines<T> from{b.at(jb, piece->k), b.across, b.along};
        Packing<T, true>{packed(piece), panel_size, from, width, piece->K}.finish(cold);
      }
      const auto after = [=](const Item& x) {
        if (x.piece + 1 < end) return Item{x.i, x.m, x.piece + 1};
        return Item{x.i + x.m, std::min(group_rows, i1 - x.i - x.m), begin};
      };
      Item x{i0, std::min(group_rows, i1 - i0), begin};
      for (bool packed_already = false; x.m > 0; x = after(x), packed_already = cold) {
        if (!packed_already) packing_of(x, packed_a).finish(cold);
        // Meanwhile the next item is packed, from memory that was fetched during the one before.
        const Item next = after(x), later = next.m > 0 && !in_place(next) ? after(next) : next;
        const int64_t steps = ceil_div(x.piece->K, step_k);
        aside.share_a(fetch_of(lines_of(later), cold ? later.m : 0, later.piece->K),
                      cold ? packing_of(next, next_a) : Packing<T, false>{},
                      ceil_div(x.m, panel_lines) * ceil_div(width, panel_lines) * steps);
        const bool first = f32_output ? x.piece == begin : x.piece->at == 0;
        const bool last = f32_output ? x.piece == end - 1 : x.piece == &block.pieces.back();
        const Phase phase{first, last, p.accumulate || (f32_output && o > 0), amx, cold};
        for (int64_t i = x.i; i < x.i + x.m; i += panel_lines) {
          PairRows rows{packed_a + (i - x.i) / panel_lines * a_panel, step_k, 2 * parts<T> * tile_size};
          if (in_place(x)) rows = {reinterpret_cast<const bf16*>(lines_of(x).data), lines_of(x).across, step_k};
          float* row_sums = sums + (i - (sums_kept > group ? i0 : x.i)) / panel_lines * panels * sums_size;
          multiply_row_panel(p, phase, rows, packed(x.piece), panel_size, steps, row_sums, done, i, i1, jb, width,
                             aside);
        }
        aside.packing.finish(false);
        if (cold) std::swap(packed_a, next_a);
      }
    }
  }
  end_tiles();
}

// Into how many pieces the sum is cut; 1: it is not.
template <class C, class T>
int64_t chunks_of(const Task<C, T>& p) {
  return !std::is_same_v<C, float> || p.M * p.N > 65536 ? 1 : chunks_of_sum(p.terms[0].K, 1024);
}

template <class T>
void multiply_chunks(const Task<float, T>& p, int64_t chunks) {
  const GemmOperands<T>& x = p.terms[0];
  const auto part = [&](float* partial, int64_t k0, int64_t k1) {
    const GemmOperands<T> piece[]{
        {{x.a.at(0, k0), x.a.across, x.a.along}, {x.b.at(0, k0), x.b.across, x.b.along}, k1 - k0}};
    multiply_region(Task<float, T>{partial, piece, p.M, p.N, false}, 0, p.M, 0, p.N);
  };
  sum_in_chunks(p.c, p.M * p.N, x.K, chunks, p.small(), p.accumulate, part);
}

template <class C, class T>
void multiply(const Task<C, T>& p) {
  if constexpr (std::is_same_v<C, float>) {
    if (const int64_t chunks = chunks_of(p); chunks > 1) return multiply_chunks(p, chunks);
  }
  share_rectangles(p.M, p.N, panel_lines, panel_lines, 4 * panel_lines, p.small(),
                   [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) { multiply_region(p, i0, i1, j0, j1); });
}

template <class C, class T>
void multiply_all(const std::vector<Task<C, T>>& tasks, int64_t M) {
  bool alone = tasks.size() == 1 || !enough_rows(M);
  for (const Task<C, T>& p : tasks) alone |= chunks_of(p) > 1;  // the same bits either way
  if (alone) {
    for (const Task<C, T>& p : tasks) multiply(p);
    return;
  }
  share_rows(M, panel_lines, [&](int64_t i0, int64_t i1) {
    for (const Task<C, T>& p : tasks) multiply_region(p, i0, i1, 0, p.N);
  });
}

template <class C, class T>
void multiply_on_units(const std::vector<GemmProduct<C, T>>& products, int64_t M) {
  std::vector<Task<C, T>>& tasks = empty_list<Task<C, T>>();
  std::vector<GemmOperands<T>>& terms = empty_list<GemmOperands<T>>();
  terms.reserve(products.size());  // so that the tasks' parts of it stay where they are
  for (const GemmProduct<C, T>& p : products) {
    if (p.K == 0 && !p.accumulate) std::fill_n(p.c, M * p.N, C(0.f));
    if (M == 0 || p.N == 0 || p.K == 0) continue;
    terms.push_back({{p.a.data, p.a.row, p.a.col}, {p.b.data, p.b.col, p.b.row}, p.K});
    if (std::is_same_v<C, bf16> && p.accumulate && !tasks.empty() && tasks.back().c == p.c)
      tasks.back().terms = {tasks.back().terms.data(), tasks.back().terms.size() + 1};
    else tasks.push_back({p.c, {&terms.back(), 1}, M, p.N, p.accumulate});
  }
  if (!tasks.empty()) multiply_all(tasks, M);
}

#else

template <class C, class T>
void multiply_on_units(const std::vector<GemmProduct<C, T>>&, int64_t) {}

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
Strided<float> to_f32(float* to, const Strided<bf16>& from, int64_t rows, int64_t cols) {
  const bool row_major = from.col == 1;
  const int64_t lines = row_major ? rows : cols, length = row_major ? cols : rows;
  const int64_t apart = row_major ? from.row : from.col;
  if (apart == length) convert(to, from.data, lines * length);
  else
    for (int64_t i = 0; i < lines; ++i) convert(to + i * length, from.data + i * apart, length);
  return {to, row_major ? length : 1, row_major ? 1 : length};
}

// The products from `p` to `end`, which are one sum in c.
template <class C>
void multiply_in_float(const GemmProduct<C, bf16>* p, const GemmProduct<C, bf16>* end, int64_t M) {
  int64_t most = 0;
  for (const GemmProduct<C, bf16>* q = p; q < end; ++q) most = std::max(most, q->K);
  float* c = scratch_f32(static_cast<size_t>((M + p->N) * most + M * p->N), 8);
  float *a = c + M * p->N, *b = a + M * most, *sums = c;
  if constexpr (std::is_same_v<C, float>) sums = p->c;
  else if (p->accumulate) convert(c, p->c, M * p->N);
  for (const GemmProduct<C, bf16>* q = p; q < end; ++q)
    gemm(sums, to_f32(a, q->a, M, q->K), to_f32(b, q->b, q->K, q->N), M, q->N, q->K, q->accumulate);
  if constexpr (!std::is_same_v<C, float>) convert(p->c, c, M * p->N);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

template <class C>
void gemm_rows_bf16(const std::vector<GemmProduct<C, bf16>>& products, int64_t M) {
  // Few rows, as in generation: packing the weights would cost more than the matrix product.
  constexpr int64_t few_rows = 8;
  if (M <= few_rows && std::all_of(products.begin(), products.end(), [](const GemmProduct<C, bf16>& p) {
        return !p.accumulate && p.a.col == 1 && p.b.row == 1;
      })) {
    for (const GemmProduct<C, bf16>& p : products) gemm_few_rows(p.c, p.a, p.b, M, p.N, p.K);
    return;
  }
  if (matrix_unit() != MatrixUnit::none) return multiply_on_units(products, M);
  for (size_t i = 0, end; i < products.size(); i = end) {
    for (end = i + 1; end < products.size() && products[end].accumulate && products[end].c == products[i].c;) ++end;
    multiply_in_float(products.data() + i, products.data() + end, M);
  }
}
template void gemm_rows_bf16(const std::vector<GemmProduct<float, bf16>>&, int64_t);
template void gemm_rows_bf16(const std::vector<GemmProduct<bf16, bf16>>&, int64_t);

void gemm_rows_bf16x3(const std::vector<GemmProduct<float, float>>& products, int64_t M) {
  if (matrix_unit() == MatrixUnit::amx) multiply_on_units(products, M);
  else gemm_rows(products, M);
}

}  // namespace crossply
