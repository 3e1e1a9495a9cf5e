#include <cmath>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_tile.h"
#include "kernels/cpu/cpu.h"

#ifdef __AVX512DQ__

// The attention of narrow heads, in float vectors. Half of the registers hold 32 queries or keys of such a head, or 16,
// or the sums that belong to them: the forward holds queries and goes through the keys, the backward holds keys and
// goes through the queries. What is held stands in columns, what goes by in rows, whose elements are broadcast from
// memory; both are padded with zeros to a width W of 8 or 16.

namespace crossply {

using namespace attention_tile;

namespace {

constexpr int64_t span = 64;  // rows between two loads and stores of the sums over rows

// As many vectors of columns as their sums fill half of the registers.
template <int W>
constexpr int most = 16 / W;
// Columns held at a time, and how far apart the rows of weights are.
template <int W>
constexpr int64_t wide = most<W>* lanes;

// -----------------------------------------------------------------------------------------------------------------
// What both directions do.

// While it lives, numbers below the normal ones are 0 in this thread: else the smallest weights would each cost
// hundreds of cycles.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};

// x = 2^x to about 1.5 ulp. NaN stays NaN.
inline void power_of_two(Vec& x) {
  const Vec r = reinterpret_cast<Vec>(_mm512_maskz_reduce_ps(0xFFFF, reinterpret_cast<__m512>(x), 9));  // x - floor(x)
  Vec p = r * 1.87757667e-3f + 8.98934009e-3f;  // 2^r on [0, 1) with relative error below 8e-8
  p = p * r + 5.58263181e-2f;
  p = p * r + 2.40153617e-1f;
  p = p * r + 6.93153073e-1f;
  p = p * r + 9.99999925e-1f;
  x = reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(0xFFFF, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
}

inline void keep_lanes(Vec& x, int lanes_kept) {
  x = reinterpret_cast<Vec>(_mm512_maskz_mov_ps(static_cast<__mmask16>(lanes_kept), reinterpret_cast<__m512>(x)));
}

// On the diagonal, the rows and the columns of one vector see each other in these lanes only.
struct Off {
  static void hide(Vec&, int64_t) {}
};
struct KeyInRow {
  static void hide(Vec& x, int64_t row) { keep_lanes(x, 0xFFFF << row); }
};
struct QueryInRow {
  static void hide(Vec& x, int64_t row) { keep_lanes(x, (2 << row) - 1); }
};

// The first D columns of dst (rows, W) = factor * src.
template <int W, class S>
inline void read_rows(float* dst, const S* src, int64_t stride, int64_t rows, int64_t D, float factor) {
  if (D < W) return write_rows(dst, W, src, stride, rows, D, factor, false);
  for (int64_t i = 0; i < rows; ++i) {
    std::conditional_t<W == 16, Vec, Half> x;
    load(x, src + i * stride);
    store(dst + i * W, x * factor);
  }
}

template <int W, int V, int U, class Start, class Body>
[[gnu::always_inline]] inline void few_dots(const float* rows, int64_t i, const Vec (&c)[V][W], Start&& start,
                                            Body&& body) {
  Vec x[U][V];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) start(i + u, v, x[u][v]);
#pragma GCC unroll 16
  for (int d = 0; d < W; ++d)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) x[u][v] += rows[(i + u) * W + d] * c[v][d];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) body(i + u, v, x[u][v]);
}

// For each of n rows (n, W) and V vectors of columns (W, tile): calls start(i, v, x), adds their products to x, and
// calls body(i, v, x).
template <int W, int V, class Start, class Body>
[[gnu::always_inline]] inline void for_dots(const float* rows, int64_t n, const float* columns, Start&& start,
                                            Body&& body) {
  constexpr int at_once = 4 / V;
  Vec c[V][W];
#pragma GCC unroll 16
  for (int d = 0; d < W; ++d)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) load(c[v][d], columns + d * tile + v * lanes);
  int64_t i = 0;
  for (; i + at_once <= n; i += at_once) few_dots<W, V, at_once>(rows, i, c, start, body);
  for (int64_t left = n % at_once; left > 0; --left, ++i) few_dots<W, V, 1>(rows, i, c, start, body);
}

