// Attention for f32 storage, heads of any width, and a few queries against caches, in float multiplications; and the
// choice between these and the tensor cores.
// Not yet run on hardware: only in the emulator.
#include "kernels/attention/attention_hopper.cuh"

namespace crossply {
namespace {

// Read attention_plain.cu first. These kernels keep no scores in memory, of which the plain ones write and read T
// squared for each head.
//
// Scores are bound by the multiplications: a warp takes four rows of its own (queries, or keys), which it keeps in
// shared memory, against 32 rows of the other side, one to a lane, so that every element which is read serves four of
// them. For sums over those 32 the lanes go along the columns.
constexpr int own = 4, max_warps = 4, stage_columns = 64, stage_stride = stage_columns + 1;

using Row4 = Floats<own>;  // one column of a warp's own rows

// What a block keeps in shared memory: `arrays` of (warps, D), then weights (warps, arrays of 32), then a stage.
struct SharedRows {
  Row4* arrays;
  int64_t D;
  __device__ Row4* array(int i) const { return arrays + (i * blockDim.y + threadIdx.y) * D; }
  __device__ Row4* weights(int count, int i) const {
    return arrays + count * blockDim.y * D + (i * blockDim.y + threadIdx.y) * warp_size;
  }
  __device__ float* stage(int count, int weights) const {
    return reinterpret_cast<float*>(arrays + (count * D + weights * warp_size) * blockDim.y);
  }
};
int64_t warp_bytes(int64_t D, int arrays, int weights) {
  return (arrays * D + weights * warp_size) * static_cast<int64_t>(sizeof(Row4));
}

// own (D) = `n` rows of the warp; 0 for what is beyond.
template <class S>
__device__ void read_own(Row4* to, const S* from, int64_t stride, int64_t n, int64_t D) {
  for (int64_t d = threadIdx.x; d < D; d += warp_size) {
    Row4 x;
#pragma unroll
    for (int r = 0; r < own; ++r) x[r] = r < n ? to_float(from[r * stride + d]) : 0.f;
    to[d] = x;
  }
}

template <class S>
__device__ void write_own(S* to, const Row4* from, int64_t stride, int64_t n, int64_t D, const Row4& factor,
                          bool accumulate) {
  for (int64_t d = threadIdx.x; d < D; d += warp_size) {
    const Row4 x = from[d];
#pragma unroll
    for (int r = 0; r < own; ++r) {
      if (r >= n) break;
      S& y = to[r * stride + d];
      from_float(y, accumulate ? to_float(y) + x[r] * factor[r] : x[r] * factor[r]);
    }
  }
}

// A lane's products with the warp's own rows: of row `lane` of from (n, D). The whole block calls this.
template <class S>
__device__ Row4 multiply_own(const Row4* rows, float* stage, const S* from, int64_t stride, int64_t n, int64_t D) {
  Row4 sum{};
  const int threads = static_cast<int>(blockDim.y) * warp_size;
  for (int64_t first = 0; first < D; first += stage_columns) {
    const int columns = static_cast<int>(D - first < stage_columns ? D - first : stage_columns);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.y * warp_size + threadIdx.x); i < warp_size * stage_columns; i += threads) {
      const int row = i / stage_columns, c = i % stage_columns;
      if (c < columns) stage[row * stage_stride + c] = row < n ? to_float(from[row * stride + first + c]) : 0.f;
    }
    __syncthreads();
    for (int c = 0; c < columns; ++c) {
      const float x = stage[threadIdx.x * stage_stride + c];
      const Row4 y = rows[first + c];
#pragma unroll
      for (int r = 0; r < own; ++r) sum[r] += x * y[r];
    }
  }
  return sum;
}

// sums (D) = sums * shrink + weights (n) from (n, D), of every own row.
template <class S>
__device__ void add_weighted(Row4* sums, const Row4& shrink, const Row4* weights, const S* from, int64_t stride,
                             int64_t n, int64_t D) {
  for (int64_t d = threadIdx.x; d < D; d += warp_size) {
    Row4 sum = sums[d];
#pragma unroll
    for (int r = 0; r < own; ++r) sum[r] *= shrink[r];
    for (int64_t j = 0; j < n; ++j) {
      const float x = to_float(from[j * stride + d]);
      const Row4 w = weights[j];
#pragma unroll
      for (int r = 0; r < own; ++r) sum[r] += w[r] * x;
    }
    sums[d] = sum;
  }
}

