// Not yet run on hardware: only in the emulator.
#include "kernels/depth/route.h"

#include <cmath>

#include "kernels/cuda/mma.cuh"

namespace crossply {
namespace {

// Read route_plain.cu first.
//
// Both directions are a sum over layers of small products: out[n,o,:] = sum_t sum_i W_t[o,i] * block_t[n,i,:]. The
// backward takes the transposed W, and the correlations of blocks for the gradients of W besides.
//
// Up to eight heads of bf16 go through tensor cores, in one kernel for each direction, which bytes bound: every block
// is read once. All else goes through float multiply-adds: with K heads an element of a block costs K of them, and as
// many again in the correlation, which is a kernel of its own. From about ten heads on they bound it.
constexpr int max_layers = 256, threads = 128;
constexpr int64_t shared_limit = 48 * 1024;

struct Terms {
  const float* weight[max_layers];  // W_t[0,0], or null: scale times the identity
  float scale[max_layers];
  int16_t layer[max_layers];  // of the slab
  int count, trained;         // the first `trained` ones have weights
  // Where W_t[o,i] is, seen from W_t[0,0]: at o * columns + i; or, if columns is 0, W_t is the transpose of a matrix
  // with (layer + 1) * K columns.
  __device__ int64_t at(int t, int64_t columns, int64_t K, int64_t o, int64_t i) const {
    return columns > 0 ? o * columns + i : i * (layer[t] + 1) * K + o;
  }
};

// -----------------------------------------------------------------------------------------------------------------
// In float. Heads are taken `heads` at a time, for which registers hold sums; the weights of heads beyond K are zero,
// and nothing is written for them.

// A thread's columns: `width` of token n from p * width on, for heads [first, first + heads).
struct HeadGroup {
  int64_t n, at;  // at: of the token's first head
  int first;
};
template <int heads, int width>
__device__ HeadGroup place_of(uint32_t item, int64_t K, int64_t D) {
  const auto vectors = static_cast<uint32_t>(D / width), groups = static_cast<uint32_t>((K + heads - 1) / heads);
  const uint32_t token = item / (vectors * groups), rest = item % (vectors * groups);
  return {token, token * K * D + rest % vectors * width, static_cast<int>(rest / vectors * heads)};
}

template <int count, int heads, int width, class S>
__device__ __forceinline__ void add_inputs(Floats<width> (&sum)[heads], const S* x, int64_t D, const float* coef,
                                           int64_t stride) {
  Floats<width> in[count];
#pragma unroll
  for (int j = 0; j < count; ++j) in[j] = load<width>(x + j * D);
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const Floats<heads> w = load<heads>(coef + j * stride);
#pragma unroll
    for (int h = 0; h < heads; ++h)
#pragma unroll
      for (int i = 0; i < width; ++i) sum[h][i] += w[h] * in[j][i];
  }
}

// In the plain kernels the K heads of a column are K threads, each of which loads all K inputs and a weight for every
// product. Here a thread has four or eight heads: an input, loaded once and 16 bytes at a time, goes into as many sums
// in registers, and weights come from shared memory. The caches serve that many times fewer loads.
//
// Some terms' weights at a time are in shared memory, [t][i][o]. Four inputs are loaded before the first is used.
template <int heads, int width, class S>
__global__ void __launch_bounds__(threads, 4) mix_kernel(S* out, const S* slab, const Terms terms, int terms_at_once,
                                                         int64_t columns, int64_t N, int64_t K, int64_t D) {
  float* coef = dynamic_shared<float>();
  const int64_t stride = (K + heads - 1) / heads * heads;  // (K, stride) a term
  const HeadGroup place = place_of<heads, width>(blockIdx.x * threads + threadIdx.x, K, D);
  Floats<width> sum[heads];
#pragma unroll
  for (int h = 0; h < heads; ++h)
#pragma unroll
    for (int i = 0; i < width; ++i) sum[h][i] = 0;
  for (int first = 0; first < terms.count; first += terms_at_once) {
    const int last = first + terms_at_once < terms.count ? first + terms_at_once : terms.count;
    if (first > 0) __syncthreads();
    for (int t = first; t < last; ++t) {
      const float* w = terms.weight[t];
      if (w == nullptr) continue;
      for (auto e = static_cast<uint32_t>(threadIdx.x); e < K * stride; e += threads) {
        const uint32_t i = e / static_cast<uint32_t>(stride), o = e % static_cast<uint32_t>(stride);
        coef[(t - first) * K * stride + e] = o < K ? w[terms.at(t, columns, K, o, i)] : 0.f;
      }
    }
    __syncthreads();
    if (place.n >= N) continue;
    for (int t = first; t < last; ++t) {
      const S* x = slab + terms.layer[t] * N * K * D + place.at;
      if (terms.weight[t] == nullptr) {
#pragma unroll
        for (int h = 0; h < heads; ++h) {
          if (place.first + h >= K) break;
          const Floats<width> in = load<width>(x + (place.first + h) * D);
#pragma unroll
          for (int i = 0; i < width; ++i) sum[h][i] += terms.scale[t] * in[i];
        }
        continue;
      }
      const float* w = coef + (t - first) * K * stride + place.first;
      int64_t i = 0;
      for (; i + 4 <= K; i += 4) add_inputs<4, heads, width>(sum, x + i * D, D, w + i * stride, stride);
      for (; i < K; ++i) add_inputs<1, heads, width>(sum, x + i * D, D, w + i * stride, stride);
    }
  }
  if (place.n >= N) return;
#pragma unroll
  for (int h = 0; h < heads; ++h)
    if (place.first + h < K) store<width>(out + place.at + (place.first + h) * D, sum[h]);
}

// The readers with weights.
struct RouterGradientTable {
  float* dweight[max_layers];  // W's element [0, layer * K], or null if not wanted
  int16_t layer[max_layers];
  int count;
};

// The plain kernel has K K threads for a reader's gradient, of which each adds up N D products: far too few for a GPU,
// and a sum so long that it needs double. Here blocks of 128 threads share out the tokens. A thread keeps the sums of a
// square of 4 x 4 or 8 x 8 heads in registers, and an element that it loads serves a row of them.
//
// partial[chunk, reader, h, i] = sum over the chunk's tokens and columns of dout_r[n,h,:] * own[n,i,:], for a square of
// heads x heads of them: block (reader and square, chunk). own comes from the L2 cache for all readers but one.
template <int heads, int width, class S>
__global__ void __launch_bounds__(threads, 3)
    correlate_kernel(float* partial, const S* slab, const S* dout, const RouterGradientTable readers, int layer,
                     int64_t N, int64_t K, int64_t D) {
  SHARED(sums, Array<Array<float, heads * heads>, threads / warp_size>);
  const auto groups = static_cast<int>((K + heads - 1) / heads);
  const int reader = static_cast<int>(blockIdx.x) % readers.count;
  const int square = static_cast<int>(blockIdx.x) / readers.count;
  const int first_h = square / groups * heads, first_i = square % groups * heads;
  const int64_t block = N * K * D;
  const S* own = slab + layer * block;
  const S* dy = readers.layer[reader] == layer ? dout : slab + readers.layer[reader] * block;
  const auto vectors = static_cast<uint32_t>(D / width);
  const int64_t items = N * vectors;
  float sum[heads * heads];
#pragma unroll
  for (int i = 0; i < heads * heads; ++i) sum[i] = 0;
  for (int64_t item = items * blockIdx.y / gridDim.y + threadIdx.x; item < items * (blockIdx.y + 1) / gridDim.y;
       item += threads) {
    const auto n = static_cast<uint32_t>(item) / vectors;
    const int64_t at = n * K * D + static_cast<uint32_t>(item) % vectors * width;
    Floats<width> x[heads];
#pragma unroll
    for (int i = 0; i < heads; ++i) x[i] = load_if<width>(first_i + i < K, own, at + (first_i + i) * D);
#pragma unroll
    for (int h = 0; h < heads; ++h) {
      if (first_h + h >= K) break;
      const Floats<width> y = load<width>(dy + at + (first_h + h) * D);
#pragma unroll
      for (int i = 0; i < heads; ++i)
#pragma unroll
        for (int c = 0; c < width; ++c) sum[h * heads + i] += y[c] * x[i][c];
    }
  }
  store_warp_sums<heads * heads>(sums[threadIdx.x / warp_size].x, sum);
  __syncthreads();
  const int e = threadIdx.x, h = first_h + e / heads, i = first_i + e % heads;
  if (e >= heads * heads || h >= K || i >= K) return;
  float total = 0;
  for (int w = 0; w < threads / warp_size; ++w) total += sums[w][e];
  partial[((static_cast<int64_t>(blockIdx.y) * readers.count + reader) * K + h) * K + i] = total;
}

// dweight of all readers += the chunks' sums.
__global__ void add_chunks_kernel(const RouterGradientTable readers, const float* partial, int64_t chunks, int64_t K) {
  const int64_t size = readers.count * K * K, e = static_cast<int64_t>(blockIdx.x) * warp_size + threadIdx.x;
  const float sum = sum_of_rows(partial, chunks, size, e);
  if (threadIdx.y > 0 || e >= size) return;
  const int64_t reader = e / (K * K), h = e / K % K, i = e % K;
  if (readers.dweight[reader] != nullptr) readers.dweight[reader][h * (readers.layer[reader] + 1) * K + i] += sum;
}

// -----------------------------------------------------------------------------------------------------------------
// On tensor cores, where multiply-adds cost next to nothing for so few heads and bytes are all that counts. One kernel
// does the mix and the correlation of a backward: each gradient is read once, where the plain kernels, and those in
// float above, read it for both. See the table of bytes in route.md.
//
// A warp takes 32 columns of a token's heads, two such stretches at a time. With g = lane / 4 and
// t = lane % 4, a lane loads columns 8t to 8t+7 of head g. Its register j, of columns 8t+2j and 8t+2j+1, is part
//   of a matrix (heads, 8 columns), as it is for the correlation, which sums over columns in any order;
//   of its transpose, with the heads as rows, after an exchange: for the mix, which sums over heads.
// The sums of the mix then are where the lane wants to store them. One instruction takes two terms: the heads of both
// as sixteen inputs of the mix, as sixteen rows of the correlation. The mix has sixteen rows for eight outputs: the
// weights rounded to bf16, and what the rounding left, so that weights have 16 bits.

constexpr int mma_warps = 8, mma_threads = mma_warps * warp_size, stretches = 2;

struct Exchange {
  uint32_t pair, result;
};
// Columns 2t and 2t+1 of row g of a matrix (8,8) of bf16 go, rows 2t and 2t+1 of column g come.
__device__ __forceinline__ uint32_t transposed(uint32_t pair CALL_SITE) {
#if CROSSPLY_CUDA
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
#else
  Exchange own{pair, 0};
  const auto combine = [](void* const* operands, uint32_t) {
    const auto at = [&](int row, int column) {
      return static_cast<const Exchange*>(operands[row * 4 + column / 2])->pair >> column % 2 * 16 & 0xFFFF;
    };
    for (int lane = 0; lane < warp_size; ++lane)
      static_cast<Exchange*>(operands[lane])->result = at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4)
                                                                                        << 16;
  };
  emulator::synchronize_warp(~0u, &own, combine, "movmatrix", site);
  return own.result;
#endif
}