// V vectors of sums (W, tile) += the sum over n rows of p (n, wide) times rows (n, W).
template <int W, int V>
inline void add_products(float* sums, const float* p, const float* rows, int64_t n) {
  Vec sum[V][W];
#pragma GCC unroll 16
  for (int d = 0; d < W; ++d)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) load(sum[v][d], sums + d * tile + v * lanes);
  for (int64_t i = 0; i < n; ++i) {
    Vec x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) load(x[v], p + i * wide<W> + v * lanes);
#pragma GCC unroll 16
    for (int d = 0; d < W; ++d)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[v][d] += rows[i * W + d] * x[v];
  }
#pragma GCC unroll 16
  for (int d = 0; d < W; ++d)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sums + d * tile + v * lanes, sum[v][d]);
}

// -----------------------------------------------------------------------------------------------------------------
// Forward.

// Scratch of one thread.
template <int W>
struct Forward {
  float *k, *v;    // (keys, W)
  float *q, *out;  // (W, tile): q times scale / ln 2; out before its division by the sum of weights
  float* p;        // (span, wide)

  Forward(int64_t keys, int64_t D) {
    k = scratch_f32(static_cast<size_t>(2 * keys * W + 2 * W * tile + span * wide<W>));
    v = k + keys * W;
    q = v + keys * W;
    out = q + W * tile;
    p = out + W * tile;
    if (D < W) std::fill_n(k, 2 * keys * W + W * tile, 0.f);
  }
};

// Adds n keys' weights to sum, and their products with v to w.out, for the queries from vector `first` on. Of those
// the first is on the diagonal, if any is.
template <int W, int V, class Diagonal>
void forward_keys(Vec* sum, const Forward<W>& w, int64_t first, int64_t key, int64_t n, const Vec* offset, Diagonal) {
  Vec total[V], before[V];
  float* p = w.p + first * lanes;
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) total[v] = sum[first + v], before[v] = -offset[first + v];
  for_dots<W, V>(
      w.k + key * W, n, w.q + first * lanes, [&](int64_t, int v, Vec& x) { x = before[v]; },
      [&](int64_t i, int v, Vec& x) {
        power_of_two(x);
        if (v == 0) Diagonal::hide(x, i);
        total[v] += x;
        store(p + i * wide<W> + v * lanes, x);
      });
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) sum[first + v] = total[v];
  add_products<W, V>(w.out + first * lanes, p, w.v + key * W, n);
}

// For the n queries of w.q, the first of them at position `diagonal`: the sum of their weights, and w.out; `offset` is
// taken off the scores.
template <int W, int V>
void forward_sums(Vec* sum, const Forward<W>& w, int64_t diagonal, int64_t n, const Vec* offset) {
  for (int v = 0; v < V; ++v) {
    sum[v] = Vec{};
    for (int d = 0; d < W; ++d) store(w.out + d * tile + v * lanes, Vec{});
  }
  for (int64_t key = 0; key < diagonal; key += span)
    forward_keys<W, V>(sum, w, 0, key, std::min(span, diagonal - key), offset, Off{});
  forward_keys<W, V>(sum, w, 0, diagonal, std::min(lanes, n), offset, KeyInRow{});
  if constexpr (V > 1) forward_keys<W, 1>(sum, w, 1, diagonal + lanes, n - lanes, offset, KeyInRow{});
}

