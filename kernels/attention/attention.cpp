#include "kernels/attention/attention.h"

#include <type_traits>

#include "kernels/attention/attention_cpu.h"
#include "kernels/attention/attention_tile.h"
#include "kernels/cpu/cpu.h"
#include "kernels/dispatch.h"

namespace crossply {

using namespace attention_tile;

namespace {

// -----------------------------------------------------------------------------------------------------------------
// Which work there is.

// One head of k or v: rows of D floats.
struct Head {
  const float* data;
  int64_t stride;
  const float* row(int64_t i) const { return data + i * stride; }
};

// Many strided rows would fall into few sets of the cache: those are read from a copy, as are those not in float.
template <class S>
Head gather(float* copy, const S* from, int64_t stride, int64_t rows, int64_t D) {
  if constexpr (std::is_same_v<S, float>)
    if (rows <= 256) return {from, stride};
  write_rows(copy, D, from, stride, rows, D, 1.f, false);
  return {copy, D};
}

// The first keys that a block's queries see.
struct FirstKeys {
  int32_t lower[tile];  // from the block's first tile of keys on; of queries that are not there, that of the last one
  int64_t begin;        // where this tile begins: at a multiple of `tile`, whatever is hidden
  int64_t last;         // the largest of lower

  FirstKeys(const AttentionSizes& z, int64_t b, int64_t t0, int64_t n) {
    const auto at = [&](int64_t i) { return z.lower(b, z.pos + t0 + std::min(i, n - 1)); };
    begin = at(0) / tile * tile;
    last = at(n - 1) - begin;
    for (int64_t i = 0; i < tile; ++i) lower[i] = static_cast<int32_t>(at(i) - begin);
  }
  // Hides from each query the keys before its own, in a tile that begins at `key`; null where it hides none.
  const int32_t* of_tile(int64_t key) const { return key - begin < last ? lower : nullptr; }
};

// Calls body(row, rows, first) for the parts of a tile of n keys against `vectors` vectors of queries, of which a part
// needs those from `first` on. A tile off the diagonal is one part. On it, a part is `lanes` keys: the vectors before
// see none of them, its first vector sees some, the others see all.
template <class F>
void for_parts(int64_t n, int64_t vectors, bool diagonal, F&& body) {
  if (!diagonal) return body(int64_t{0}, n, int64_t{0});
  for (int64_t j = 0; j < vectors; ++j) body(j * lanes, std::min(lanes, n - j * lanes), j);
}

// -----------------------------------------------------------------------------------------------------------------
// Forward.

// Scratch of one thread.
struct Forward {
  float *k_copy, *v_copy;  // (keys, D)
  float *q, *out;          // (D, tile): q times scale / ln 2; out before its division by sum
  float* s;                // (tile, tile): scores of (key, query) in units of ln 2, then their weights
  float *max, *sum;        // (tile): over the keys so far, and of exp2(s - max); at the end max becomes lse