__device__ inline void clear(Row4* x, int64_t D) {
  for (int64_t d = threadIdx.x; d < D; d += warp_size) x[d] = Row4{};
}

__device__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The plain forward writes all scores of a query and reads them again, for the softmax and for each column of out. Here
// a warp takes 32 keys at a time and the softmax online: when a larger score comes, what was summed before shrinks by
// the exponential of the difference. Scores live in shared memory, for these 32 keys only. A row of k, once there,
// serves all queries of the block, up to 16.
//
// Block (x: head, y: queries from the last ones, which see the most keys).
template <bool masked, class S>
__global__ void attention_forward_kernel(S* out, float* lse, const S* q, const S* k, const S* v, AttentionSizes z,
                                         float scale) {
  const SharedRows rows{dynamic_shared<Row4>(), z.D};
  Row4 *q_rows = rows.array(0), *sums = rows.array(1), *weights = rows.weights(2, 0);
  float* stage = rows.stage(2, 1);
  const int64_t b = blockIdx.x / z.H, h = blockIdx.x % z.H, queries = own * blockDim.y;
  const int64_t first = (gridDim.y - 1 - blockIdx.y) * queries, t = first + threadIdx.y * own, left = z.T - t;
  const int64_t seen = z.pos + smaller(z.T, first + queries), at = z.query_head(b, h) + t * z.query_stride;
  k += z.key_head(b, h / z.group), v += z.key_head(b, h / z.group);
  read_own(q_rows, q + at, z.query_stride, left, z.D);
  clear(sums, z.D);
  Row4 max, sum{};  // the sum of this lane's keys
  [[maybe_unused]] int back[own];
#pragma unroll
  for (int r = 0; r < own; ++r) {
    max[r] = max_of_none;
    if (masked) back[r] = back_of(z, b, t + r);
  }
  for (int64_t key = masked ? first_tile<warp_size>(z, b, z.pos + first) : 0; key < seen; key += warp_size) {
    const int64_t n = smaller(warp_size, seen - key);
    const Row4 s = multiply_own(q_rows, stage, k + key * z.key_stride, z.key_stride, n, z.D);
    Row4 p, shrink;
    const int64_t j = key + threadIdx.x;
    const int ahead = static_cast<int>(z.pos + t - j);
#pragma unroll
    for (int r = 0; r < own; ++r) {
      const bool seen_by = j <= z.pos + t + r && (!masked || ahead + r <= back[r]);
      const float x = seen_by ? s[r] * scale : -INFINITY, old_max = max[r];
      max[r] = larger_or_nan(old_max, warp_max(x));
      shrink[r] = expf(old_max - max[r]);
      p[r] = expf(x - max[r]);
      sum[r] = sum[r] * shrink[r] + p[r];
    }
    weights[threadIdx.x] = p;
    __syncwarp();
    add_weighted(sums, shrink, weights, v + key * z.key_stride, z.key_stride, n, z.D);
    __syncwarp();
  }
  Row4 factor;
#pragma unroll
  for (int r = 0; r < own; ++r) {
    const float whole = warp_sum(sum[r]);
    factor[r] = 1 / whole;
    if (lse != nullptr && threadIdx.x == 0 && r < left) lse[blockIdx.x * z.T + t + r] = max[r] + logf(whole);
  }
  write_own(out + at, sums, z.query_stride, left, z.D, factor, false);
}

// In the plain backward every pair of a query and a key computes delta for itself, T times as often as here. A warp for
// each (b,t,h); bound by reading dout and out.
template <int width, class S>
__global__ void attention_delta_kernel(float* delta, const S* dout, const S* out, AttentionSizes z) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (n >= z.B * z.T * z.H) return;
  float sum = 0;
  for (int64_t d = threadIdx.x * width; d < z.D; d += warp_size * width) {
    const Floats<width> x = load<width>(dout + n * z.D + d), y = load<width>(out + n * z.D + d);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += x[i] * y[i];
  }
  sum = warp_sum(sum);
  const auto H = static_cast<uint32_t>(z.H), T = static_cast<uint32_t>(z.T), row = static_cast<uint32_t>(n) / H;
  if (threadIdx.x == 0) delta[(row / T * z.H + static_cast<uint32_t>(n) % H) * z.T + row % T] = sum;
}