template <int W, int V>
void largest_scores(Vec* max, const Forward<W>& w, int64_t diagonal, int64_t n) {
  Vec largest[V];
  for (int v = 0; v < V; ++v) largest[v] = Vec{} - INFINITY;
  for_dots<W, V>(
      w.k, diagonal + n, w.q, [](int64_t, int, Vec& s) { s = Vec{}; },
      [&](int64_t key, int v, Vec& s) {
        mask(s, key, diagonal + v * lanes, -INFINITY);
        take_larger(largest[v], s);
      });
  for (int v = 0; v < V; ++v) max[v] = largest[v];
}

// n queries from t0 on of one head. lse may be null.
template <int W, int V, class S>
void forward_block(S* out, float* lse, const S* q, const Forward<W>& w, const AttentionSizes& z, int64_t t0, int64_t n,
                   float scale) {
  const int64_t stride = z.query_stride, diagonal = z.pos + t0;
  pack_transposed(w.q, q + t0 * stride, stride, n, z.D, scale * log2_e);
  Vec offset[V] = {}, sum[V], max[V], x;
  forward_sums<W, V>(sum, w, diagonal, n, offset);
  // The powers of the scores as they are will do, unless they are huge or tiny; then the largest score is taken off.
  // That is hardly ever, and each query's own affair: no later key changes its bits.
  IntVec good[V], all_good = IntVec{} - 1;
  for (int v = 0; v < V; ++v) all_good &= good[v] = (sum[v] > 0x1p-60f) & (sum[v] < 0x1p60f);
  if (_mm512_movepi32_mask(reinterpret_cast<__m512i>(all_good)) != 0xFFFF) {
    largest_scores<W, V>(max, w, diagonal, n);
    for (int v = 0; v < V; ++v) offset[v] = good[v] ? offset[v] : max[v];
    forward_sums<W, V>(sum, w, diagonal, n, offset);
  }
  for (int v = 0; v < V; ++v) {
    const Vec r = 1.f / sum[v];
    for (int d = 0; d < W; ++d) {
      load(x, w.out + d * tile + v * lanes);
      store(w.out + d * tile + v * lanes, x * r);
    }
  }
  unpack_transposed(out + t0 * stride, stride, w.out, n, z.D, 1.f, false);
  for (int v = 0; v < V && lse != nullptr; ++v) {
    log_in_place(sum[v]);
    sum[v] += offset[v] * ln_2;
    std::memcpy(lse + t0 + v * lanes, &sum[v], static_cast<size_t>(std::min(lanes, n - v * lanes)) * sizeof(float));
  }
}

// The queries before `end` that are one block of one head.
template <int W, class S>
void forward_head(S* out, float* lse, const S* q, const Forward<W>& w, const AttentionSizes& z, int64_t end,
                  float scale) {
  int64_t t = std::max(int64_t{0}, end - wide<W>);
  // Those that fill no vector are the first, which see the fewest keys.
  if (const int64_t n = (end - t) % lanes; n > 0) forward_block<W, 1>(out, lse, q, w, z, t, n, scale), t += n;
  if (end - t == lanes) forward_block<W, 1>(out, lse, q, w, z, t, lanes, scale);
  else if (end > t) forward_block<W, most<W>>(out, lse, q, w, z, t, wide<W>, scale);
}