  Forward(int64_t keys, int64_t D) {
    const int64_t copied = round_up(keys * D);
    k_copy = scratch_f32(static_cast<size_t>(2 * copied + 2 * D * tile + tile * tile + 2 * tile));
    v_copy = k_copy + copied;
    q = v_copy + copied;
    out = q + D * tile;
    s = out + D * tile;
    max = s + tile * tile;
    sum = max + tile;
  }
};

// max = the larger of max and every row of s (n, tile), in four chains that do not wait for each other.
inline void max_of_column(Vec& max, const float* s, int64_t n) {
  Vec chain[4] = {max, max, max, max};
  for (int64_t i = 0; i < n; i += 4)
#pragma GCC unroll 4
    for (int64_t c = 0; c < 4; ++c) {
      Vec x;
      load(x, s + std::min(i + c, n - 1) * tile);
      take_larger(chain[c], x);
    }
  for (const Vec& x : chain) take_larger(max, x);
}

// Takes one tile of scores into the running softmax; scores become weights. lower: the first keys that the queries see,
// counted as the tile's own, which begin at `key`; null where they see them all.
void softmax_tile(const Forward& w, int64_t n, int64_t vectors, bool diagonal, const int32_t* lower, int64_t key,
                  int64_t D) {
  const bool first = key == 0;
  for (int64_t j = 0; j < vectors; ++j) {
    float* s = w.s + j * lanes;
    const int64_t keys = diagonal ? std::min(n, (j + 1) * lanes) : n;
    Vec x, max, sum;
    load(max, w.max + j * lanes);
    const Vec old_max = max;
    for (int64_t i = diagonal ? j * lanes : n; i < keys; ++i) {
      load(x, s + i * tile);
      mask(x, i, j * lanes, -INFINITY);
      store(s + i * tile, x);
    }
    for (int64_t i = 0; lower != nullptr && i < keys; ++i) {
      load(x, s + i * tile);
      mask_below(x, key + i, lower + j * lanes, -INFINITY);
      store(s + i * tile, x);
    }
    max_of_column(max, s, keys);
    store(w.max + j * lanes, max);
    if (lower != nullptr) max = max > -INFINITY ? max : Vec{};  // a query that has seen no key yet has weights of 0
    Vec shrink = old_max - max;
    exp2_in_place(shrink);
    load(sum, w.sum + j * lanes);
    sum *= shrink;
    for (int64_t i = 0; i < keys; ++i) {
      load(x, s + i * tile);
      x -= max;
      exp2_in_place(x);
      sum += x;
      store(s + i * tile, x);
    }
    store(w.sum + j * lanes, sum);
    for (int64_t d = 0; d < (first ? 0 : D); ++d) {
      load(x, w.out + d * tile + j * lanes);
      store(w.out + d * tile + j * lanes, x * shrink);
    }
  }
}

// Queries t0 .. of one head. lse may be null.
template <class S>
void forward_block(S* out, float* lse, const S* q, const Head& k, const Head& v, const AttentionSizes& z, int64_t b,
                   int64_t t0, float scale, const Forward& w) {
  const int64_t n = std::min(tile, z.T - t0), vectors = ceil_div(n, lanes), D = z.D, stride = z.query_stride;
  const int64_t diagonal = z.pos + t0;  // the keys before it are behind no query of the block
  const FirstKeys seen(z, b, t0, n);
  pack_transposed(w.q, q + t0 * stride, stride, n, D, scale * log2_e);
  std::fill_n(w.max, tile, -INFINITY);
  std::fill_n(w.sum, tile, 0.f);
  for (int64_t key = seen.begin, keys; key < diagonal + n; key += keys) {
    const bool on = key == diagonal;
    keys = on ? n : std::min(tile, diagonal - key);
    for_parts(keys, vectors, on, [&](int64_t row, int64_t rows, int64_t first) {
      multiply<false>(w.s + row * tile + first * lanes, tile, k.row(key + row), k.stride, w.q + first * lanes, tile,
                      rows, vectors - first, D, false);
    });
    softmax_tile(w, keys, vectors, on, seen.of_tile(key), key - seen.begin, D);
    for_parts(keys, vectors, on, [&](int64_t row, int64_t rows, int64_t first) {
      multiply<true>(w.out + first * lanes, tile, v.row(key + row), v.stride, w.s + row * tile + first * lanes, tile, D,
                     vectors - first, rows, key + row > seen.begin);
    });
  }
  for (int64_t j = 0; j < vectors * lanes; j += lanes) {
    Vec x, max, sum;
    load(max, w.max + j);
    load(sum, w.sum + j);
    const Vec r = 1.f / sum;
    log_in_place(sum);
    store(w.max + j, max * ln_2 + sum);
    for (int64_t d = 0; d < D; ++d) {
      load(x, w.out + d * tile + j);
      store(w.out + d * tile + j, x * r);
    }
  }
  unpack_transposed(out + t0 * stride, stride, w.out, n, D, 1.f, false);
  if (lse != nullptr) std::copy_n(w.max, n, lse + t0);
}

// lse may be null.
template <class S>
void attention_forward_cpu(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z,
                           float scale) {
  const int64_t blocks = ceil_div(z.T, tile), items = z.B * z.H * blocks, keys = z.pos + z.T, stride = z.key_stride;
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) {
    const Forward w(keys, z.D);
    Head k_rows{}, v_rows{};
    int64_t gathered = -1;  // whose rows these are
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / blocks, b = head / z.H, h = head % z.H, kv = h / z.group;
      if (b * z.K + kv != gathered) {
        k_rows = gather(w.k_copy, k + z.key_head(b, kv), stride, keys, z.D);
        v_rows = gather(w.v_copy, v + z.key_head(b, kv), stride, keys, z.D);
        gathered = b * z.K + kv;
      }
      const int64_t at = z.query_head(b, h);
      forward_block(out + at, lse == nullptr ? nullptr : lse + head * z.T, q + at, k_rows, v_rows, z, b,
                    folded(item % blocks, blocks) * tile, scale, w);
    }
  });
}

