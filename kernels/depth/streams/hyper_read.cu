// The read of the hyper-connections and its backward: the part with the norm, the projections and the tanhs. The usual
// shapes in bf16 go through tensor cores: hyper_read_mma.cu and hyper_read_backward_mma.cu.
// Not yet run on hardware: only in the emulator.
#include "kernels/cuda/mma.cuh"
#include "kernels/depth/streams/hyper_read.cuh"

namespace crossply {

using namespace hyper;

namespace {

// Column j of (alpha_proj | beta_proj) at c.
template <class P>
__device__ P& projection_at(const HyperWeights<P*>& w, int64_t c, int j, int E) {
  return j <= E ? w.alpha_proj[c * (E + 1) + j] : w.beta_proj[c];
}

// A block for each j.
__global__ void hyper_plan_kernel(DeviceReadPlan plan, int E, int64_t C, bool centred) {
  SHARED(sums, Array<Array<float, 2>, warps>);
  const int j = static_cast<int>(blockIdx.x);
  float* p = plan.projection + j * C;
  float mean = 0, offset = 0;
  for (int64_t c = threadIdx.x; c < C; c += threads) {
    const float weight = projection_at(plan.w, c, j, E);
    if (plan.w.norm_bias != nullptr) offset += plan.w.norm_bias[c] * weight;
    p[c] = plan.w.norm_weight != nullptr ? plan.w.norm_weight[c] * weight : weight;
    mean += p[c];
  }
  mean = warp_sum(mean), offset = warp_sum(offset);
  Array<float, 2>& own = sums[threadIdx.x / warp_size];
  if (threadIdx.x % warp_size == 0) own[0] = mean, own[1] = offset;
  __syncthreads();
  mean = offset = 0;
  for (int warp = 0; warp < warps; ++warp) mean += sums[warp][0], offset += sums[warp][1];
  if (threadIdx.x == 0) plan.offset[j] = offset;
  if (!centred) return;
  mean /= static_cast<float>(C);
  for (int64_t c = threadIdx.x; c < C; c += threads) p[c] -= mean;
}

// d_k -= mean_k
template <int64_t count, int64_t width>
__device__ __forceinline__ void subtract(Array<Array<float, width>, count>& d, const float (&mean)[count]) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
#pragma unroll
    for (int l = 0; l < width; ++l) d[k][l] -= mean[k];
  }
}

// So many streams at once have room for their sums in registers.
template <int most>
constexpr int streams_at_once = most < 4 ? most : 4;

// -----------------------------------------------------------------------------------------------------------------
// Read. A block takes one token after the other. For many streams the arithmetic of the projections, E (E+2) products a
// column, takes about as long as the memory: so where 16-byte accesses fit, and two tokens fit into shared memory, each
// thread copies its columns of the next token there while the block computes with this one. Else they are read from
// where they are, for each pass.

constexpr int read_warps = 4;
constexpr int64_t columns_of_lane = 16;   // at least, in a block of fewer warps
constexpr int64_t max_ahead = 64 * 1024;  // bytes of both tokens: three or four blocks, and some for the L1 cache

// A token.
template <int most, int width, class S>
struct Token {
  static constexpr bool can_fetch = width * sizeof(S) == 16;
  const S* streams;  // (E,C), in device or shared memory

  static __device__ int64_t step() { return static_cast<int64_t>(blockDim.x) * width; }
  static __device__ __forceinline__ void fetch(S* to, const S* streams, int E, int64_t C) {
    if constexpr (can_fetch) {
      for (int64_t c = threadIdx.x * width; c < C; c += step()) {
#pragma unroll
        for (int i = 0; i < most; ++i)
          if (i < E) cp_async<16>(to + i * C + c, streams + i * C + c, true);
      }
      cp_async_commit();
    }
  }
  // Calls body(c, x) for a thread's columns c.. of all streams.
  template <class F>
  __device__ __forceinline__ void for_columns(int E, int64_t C, F&& body) const {
    for (int64_t c = threadIdx.x * width; c < C; c += step()) {
      Array<Packed<width, S>, most> x;
      load_streams<most, width>(x, streams + c, E, static_cast<int>(C));
      body(c, x);
    }
  }
};

// to[i] = the sum over the block's warps of from(warps,n). A barrier must come before and behind.
__device__ __forceinline__ void add_warps(float* to, const float* from, int n) {
  for (int e = static_cast<int>(threadIdx.x); e < n; e += static_cast<int>(blockDim.x)) {
    float sum = from[e];
#pragma unroll 1
    for (uint32_t warp = 1; warp < blockDim.x / warp_size; ++warp) sum += from[static_cast<int>(warp) * n + e];
    to[e] = sum;
  }
}