template <int W, class S>
void forward(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z, float scale) {
  // Heads that share cache lines are taken together.
  constexpr int64_t together = std::max<int64_t>(1, 64 / (W * sizeof(S)));
  const int64_t blocks = ceil_div(z.T, wide<W>), sets = ceil_div(z.K, together), items = z.B * sets * blocks;
  const int64_t keys = z.pos + z.T, size = keys * W;
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    Forward<W> w(together * keys, z.D);
    float *all_k = w.k, *all_v = w.v;
    int64_t gathered = -1;  // whose keys these are
    for (int64_t item = begin; item < end; ++item) {
      const int64_t set = item / blocks, b = set / sets, first = set % sets * together;
      const int64_t heads = std::min(together, z.K - first), last = z.T - folded(item % blocks, blocks) * wide<W>;
      for (int64_t j = 0; j < keys && set != gathered; j += lanes)
        for (int64_t i = 0; i < heads; ++i) {
          const int64_t at = z.key_head(b, first + i) + j * z.K * z.D, n = std::min(lanes, keys - j);
          read_rows<W>(all_k + i * size + j * W, k + at, z.K * z.D, n, z.D, 1.f);
          read_rows<W>(all_v + i * size + j * W, v + at, z.K * z.D, n, z.D, 1.f);
        }
      gathered = set;
      for (int64_t i = 0; i < heads * z.group; ++i) {
        const int64_t h = first * z.group + i, at = z.query_head(b, h);
        w.k = all_k + i / z.group * size, w.v = all_v + i / z.group * size;
        forward_head(out + at, lse == nullptr ? nullptr : lse + (b * z.H + h) * z.T, q + at, w, z, last, scale);
      }
    }
  });
}

}  // namespace

template <class S>
void attention_forward_narrow(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z,
                              float scale) {
  if (z.D <= 8) forward<8>(out, lse, q, k, v, z, scale);
  else forward<16>(out, lse, q, k, v, z, scale);
}
template void attention_forward_narrow(float*, float*, const float*, const float*, const float*, const AttentionSizes&,
                                       float);
template void attention_forward_narrow(bf16*, float*, const bf16*, const bf16*, const bf16*, const AttentionSizes&,
                                       float);

// -----------------------------------------------------------------------------------------------------------------
// Backward, of heads of up to 8 columns.

namespace {
constexpr int width = 8;
constexpr int64_t held = wide<width>;

// Scratch of one thread.
struct Backward {
  float *q, *dout;     // (T, width) of one head of queries: q times scale / ln 2
  float *lse, *delta;  // (T): negative, lse in units of ln 2
  float* dq;           // (T, lanes): each in two parts, by turns, which lack the factor scale
  float *dk, *dv;      // (tiles, width, tile) of one head of keys: dk lacks the factor ln 2
  float *k, *v;        // (width, tile): one block of keys
  float* k_rows;       // (held, width): the same block
  float *p, *ds;       // (span, held): of (query, key)

