// The read of the hyper-connections on tensor cores, forward, for two or four streams in bf16.
//
// A block takes eight streams at a time, those of four or two tokens, while it copies those behind them to shared
// memory. With g = lane / 4 and t = lane % 4, of the 32 columns that are its warp's turn a lane loads columns 8t to
// 8t+7 of stream g: four pairs, two for each of two products of sixteen columns. These are summed in any order, as long
// as the projections' columns have the same one. Of the projections a lane keeps row g in registers, in three parts of
// bf16 that together are exactly the float. Two products a step:
//   (first; second) x^T   rows 0 to 7 and 8 to 15; row `ones` of the first sums x
//   (x; third) x^T        on the diagonal of rows 0 to 7 the squares
//
// For LayerNorm x becomes d = x - shift, so that nothing cancels where the mean is large. shift is the mean over the
// first columns, rounded to bf16: off by sqrt(C / 128) <= 4 standard deviations at most, and what is missing follows
// from the sum of d. d is a sum of two bf16, high + low, without any error: high takes the place of x, low needs
//   (first; second) low^T
//   (high; low) low^T     for what the squares are short of
//
// Not yet run on hardware: only in the emulator.
#include "kernels/depth/streams/hyper_read_mma.cuh"

namespace crossply::hyper {
namespace {

constexpr int ahead = 2, buffers = ahead + 2;  // for at_once streams each: also those that are mixed and multiplied
constexpr int ones = 6, squares = 7;           // rows behind the projections, of which there are up to six
constexpr int columns_of_shift = 128;

// Elements from one stream in shared memory to the next: whole turns of the block, and half of the banks.
__host__ __device__ constexpr int stride_of(int C, int threads) {
  return (C + threads - 1) / threads * threads + stretch;
}

template <int threads>
__device__ __forceinline__ void fetch(bf16* to, const Read<bf16>& r, int n, int streams, int C) {
  fetch_rows<at_once, threads>(to, stride_of(C, threads), r.streams, n, streams, C);
  cp_async_commit();
}

// Row g of the projections, or the ones, at a lane's eight columns.
struct Parts {
  Pairs first, second, third;
};
__device__ __forceinline__ Parts parts_of(const DeviceReadPlan& plan, int row, int J, int c, int C) {
  const Floats<8> p = projection_at(plan, row, J, c, C);
  Parts parts;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a = p[2 * i], b = p[2 * i + 1];
    if (row == ones && c < C) a = b = 1;
    parts.first[i] = split(a, b);
    parts.second[i] = split(a, b);
    parts.third[i] = pack(a, b);
  }
  return parts;
}

// a + sign b for pairs of bf16, rounded to the nearest.
template <int sign>
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
#if CROSSPLY_CUDA
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(b), "r"(sign > 0 ? 0x3F803F80 : 0xBF80BF80), "r"(a));
  return sum;
#else
  return pack(first_of(a) + sign * first_of(b), second_of(a) + sign * second_of(b));
#endif
}
// x - shift = high + low: low is what rounding takes from high, and a bf16 itself (Knuth's sum of two).
__device__ __forceinline__ void subtract(uint32_t& high, uint32_t& low, uint32_t x, uint32_t shift) {
  high = add_pairs<-1>(x, shift);
  const uint32_t of_shift = add_pairs<-1>(x, high), of_x = add_pairs<1>(high, of_shift);
  low = add_pairs<1>(add_pairs<-1>(x, of_x), add_pairs<-1>(of_shift, shift));
}

// The mean of a lane's stream over its first columns, as a pair. Rows 8 to 15 are the same streams' other columns.
__device__ __forceinline__ uint32_t shift_of(const bf16* x, int C) {
  constexpr uint32_t two_ones = 0x3F803F80;
  Floats<4> sum = {};
#pragma unroll
  for (int c = 0; c < columns_of_shift; c += stretch) mma_m16n8k16(sum, pairs_at(x + c), two_ones, two_ones);
  const float mean = __fdividef(sum[0] + sum[2], static_cast<float>(C < columns_of_shift ? C : columns_of_shift));
  return pack(mean, mean);
}