// Pair p of the terms, as the left side of the mix.
__device__ __forceinline__ Pairs weights_of(const Terms& terms, int p, int lane, int64_t columns, int64_t K) {
  Pairs a;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float rounded[2], rest[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int t = 2 * p + j, o = lane / 4, i = lane % 4 * 2 + k;
      const float w = t < terms.trained && o < K && i < K ? terms.weight[t][terms.at(t, columns, K, o, i)] : 0.f;
      rounded[k] = first_of(pack(w, 0.f));
      rest[k] = fabsf(rounded[k]) < INFINITY ? w - rounded[k] : 0.f;
    }
    a[2 * j] = pack(rounded[0], rounded[1]), a[2 * j + 1] = pack(rest[0], rest[1]);
  }
  return a;
}

// Where a lane's columns of the warp's stretches are in a block, from unit u on; a unit is a stretch of a token.
struct Stretches {
  int64_t at[stretches];
  bool there[stretches];
  __device__ Stretches(int64_t u, int64_t N, int64_t K, int64_t D) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const auto units = static_cast<uint32_t>(D / warp_size);
#pragma unroll
    for (int s = 0; s < stretches; ++s) {
      const auto unit = static_cast<uint32_t>(u) + s, n = unit / units;
      at[s] = (n * K + lane / 4) * D + unit % units * warp_size + lane % 4 * 8;
      there[s] = n < N && lane / 4 < K;
    }
  }
  __device__ __forceinline__ Pairs load(const bf16* block, int s) const {
    return there[s] ? *reinterpret_cast<const Pairs*>(block + at[s]) : Pairs{};
  }
  __device__ __forceinline__ void store(bf16* block, int s, const Pairs& x) const {
    if (there[s]) *reinterpret_cast<Pairs*>(block + at[s]) = x;
  }
};