// The plain backward keeps p and ds of all pairs in memory. This kernel and the next each compute them anew, 32 rows at
// a time, in shared memory: two products more, in exchange for 8 T squared bytes a head that nobody writes and reads.
// An element of k or v, once loaded, serves four queries or more.
template <bool masked, class S>
__global__ void attention_dq_kernel(AttentionBackward<S> g, AttentionSizes z) {
  const SharedRows rows{dynamic_shared<Row4>(), z.D};
  Row4 *q_rows = rows.array(0), *dout_rows = rows.array(1), *sums = rows.array(2), *weights = rows.weights(3, 0);
  float* stage = rows.stage(3, 1);
  const int64_t b = blockIdx.x / z.H, h = blockIdx.x % z.H, queries = own * blockDim.y, stride = z.key_stride;
  const int64_t first = (gridDim.y - 1 - blockIdx.y) * queries, t = first + threadIdx.y * own, left = z.T - t;
  const int64_t seen = smaller(z.T, first + queries), at = z.query_head(b, h) + t * z.query_stride;
  const S *k = g.k + z.key_head(b, h / z.group), *v = g.v + z.key_head(b, h / z.group);
  read_own(q_rows, g.q + at, z.query_stride, left, z.D);
  read_own(dout_rows, g.dout + at, z.query_stride, left, z.D);
  clear(sums, z.D);
  Row4 lse{}, delta{}, ones, factor;
  [[maybe_unused]] int back[own];
#pragma unroll
  for (int r = 0; r < own; ++r) {
    if (masked) back[r] = back_of(z, b, t + r);
    if (r < left) lse[r] = g.lse[blockIdx.x * z.T + t + r], delta[r] = g.delta[blockIdx.x * z.T + t + r];
    ones[r] = 1, factor[r] = g.scale;
  }
  for (int64_t key = masked ? first_tile<warp_size>(z, b, first) : 0; key < seen; key += warp_size) {
    const int64_t n = smaller(warp_size, seen - key);
    const Row4 s = multiply_own(q_rows, stage, k + key * stride, stride, n, z.D);
    const Row4 dp = multiply_own(dout_rows, stage, v + key * stride, stride, n, z.D);
    Row4 ds;
    const int64_t j = key + threadIdx.x;
    const int ahead = static_cast<int>(t - j);
#pragma unroll
    for (int r = 0; r < own; ++r) {
      const bool seen_by = j <= t + r && (!masked || ahead + r <= back[r]);
      ds[r] = seen_by ? expf(s[r] * g.scale - lse[r]) * (dp[r] - delta[r]) : 0.f;
    }
    weights[threadIdx.x] = ds;
    __syncwarp();
    add_weighted(sums, ones, weights, k + key * stride, stride, n, z.D);
    __syncwarp();
  }
  write_own(g.dq + at, sums, z.query_stride, left, z.D, factor, g.accumulate_q);
}