template <int exact, int width, class S>
__device__ __forceinline__ void read_token(const Read<S>& r, const DeviceReadPlan& plan,
                                           const Token<max_of<exact>, width, S>& token, int64_t n) {
  constexpr int most = max_of<exact>, count = streams_at_once<most>, row = most + 3;
  const int E = number_of_streams<exact>(r.E), J = E + 2, thread = static_cast<int>(threadIdx.x);
  const int64_t C = r.C;
  const bool centred = r.centred;
  SHARED(sums, Array<float, read_warps * most * row>);
  SHARED(products, Array<float, most * row>);
  SHARED(means, Array<float, most>);
  SHARED(first_column, Array<float, most>);  // A[i,0]
  const int warp = thread / warp_size;
  S* out = r.out + n * C;
  float *coef = r.coef + n * E * J, *stats = r.stats;
  if (thread < most) first_column[thread] = means[thread] = 0;
  __syncthreads();
  if (plan.projection != nullptr) {
    stats += n * E * (E + 4);
    float mean[most] = {};
    if (centred) {
      token.for_columns(E, C, [&](int64_t, auto& x) {
#pragma unroll
        for (int i = 0; i < most; ++i) {
          const Columns<width> in = floats(x[i]);
#pragma unroll
          for (int l = 0; l < width; ++l) mean[i] += in[l];
        }
      });
      store_warp_sums<most>(&sums[warp * most], mean);
      __syncthreads();
      add_warps(&means[0], &sums[0], most);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < most; ++i) mean[i] = means[i] / static_cast<float>(C);
    }
    // d . projection_j, and d . d behind them
#pragma unroll
    for (int i = 0; i < most; i += count) {
      float product[count * row] = {};
      token.for_columns(E, C, [&](int64_t c, auto& x) {
        Array<Columns<width>, count> d;
        float of_these[count];
#pragma unroll
        for (int k = 0; k < count; ++k) {
          d[k] = floats(x[i + k]);
          of_these[k] = mean[i + k];
        }
        if (centred) subtract(d, of_these);
#pragma unroll
        for (int k = 0; k < count; ++k) product[k * row + most + 2] += dot(d[k], d[k]);
#pragma unroll
        for (int j = 0; j < most + 2; ++j) {
          if (j >= J) continue;
          const Columns<width> p = load<width>(plan.projection + c + j * static_cast<int>(C));
#pragma unroll
          for (int k = 0; k < count; ++k) product[k * row + j] += dot(d[k], p);
        }
      });
      store_warp_sums<count * row>(&sums[(warp * most + i) * row], product);
    }
    __syncthreads();
    add_warps(&products[0], &sums[0], most * row);
    __syncthreads();
  }
  for (int e = thread; e < E * J; e += static_cast<int>(blockDim.x)) {
    const int i = e / J, j = e % J;
    float value = static_part(plan, i, j, E);
    if (plan.projection != nullptr) {
      const float rstd = rsqrtf(products[i * row + most + 2] / static_cast<float>(C) + r.eps);
      const float t = tanhf(products[i * row + j] * rstd + plan.offset[j]);
      stats[i * (E + 4) + 2 + j] = t;
      if (j == 0) stats[i * (E + 4)] = means[i] / static_cast<float>(C), stats[i * (E + 4) + 1] = rstd;
      value += scale_of(plan, j, E) * t;
    }
    coef[e] = value;
    if (j == 0) first_column[i] = value;
  }
  __syncthreads();
  token.for_columns(E, C, [&](int64_t c, auto& x) {
    Columns<width> sum = {};
#pragma unroll
    for (int i = 0; i < most; ++i) add_scaled(sum, first_column[i], floats(x[i]));
    store<width>(out + c, sum);
  });
}

