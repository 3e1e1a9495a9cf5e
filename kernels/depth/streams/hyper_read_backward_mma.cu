// The read of the hyper-connections on tensor cores, backward, for two or four streams in bf16. As forward, a block
// takes eight streams at a time while it copies those behind them, and a lane is one of g = lane / 4 and t = lane % 4.
// All products are of x itself, not of x less its mean: what that costs in digits is far less than x lost when it was
// rounded to bf16. Where one side is in float, it is two parts of bf16, 16 bits together, or three, which are all of
// it. With k_j = rstd q_j:
//   x . projection_j   (first; second) x^T as forward; only `along` needs them
//   x . dout           dout x^T, where the row is that of the stream's token
//   dx                 (k; rest of k) (projections; rest of them), rows are streams, summed over j. Row `constants` of
//                      the projections is 1: what is the same for all columns of a stream is one more k
//   dprojections       x^T (first; second) and x^T third, of k, summed over streams, in registers over all tokens
//
// Not yet run on hardware: only in the emulator.
#include "kernels/depth/streams/hyper_read_mma.cuh"

namespace crossply::hyper {
namespace {

constexpr int buffers = 3;                    // for at_once streams and their dout each
constexpr int of_dout = 6, constants = 6;     // rows behind the projections, of which there are up to six
constexpr int sums_size = at_once * at_once;  // (row j, stream)

// Elements from a row in shared memory to the next: whole turns of the block, and an odd number of 16 bytes.
__host__ __device__ constexpr int stride_of(int C, int threads) {
  return (C + threads - 1) / threads * threads + stretch + 8;
}

// What is there of eight streams in shared memory: x (8,stride), dout (tokens,stride), and as they lie in memory
// dcoef, coef (8,E+2) and stats (8,E+4).
template <int E, int threads>
struct StagedTokens {
  static constexpr int tokens = at_once / E, J = E + 2, rows = at_once + tokens;
  static constexpr int numbers = at_once * (2 * J + E + 4);
  bf16* x;
  int stride;
  __host__ __device__ static constexpr int size(int C) { return rows * stride_of(C, threads) + 2 * numbers; }
  __device__ __forceinline__ bf16* dout(int stream) const { return x + (at_once + stream / E) * stride; }
  __device__ __forceinline__ float* dcoef() const { return reinterpret_cast<float*>(x + rows * stride); }
  __device__ __forceinline__ float* coef() const { return dcoef() + at_once * J; }
  __device__ __forceinline__ float* stats() const { return coef() + at_once * J; }
};
template <int width>
__device__ __forceinline__ void fetch_numbers(float* to, const float* from, int n, int streams) {
  const int e = static_cast<int>(threadIdx.x) * 4;
  if (e < at_once * width && e / width < streams - n)
    cp_async<16>(to + e, from + static_cast<int64_t>(n) * width + e, true);
}
template <int E, int threads>
__device__ __forceinline__ void fetch(bf16* to, const ReadBackward<bf16>& b, int n, int streams, int C) {
  using S = StagedTokens<E, threads>;
  const S stage{to, stride_of(C, threads)};
  fetch_rows<at_once, threads>(stage.x, stage.stride, b.streams, n, streams, C);
  fetch_rows<S::tokens, threads>(stage.dout(0), stage.stride, b.dout, n / E, streams / E, C);
  fetch_numbers<E + 2>(stage.dcoef(), b.dcoef, n, streams);
  fetch_numbers<E + 2>(stage.coef(), b.coef, n, streams);
  fetch_numbers<E + 4>(stage.stats(), b.stats, n, streams);
  cp_async_commit();
}

// -----------------------------------------------------------------------------------------------------------------
// Sums over columns.

// Row g of the projections at a lane's eight columns, as left sides of two products: first part in rows 0 to 7, second
// in rows 8 to 15.
struct Parts {
  Pairs a[2];
};
__device__ __forceinline__ Parts parts_of(const DeviceReadPlan& plan, int row, int J, int c, int C) {
  const Floats<8> p = projection_at(plan, row, J, c, C);
  Parts parts;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float u = p[2 * i], v = p[2 * i + 1];
    parts.a[i / 2][i % 2 * 2] = split(u, v);
    parts.a[i / 2][i % 2 * 2 + 1] = pack(u, v);
  }
  return parts;
}

// to (8,8): row j of the products with a warp's columns for all streams; in row of_dout those with dout.
template <int E, int threads>
__device__ __forceinline__ void warp_products(float* to, const StagedTokens<E, threads>& stage,
                                              const Parts (&parts)[turns], int C) {
  const int warp = static_cast<int>(threadIdx.x / warp_size), lane = static_cast<int>(threadIdx.x % warp_size);
  const int g = lane / 4, t = lane % 4, first = warp * stretch + 8 * t;
  const bf16 *x = stage.x + g * stage.stride + first,
             *dout = stage.dout(g % StagedTokens<E, threads>::tokens * E) + first;
  Floats<4> products = {}, left = {}, right = {};  // the latter: of two pairs rows 0 to 7, of the others rows 8 to 15
#pragma unroll
  for (int k = 0; k < turns; ++k) {
    if (k * threads >= C) break;
    const Pairs own = pairs_at(x + k * threads), dy = pairs_at(dout + k * threads);
    const Pairs both{{dy[0], dy[2], dy[1], dy[3]}};
    mma_m16n8k16(products, parts[k].a[0], own[0], own[1]);
    mma_m16n8k16(left, both, own[0], own[1]);
    mma_m16n8k16(products, parts[k].a[1], own[2], own[3]);
    mma_m16n8k16(right, both, own[2], own[3]);
  }
  if (g < E + 2)
    store<2, Space::shared>(to + g * at_once + 2 * t,
                            Floats<2>{{products[0] + products[2], products[1] + products[3]}});
  if (g == 2 * t / E)
    store<2, Space::shared>(to + of_dout * at_once + 2 * t, Floats<2>{{left[0] + right[2], left[1] + right[3]}});
}

// -----------------------------------------------------------------------------------------------------------------
// Between the two: a thread for every row j of every stream.

// In shared memory: k (8,8), of which k[i][constants] is along * mean; along and A[i,0]. And sums over tokens of dA,
// dA tanh, q and k mean, for (stream,j) each.
struct TokenFactors {
  Array<float, sums_size> k;
  Array<float, at_once> along, a;
  Array<Array<float, sums_size>, 4> totals;
};

template <int warps, int E, int threads>
__device__ __forceinline__ void set_factors(TokenFactors& factors, const Array<float, sums_size>* sums,
                                            const StagedTokens<E, threads>& stage, const DeviceReadPlan& plan,
                                            int there, int C) {
  const int thread = static_cast<int>(threadIdx.x), own = thread / 8, j = thread % 8;
  float sum = 0, k = 0, mean = 0, rstd = 0;
#pragma unroll
  for (int warp = 0; warp < warps; ++warp) sum += sums[warp][j * at_once + own];
  const float with_dout = __shfl_sync(~0u, sum, thread % warp_size - j + of_dout);
  const float* stats = stage.stats() + own * (E + 4);
  if (own < there) mean = stats[0], rstd = stats[1];
  if (own < there && j < E + 2) {
    const float da = stage.dcoef()[own * (E + 2) + j] + (j == 0 ? with_dout : 0.f), t = stats[2 + j];
    const float q = scale_of(plan, j, E) * da * (1.f - t * t);
    k = q * rstd;
    const float all[] = {da, da * t, q, k * mean};
#pragma unroll
    for (int i = 0; i < 4; ++i) factors.totals[i][thread] += all[i];
  }
  const float along = group_sum(j < E + 2 ? k * sum : 0.f, 8) * rstd * rstd / static_cast<float>(C);
  factors.k[thread] = j == constants ? along * mean : k;
  if (j == 0) factors.along[own] = along, factors.a[own] = own < there ? stage.coef()[own * (E + 2)] : 0.f;
}

// -----------------------------------------------------------------------------------------------------------------
// Columns.

// The right sides of the product for dx, for all columns: eight at a time of the 32 of a stretch, 2q and 2q+1 of each
// lane's eight. Pairs of j, rows 0 to 7 the first parts, rows 8 to 15 the second: (stretches, q / 2, lane) of two q.
template <int threads>
__device__ __forceinline__ void fill_table(uint32_t* table, const DeviceReadPlan& plan, int J, int C) {
  const auto value = [&](int j, int c) {
    if (c >= C) return 0.f;
    return j < J ? plan.projection[j * C + c] : j == constants ? 1.f : 0.f;
  };
  for (int e = static_cast<int>(threadIdx.x); e < (C + threads - 1) / threads * threads * 4; e += threads) {
    const int chunk = e / 128, q = e / 64 % 2 * 2 + e % 2, lane = e / 2 % warp_size, g = lane / 4, j = lane % 4 * 2;
    const int c = chunk * stretch + g / 2 * 8 + 2 * q + g % 2;
    float u = value(j, c), v = value(j + 1, c);
    table[2 * e] = split(u, v), table[2 * e + 1] = pack(u, v);
  }
}

struct FactorFragments {
  Pairs left;         // (k; rest of k), rows are streams, for both halves of the j
  uint32_t right[3];  // k in three parts, rows are streams, columns j
  float along, a;
  __device__ __forceinline__ FactorFragments(const TokenFactors& factors, int g, int t)
      : along(factors.along[g]), a(factors.a[g]) {
    float u = factors.k[g * 8 + 2 * t], v = factors.k[g * 8 + 2 * t + 1];
    left[0] = left[2] = split(u, v), left[1] = left[3] = pack(u, v);
    u = factors.k[16 * t + g], v = factors.k[16 * t + 8 + g];
    right[0] = split(u, v), right[1] = split(u, v), right[2] = pack(u, v);
  }
};

// A lane's eight columns of dx_g: a dout + sum_j k_j projection_j - along (x - mean).
__device__ __forceinline__ Floats<8> dx_of(const FactorFragments& column, const uint32_t* table, const Pairs& x,
                                           const Pairs& dout) {
  Floats<8> dx;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Pairs right = *reinterpret_cast<const Pairs*>(table + half * 4 * warp_size);
#pragma unroll
    for (int q = 2 * half; q < 2 * half + 2; ++q) {
      Floats<4> d = {};
      mma_m16n8k16(d, column.left, right[q % 2 * 2], right[q % 2 * 2 + 1]);
      dx[2 * q] = d[0] + d[2] + column.a * first_of(dout[q]) - column.along * first_of(x[q]);
      dx[2 * q + 1] = d[1] + d[3] + column.a * second_of(dout[q]) - column.along * second_of(x[q]);
    }
  }
  return dx;
}