// Shared memory: the weights of all pairs of terms, (pairs, lanes); backward also every warp's correlations, (warps,
// pairs, lanes). There `layer` is the slab's block that is read for the last time and becomes dout, and partial
// (blocks, trained terms, K, K).
template <bool backward>
__global__ void __launch_bounds__(mma_threads, 2)
    mma_kernel(bf16* out, float* partial, bf16* slab, const bf16* dout, const Terms terms, int layer, int64_t columns,
               int64_t N, int64_t K, int64_t D) {
  const int pairs = (terms.trained + 1) / 2, lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  auto* weights = dynamic_shared<Pairs>();
  auto* all_sums = reinterpret_cast<Floats<4>*>(weights + pairs * warp_size);
  for (int e = static_cast<int>(threadIdx.x); e < pairs * warp_size; e += mma_threads)
    weights[e] = weights_of(terms, e / warp_size, lane, columns, K);
  Floats<4>* sums = all_sums + warp * pairs * warp_size + lane;
  for (int p = 0; backward && p < pairs; ++p) sums[p * warp_size] = Floats<4>{};
  __syncthreads();

  const int64_t block = N * K * D, units = N * (D / warp_size);
  const auto block_of_term = [&](int t) {
    return backward && terms.layer[t] == layer ? dout : slab + terms.layer[t] * block;
  };
  for (int64_t u = (static_cast<int64_t>(blockIdx.x) * mma_warps + warp) * stretches; u < units;
       u += static_cast<int64_t>(gridDim.x) * mma_warps * stretches) {
    const Stretches place(u, N, K, D);
    Floats<4> sum[stretches][4];
    Pairs own[stretches];
#pragma unroll
    for (int s = 0; s < stretches; ++s) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[s][j] = Floats<4>{};
      if (backward) own[s] = place.load(slab + layer * block, s);
    }
    const auto load_pair = [&](Pairs(&x)[2][stretches], int p) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int s = 0; s < stretches; ++s)
          x[j][s] = 2 * p + j < terms.trained ? place.load(block_of_term(2 * p + j), s) : Pairs{};
    };
    Pairs x[2][stretches];
    load_pair(x, 0);
    for (int p = 0; p < pairs; ++p) {
      Pairs next[2][stretches];
      load_pair(next, p + 1);  // asked for before the present ones are used
      const Pairs w = weights[p * warp_size + lane];
      if (backward) {
        Floats<4> d = sums[p * warp_size];
#pragma unroll
        for (int s = 0; s < stretches; ++s)
#pragma unroll
          for (int j = 0; j < 4; j += 2)
            mma_m16n8k16(d, {{x[0][s][j], x[1][s][j], x[0][s][j + 1], x[1][s][j + 1]}}, own[s][j], own[s][j + 1]);
        sums[p * warp_size] = d;
      }
#pragma unroll
      for (int s = 0; s < stretches; ++s)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t b0 = transposed(x[0][s][j]), b1 = transposed(x[1][s][j]);
          mma_m16n8k16(sum[s][j], w, b0, b1);
        }
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int s = 0; s < stretches; ++s) x[j][s] = next[j][s];
    }
    for (int t = terms.trained; t < terms.count; ++t) {
#pragma unroll
      for (int s = 0; s < stretches; ++s) {
        const Pairs plain = place.load(block_of_term(t), s);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[s][j][0] += terms.scale[t] * first_of(plain[j]);
          sum[s][j][1] += terms.scale[t] * second_of(plain[j]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < stretches; ++s) {
      if (backward) place.store(slab + layer * block, s, place.load(dout, s));  // before out, which may be dout
      Pairs result;
#pragma unroll
      for (int j = 0; j < 4; ++j) result[j] = pack(sum[s][j][0] + sum[s][j][2], sum[s][j][1] + sum[s][j][3]);
      place.store(out, s, result);
    }
  }
  if (!backward) return;
  __syncthreads();
  for (int64_t e = threadIdx.x; e < terms.trained * K * K; e += mma_threads) {
    const auto t = static_cast<int>(e / (K * K)), h = static_cast<int>(e / K % K), i = static_cast<int>(e % K);
    float total = 0;
    for (int w = 0; w < mma_warps; ++w)
      total += all_sums[(w * pairs + t / 2) * warp_size + h * 4 + i / 2][t % 2 * 2 + i % 2];
    partial[blockIdx.x * terms.trained * K * K + e] = total;
  }
}