// ahead: elements of a token in dynamic shared memory, which has room for two; 0: none.
template <int exact, int width, class S>
__global__ void __launch_bounds__(read_warps* warp_size, 4)
    hyper_read_forward_kernel(const Read<S> r, const DeviceReadPlan plan, int ahead) {
  using Of = Token<max_of<exact>, width, S>;
  const int E = number_of_streams<exact>(r.E);
  const int64_t size = E * r.C;
  S *now = dynamic_shared<S>(), *next = now + ahead;
  if (ahead > 0) Of::fetch(now, r.streams + blockIdx.x * size, E, r.C);
#pragma unroll 1
  for (int64_t n = blockIdx.x; n < r.rows; n += gridDim.x) {
    Of token{r.streams + n * size};
    if (ahead > 0) {
      cp_async_wait<0>();
      token = {now};
      if (n + gridDim.x < r.rows) Of::fetch(next, r.streams + (n + gridDim.x) * size, E, r.C);
    }
    read_token<exact, width>(r, plan, token, n);
    __syncthreads();  // what is shared is the next token's
    S* before = now;
    now = next, next = before;
  }
}

// -----------------------------------------------------------------------------------------------------------------
// The read's backward. A block takes four tokens at a time: first two warps each, for all that is summed over columns;
// then a thread the same columns of all of them, so that sums over tokens stay in registers. In between the streams are
// in the caches: of more tokens they would not be, as there are two blocks on a multiprocessor. Memory and the
// arithmetic of the projections, 3 E (E+2) products a column, take about as long.

constexpr int group = 4, warps_of_token = warps / group;

// What the second part needs of a stream, in shared memory: k_j = rstd q_j, then mean, A[i,0] and along.
template <int most>
struct StreamRow {
  static constexpr int size = (most + 2 + 3 + 3) / 4 * 4, mean = most + 2, a = most + 3, along = most + 4;
};
// A warp's sums over its columns of a token, in shared memory: for each stream d . projection_j for j < E+2, then
// d . dout, which lacks what the mean takes from x . dout; in the end the sum of dout.
template <int most>
struct ProductLayout {
  static constexpr int row = most + 3, total = most * row, size = total + 1;
};

// Products for every second part of `width` columns of token n, `part` the first of them.
template <int exact, int width, bool dynamic, class S>
__device__ __forceinline__ void token_products(float* products, const ReadBackward<S>& b, const DeviceReadPlan& plan,
                                               int64_t n, int part) {
  constexpr int most = max_of<exact>, count = streams_at_once<most>, row = ProductLayout<most>::row;
  const int E = number_of_streams<exact>(b.E);
  const S *x = b.streams + n * E * b.C, *dout = b.dout + n * b.C;
#pragma unroll
  for (int i = 0; i < most; i += count) {
    float sums[count * row + 1] = {}, mean[count];
#pragma unroll
    for (int k = 0; k < count; ++k) mean[k] = b.centred && i + k < E ? b.stats[(n * E + i + k) * (E + 4)] : 0.f;
    for (int64_t c = (part * warp_size + threadIdx.x) * width; c < b.C; c += warps_of_token * warp_size * width) {
      Array<Packed<width, S>, count> raw = {};
#pragma unroll
      for (int k = 0; k < count; ++k)
        if (i + k < E) raw[k] = load_packed<width>(x + (i + k) * b.C + c);
      const Columns<width> dy = load<width>(dout + c);
      Array<Columns<width>, count> d;
#pragma unroll
      for (int k = 0; k < count; ++k) d[k] = floats(raw[k]);
      if (b.centred) subtract(d, mean);
#pragma unroll
      for (int k = 0; k < count; ++k) sums[k * row + most + 2] += dot(d[k], dy);
#pragma unroll
      for (int l = 0; l < width; ++l) sums[count * row] += dy[l];
      if constexpr (dynamic) {
#pragma unroll
        for (int j = 0; j < most + 2; ++j) {
          if (j >= E + 2) continue;
          const Columns<width> p = load<width>(plan.projection + j * b.C + c);
#pragma unroll
          for (int k = 0; k < count; ++k) sums[k * row + j] += dot(d[k], p);
        }
      }
    }
    store_warp_sums<count * row + 1>(products + i * row, sums);  // the total goes where the next streams' sums begin
    __syncwarp();
  }
}