// A warp's sums over its columns, of the products above. Those of low are apart: no sum waits for another.
struct Sums {
  Floats<4> products, square, products_of_low, rest;
  template <bool centred>
  __device__ __forceinline__ void add(const Parts& p, const Pairs& high, const Pairs& low) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Pairs projections{{p.first[i], p.second[i], p.first[i + 1], p.second[i + 1]}};
      mma_m16n8k16(products, projections, high[i], high[i + 1]);
      mma_m16n8k16(square, {{high[i], p.third[i], high[i + 1], p.third[i + 1]}}, high[i], high[i + 1]);
      if (!centred) continue;
      mma_m16n8k16(products_of_low, projections, low[i], low[i + 1]);
      mma_m16n8k16(rest, {{high[i], low[i], high[i + 1], low[i + 1]}}, low[i], low[i + 1]);
    }
  }
  // to (8,8): row j for all streams.
  template <bool centred>
  __device__ __forceinline__ void store(float* to, int g, int t) const {
    Floats<2> row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_diagonal = square[i];
      row[i] = products[i] + (products[i + 2] + square[i + 2]);
      if (centred) of_diagonal += 2 * rest[i] + rest[i + 2], row[i] += products_of_low[i] + products_of_low[i + 2];
      if (g == 2 * t + i) to[squares * at_once + g] = of_diagonal;
    }
    if (g != squares) crossply::store<2, Space::shared>(to + g * at_once + 2 * t, row);
  }
};

// The sums over a warp's columns of the streams x, and into shifts what is subtracted from them.
template <bool centred, int threads>
__device__ __forceinline__ void warp_products(float* to, float* shifts, const bf16* x, const Parts (&parts)[turns],
                                              int C) {
  const int warp = static_cast<int>(threadIdx.x / warp_size), lane = static_cast<int>(threadIdx.x % warp_size);
  const int g = lane / 4, t = lane % 4, first = warp * stretch + 8 * t;
  x += g * stride_of(C, threads);
  const uint32_t shift = centred ? shift_of(x + 8 * t, C) : 0;
  if (warp == 0 && t == 0) shifts[g] = first_of(shift);
  Sums sums = {};
#pragma unroll
  for (int k = 0; k < turns; ++k) {
    if (k * threads >= C) break;
    Pairs high = pairs_at(x + first + k * threads), low = {};
    if (centred) {
      const uint32_t by = k * threads < C - first ? shift : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) subtract(high[i], low[i], high[i], by);
    }
    sums.add<centred>(parts[k], high, low);
  }
  sums.store<centred>(to, g, t);
}

// A thread's coefficient: row j of the block's stream `own`.
template <int E>
struct Coefficient {
  int own, j;
  float constant = 0, scale = 0, offset = 0, per_column;
  __device__ __forceinline__ Coefficient(const DeviceReadPlan& plan, int64_t C)
      : own(static_cast<int>(threadIdx.x) / 8),
        j(static_cast<int>(threadIdx.x) % 8),
        per_column(1.f / static_cast<float>(C)) {
    if (own >= at_once || j >= E + 2) return;
    constant = static_part(plan, own % E, j, E), scale = scale_of(plan, j, E), offset = plan.offset[j];
  }
  // From the sums of so many warps for the streams from n on.
  template <int warps>
  __device__ __forceinline__ void set(float* first_column, const Array<float, at_once * 8>* sums, const float* shifts,
                                      const Read<bf16>& r, int streams, int n) const {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) sum += sums[warp][j * at_once + own];
    const int lane = static_cast<int>(threadIdx.x) % warp_size - j;
    const float square = __shfl_sync(~0u, sum, lane + squares) * per_column;
    const float mean = r.centred ? __shfl_sync(~0u, sum, lane + ones) * per_column : 0.f;  // of what is left
    if (j >= E + 2 || n + own >= streams) return;
    const float rstd = rsqrtf(square - mean * mean + r.eps), t = tanhf(sum * rstd + offset);
    float* stats = r.stats + static_cast<int64_t>(n + own) * (E + 4);
    stats[2 + j] = t;
    r.coef[static_cast<int64_t>(n + own) * (E + 2) + j] = constant + scale * t;
    if (j > 0) return;
    stats[0] = shifts[own] + mean, stats[1] = rstd;
    first_column[own] = constant + scale * t;
  }
};