// -----------------------------------------------------------------------------------------------------------------
// Backward.

// Scratch of one thread. `width` is D rounded up to vectors.
struct Backward {
  float *k_copy, *v_copy;   // (T, D)
  float *dk, *dv;           // (T, width): dk lacks the factor scale
  float *q_rows, *do_rows;  // (tile, width): the padding is never used, but denormals there would be slow
  float *q, *dout, *dq;     // (D, tile): q times scale / ln 2; dq lacks the factor scale
  float *p, *ds;            // (tile, tile): weights of (key, query), and the gradients of the scores but for scale
  float *lse, *delta;       // (tile): lse in units of ln 2

  Backward(int64_t T, int64_t D) {
    const int64_t width = round_up(D), copied = round_up(T * D);
    k_copy = scratch_f32(
        static_cast<size_t>(2 * copied + 2 * (T + tile) * width + 3 * D * tile + 2 * tile * tile + 2 * tile));
    v_copy = k_copy + copied;
    dk = v_copy + copied;
    dv = dk + T * width;
    q_rows = dv + T * width;
    do_rows = q_rows + tile * width;
    q = do_rows + tile * width;
    dout = q + D * tile;
    dq = dout + D * tile;
    p = dq + D * tile;
    ds = p + tile * tile;
    lse = ds + tile * tile;
    delta = lse + tile;
    std::fill(q_rows, q, 0.f);
  }
};

// From s = q k and dp = dout v, which p and ds hold, the weights and the gradients of the scores. lower, key: as in
// softmax_tile.
void weights_tile(const Backward& w, int64_t row, int64_t rows, int64_t first, int64_t vectors, bool diagonal,
                  const int32_t* lower, int64_t key) {
  for (int64_t j = first; j < vectors; ++j) {
    Vec lse, delta, p, dp;
    load(lse, w.lse + j * lanes);
    load(delta, w.delta + j * lanes);
    for (int64_t i = row; i < row + rows; ++i) {
      const int64_t at = i * tile + j * lanes;
      load(p, w.p + at);
      load(dp, w.ds + at);
      p -= lse;
      exp2_in_place(p);
      Vec ds = p * (dp - delta);
      if (diagonal && j == first) {
        mask(p, i, j * lanes, 0.f);
        mask(ds, i, j * lanes, 0.f);
      }
      if (lower != nullptr) {
        mask_below(p, key + i, lower + j * lanes, 0.f);
        mask_below(ds, key + i, lower + j * lanes, 0.f);
      }
      store(w.p + at, p);
      store(w.ds + at, ds);
    }
  }
}

// w.delta from w.dout and out (n rows); takes w.dq as scratch.
template <class S>
void delta_of(const Backward& w, const S* out, int64_t stride, int64_t n, int64_t D) {
  pack_transposed(w.dq, out, stride, n, D, 1.f);
  for (int64_t j = 0; j < n; j += lanes) {
    Vec sum{}, x, y;
    for (int64_t d = 0; d < D; ++d) {
      load(x, w.dout + d * tile + j);
      load(y, w.dq + d * tile + j);
      sum += x * y;
    }
    store(w.delta + j, sum);
  }
}