// The rest of the first part for token n: k(most,StreamRow) for the second, values(3,E,E+2) for the sums over tokens.
template <int exact, bool dynamic, class S>
__device__ __forceinline__ void token_values(float* k, float* values, float* products, const ReadBackward<S>& b,
                                             const DeviceReadPlan& plan, int64_t n) {
  using Row = StreamRow<max_of<exact>>;
  using P = ProductLayout<max_of<exact>>;
  const int E = number_of_streams<exact>(b.E), J = E + 2, lane = static_cast<int>(threadIdx.x);
  const float* stats = dynamic ? b.stats + n * E * (E + 4) : nullptr;
  for (int e = lane; e < P::size; e += warp_size)
    for (int part = 1; part < warps_of_token; ++part) products[e] += products[part * P::size + e];
  __syncwarp();
  for (int e = lane; e < E * J; e += warp_size) {
    const int i = e / J, j = e % J;
    const float* s = dynamic ? stats + i * (E + 4) : nullptr;
    const float mean = dynamic ? s[0] : 0.f, t = dynamic ? s[2 + j] : 0.f;
    float da = b.dcoef[(n * E + i) * J + j];
    if (j == 0) da += products[i * P::row + max_of<exact> + 2] + mean * products[P::total];
    values[e] = da;
    if (j == 0) k[i * Row::size + Row::a] = b.coef[(n * E + i) * J], k[i * Row::size + Row::mean] = mean;
    if (!dynamic) continue;
    const float q = scale_of(plan, j, E) * da * (1.f - t * t);
    values[E * J + e] = da * t;
    values[2 * E * J + e] = q;
    k[i * Row::size + j] = q * s[1];
  }
  if (!dynamic) return;
  __syncwarp();
  if (lane >= E) return;
  float along = 0;
  for (int j = 0; j < J; ++j) along += k[lane * Row::size + j] * products[lane * P::row + j];
  const float rstd = stats[lane * (E + 4) + 1];
  k[lane * Row::size + Row::along] = along * rstd * rstd / static_cast<float>(b.C);
}

// The second part at columns c.. of tokens n..: dx_i = or += A[i,0] dout + sum_j k_j projection_j - along (x_i - mean),
// and what sum_n,i k_j (x_i - mean) grows by.
template <int exact, int width, bool dynamic, class S>
__device__ __forceinline__ void column_gradients(float* sums /*(E+2,C)*/, const float* k, const ReadBackward<S>& b,
                                                 const DeviceReadPlan& plan, int64_t n, int tokens, int64_t c,
                                                 bool first) {
  constexpr int most = max_of<exact>;
  using Row = StreamRow<most>;
  const int E = number_of_streams<exact>(b.E);
  Array<Columns<width>, most + 2> projection = {}, dprojection = {};
#pragma unroll
  for (int j = 0; j < most + 2; ++j)
    if (dynamic && j < E + 2) projection[j] = load<width>(plan.projection + j * b.C + c);
  const int C = static_cast<int>(b.C);
  const S *streams = b.streams + n * E * C + c, *dout = b.dout + n * C + c;
  S* dstreams = b.dstreams + n * E * C + c;
#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    Array<Packed<width, S>, most> x = {}, before = {};
    if (dynamic) load_streams<most, width>(x, streams, E, C);
    const Columns<width> dy = load<width>(dout);
    if (b.accumulate) load_streams<most, width>(before, dstreams, E, C);
    Array<Columns<width>, most> d;
#pragma unroll
    for (int i = 0; i < most; ++i) d[i] = floats(x[i]);
    if (b.centred) {
      float mean[most];
#pragma unroll
      for (int i = 0; i < most; ++i) mean[i] = k[i * Row::size + Row::mean];
      subtract(d, mean);
    }
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= E) continue;
      const Floats<Row::size> of = load<Row::size>(k + i * Row::size);
      Columns<width> g = floats(before[i]);
      add_scaled(g, of[Row::a], dy);
      if constexpr (dynamic) {
        add_scaled(g, -of[Row::along], d[i]);
#pragma unroll
        for (int j = 0; j < most + 2; ++j) {
          if (j >= E + 2) continue;
          add_scaled(g, of[j], projection[j]);
          add_scaled(dprojection[j], of[j], d[i]);
        }
      }
      store<width>(dstreams + i * C, g);
    }
    k += most * Row::size, streams += E * C, dout += C, dstreams += E * C;
  }
#pragma unroll
  for (int j = 0; j < most + 2; ++j)
    if (dynamic && j < E + 2) store_or_accumulate<width, Space::any>(sums + j * b.C + c, dprojection[j], !first);
}

