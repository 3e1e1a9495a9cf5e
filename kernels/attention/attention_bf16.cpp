#include "kernels/attention/attention_bf16.h"

#if CROSSPLY_MATRIX_UNITS

#include <cmath>

#include "kernels/attention/attention_tile.h"
#include "kernels/cpu/cpu.h"

namespace crossply {

using namespace attention_bf16;
using attention_tile::log2_e, attention_tile::ln_2;

namespace {

// Scratch memory handed out piece by piece, each beginning at a cache line.
struct Pieces {
  float* next = nullptr;
  size_t used = 0;
  float* floats(int64_t count) {
    const auto size = static_cast<size_t>(round_up(count, side));
    float* const piece = next;
    if (next != nullptr) next += size;
    used += size;
    return piece;
  }
  bf16* halves(int64_t count) { return reinterpret_cast<bf16*>(floats(count / 2)); }
};

// A scratch of type W, which takes its pieces in the order of its constructor: first counted, then handed out.
template <class W>
W scratch_of(const AttentionSizes& z) {
  Pieces count;
  W(z, count);
  Pieces pieces{scratch_f32(count.used)};
  return W(z, pieces);
}

// Scores s of the 32 keys that the diagonal crosses, by two tiles that are `column` apart, where row 0 sees key 0 only:
// what a row does not see becomes -infinity.
MATRIX_TARGET void hide(float* s, int64_t pitch, int64_t column) {
  Floats x, key;
#pragma GCC unroll 16
  for (int64_t l = 0; l < side; ++l) key[l] = static_cast<float>(l);
  const Floats hidden = Floats{} - INFINITY;
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t i = 0; i < side; ++i, s += pitch) {
      if (half == 0) put(s + column, hidden);
      float* const crossed = s + half * column;
      get(x, crossed);
      x = key > static_cast<float>(i) ? hidden : x;
      put(crossed, x);
    }
}

// -----------------------------------------------------------------------------------------------------------------
// Forward: 32 queries at a time, the softmax over up to 256 keys at once. The scores are the products q k; c = scale /
// ln 2 turns them into exponents of 2.
//
// A load waits for a store in flight whose address differs by a multiple of 4 KiB. So weights are written where the
// scores were read, always a little behind the reading.

constexpr int64_t queries = depth, strip = 256, pitch = strip + side;

struct Forward {
  int64_t width, columns;  // D in bf16 of scratch, and in tiles
  bf16* rows;              // (32, width)
  bf16 *k, *v;             // right factors: k for scores, v for out
  bf16* q;                 // (queries, width)
  float* s;                // (queries, pitch): scores; then from the beginning of every row its weights, in bf16
  float* out;              // (queries, 16 columns)
  float* sum;              // (queries, 16): still to be summed over the lanes
  float* max;              // (queries)
  float* factor;           // (queries)