// -----------------------------------------------------------------------------------------------------------------

void add_term(Terms& terms, const Router& router, int64_t layer, int64_t source, int64_t K) {
  const bool trained = router.weight.data != nullptr;
  int t = terms.count++;
  if (trained) {  // before those that are not
    for (; t > terms.trained; --t) {
      terms.weight[t] = terms.weight[t - 1];
      terms.scale[t] = terms.scale[t - 1];
      terms.layer[t] = terms.layer[t - 1];
    }
    ++terms.trained;
  }
  terms.weight[t] = trained ? router.weight.as<float>() + source * K : nullptr;
  terms.scale[t] = 1.f / static_cast<float>(router.sources.size());
  terms.layer[t] = static_cast<int16_t>(layer);
}

// Calls body(heads, width), constants.
template <class S, class F>
void with_heads(int64_t K, int64_t D, std::initializer_list<const void*> tensors, F&& body) {
  with_width<S>(D, tensors, [&](auto width) {
    if (K <= 4) body(std::integral_constant<int, 4>{}, width);
    else body(std::integral_constant<int, 8>{}, width);
  });
}

template <class S>
void mix(S* out, const S* slab, const Terms& terms, int64_t columns, int64_t N, int64_t K, int64_t D) {
  with_heads<S>(K, D, {out, slab}, [&](auto heads, auto width) {
    const int64_t groups = blocks_of(K, heads), items = N * groups * (D / width);
    const int64_t term_bytes = K * groups * heads * static_cast<int64_t>(sizeof(float));
    CHECK_THAT(items < int64_t{1} << 31 && term_bytes < max_shared_bytes() - 1024, "route: ", N, " tokens of ", K,
               " heads are too many for a GPU");
    const int64_t at_once = std::clamp<int64_t>(shared_limit / term_bytes, 1, terms.count);
    launch({"route_mix", blocks_of(items, threads), threads, static_cast<size_t>(at_once * term_bytes)},
           mix_kernel<heads, width, S>, out, slab, terms, static_cast<int>(at_once), columns, N, K, D);
  });
}