template <int exact, bool wide, bool dynamic, class S>
__global__ void __launch_bounds__(threads, max_of<exact> == 8 ? 1 : 2)
    hyper_read_backward_kernel(ReadBackward<S> b, DeviceReadPlan plan) {
  constexpr int most = max_of<exact>, max_values = most * (most + 2);
  constexpr int width = wide ? 4 : 1, first_width = width_with_sums<exact, wide, S>;
  SHARED(rows_of_k, Array<float, group * most * StreamRow<most>::size>);
  SHARED(values_of, Array<Array<float, 3 * max_values>, group>);
  SHARED(products_of, Array<Array<float, warps_of_token * ProductLayout<most>::size>, group>);
  const int E = number_of_streams<exact>(b.E), values = (dynamic ? 3 : 1) * E * (E + 2);
  float *k = &rows_of_k[0], *partial = b.partial + blockIdx.x * b.row;
  float* sums = b.sums_in_shared ? dynamic_shared<float>() : partial + head_size(E);
  const int warp = static_cast<int>(threadIdx.y), thread = static_cast<int>(warp * warp_size + threadIdx.x);
  const int of_warp = warp / warps_of_token, part = warp % warps_of_token;  // its token
  float* products = &products_of[of_warp][0];
  float total[(3 * max_values + threads - 1) / threads] = {};  // of values thread, thread + threads, ...
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * group; n < b.rows; n += static_cast<int64_t>(gridDim.x) * group) {
    const int tokens = static_cast<int>(b.rows - n < group ? b.rows - n : group);
    if (of_warp < tokens)
      token_products<exact, first_width, dynamic>(products + part * ProductLayout<most>::size, b, plan, n + of_warp,
                                                  part);
    __syncthreads();  // also: the tokens before are done
    if (of_warp < tokens && part == 0)
      token_values<exact, dynamic>(k + of_warp * most * StreamRow<most>::size, &values_of[of_warp][0], products, b,
                                   plan, n + of_warp);
    __syncthreads();
#pragma unroll
    for (int first = 0; first < 3 * max_values; first += threads)
      for (int t = 0; t < tokens && first + thread < values; ++t)
        total[first / threads] += values_of[t][first + thread];
    for (int64_t c = thread * width; c < b.C; c += threads * width)
      column_gradients<exact, width, dynamic>(sums, k, b, plan, n, tokens, c,
                                              n == static_cast<int64_t>(blockIdx.x) * group);
  }
#pragma unroll
  for (int first = 0; first < 3 * max_values; first += threads)
    if (first + thread < values) partial[first + thread] = total[first / threads];
  if (!b.sums_in_shared) return;
  __syncthreads();
  for (int64_t e = thread; e < b.row - head_size(E); e += threads) partial[head_size(E) + e] = sums[e];
}

// The parameters' gradients from a row of sums over all tokens, as in ReadBackward: a thread for each column, and the
// first block those without columns.
__global__ void hyper_finish_kernel(HyperWeights<float*> d, const float* sums, HyperWeights<const float*> w, int E,
                                    int64_t C) {
  const int J = E + 2, EJ = E * J;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (c < EJ) {
    const int i = static_cast<int>(c) / J, j = static_cast<int>(c) % J;
    if (j <= E && d.static_alpha != nullptr) d.static_alpha[i * (E + 1) + j] += sums[c];
    if (j > E && d.static_beta != nullptr) d.static_beta[i] += sums[c];
  }
  if (w.alpha_proj == nullptr) return;
  if (c < 2) {
    float* dscale = c == 0 ? d.alpha_scale : d.beta_scale;
    float sum = 0;
    for (int e = 0; e < EJ; ++e)
      if ((e % J <= E) == (c == 0)) sum += sums[EJ + e];
    if (dscale != nullptr) *dscale += sum;
  }
  if (c >= C) return;
  float dweight = 0, dbias = 0;
  for (int j = 0; j < J; ++j) {
    float along_xh = sums[head_size(E) + j * C + c], q = 0;
    for (int i = 0; i < E; ++i) q += sums[2 * EJ + i * J + j];
    const float weight = projection_at(w, c, j, E);
    dweight += weight * along_xh;
    dbias += weight * q;
    if (w.norm_weight != nullptr) along_xh *= w.norm_weight[c];
    if (w.norm_bias != nullptr) along_xh += w.norm_bias[c] * q;
    if ((j <= E ? d.alpha_proj : d.beta_proj) != nullptr) projection_at(d, c, j, E) += along_xh;
  }
  if (d.norm_weight != nullptr) d.norm_weight[c] += dweight;
  if (d.norm_bias != nullptr) d.norm_bias[c] += dbias;
}

// -----------------------------------------------------------------------------------------------------------------

constexpr int plan_slot = 1, total_slot = 2;