// Adds to w.dk and w.dv what queries t0 .. of head h contribute, and writes their dq.
template <class S>
void backward_block(const AttentionGradients<S>& g, const Head& k, const Head& v, const AttentionSizes& z, int64_t b,
                    int64_t h, int64_t t0, const Backward& w) {
  const int64_t n = std::min(tile, z.T - t0), vectors = ceil_div(n, lanes), D = z.D, width = round_up(D);
  const int64_t stride = z.query_stride, at = z.query_head(b, h) + t0 * stride;
  write_rows(w.q_rows, width, g.q + at, stride, n, D, 1.f, false);
  write_rows(w.do_rows, width, g.dout + at, stride, n, D, 1.f, false);
  pack_transposed(w.q, g.q + at, stride, n, D, g.scale * log2_e);
  pack_transposed(w.dout, g.dout + at, stride, n, D, 1.f);
  delta_of(w, g.out + at, stride, n, D);
  for (int64_t i = 0; i < vectors * lanes; ++i) w.lse[i] = i < n ? g.lse[(b * z.H + h) * z.T + t0 + i] * log2_e : 0.f;
  const FirstKeys seen(z, b, t0, n);
  for (int64_t key = seen.begin; key < t0 + n; key += tile) {
    const bool on = key == t0;
    for_parts(on ? n : tile, vectors, on, [&](int64_t row, int64_t rows, int64_t first) {
      const int64_t at_tile = row * tile + first * lanes, wide = vectors - first, query = first * lanes;
      const int64_t at_key = (key + row) * width, seeing = n - query;
      const float *k_row = k.row(key + row), *v_row = v.row(key + row);
      multiply<false>(w.p + at_tile, tile, k_row, k.stride, w.q + query, tile, rows, wide, D, false);
      multiply<false>(w.ds + at_tile, tile, v_row, v.stride, w.dout + query, tile, rows, wide, D, false);
      weights_tile(w, row, rows, first, vectors, on, seen.of_tile(key), key - seen.begin);
      multiply<true>(w.dq + query, tile, k_row, k.stride, w.ds + at_tile, tile, D, wide, rows, key + row > seen.begin);
      multiply<false>(w.dv + at_key, width, w.p + at_tile, tile, w.do_rows + query * width, width, rows, width / lanes,
                      seeing, true);
      multiply<false>(w.dk + at_key, width, w.ds + at_tile, tile, w.q_rows + query * width, width, rows, width / lanes,
                      seeing, true);
    });
  }
  unpack_transposed(g.dq + at, stride, w.dq, n, D, g.scale, g.accumulate_q);
}

template <class S>
void attention_backward_cpu(const AttentionGradients<S>& g, const AttentionSizes& z) {
  const int64_t T = z.T, D = z.D, width = round_up(D), stride = z.key_stride, blocks = ceil_div(z.T, tile),
                pairs = z.B * z.K;
  const int64_t work = z.group * blocks, parts = backward_parts(pairs, work), items = pairs * parts;
  float* partial = parts == 1 ? nullptr : scratch_f32(static_cast<size_t>(2 * items * T * width), 1);
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) {
    Backward w(T, D);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item / parts, part = item % parts, b = pair / z.K, kv = pair % z.K;
      const int64_t head = z.key_head(b, kv);
      const Head k = gather(w.k_copy, g.k + head, stride, T, D), v = gather(w.v_copy, g.v + head, stride, T, D);
      if (parts > 1) w.dk = partial + 2 * item * T * width, w.dv = w.dk + T * width;
      std::fill_n(w.dk, T * width, 0.f);
      std::fill_n(w.dv, T * width, 0.f);
      for (int64_t i = work * part / parts; i < work * (part + 1) / parts; ++i)
        backward_block(g, k, v, z, b, kv * z.group + i / blocks, folded(i % blocks, blocks) * tile, w);
      if (parts > 1) continue;
      write_rows(g.dk + head, stride, w.dk, width, T, D, g.scale, g.accumulate_k);
      write_rows(g.dv + head, stride, w.dv, width, T, D, 1.f, g.accumulate_v);
    }
  });
  for (int64_t pair = 0; parts > 1 && pair < pairs; ++pair) {
    const int64_t head = z.key_head(pair / z.K, pair % z.K), size = 2 * T * width;
    float* dk = partial + pair * parts * size;
    add_parts(dk, size, size, parts);
    write_rows(g.dk + head, stride, dk, width, T, D, g.scale, g.accumulate_k);
    write_rows(g.dv + head, stride, dk + T * width, width, T, D, 1.f, g.accumulate_v);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// A few queries against long caches: too few to fill a vector, so along d.

template <class S>
void attend_rows_cpu(S* out, float* lse, const S* q, const S* k_cache, const S* v_cache, const AttentionSizes& z,
                     float scale) {
  const int64_t D = z.D, stride = z.key_stride, items = z.B * z.T * z.H;
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) {
    float *y = scratch_f32(static_cast<size_t>(D + z.pos + z.T)), *p = y + D;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / (z.T * z.H), t = item / z.H % z.T, h = item % z.H, n = z.pos + t + 1;
      const int64_t first = z.lower(b, z.pos + t);
      const int64_t head = z.key_head(b, h / z.group);
      const S *x = q + item * D, *k = k_cache + head, *v = v_cache + head;
      float max = -INFINITY, sum = 0;
      for (int64_t j = first; j < n; ++j) {
        float s = 0;
#pragma omp simd reduction(+ : s)
        for (int64_t d = 0; d < D; ++d) s += x[d] * k[j * stride + d];
        p[j] = s * scale;
        max = std::max(max, p[j]);
      }
#pragma omp simd reduction(+ : sum)
      for (int64_t j = first; j < n; ++j) sum += p[j] = exp_f32(p[j] - max);
      std::fill_n(y, D, 0.f);
      for (int64_t j = first; j < n; ++j) {
        const float weight = p[j] / sum;
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) y[d] += weight * v[j * stride + d];
      }
      std::copy_n(y, D, out + item * D);
      if (lse != nullptr) lse[(b * z.H + h) * z.T + t] = max + std::log(sum);
    }
  });
}