  Forward(const AttentionSizes& z, Pieces& pieces) : width(round_up(z.D, depth)), columns(ceil_div(z.D, side)) {
    const int64_t keys = round_up(z.T, depth);
    rows = pieces.halves(depth * width);
    k = pieces.halves(keys * width);
    v = pieces.halves(keys * columns * side);
    q = pieces.halves(queries * width);
    s = pieces.floats(queries * pitch);
    out = pieces.floats(queries * columns * side);
    sum = pieces.floats(queries * side);
    max = pieces.floats(queries);
    factor = pieces.floats(queries);
  }
};

MATRIX_TARGET void pack_keys(const Forward& w, const bf16* k, const bf16* v, const AttentionSizes& z) {
  const int64_t stride = z.key_stride;
  for (int64_t key = 0; key < z.T; key += depth) {
    const int64_t n = std::min(depth, z.T - key);
    take_rows(w.rows, w.width, k + key * stride, stride, n, z.D);
    pack_columns(w.k + key * w.width, w.rows, w.width);
    take_rows(w.rows, w.width, v + key * stride, stride, n, z.D);
    pack_pairs(w.v + key * w.columns * side, w.rows, w.width, z.D);
  }
}

// Raises w.max to what the scores of `tiles` x 16 keys need, and scales what was summed up by the old one.
MATRIX_TARGET void raise_max(const Forward& w, int64_t tiles, float c, bool first) {
  for (int64_t i = 0; i < queries; i += side) {
    Floats row[side], max, old;
#pragma GCC unroll 16
    for (int64_t r = 0; r < side; ++r) get(row[r], w.s + (i + r) * pitch);
    for (int64_t j = 1; j < tiles; ++j)
#pragma GCC unroll 16
      for (int64_t r = 0; r < side; ++r) {
        Floats x;
        get(x, w.s + (i + r) * pitch + j * side);
        row[r] = Larger()(x, row[r]);
      }
    reduce_rows(max, row, Larger());
    keep_awake();
    max *= c;
    if (!first) {
      get(old, w.max + i);
      max = Larger()(max, old);
      old -= max;
      exp2_in_place(old);
      put(w.factor + i, old);
    }
    put(w.max + i, max);
  }
}

MATRIX_TARGET void shrink(const Forward& w) {
  const int64_t wide = w.columns * side;
  for (int64_t i = 0; i < queries; ++i) {
    Floats x;
    get(x, w.sum + i * side);
    x *= w.factor[i];
    put(w.sum + i * side, x);
    for (int64_t d = 0; d < wide; d += side) {
      get(x, w.out + i * wide + d);
      x *= w.factor[i];
      put(w.out + i * wide + d, x);
    }
  }
}

// From scores the weights 2^(c s - max), and their sums. Fetches 32 rows of q and out for the next block meanwhile.
MATRIX_TARGET void weights(const Forward& w, int64_t steps, float c, bool first, const bf16* q, const bf16* out,
                           int64_t stride, int64_t D) {
  for (int64_t i = 0; i < queries; ++i) {
    if (i % 8 == 0) keep_awake();
    prefetch_row(q + i * stride, D);
    prefetch_row(out + i * stride, D);
    const float max = w.max[i];
    Floats sum{}, more{};
    if (!first) get(sum, w.sum + i * side);
    float* const s = w.s + i * pitch;
    for (int64_t step = 0; step < steps; ++step) {
      Floats x, y;
      get(x, s + step * depth);
      get(y, s + step * depth + side);
      x = x * c - max, y = y * c - max;
      exp2_in_place(x);
      exp2_in_place(y);
      sum += x, more += y;
      Pairs rounded;
      to_bf16(rounded, x, y);
      put(s + step * side, rounded);
    }
    put(w.sum + i * side, sum + more);
  }
}

// Queries t0 .. of one head, where out, lse and q begin. The next block's q and out are `ahead` elements behind.
MATRIX_TARGET void forward_block(bf16* out, float* lse, const bf16* q, const Forward& w, const AttentionSizes& z,
                                 int64_t t0, float c, int64_t ahead) {
  const int64_t n = std::min(queries, z.T - t0), stride = z.query_stride, deep = w.width / depth,
                wide = w.columns * side;
  take_rows(w.q, w.width, q, stride, n, z.D);
  for (int64_t key = 0; key < t0 + queries; key += strip) {
    const int64_t keys = std::min(strip, t0 + queries - key), tiles = keys / side, steps = keys / depth;
    multiply({w.s, side * pitch, side, pitch * 4}, {w.q, side * w.width, depth, w.width * 2},
             {w.k + key * w.width, deep * tile_size, tile_size}, 2, tiles, deep, false);
    if (key + keys > t0) hide(w.s + keys - depth, pitch, side);
    raise_max(w, tiles, c, key == 0);
    if (key > 0) shrink(w);
    weights(w, steps, c, key == 0, q + ahead, out + ahead, stride, z.D);
    multiply({w.out, side * wide, side, wide * 4}, {reinterpret_cast<bf16*>(w.s), side * pitch * 2, depth, pitch * 4},
             {w.v + key * wide, tile_size, w.columns * tile_size}, 2, w.columns, steps, key > 0);
  }
  for (int64_t i = 0; i < queries; i += side) {
    Floats row[side], sum, max;
#pragma GCC unroll 16
    for (int64_t r = 0; r < side; ++r) get(row[r], w.sum + (i + r) * side);
    reduce_rows(sum, row, Plus());
    put(w.factor + i, 1.f / sum);
    attention_tile::log_in_place(sum);
    get(max, w.max + i);
    put(w.max + i, max * ln_2 + sum);
  }
  give_rows(out, stride, w.out, wide, n, z.D, w.factor, false);
  std::copy_n(w.max, n, lse);
}

struct ForwardArguments {
  bf16* out;
  float* lse;
  const bf16 *q, *k, *v;
  float scale;
};

// Blocks in their order: of one head after the other.
struct BlockOfQueries {
  int64_t b, h, t0, at;  // at: where its rows begin in q and out
  BlockOfQueries(const AttentionSizes& z, int64_t item) {
    const int64_t blocks = ceil_div(z.T, queries), head = item / blocks;
    b = head / z.H, h = head % z.H, t0 = folded(item % blocks, blocks) * queries;
    at = z.query_head(b, h) + t0 * z.H * z.D;
  }
};

MATRIX_TARGET void forward_items(const ForwardArguments& a, const AttentionSizes& z, int64_t begin, int64_t end) {
  const Forward w = scratch_of<Forward>(z);
  int64_t packed = -1;
  begin_tiles();
  for (int64_t item = begin; item < end; ++item) {
    const BlockOfQueries x(z, item), next(z, std::min(item + 1, end - 1));
    const int64_t kv = x.h / z.group, head = z.key_head(x.b, kv);
    if (x.b * z.K + kv != packed) pack_keys(w, a.k + head, a.v + head, z);
    packed = x.b * z.K + kv;
    forward_block(a.out + x.at, a.lse + (x.b * z.H + x.h) * z.T + x.t0, a.q + x.at, w, z, x.t0, a.scale * log2_e,
                  next.at - x.at);
  }
  end_tiles();
}

}  // namespace