template <int E, int threads>
__device__ __forceinline__ void column_gradients(Floats<4> (&dprojection)[turns][2], const ReadBackward<bf16>& b,
                                                 const StagedTokens<E, threads>& stage, const TokenFactors& factors,
                                                 const uint32_t* table, int n, int streams, int C) {
  const int warp = static_cast<int>(threadIdx.x / warp_size), lane = static_cast<int>(threadIdx.x % warp_size);
  const int g = lane / 4, t = lane % 4, first = warp * stretch + 8 * t;
  const FactorFragments column(factors, g, t);
  const bf16 *x = stage.x + g * stage.stride + first, *dout = stage.dout(g) + first;
  const bf16* transposed = stage.x + lane % 8 * stage.stride + lane / 8 % 2 * 8 + warp * stretch;
  bf16* dx = b.dstreams + static_cast<int64_t>(n + g) * C + first;
  const int columns = n + g < streams ? C - first : 0;
  table += (warp * 2 * warp_size + lane) * 4;
#pragma unroll
  for (int k = 0; k < turns; ++k) {
    if (k * threads >= C) break;
    Pairs before = {};  // asked for early, it comes from memory
    if (b.accumulate && k * threads < columns) before = pairs_at(dx + k * threads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Pairs rows = ldmatrix_transposed(transposed + k * threads + i * 16);
      mma_m16n8k16(dprojection[k][i], rows, column.right[0], column.right[1]);
      mma_m16n8k16(dprojection[k][i], rows, column.right[2], 0);
    }
    Floats<8> sum = dx_of(column, table + k * threads * 8, pairs_at(x + k * threads), pairs_at(dout + k * threads));
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (b.accumulate) sum[e] += e % 2 == 0 ? first_of(before[e / 2]) : second_of(before[e / 2]);
    if (k * threads < columns) store<8>(dx + k * threads, sum);
  }
}