// As the kernel of dq, with a warp's four keys as its own rows. p and ds of 32 queries serve dk and dv at once, and an
// element of q or dout serves four keys or more.
//
// Block (x: head of k and v, y: keys). Heads and queries in order, so the sums depend on nothing else.
template <bool masked, class S>
__global__ void attention_dkdv_kernel(AttentionBackward<S> g, AttentionSizes z) {
  const SharedRows rows{dynamic_shared<Row4>(), z.D};
  Row4 *k_rows = rows.array(0), *v_rows = rows.array(1), *dk = rows.array(2), *dv = rows.array(3);
  Row4 *p_weights = rows.weights(4, 0), *ds_weights = rows.weights(4, 1);
  float* stage = rows.stage(4, 2);
  const int64_t b = blockIdx.x / z.K, kv = blockIdx.x % z.K, first = blockIdx.y * blockDim.y * own;
  const int64_t key = first + threadIdx.y * own, left = z.T - key, stride = z.query_stride;
  const int64_t end = masked ? z.upper(b, smaller(first + blockDim.y * own, z.T) - 1) + 1 : z.T;
  const int64_t at = z.key_head(b, kv) + key * z.key_stride;
  read_own(k_rows, g.k + at, z.key_stride, left, z.D);
  read_own(v_rows, g.v + at, z.key_stride, left, z.D);
  clear(dk, z.D);
  clear(dv, z.D);
  Row4 ones, factor;
  [[maybe_unused]] int forth[own];
#pragma unroll
  for (int r = 0; r < own; ++r) {
    ones[r] = 1, factor[r] = g.scale;
    if (masked) forth[r] = forth_of(z, b, key + r);
  }
  for (int64_t h = kv * z.group; h < (kv + 1) * z.group; ++h)
    for (int64_t t0 = first / warp_size * warp_size; t0 < end; t0 += warp_size) {
      const int64_t n = smaller(warp_size, end - t0), t = t0 + threadIdx.x;
      const S *q = g.q + z.query_head(b, h) + t0 * stride, *dout = g.dout + z.query_head(b, h) + t0 * stride;
      const Row4 s = multiply_own(k_rows, stage, q, stride, n, z.D);
      const Row4 dp = multiply_own(v_rows, stage, dout, stride, n, z.D);
      const bool there = t < end;
      const float lse = there ? g.lse[(b * z.H + h) * z.T + t] : 0.f;
      const float delta = there ? g.delta[(b * z.H + h) * z.T + t] : 0.f;
      Row4 p, ds;
      const int behind = static_cast<int>(t - key);
#pragma unroll
      for (int r = 0; r < own; ++r) {
        const bool sees = there && key + r <= t && (!masked || behind - r <= forth[r]);
        p[r] = sees ? expf(s[r] * g.scale - lse) : 0.f;
        ds[r] = sees ? p[r] * (dp[r] - delta) : 0.f;
      }
      p_weights[threadIdx.x] = p;
      ds_weights[threadIdx.x] = ds;
      __syncwarp();
      add_weighted(dv, ones, p_weights, dout, stride, n, z.D);
      add_weighted(dk, ones, ds_weights, q, stride, n, z.D);
      __syncwarp();
    }
  write_own(g.dk + at, dk, z.key_stride, left, z.D, factor, g.accumulate_k);
  write_own(g.dv + at, dv, z.key_stride, left, z.D, ones, g.accumulate_v);
}

// Into rows pos .. of the caches (B, S, row), with row = K D: block (x: elements of a batch, y: batch, z: k or v).
template <int width, class S>
__global__ void append_rows_kernel(S* k_cache, S* v_cache, const S* k, const S* v, int64_t n, int64_t cache,
                                   int64_t at) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  if (i >= n) return;
  S* to = (blockIdx.z == 0 ? k_cache : v_cache) + blockIdx.y * cache + at;
  const S* from = (blockIdx.z == 0 ? k : v) + blockIdx.y * n;
  store<width>(to + i, load<width>(from + i));
}

// -----------------------------------------------------------------------------------------------------------------

// As many warps as have room for `arrays` rows of D and `weights`.
struct FloatBlock {
  uint32_t warps;
  size_t shared_bytes;
  FloatBlock(int64_t D, int arrays, int weights)
      : warps(static_cast<uint32_t>(std::clamp<int64_t>(80 * 1024 / warp_bytes(D, arrays, weights), 1, max_warps))),
        shared_bytes(static_cast<size_t>(warps * warp_bytes(D, arrays, weights)) +
                     warp_size * stage_stride * sizeof(float)) {}
  Launch over(const char* name, int64_t heads, int64_t rows) const {
    const dim3 grid(static_cast<uint32_t>(heads), blocks_of(rows, warps * own));
    return {name, grid, dim3(warp_size, warps), shared_bytes};
  }
};

template <class S>
void attention_forward_float(S* out, float* lse, const S* q, const S* k, const S* v, const AttentionSizes& z,
                             float scale) {
  with_mask(z, [&](auto masked) {
    launch(FloatBlock(z.D, 2, 1).over("attention_forward", z.B * z.H, z.T), attention_forward_kernel<masked, S>, out,
           lse, q, k, v, z, scale);
  });
}

template <class S>
void attention_backward_float(const AttentionBackward<S>& g, const AttentionSizes& z) {
  with_mask(z, [&](auto masked) {
    launch(FloatBlock(z.D, 3, 1).over("attention_dq", z.B * z.H, z.T), attention_dq_kernel<masked, S>, g, z);
    launch(FloatBlock(z.D, 4, 2).over("attention_dkdv", z.B * z.K, z.T), attention_dkdv_kernel<masked, S>, g, z);
  });
}