void attention_forward_bf16(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionSizes& z,
                            float scale) {
  const ForwardArguments a{out, lse, q, k, v, scale};
  const int64_t items = z.B * z.H * ceil_div(z.T, queries);
  parallel_for(items, grain_of(z, items), [=](int64_t begin, int64_t end) { forward_items(a, z, begin, end); });
}

// -----------------------------------------------------------------------------------------------------------------
// Backward: 64 queries against 32 keys at a time. The sums for k and v grow transposed.

namespace {

constexpr int64_t block = 2 * depth;

struct Backward {
  int64_t width, columns;        // D in bf16 of scratch, and in tiles
  bf16* rows;                    // (32, width)
  bf16 *k, *v, *k_pairs;         // right factors: k for scores, v for dp, k for dq
  bf16 *q, *dout;                // (block, width)
  bf16 *q_columns, *do_columns;  // left factors: q for dk, dout for dv
  float *s, *dp;                 // (2, block, 16): of 32 keys; 2 KiB from what is written while they are read
  bf16 *p, *ds;                  // right factors for dv and dk
  bf16* ds_rows;                 // (block, 32), left factor for dq
  float* dq;                     // (block, 16 columns)
  float *dk, *dv;                // (keys / 16, columns, 16, 16): of (d, key), with the keys as zip_quarters leaves them
  float *lse, *delta;            // (block): lse in units of ln 2