// out of the tokens of streams n.., a share of the threads each.
template <int E, int threads>
__device__ __forceinline__ void mix(const Read<bf16>& r, const bf16* x, const float* first_column, int streams, int n) {
  constexpr int threads_of_token = threads * E / at_once;
  const int C = static_cast<int>(r.C), stride = stride_of(C, threads);
  const int token = static_cast<int>(threadIdx.x / threads_of_token);
  if (n + token * E >= streams) return;
  const Floats<E> a = load<E>(first_column + token * E);
  bf16* out = forgotten(r.out + static_cast<int64_t>(static_cast<uint32_t>(n) / E + token) * C);
  x += token * E * stride;
  for (int c = static_cast<int>(threadIdx.x % threads_of_token * 8); c < C; c += threads_of_token * 8) {
    Floats<8> sum = {};
#pragma unroll
    for (int i = 0; i < E; ++i) add_scaled(sum, a[i], load<8>(x + i * stride + c));
    store<8>(out + c, sum);
  }
}

template <int E, bool centred, int threads>
__global__ void __launch_bounds__(threads, max_threads / threads)
    hyper_read_mma_kernel(const Read<bf16> r, const DeviceReadPlan plan) {
  constexpr int warps = threads / warp_size;
  SHARED(sums, Array<Array<float, at_once * 8>, warps>);
  SHARED(shifts, Array<float, at_once>);
  SHARED(first_column, Array<Array<float, at_once>, 2>);
  const int warp = static_cast<int>(threadIdx.x / warp_size), lane = static_cast<int>(threadIdx.x % warp_size);
  const int C = static_cast<int>(r.C), size = at_once * stride_of(C, threads);
  const int streams = static_cast<int>(r.rows) * E, step = static_cast<int>(gridDim.x) * at_once;
  int n = static_cast<int>(blockIdx.x) * at_once;
  bf16* x = dynamic_shared<bf16>();
  clear<threads>(x, buffers * size);
#pragma unroll 1
  for (int stage = 0; stage < ahead; ++stage) fetch<threads>(x + stage * size, r, n + stage * step, streams, C);
  const Coefficient<E> coefficient(plan, C);
  Parts parts[turns];
#pragma unroll
  for (int k = 0; k < turns; ++k)
    parts[k] = parts_of(plan, lane / 4, E + 2, k * threads + warp * stretch + lane % 4 * 8, C);
  uint32_t stage = 0;
  const auto mix_before = [&] {
    mix<E, threads>(r, x + (stage - 1) % buffers * size, &first_column[(stage - 1) % 2][0], streams, n - step);
  };
#pragma unroll 1
  for (; n < streams; n += step, ++stage) {
    cp_async_wait<ahead - 1>();
    __syncthreads();  // also: those two before are mixed
    fetch<threads>(x + (stage + ahead) % buffers * size, r, n + ahead * step, streams, C);
    warp_products<centred, threads>(&sums[warp][0], &shifts[0], x + stage % buffers * size, parts, C);
    __syncthreads();
    if (coefficient.own < at_once)  // while the others mix
      coefficient.template set<warps>(&first_column[stage % 2][0], &sums[0], &shifts[0], r, streams, n);
    if (stage > 0) mix_before();
  }
  __syncthreads();
  mix_before();
}

template <int threads>
bool launch_read(const Read<bf16>& r, const DeviceReadPlan& plan) {
  // In 32 bits the kernel counts streams, and it has some shared memory of its own.
  const auto bytes = buffers * at_once * sizeof(bf16) * static_cast<size_t>(stride_of(static_cast<int>(r.C), threads));
  if (r.rows * r.E >= int64_t{1} << 30 || static_cast<int64_t>(bytes) > max_shared_bytes() - 8 * 1024) return false;
  const uint32_t blocks_at_once = 132 * max_threads / threads;  // that an H200 has room for
  launch({"hyper_read_mma", std::min(blocks_of(r.rows * r.E, at_once), blocks_at_once), threads, bytes},
         r.E == 2 ? (r.centred ? hyper_read_mma_kernel<2, true, threads> : hyper_read_mma_kernel<2, false, threads>)
                  : (r.centred ? hyper_read_mma_kernel<4, true, threads> : hyper_read_mma_kernel<4, false, threads>),
         r, plan);
  return true;
}

}  // namespace

bool read_on_tensor_cores(const Read<bf16>& r, const DeviceReadPlan& plan) {
  if (plan.projection == nullptr || r.C > max_mma_columns) return false;
  return r.C > max_mma_columns / 2 ? launch_read<max_threads>(r, plan) : launch_read<max_threads / 2>(r, plan);
}

}  // namespace crossply::hyper