// Whether the tensor cores serve: bf16 rows in whole chunks of 16 bytes.
template <class S>
bool tiles_serve(const AttentionSizes& z, float scale, std::initializer_list<const void*> tensors) {
  return std::is_same_v<S, bf16> && z.D % 8 == 0 && z.D <= 256 && z.S < INT32_MAX && scale > 0 && aligned16(tensors);
}
auto* forward_on_tensor_cores(const AttentionSizes& z) {
  return hopper_serves(z) ? attention_forward_hopper : attention_forward_mma;
}

}  // namespace

void attention_forward_cuda(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                            const AttentionSizes& z, float scale) {
  with_storage(out.dtype, [&]<class S>(S) {
    if constexpr (std::is_same_v<S, bf16>)
      if (tiles_serve<S>(z, scale, {out.data, q.data, k.data, v.data}))
        return forward_on_tensor_cores(z)(out.as<S>(), lse.as<float>(), q.as<S>(), k.as<S>(), v.as<S>(), z, scale);
    attention_forward_float(out.as<S>(), lse.as<float>(), q.as<S>(), k.as<S>(), v.as<S>(), z, scale);
  });
}

void attention_backward_cuda(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout, const Tensor& out,
                             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                             const AttentionSizes& z, float scale) {
  const int64_t rows = z.B * z.T * z.H;
  CHECK_THAT(rows < int64_t{1} << 32, "attention: ", rows, " rows of queries are too many for a GPU");
  float* delta = scratch<float>(rows);
  with_storage(dq.dtype, [&]<class S>(S) {
    with_width<S>(z.D, {dout.data, out.data}, [&](auto width) {
      launch({"attention_delta", blocks_of(rows, 8), dim3(warp_size, 8)}, attention_delta_kernel<width, S>, delta,
             dout.as<S>(), out.as<S>(), z);
    });
    const AttentionBackward<S> g{.dq = dq.as<S>(),
                                 .dk = dk.as<S>(),
                                 .dv = dv.as<S>(),
                                 .dout = dout.as<S>(),
                                 .q = q.as<S>(),
                                 .k = k.as<S>(),
                                 .v = v.as<S>(),
                                 .lse = lse.as<float>(),
                                 .delta = delta,
                                 .scale = scale,
                                 .accumulate_q = dq.accumulate,
                                 .accumulate_k = dk.accumulate,
                                 .accumulate_v = dv.accumulate};
    if constexpr (std::is_same_v<S, bf16>)
      if (tiles_serve<S>(z, scale, {dq.data, dk.data, dv.data, dout.data, q.data, k.data, v.data}))
        return hopper_serves(z) ? attention_backward_hopper(g, z) : attention_backward_mma(g, z);
    attention_backward_float(g, z);
  });
}

void attention_cached_cuda(const Tensor& out, const Tensor& lse, const Tensor& k_cache, const Tensor& v_cache,
                           const Tensor& q, const Tensor& k, const Tensor& v, const AttentionSizes& z, float scale) {
  float* log_sums = data_or_null<float>(lse);
  const int64_t row = z.K * z.D, n = z.T * row;
  with_storage(out.dtype, [&]<class S>(S) {
    if (k.data != nullptr)
      with_width<S>(row, {k_cache.data, v_cache.data, k.data, v.data}, [&](auto width) {
        launch({"append_rows", dim3(blocks_of(n, 256 * width), static_cast<uint32_t>(z.B), 2), 256},
               append_rows_kernel<width, S>, k_cache.as<S>(), v_cache.as<S>(), k.as<S>(), v.as<S>(), n, z.S * row,
               z.pos * row);
      });
    if constexpr (std::is_same_v<S, bf16>)
      if (z.T > own * max_warps && tiles_serve<S>(z, scale, {out.data, q.data, k_cache.data, v_cache.data}))
        return forward_on_tensor_cores(z)(out.as<S>(), log_sums, q.as<S>(), k_cache.as<S>(), v_cache.as<S>(), z, scale);
    attention_forward_float<S>(out.as<S>(), log_sums, q.as<S>(), k_cache.as<S>(), v_cache.as<S>(), z, scale);
  });
}

}  // namespace crossply