  static int64_t sums(const AttentionSizes& z) { return round_up(z.T, depth) * round_up(z.D, side); }
  Backward(const AttentionSizes& z, Pieces& pieces) : width(round_up(z.D, depth)), columns(ceil_div(z.D, side)) {
    const int64_t keys = round_up(z.T, depth), wide = columns * side;
    rows = pieces.halves(depth * width);
    k = pieces.halves(keys * width);
    v = pieces.halves(keys * width);
    k_pairs = pieces.halves(keys * wide);
    q = pieces.halves(block * width);
    dout = pieces.halves(block * width);
    q_columns = pieces.halves(block * wide);
    do_columns = pieces.halves(block * wide);
    s = pieces.floats(block * depth);
    dp = pieces.floats(block * depth);
    pieces.floats(block * depth / 4);
    p = pieces.halves(block * depth);
    ds = pieces.halves(block * depth);
    ds_rows = pieces.halves(block * depth);
    dq = pieces.floats(block * wide);
    dk = pieces.floats(sums(z));
    dv = pieces.floats(sums(z));
    lse = pieces.floats(block);
    delta = pieces.floats(block);
  }
};

MATRIX_TARGET void pack_keys(const Backward& w, const bf16* k, const bf16* v, const AttentionSizes& z) {
  const int64_t stride = z.key_stride;
  for (int64_t key = 0; key < z.T; key += depth) {
    const int64_t n = std::min(depth, z.T - key);
    take_rows(w.rows, w.width, k + key * stride, stride, n, z.D);
    pack_columns(w.k + key * w.width, w.rows, w.width);
    pack_pairs(w.k_pairs + key * w.columns * side, w.rows, w.width, z.D);
    take_rows(w.rows, w.width, v + key * stride, stride, n, z.D);
    pack_columns(w.v + key * w.width, w.rows, w.width);
  }
}

// delta (32) = the sums of dout * out over the columns, both (32, width).
MATRIX_TARGET void delta_of(float* delta, const bf16* dout, const bf16* out, int64_t width) {
  for (int64_t i = 0; i < depth; i += side) {
    Floats row[side], sum;
#pragma GCC unroll 16
    for (int64_t r = 0; r < side; ++r) {
      row[r] = Floats{};
      for (int64_t d = 0; d < width; d += depth) {
        Words x, y;
        get(x, dout + (i + r) * width + d);
        get(y, out + (i + r) * width + d);
        row[r] += reinterpret_cast<Floats>(x << 16) * reinterpret_cast<Floats>(y << 16);
        row[r] += reinterpret_cast<Floats>(x & 0xFFFF0000) * reinterpret_cast<Floats>(y & 0xFFFF0000);
      }
    }
    reduce_rows(sum, row, Plus());
    put(delta + i, sum);
  }
}

// p = 2^(c s - lse), ds = p (dp - delta) of query i and 32 keys, in bf16.
MATRIX_TARGET inline void weights(Pairs& p, Pairs& ds, const Backward& w, int64_t i, float c) {
  Floats both[2], gradient[2];
#pragma GCC unroll 2
  for (int64_t j = 0; j < 2; ++j) {
    Floats x, dp;
    get(x, w.s + (j * block + i) * side);
    get(dp, w.dp + (j * block + i) * side);
    x = x * c - w.lse[i];
    exp2_in_place(x);
    both[j] = x;
    gradient[j] = x * (dp - w.delta[i]);
  }
  to_bf16(p, both[0], both[1]);
  to_bf16(ds, gradient[0], gradient[1]);
}

// From w.s and w.dp of queries first .. last, the factors w.p, w.ds and w.ds_rows.
MATRIX_TARGET void weights_block(const Backward& w, int64_t first, int64_t last, float c) {
  for (int64_t i = first; i < last; i += 2) {
    if (i % side == 0) keep_awake();
    Pairs p0, p1, ds0, ds1, low, high;
    weights(p0, ds0, w, i, c);
    weights(p1, ds1, w, i + 1, c);
    put(w.ds_rows + i * depth, ds0);
    put(w.ds_rows + (i + 1) * depth, ds1);
    const int64_t at = i / depth * 2 * tile_size + i % depth / 2 * depth;
    zip_quarters(low, high, p0, p1);
    put(w.p + at, low);
    put(w.p + at + tile_size, high);
    zip_quarters(low, high, ds0, ds1);
    put(w.ds + at, low);
    put(w.ds + at + tile_size, high);
  }
}

// Takes queries t0 .. of head h: q, dout, lse and delta.
MATRIX_TARGET void take_queries(const AttentionGradients<bf16>& g, const AttentionSizes& z, int64_t b, int64_t h,
                                int64_t t0, const Backward& w) {
  const int64_t stride = z.query_stride, wide = w.columns * side;
  for (int64_t i = 0; i < block && t0 + i < z.T; i += depth) {
    const int64_t n = std::min(depth, z.T - t0 - i), at = z.query_head(b, h) + (t0 + i) * stride;
    take_rows(w.q + i * w.width, w.width, g.q + at, stride, n, z.D);
    take_rows(w.dout + i * w.width, w.width, g.dout + at, stride, n, z.D);
    take_rows(w.rows, w.width, g.out + at, stride, n, z.D);
    pack_transposed(w.q_columns + i * wide, w.q + i * w.width, w.width, z.D);
    pack_transposed(w.do_columns + i * wide, w.dout + i * w.width, w.width, z.D);
    delta_of(w.delta + i, w.dout + i * w.width, w.rows, w.width);
    for (int64_t j = 0; j < depth; ++j) w.lse[i + j] = j < n ? g.lse[(b * z.H + h) * z.T + t0 + i + j] * log2_e : 0.f;
  }
}

// Adds to w.dk and w.dv what queries t0 .. of head h contribute, and writes their dq. The next block's rows are `ahead`
// elements behind.
MATRIX_TARGET void backward_block(const AttentionGradients<bf16>& g, const AttentionSizes& z, int64_t b, int64_t h,
                                  int64_t t0, int64_t ahead, const Backward& w) {
  const int64_t n = std::min(block, z.T - t0), last = round_up(n, depth), stride = z.query_stride;
  const int64_t deep = w.width / depth, wide = w.columns * side;
  take_queries(g, z, b, h, t0, w);
  for (int64_t key = 0; key < t0 + last; key += depth) {
    const int64_t first = std::max<int64_t>(0, key - t0), rows = (last - first) / side, steps = rows / 2;
    const OutputTile s{w.s + first * side, tile_size / 2, block * side, 64};
    const OutputTile dp{w.dp + first * side, s.row, s.column, s.stride};
    multiply(s, {w.q + first * w.width, side * w.width, depth, w.width * 2},
             {w.k + key * w.width, deep * tile_size, tile_size}, rows, 2, deep, false);
    multiply(dp, {w.dout + first * w.width, side * w.width, depth, w.width * 2},
             {w.v + key * w.width, deep * tile_size, tile_size}, rows, 2, deep, false);
    const int64_t keys = t0 + last;
    for (int64_t i = block * key / keys; i < block * (key + depth) / keys; ++i) {
      const int64_t row = z.query_head(b, h) + (t0 + i) * stride + ahead;
      for (const bf16* x : {g.q, g.dout, g.out, static_cast<const bf16*>(g.dq)}) prefetch_row(x + row, z.D);
    }
    if (key >= t0) hide(w.s + first * side, side, block * side);
    weights_block(w, first, last, g.scale * log2_e);
    multiply({w.dv + key * wide, tile_size / 2, wide * side, 64},
             {w.do_columns + first * wide, tile_size, w.columns * tile_size, 64},
             {w.p + first * depth, tile_size, 2 * tile_size}, w.columns, 2, steps, true);
    multiply({w.dk + key * wide, tile_size / 2, wide * side, 64},
             {w.q_columns + first * wide, tile_size, w.columns * tile_size, 64},
             {w.ds + first * depth, tile_size, 2 * tile_size}, w.columns, 2, steps, true);
    multiply({w.dq + first * wide, side * wide, side, wide * 4}, {w.ds_rows + first * depth, tile_size, 0, 64},
             {w.k_pairs + key * wide, tile_size, 0}, rows, w.columns, 1, key > 0);
  }
  for (int64_t i = 0; i < n; ++i) w.lse[i] = g.scale;
  give_rows(g.dq + z.query_head(b, h) + t0 * stride, stride, w.dq, wide, n, z.D, w.lse, g.accumulate_q);
}

// dst (T, D), one head of dk or dv, = [dst +] factor * sums.
MATRIX_TARGET void give_keys(bf16* dst, const float* sums, float factor, bool accumulate, const AttentionSizes& z) {
  const int64_t stride = z.key_stride;
  alignas(64) float tile[side * side];
  for (int64_t key = 0; key < round_up(z.T, depth); key += side)
    for (int64_t d = 0; d < z.D; d += side, sums += side * side) {
      transpose_words(tile, sums, 64);
      for (int64_t i = 0; i < side; ++i) {
        const int64_t at = key / depth * depth + quarter_column(key / side % 2, i);
        if (at >= z.T) continue;
        give_rows(dst + at * stride + d, stride, tile + i * side, side, 1, std::min(side, z.D - d), &factor,
                  accumulate);
      }
    }
}

MATRIX_TARGET void backward_items(const AttentionGradients<bf16>& g, const AttentionSizes& z, int64_t parts,
                                  float* partial, int64_t begin, int64_t end) {
  Backward w = scratch_of<Backward>(z);
  const int64_t blocks = ceil_div(z.T, block), work = z.group * blocks, sums = Backward::sums(z);
  int64_t packed = -1;
  begin_tiles();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t pair = item / parts, part = item % parts, b = pair / z.K, kv = pair % z.K, head = z.key_head(b, kv);
    if (pair != packed) pack_keys(w, g.k + head, g.v + head, z);
    packed = pair;
    if (parts > 1) w.dk = partial + 2 * item * sums, w.dv = w.dk + sums;
    std::fill_n(w.dk, sums, 0.f);
    std::fill_n(w.dv, sums, 0.f);
    const auto first_row = [=](int64_t i) { return i / blocks * z.D + folded(i % blocks, blocks) * block * z.H * z.D; };
    const int64_t last = work * (part + 1) / parts;
    for (int64_t i = work * part / parts; i < last; ++i)
      backward_block(g, z, b, kv * z.group + i / blocks, folded(i % blocks, blocks) * block,
                     first_row(std::min(i + 1, last - 1)) - first_row(i), w);
    if (parts > 1) continue;
    give_keys(g.dk + head, w.dk, g.scale, g.accumulate_k, z);
    give_keys(g.dv + head, w.dv, 1.f, g.accumulate_v, z);
  }
  end_tiles();
}

}  // namespace

void attention_backward_bf16(const AttentionGradients<bf16>& g, const AttentionSizes& z) {
  const int64_t pairs = z.B * z.K, parts = backward_parts(pairs, z.group * ceil_div(z.T, block));
  const int64_t items = pairs * parts, size = 2 * Backward::sums(z);
  float* partial = parts == 1 ? nullptr : scratch_f32(static_cast<size_t>(items * size), 1);
  parallel_for(items, grain_of(z, items),
               [=](int64_t begin, int64_t end) { backward_items(g, z, parts, partial, begin, end); });
  if (parts == 1) return;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t head = z.key_head(pair / z.K, pair % z.K);
    float* dk = partial + pair * parts * size;
    add_parts(dk, size, size, parts);
    give_keys(g.dk + head, dk, g.scale, g.accumulate_k, z);
    give_keys(g.dv + head, dk + size / 2, 1.f, g.accumulate_v, z);
  }
}

}  // namespace crossply

#endif