  Backward(int64_t T, int64_t D) {
    const int64_t rows = T * width, tiles = ceil_div(T, tile) * tile * width, padded = round_up(T);
    q = scratch_f32(static_cast<size_t>(2 * rows + 2 * padded + T * lanes + 2 * tiles + 2 * width * tile +
                                        held * (width + 2 * span)));
    dout = q + rows;
    lse = dout + rows;
    delta = lse + padded;
    dq = delta + padded;
    dk = dq + T * lanes;
    dv = dk + tiles;
    k = dv + tiles;
    v = k + width * tile;
    k_rows = v + width * tile;
    p = k_rows + held * width;
    ds = p + span * held;
    if (D == width) return;
    std::fill_n(q, 2 * rows, 0.f);
    std::fill_n(k, p - k, 0.f);
  }
  // Where a block of keys stands in dk and dv.
  static int64_t column(int64_t key) { return key / tile * tile * width + key % tile; }
};

// Everything of head h's queries.
template <class S>
void take_queries(const Backward& w, const AttentionGradients<S>& g, const AttentionSizes& z, int64_t b, int64_t h) {
  const int64_t stride = z.query_stride, head = z.query_head(b, h);
  const float* lse = g.lse + (b * z.H + h) * z.T;
  read_rows<width>(w.q, g.q + head, stride, z.T, z.D, g.scale * log2_e);
  read_rows<width>(w.dout, g.dout + head, stride, z.T, z.D, 1.f);
#pragma omp simd
  for (int64_t t = 0; t < z.T; ++t) w.lse[t] = lse[t] * -log2_e;
  for (int64_t t = 0; t < z.T; t += lanes) {
    const int64_t n = std::min(lanes, z.T - t);
    read_rows<width>(w.k_rows, g.out + head + t * stride, stride, n, z.D, 1.f);
    TransposeBlock sum, out;
    load_rows(sum, w.dout + t * width, width, n);
    load_rows(out, w.k_rows, width, n);
    for (size_t r = 0; r < eight; ++r) sum[r] *= out[r];
    transpose(sum, std::make_index_sequence<lanes>());
    for (size_t r = 1; r < eight; ++r) sum[0] += sum[r];
    store(w.delta + t, -sum[0]);
  }
}

// Two floats, over and over.
inline void load_pair(Vec& x, const float* p) {
  double pair;
  std::memcpy(&pair, p, sizeof pair);
  x = reinterpret_cast<Vec>(_mm512_maskz_broadcastsd_pd(0xFF, _mm_set_sd(pair)));
}

// dq (n, lanes) += ds (n, held) times the rows of V vectors of keys. Two rows are in one vector, by turns, so a row of
// dq is in two parts.
template <int V>
inline void add_dq(float* dq, const float* ds, const float* k_rows, int64_t n) {
  constexpr int pairs = V * width;
  Vec k[pairs];
#pragma GCC unroll 16
  for (int j = 0; j < pairs; ++j) {
    load(k[j], k_rows + j * lanes);
    k[j] = __builtin_shufflevector(k[j], k[j], 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  }
  for (int64_t i = 0; i < n; ++i) {
    Vec sum, x;
    load(sum, dq + i * lanes);
#pragma GCC unroll 16
    for (int j = 0; j < pairs; ++j) {
      load_pair(x, ds + i * held + 2 * j);
      sum += x * k[j];
    }
    store(dq + i * lanes, sum);
  }
}

// What n queries from t on and V vectors of keys give each other. Of these the last is on the diagonal, if any is.
template <int V, class Diagonal>
void backward_queries(const Backward& w, int64_t column, int64_t t, int64_t n, Diagonal) {
  const float *q = w.q + t * width, *dout = w.dout + t * width, *lse = w.lse + t, *delta = w.delta + t;
  float *weights = w.p, *gradients = w.ds;
  for_dots<width, V>(
      q, n, w.k, [&](int64_t i, int, Vec& x) { x = Vec{} + lse[i]; },
      [&](int64_t i, int v, Vec& x) {
        power_of_two(x);
        if (v == V - 1) Diagonal::hide(x, i);
        store(weights + i * held + v * lanes, x);
      });
  for_dots<width, V>(
      dout, n, w.v, [&](int64_t i, int, Vec& x) { x = Vec{} + delta[i]; },
      [&](int64_t i, int v, Vec& x) {
        Vec p;
        load(p, weights + i * held + v * lanes);
        store(gradients + i * held + v * lanes, p * x);
      });
  add_products<width, V>(w.dv + column, weights, dout, n);
  add_products<width, V>(w.dk + column, gradients, q, n);
  add_dq<V>(w.dq + t * lanes, gradients, w.k_rows, n);
}

// V vectors of keys of one head from j0 on, n keys in all, and the queries that see them.
template <int V>
void backward_keys(const Backward& w, int64_t T, int64_t j0, int64_t n) {
  const int64_t column = w.column(j0);
  backward_queries<1>(w, column, j0, std::min(lanes, n), QueryInRow{});
  if constexpr (V > 1) backward_queries<V>(w, column, j0 + lanes, n - lanes, QueryInRow{});
  for (int64_t t = j0 + V * lanes; t < T; t += span) backward_queries<V>(w, column, t, std::min(span, T - t), Off{});
}

template <class S>
void backward_block(const Backward& w, const S* k, const S* v, int64_t stride, int64_t T, int64_t D, int64_t j0) {
  const int64_t n = std::min(held, T - j0);
  pack_transposed(w.k, k + j0 * stride, stride, n, D, 1.f);
  pack_transposed(w.v, v + j0 * stride, stride, n, D, 1.f);
  if (n < held) std::fill_n(w.k_rows, held * width, 0.f);
  read_rows<width>(w.k_rows, k + j0 * stride, stride, n, D, 1.f);
  if (n <= lanes) backward_keys<1>(w, T, j0, n);
  else backward_keys<2>(w, T, j0, n);
}

// dq (T, D) = [dq +] scale * sums (T, lanes), which this may overwrite.
template <class S>
void write_dq(S* dq, int64_t stride, float* sums, int64_t T, int64_t D, float scale, bool accumulate) {
  for (int64_t t = 0; t < T; ++t) {
    Vec x;
    load(x, sums + t * lanes);
    const Half half = __builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14) +
                      __builtin_shufflevector(x, x, 1, 3, 5, 7, 9, 11, 13, 15);
    if (D == width) write_half(dq + t * stride, half, scale, accumulate);
    else store(sums + t * width, half);
  }
  if (D < width) write_rows(dq, stride, sums, width, T, D, scale, accumulate);
}

}  // namespace