void add_chunks(const RouterGradientTable& readers, const float* partial, int64_t chunks, int64_t K) {
  launch({"route_add_chunks", blocks_of(readers.count * K * K, warp_size), dim3(warp_size, groups_of_rows)},
         add_chunks_kernel, readers, partial, chunks, K);
}

template <class S>
void correlate(const RouterGradientTable& readers, const S* slab, const S* dout, int layer, int64_t N, int64_t K,
               int64_t D) {
  with_heads<S>(K, D, {slab, dout}, [&](auto heads, auto width) {
    const int64_t items = N * (D / width), chunks = std::clamp<int64_t>(items / (8 * threads), 1, 512);
    const int64_t groups = blocks_of(K, heads);
    CHECK_THAT(items < int64_t{1} << 31, "route_backward: ", N, " tokens are too many for a GPU");
    float* partial = scratch<float>(max_sums(N, D) * readers.count * K * K);
    const dim3 grid(static_cast<uint32_t>(readers.count * groups * groups), static_cast<uint32_t>(chunks));
    launch({"route_correlate", grid, threads}, correlate_kernel<heads, width, S>, partial, slab, dout, readers, layer,
           N, K, D);
    add_chunks(readers, partial, chunks, K);
  });
}

// Whether tensor cores can do it: then launches the kernel and is true. columns, dout and readers as there.
template <bool backward>
bool mix_on_tensor_cores(const Tensor& out, const Tensor& slab, const Tensor& dout, const Terms& terms,
                         const RouterGradientTable& readers, int layer, int64_t columns, int64_t N, int64_t K,
                         int64_t D) {
  const int64_t pairs = (terms.trained + 1) / 2, units = N * (D / warp_size);
  const int64_t bytes = pairs * warp_size * int64_t{sizeof(Pairs)} * (backward ? 1 + mma_warps : 1);
  if (out.dtype != Dtype::bf16 || K > 8 || D % warp_size != 0 || !aligned16({out.data, slab.data, dout.data}) ||
      bytes > 96 * 1024 || units >= int64_t{1} << 31)
    return false;
  const int64_t blocks = std::clamp<int64_t>(units / (4 * mma_warps * stretches), 1, 528);
  float* partial = backward ? scratch<float>(max_sums(N, D) * terms.trained * K * K) : nullptr;
  launch({"route_mma", static_cast<uint32_t>(blocks), mma_threads, static_cast<size_t>(bytes)}, mma_kernel<backward>,
         out.as<bf16>(), partial, slab.as<bf16>(), backward ? dout.as<bf16>() : nullptr, terms, layer, columns, N, K,
         D);
  if (readers.count > 0) add_chunks(readers, partial, blocks, K);
  return true;
}

}  // namespace