// The block's row of sums over tokens.
template <int E, int threads>
__device__ __forceinline__ void store_sums(float* partial, const Array<Array<float, sums_size>, 4>& totals,
                                           const Floats<4> (&dprojection)[turns][2], int C) {
  constexpr int J = E + 2;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, g = lane / 4, t = lane % 4;
  for (int e = thread; e < 3 * E * J; e += threads) {
    float sum = 0;
    for (int own = e % (E * J) / J; own < at_once; own += E) sum += totals[e / (E * J)][own * 8 + e % J];
    partial[e] = sum;
  }
  partial += head_size(E);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = 2 * t + r;
    float mean = 0;
    for (int own = 0; own < at_once; ++own) mean += totals[3][own * 8 + j];
#pragma unroll
    for (int e = 0; e < turns * 4; ++e) {
      const int c = e / 4 * threads + thread / warp_size * stretch + e % 4 * 8 + g;
      if (j < J && c < C) partial[j * C + c] = dprojection[e / 4][e / 2 % 2][e % 2 * 2 + r] - mean;
    }
  }
}

template <int E, int threads>
__global__ void __launch_bounds__(threads, max_threads / threads)
    hyper_read_backward_mma_kernel(const ReadBackward<bf16> b, const DeviceReadPlan plan) {
  using S = StagedTokens<E, threads>;
  constexpr int warps = threads / warp_size;
  SHARED(sums, Array<Array<float, sums_size>, warps>);
  SHARED(factors, TokenFactors);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
  const int C = static_cast<int>(b.C), stride = stride_of(C, threads), size = S::size(C);
  const int streams = static_cast<int>(b.rows) * E, step = static_cast<int>(gridDim.x) * at_once;
  int n = static_cast<int>(blockIdx.x) * at_once;
  bf16* x = dynamic_shared<bf16>();
  auto* table = reinterpret_cast<uint32_t*>(x + buffers * size);
  clear<threads>(x, buffers * size);
#pragma unroll 1
  for (int ahead = 0; ahead < buffers - 1; ++ahead)
    fetch<E, threads>(x + ahead * size, b, n + ahead * step, streams, C);
  fill_table<threads>(table, plan, E + 2, C);
  for (int i = 0; i < 4; ++i)
    if (thread < sums_size) factors.totals[i][thread] = 0;
  Parts parts[turns];
  Floats<4> dprojection[turns][2] = {};
#pragma unroll
  for (int k = 0; k < turns; ++k)
    parts[k] = parts_of(plan, lane / 4, E + 2, k * threads + warp * stretch + lane % 4 * 8, C);
#pragma unroll 1
  for (int now = 0; n < streams; n += step, now = now + 1 < buffers ? now + 1 : 0) {
    const S stage{x + now * size, stride};
    cp_async_wait<buffers - 2>();
    __syncthreads();  // also: the streams before are done
    fetch<E, threads>(x + (now > 0 ? now - 1 : buffers - 1) * size, b, n + (buffers - 1) * step, streams, C);
    warp_products<E, threads>(&sums[warp][0], stage, parts, C);
    __syncthreads();
    if (thread < sums_size) set_factors<warps, E, threads>(factors, &sums[0], stage, plan, streams - n, C);
    __syncthreads();
    column_gradients<E, threads>(dprojection, b, stage, factors, table, n, streams, C);
  }
  store_sums<E, threads>(b.partial + blockIdx.x * b.row, factors.totals, dprojection, C);
}