DeviceReadPlan plan_read(const HyperWeights<Tensor>& w, HyperNorm norm, int64_t E, int64_t C) {
  DeviceReadPlan plan{mapped(w, data_or_null<const float>), nullptr, nullptr};
  if (w.alpha_proj.data == nullptr) return plan;
  plan.projection = scratch<float>((E + 2) * (C + 1), plan_slot);
  plan.offset = plan.projection + (E + 2) * C;
  launch({"hyper_plan", static_cast<uint32_t>(E + 2), threads}, hyper_plan_kernel, plan, static_cast<int>(E), C,
         norm != HyperNorm::rmsnorm);
  return plan;
}

}  // namespace

void hyper_read_forward_cuda(const Tensor& out, const Tensor& coef, const Tensor& stats, const Tensor& streams,
                             const HyperWeights<Tensor>& w, HyperNorm norm, double eps, int64_t rows, int64_t E,
                             int64_t C) {
  const DeviceReadPlan plan = plan_read(w, norm, E, C);
  with_instance(out.dtype, E, C, {out.data, streams.data}, [&]<class S>(S, auto exact, auto wide) {
    constexpr int width = width_with_sums<exact, wide, S>;
    const Read<S> r{out.as<S>(), coef.as<float>(),    data_or_null<float>(stats), streams.as<S>(),           rows,
                    C,           static_cast<int>(E), static_cast<float>(eps),    norm != HyperNorm::rmsnorm};
    if constexpr (for_tensor_cores<exact, wide, S>)
      if (read_on_tensor_cores(r, plan)) return;
    const int64_t size = E * C, bytes = 2 * size * static_cast<int64_t>(sizeof(S));
    const bool fetches = Token<max_of<exact>, width, S>::can_fetch && bytes <= max_ahead;
    const uint32_t block_warps = std::min<uint32_t>(blocks_of(C, columns_of_lane * warp_size), read_warps);
    const int64_t at_once = 132 * 4 * read_warps / block_warps;  // blocks that an H200 has room for
    launch({"hyper_read_forward", static_cast<uint32_t>(fetches ? std::min(rows, at_once) : rows),
            block_warps * warp_size, fetches ? static_cast<size_t>(bytes) : 0},
           hyper_read_forward_kernel<exact, width, S>, r, plan, fetches ? static_cast<int>(size) : 0);
  });
}

void hyper_read_backward_cuda(const Grad& dstreams, const HyperWeights<Tensor>& d, const Tensor& dout,
                              const Tensor& dcoef, const Tensor& streams, const Tensor& coef, const Tensor& stats,
                              const HyperWeights<Tensor>& w, HyperNorm norm, int64_t rows, int64_t E, int64_t C) {
  const DeviceReadPlan plan = plan_read(w, norm, E, C);
  const ReadSums sums = read_sums(rows, E, C, plan.projection != nullptr);
  const int64_t row = sums.row;
  int64_t blocks = sums.blocks;
  const size_t shared = static_cast<size_t>(row - head_size(E)) * sizeof(float);
  const bool in_shared = shared <= 64 * 1024;  // and leave some for the L1 cache
  float *partial = scratch<float>(blocks * row), *total = scratch<float>(row, total_slot);
  with_instance(dstreams.dtype, E, C, {dstreams.data, dout.data, streams.data}, [&]<class S>(S, auto exact, auto wide) {
    const ReadBackward<S> b{dstreams.as<S>(),
                            dout.as<S>(),
                            dcoef.as<float>(),
                            streams.as<S>(),
                            coef.as<float>(),
                            data_or_null<float>(stats),
                            partial,
                            row,
                            rows,
                            C,
                            static_cast<int>(E),
                            plan.projection != nullptr && norm != HyperNorm::rmsnorm,
                            dstreams.accumulate,
                            in_shared};
    if constexpr (for_tensor_cores<exact, wide, S>)
      if (const int64_t used = read_backward_on_tensor_cores(b, plan, blocks); used > 0) {
        blocks = used;
        return;
      }
    auto kernel = plan.projection != nullptr ? hyper_read_backward_kernel<exact, wide, true, S>
                                             : hyper_read_backward_kernel<exact, wide, false, S>;
    launch({"hyper_read_backward", static_cast<uint32_t>(blocks), dim3(warp_size, warps), in_shared ? shared : 0},
           kernel, b, plan);
  });
  fill_device_memory(total, 0, static_cast<size_t>(row) * sizeof(float));
  add_rows(total, partial, blocks, row);
  launch({"hyper_finish", blocks_of(std::max(C, E * (E + 2)), threads), threads}, hyper_finish_kernel,
         mapped(d, data_or_null<float>), total, plan.w, static_cast<int>(E), C);
}

}  // namespace crossply