void route_forward_cuda(const Tensor& out, const Tensor& slab, const Router& router, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(router.sources.size() <= max_layers, "route_forward: more than ", max_layers, " sources on a GPU");
  Terms terms;
  RouterGradientTable none;
  terms.count = terms.trained = none.count = 0;
  for (int s : router.sources) add_term(terms, router, s, s, K);
  const int64_t columns = router.weight.dim(1);
  if (mix_on_tensor_cores<false>(out, slab, Tensor{}, terms, none, -1, columns, N, K, D)) return;
  with_storage(out.dtype, [&]<class S>(S) { mix(out.as<S>(), slab.as<S>(), terms, columns, N, K, D); });
}

// In float the block's own layer becomes dout between its last use and the mix, so that dslice may be dout.
void route_backward_cuda(const Tensor& dslice, const Tensor& slab, const Tensor& dout,
                         const std::vector<Router>& routers, int layer, int64_t N, int64_t K, int64_t D) {
  CHECK_THAT(routers.size() <= max_layers, "route_backward: more than ", max_layers, " layers on a GPU");
  Terms terms;
  RouterGradientTable readers;
  terms.count = terms.trained = readers.count = 0;
  for (size_t r = static_cast<size_t>(layer); r < routers.size(); ++r) {
    const Router& router = routers[r];
    if (!std::binary_search(router.sources.begin(), router.sources.end(), layer)) continue;
    add_term(terms, router, static_cast<int64_t>(r), layer, K);
    if (router.weight.data == nullptr) continue;
    readers.dweight[readers.count] = router.dweight.data == nullptr ? nullptr : router.dweight.as<float>() + layer * K;
    readers.layer[readers.count++] = static_cast<int16_t>(r);
  }
  if (mix_on_tensor_cores<true>(dslice, slab, dout, terms, readers, layer, 0, N, K, D)) return;
  const float* none = nullptr;
  const bool wanted = std::count(readers.dweight, readers.dweight + readers.count, none) < readers.count;
  with_storage(dslice.dtype, [&]<class S>(S) {
    S* own = slab.as<S>() + layer * dout.numel();
    if (wanted) correlate(readers, slab.as<S>(), dout.as<S>(), layer, N, K, D);
    copy_on_device(own, dout.as<S>(), dout.bytes());
    mix(dslice.as<S>(), slab.as<S>(), terms, 0, N, K, D);
  });
}

}  // namespace crossply