template <int E, int threads>
int64_t launch_backward(const ReadBackward<bf16>& b, const DeviceReadPlan& plan, int64_t max_blocks) {
  const int C = static_cast<int>(b.C);
  const auto padded = static_cast<size_t>(blocks_of(b.C, threads)) * threads;
  const size_t bytes =
      buffers * sizeof(bf16) * static_cast<size_t>(StagedTokens<E, threads>::size(C)) + padded * stretch;
  // In 32 bits the kernel counts streams, and it has some shared memory of its own.
  if (b.rows * E >= int64_t{1} << 30 || static_cast<int64_t>(bytes) > max_shared_bytes() - 8 * 1024) return 0;
  const int64_t blocks = std::min<int64_t>(max_blocks, 132 * max_threads / threads);  // that an H200 has room for
  launch({"hyper_read_backward_mma", static_cast<uint32_t>(blocks), threads, bytes},
         hyper_read_backward_mma_kernel<E, threads>, b, plan);
  return blocks;
}

}  // namespace

int64_t read_backward_on_tensor_cores(const ReadBackward<bf16>& b, const DeviceReadPlan& plan, int64_t max_blocks) {
  constexpr int most = max_threads;
  if (plan.projection == nullptr || b.C > max_mma_columns || !aligned16({b.dcoef, b.coef, b.stats})) return 0;
  if (b.C > max_mma_columns / 2)
    return b.E == 2 ? launch_backward<2, most>(b, plan, max_blocks) : launch_backward<4, most>(b, plan, max_blocks);
  return b.E == 2 ? launch_backward<2, most / 2>(b, plan, max_blocks)
                  : launch_backward<4, most / 2>(b, plan, max_blocks);
}

}  // namespace crossply::hyper