bool tiles_serve(Dtype stored, float scale) {
  return stored == Dtype::bf16 && matrix_unit() != MatrixUnit::none && scale >= 0;
}

// The tiles are for whole sequences, and they and the narrow kernels for what is causal and no more. lse may be null
// over caches.
template <class S>
void forward_fast(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z, float scale,
                  bool cached) {
  if (!z.causal_only()) return attention_forward_cpu(out, lse, q, k, v, z, scale);
  const bool tiles = !cached && tiles_serve(DtypeOf<S>::value, scale);
  if constexpr (narrow_paths)
    if (narrow_forward_serves(z, tiles)) return attention_forward_narrow(out, lse, q, k, v, z, scale);
#if CROSSPLY_MATRIX_UNITS
  if constexpr (std::is_same_v<S, bf16>)
    if (tiles) return attention_forward_bf16(out, lse, q, k, v, z, scale);
#endif
  attention_forward_cpu(out, lse, q, k, v, z, scale);
}

template <class S>
void backward_fast(const AttentionGradients<S>& g, const AttentionSizes& z) {
  if (!z.causal_only()) return attention_backward_cpu(g, z);
  const bool tiles = tiles_serve(DtypeOf<S>::value, g.scale);
  if constexpr (narrow_paths)
    if (narrow_backward_serves(z, tiles)) return attention_backward_narrow(g, z);
#if CROSSPLY_MATRIX_UNITS
  if constexpr (std::is_same_v<S, bf16>)
    if (tiles) return attention_backward_bf16(g, z);
#endif
  attention_backward_cpu(g, z);
}

template <class S>
void cached_fast(S* out, float* lse, S* k_cache, S* v_cache, const S* q, const S* k, const S* v,
                 const AttentionSizes& z, float scale) {
  const int64_t row = z.key_stride;
  for (int64_t b = 0; b < z.B && k != nullptr; ++b) {
    std::copy_n(k + b * z.T * row, z.T * row, k_cache + (b * z.S + z.pos) * row);
    std::copy_n(v + b * z.T * row, z.T * row, v_cache + (b * z.S + z.pos) * row);
  }
  if (z.T < 4) return attend_rows_cpu(out, lse, q, k_cache, v_cache, z, scale);
  forward_fast<S>(out, lse, q, k_cache, v_cache, z, scale, true);
}