template <class S>
void attention_backward_narrow(const AttentionGradients<S>& g, const AttentionSizes& z) {
  const int64_t T = z.T, D = z.D, group = z.group, blocks = ceil_div(T, held), pairs = z.B * z.K;
  // One thread goes through one part of the keys of one pair (b, kv head). Only where the pairs are few, and long, are
  // they cut, by the shape; then there are as many sums for dq.
  const int64_t parts = backward_parts(pairs, ceil_div(T, 256)), items = pairs * parts, size = T * lanes;
  float* partial = parts == 1 ? nullptr : scratch_f32(static_cast<size_t>(items * group * size), 1);
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    Backward w(T, D);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item / parts, part = item % parts, b = pair / z.K, kv = pair % z.K;
      const int64_t at = z.key_head(b, kv), stride = z.key_stride;
      // By turns forwards and backwards, because the first keys are seen by the most queries.
      const auto first_key = [=](int64_t i) { return (i * parts + (i % 2 == 0 ? part : parts - 1 - part)) * held; };
      std::fill_n(w.dk, w.k - w.dk, 0.f);
      for (int64_t i = 0; i < group; ++i) {
        const int64_t h = kv * group + i;
        if (parts > 1) w.dq = partial + (item * group + i) * size;
        std::fill_n(w.dq, size, 0.f);
        take_queries(w, g, z, b, h);
        for (int64_t n = 0; n * parts < blocks; ++n)
          if (first_key(n) < T) backward_block(w, g.k + at, g.v + at, stride, T, D, first_key(n));
        if (parts == 1) write_dq(g.dq + z.query_head(b, h), z.H * D, w.dq, T, D, g.scale, g.accumulate_q);
      }
      for (int64_t n = 0; n * parts < blocks; ++n) {
        const int64_t j0 = first_key(n), rows = std::min(held, T - j0), column = w.column(j0);
        if (rows <= 0) continue;
        unpack_transposed(g.dk + at + j0 * stride, stride, w.dk + column, rows, D, ln_2, g.accumulate_k);
        unpack_transposed(g.dv + at + j0 * stride, stride, w.dv + column, rows, D, 1.f, g.accumulate_v);
      }
    }
  });
  for (int64_t head = 0; parts > 1 && head < z.B * z.H; ++head) {
    const int64_t pair = head / group, i = head % group;
    float* dq = partial + (pair * parts * group + i) * size;
    add_parts(dq, size, group * size, parts);
    write_dq(g.dq + z.query_head(head / z.H, head % z.H), z.H * D, dq, T, D, g.scale, g.accumulate_q);
  }
}

template void attention_backward_narrow(const AttentionGradients<float>&, const AttentionSizes&);
template void attention_backward_narrow(const AttentionGradients<bf16>&, const AttentionSizes&);

}  // namespace crossply

#endif