// The sizes of an attention over whole sequences, after checking that the shapes agree.
AttentionSizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionMask& mask) {
  const int64_t K = k.dim(2), T = q.dim(1);
  CHECK_SHAPES(q.shape.rank == 4 && k.shape == Shape({q.dim(0), T, K, q.dim(3)}) && v.shape == k.shape && K > 0 &&
                   q.dim(2) % K == 0,
               q, k, v);
  AttentionSizes z{q.dim(0), T, q.dim(2), K, q.dim(3), T, 0};
  if (mask.window > 0) z.window = std::min(mask.window, T);
  if (mask.documents.data == nullptr) return z;
  CHECK_SHAPES(mask.documents.shape == Shape({z.B, T, 2}), q, mask.documents);
  z.documents = mask.documents.as<int32_t>();
  return z;
}
// Where every row is one document, the kernels that know of none serve.
AttentionSizes on_cpu(AttentionSizes z) {
  const auto of_last = [&](int64_t b) { return z.documents[2 * (b * z.T + z.T - 1)]; };
  for (int64_t b = 0; z.documents != nullptr && b < z.B; ++b)
    if (of_last(b) != 0) return z;
  z.documents = nullptr;
  return z;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void attention_forward(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, const AttentionMask& mask, Stream stream) {
  const AttentionSizes z = sizes_of(q, k, v, mask);
  CHECK_SHAPES(out.shape == q.shape && lse.shape == Shape({z.B, z.H, z.T}), out, lse, q);
  const float scale_f32 = static_cast<float>(scale);
  dispatch(
      stream, out.dtype, [&] { attention_forward_cuda(out, lse, q, k, v, z, scale_f32); },
      [&]<class S>(S) {
        forward_fast(out.as<S>(), lse.as<float>(), q.as<S>(), k.as<S>(), v.as<S>(), on_cpu(z), scale_f32, false);
      },
      [&]<class T>(T) { attention_forward_ref(out.as<T>(), lse.as<T>(), q.as<T>(), k.as<T>(), v.as<T>(), z, scale); });
}

void attention_backward(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout, const Tensor& out,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, double scale,
                        const AttentionMask& mask, Stream stream) {
  const AttentionSizes z = sizes_of(q, k, v, mask);
  CHECK_SHAPES(dq.shape == q.shape && dout.shape == q.shape && out.shape == q.shape && dk.shape == k.shape &&
                   dv.shape == k.shape && lse.shape == Shape({z.B, z.H, z.T}),
               dq, dk, dv, dout, out, q, k, lse);
  const float scale_f32 = static_cast<float>(scale);
  dispatch(
      stream, dq.dtype, [&] { attention_backward_cuda(dq, dk, dv, dout, out, q, k, v, lse, z, scale_f32); },
      [&]<class S>(S) {
        backward_fast<S>({dq.as<S>(), dk.as<S>(), dv.as<S>(), dout.as<S>(), out.as<S>(), q.as<S>(), k.as<S>(),
                          v.as<S>(), lse.as<float>(), scale_f32, dq.accumulate, dk.accumulate, dv.accumulate},
                         on_cpu(z));
      },
      [&]<class T>(T) {
        attention_backward_ref(dq.as<T>(), dk.as<T>(), dv.as<T>(), dout.as<T>(), out.as<T>(), q.as<T>(), k.as<T>(),
                               v.as<T>(), lse.as<T>(), z, scale, dq.accumulate, dk.accumulate, dv.accumulate);
      });
}

void attention_cached(const Tensor& out, const Tensor& lse, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& q, const Tensor& k, const Tensor& v, int64_t pos, double scale, int64_t window,
                      Stream stream) {
  const int64_t S = k_cache.dim(1), K = k_cache.dim(2);
  const AttentionSizes z{q.dim(0), q.dim(1), q.dim(2), K, q.dim(3), S, pos, window > 0 ? std::min(window, S) : S};
  CHECK_SHAPES(out.shape == q.shape && k_cache.shape == Shape({z.B, S, K, z.D}) && v_cache.shape == k_cache.shape &&
                   K > 0 && z.H % K == 0,
               out, k_cache, v_cache, q);
  CHECK_SHAPES(lse.data == nullptr || lse.shape == Shape({z.B, z.H, z.T}), lse, q);
  const Shape rows{z.B, z.T, K, z.D};
  CHECK_SHAPES((k.data == nullptr && v.data == nullptr) || (k.shape == rows && v.shape == rows), q, k, v, k_cache);
  CHECK_THAT(pos >= 0 && pos + z.T <= z.S, z.T, " rows at ", pos, " of ", z.S);
  const float scale_f32 = static_cast<float>(scale);
  dispatch(
      stream, out.dtype, [&] { attention_cached_cuda(out, lse, k_cache, v_cache, q, k, v, z, scale_f32); },
      [&]<class S>(S) {
        cached_fast(out.as<S>(), data_or_null<float>(lse), k_cache.as<S>(), v_cache.as<S>(), q.as<S>(),
                    data_or_null<const S>(k), data_or_null<const S>(v), z, scale_f32);
      },
      [&]<class T>(T) {
        attention_cached_ref(out.as<T>(), data_or_null<T>(lse), k_cache.as<T>(), v_cache.as<T>(), q.as<T>(),
                             data_or_null<const T>(k), data_or_null<const T>(v), z, scale);
      });
}

}  // namespace crossply
