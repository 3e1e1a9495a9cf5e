// Not yet run on hardware: only in the emulator.
#include "kernels/depth/streams/mhc.h"

#include "kernels/block/matmul.cuh"
#include "kernels/depth/streams/hyper.cuh"

namespace crossply {

using namespace hyper;

namespace {

// The products with fn are cuBLASLt's. On a bf16 tape a float is the sum of two bf16 there, which keeps 16 of 24 bits:
// fn for the forward, the gradients of the logits for the backward. The rest is bound by memory: a block takes a few
// tokens, of whose streams what is needed a second time comes from the caches; in between, a thread has a token's
// coefficients in registers.

constexpr int threads = warps * warp_size, tokens_of_block = 16;
constexpr int max_rows = static_cast<int>(max_mhc_rows);
enum Slot { divisor_slot, factor_slot, product_slot, logits_slot, partial_slot };  // as in mhc_scratch

struct Form {
  Mixing mixing;
  int M, E, steps;  // of Sinkhorn's
  float eps, norm_eps;
};

// -----------------------------------------------------------------------------------------------------------------
// A token's coefficients, by one thread.

__device__ __forceinline__ float sigmoid(float x) { return logistic(x).s; }

// Of the first `count` of at(0) .. at(most - 1): with constants for i these may be registers.
template <int most, class At>
__device__ __forceinline__ void softmax_in_place(int count, At&& at) {
  float largest = at(0), sum = 0;
#pragma unroll
  for (int i = 1; i < most; ++i)
    if (i < count) largest = larger_or_nan(largest, at(i));
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < count) sum += at(i) = expf(at(i) - largest);
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < count) at(i) /= sum;
}
// From the gradient g of a softmax p to that of its logits.
template <int most, class At, class Of>
__device__ __forceinline__ void softmax_backward(int count, At&& g, Of&& p) {
  float along = 0;
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < count) along += g(i) * p(i);
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (i < count) g(i) = p(i) * (g(i) - along);
}

template <int exact>
struct Coefficients {
  static constexpr int most = max_of<exact>, max_permutations = static_cast<int>(permutations_of(max_permuted_streams));
  float pre[most], post[most], comb[most * most];
  const Form& form;
  float* divisors;  // a token's number i at [i * apart]; null in the forward
  int64_t apart;

  __device__ int E() const { return number_of_streams<exact>(form.E); }
  // Member i of row or column j, for a step of Sinkhorn's.
  static __device__ int at(int step, int j, int i) { return step % 2 == 0 ? i * most + j : j * most + i; }

  // l (M), of which a mixing by permutations makes a softmax.
  __device__ __forceinline__ void compute(float* l) {
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= E()) continue;
      pre[i] = sigmoid(l[i]) + form.eps;
      post[i] = form.mixing == Mixing::merge ? 0.f : 2.f * sigmoid(l[E() + i]);
#pragma unroll
      for (int k = 0; k < most; ++k) comb[k * most + i] = k == i ? 1.f : 0.f;
    }
    if (form.mixing == Mixing::sinkhorn) sinkhorn(l + 2 * E());
    if (form.mixing == Mixing::permutations) permutations(l + 2 * E());
  }
  __device__ __forceinline__ void sinkhorn(const float* l) {
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (k >= E()) continue;
#pragma unroll
      for (int i = 0; i < most; ++i) comb[k * most + i] = i < E() ? l[k * E() + i] : 0.f;
      softmax_in_place<most>(E(), [&](int i) -> float& { return comb[k * most + i]; });
#pragma unroll
      for (int i = 0; i < most; ++i) comb[k * most + i] += form.eps;
    }
    for (int pair = 0; pair < form.steps; pair += 2) {
      normalise<0>(pair);
      if (pair + 1 < form.steps) normalise<1>(pair + 1);
    }
  }
  template <int parity>
  __device__ __forceinline__ void normalise(int step) {
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j >= E()) continue;
      float sum = form.eps;
#pragma unroll
      for (int i = 0; i < most; ++i) sum += i < E() ? comb[at(parity, j, i)] : 0.f;
      const float inverse = 1.f / sum;
#pragma unroll
      for (int i = 0; i < most; ++i) comb[at(parity, j, i)] *= inverse;
      if (divisors != nullptr) divisors[(step * E() + j) * apart] = sum;
    }
  }
  __device__ __forceinline__ void permutations(float* l) {
    const int count = static_cast<int>(permutations_of(E()));
    softmax_in_place<max_permutations>(count, [&](int p) -> float& { return l[p]; });
#pragma unroll
    for (int i = 0; i < most; ++i) comb[i * most + i] = 0;
    for (int p = 0; p < count; ++p) for_targets(p, [&](int at) { comb[at] += l[p]; });
  }
  // Calls body(k * most + the target of k in permutation p), which for the compiler is a constant, for every stream k.
  template <class F>
  __device__ __forceinline__ void for_targets(int p, F&& body) const {
#pragma unroll
    for (int k = 0; k < most; ++k) {
      const int target = k < E() ? static_cast<int>(permuted(p, E(), k)) : -1;
#pragma unroll
      for (int i = 0; i < most; ++i)
        if (i == target) body(k * most + i);
    }
  }

  // dl from the gradients of pre and post to those of the logits; comb's, g, go to its rest. l: as compute() left it.
  __device__ __forceinline__ void backward(float* dl, float (&g)[most * most], const float* l) {
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= E()) continue;
      dl[i] *= (pre[i] - form.eps) * (1.f + form.eps - pre[i]);
      if (form.mixing != Mixing::merge) dl[E() + i] *= post[i] * (2.f - post[i]) * 0.5f;
    }
    if (form.mixing == Mixing::sinkhorn) sinkhorn_backward(dl + 2 * E(), g);
    if (form.mixing == Mixing::permutations) permutations_backward(dl + 2 * E(), g, l + 2 * E());
  }
  __device__ __forceinline__ void sinkhorn_backward(float* dl, float (&g)[most * most]) {
    for (int pair = form.steps - 1; pair >= 0; pair -= 2) {  // the last step is over columns
      undo<0>(g, pair);
      if (pair > 0) undo<1>(g, pair - 1);
    }
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (k >= E()) continue;
      softmax_backward<most>(
          E(), [&](int i) -> float& { return g[k * most + i]; }, [&](int i) { return comb[k * most + i] - form.eps; });
#pragma unroll
      for (int i = 0; i < most; ++i)
        if (i < E()) dl[k * E() + i] = g[k * most + i];
    }
  }
  template <int parity>
  __device__ __forceinline__ void undo(float (&g)[most * most], int step) {
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j >= E()) continue;
      const float d = divisors[(step * E() + j) * apart], inverse = 1.f / d;
      float along = 0;
#pragma unroll
      for (int i = 0; i < most; ++i) along += i < E() ? g[at(parity, j, i)] * comb[at(parity, j, i)] : 0.f;
#pragma unroll
      for (int i = 0; i < most; ++i) {
        g[at(parity, j, i)] = (g[at(parity, j, i)] - along) * inverse;
        comb[at(parity, j, i)] *= d;
      }
    }
  }
  __device__ __forceinline__ void permutations_backward(float* dl, const float (&g)[most * most], const float* l) {
    const int count = static_cast<int>(permutations_of(E()));
    for (int p = 0; p < count; ++p) {
      float sum = 0;
      for_targets(p, [&](int at) { sum += g[at]; });
      dl[p] = sum;
    }
    softmax_backward<max_permutations>(
        count, [&](int p) -> float& { return dl[p]; }, [&](int p) { return l[p]; });
  }
};

// -----------------------------------------------------------------------------------------------------------------

template <class S>
struct Kernel {
  MhcRead<S*, float*> t;
  MhcWeights<const float*> w;
  Form form;
  int64_t rows, C;
  // Of the products with fn, or of their gradients: `parts` of `stride` numbers a token.
  float* products;
  int parts;
  int64_t stride;

  __device__ int tokens(int64_t first) const {
    return static_cast<int>(rows - first < tokens_of_block ? rows - first : tokens_of_block);
  }
  __device__ float logit(int64_t n, int m) const {
    return w.scale[mhc_group(m, form.E)] * t.z[n * form.M + m] + w.base[m];
  }
};

// A warp's token n: rho and z from the products.
template <int width, class S>
__device__ __forceinline__ void norm_products(const Kernel<S>& a, int64_t n) {
  const int64_t EC = a.form.E * a.C;
  const S* x = a.t.streams + n * EC;
  float squares = 0;
  if (a.t.squares != nullptr) {
    squares = a.t.squares[n];
  } else {
    for (int64_t e = threadIdx.x * width; e < EC; e += warp_size * width) {
      const Columns<width> v = load<width>(x + e);
      squares += dot(v, v);
    }
    squares = warp_sum(squares);
  }
  const float rho = rsqrtf(squares / static_cast<float>(EC) + a.form.norm_eps);
  if (threadIdx.x == 0) a.t.rho[n] = rho;
  for (int m = static_cast<int>(threadIdx.x); m < a.form.M; m += warp_size) {
    float z = 0;
    for (int part = 0; part < a.parts; ++part) z += a.products[(n * a.parts + part) * a.stride + m];
    a.t.z[n * a.form.M + m] = rho * z;
  }
}

template <int exact, class S>
__device__ __forceinline__ void store_coefficients(const Kernel<S>& a, const Coefficients<exact>& of, int64_t n) {
  const int E = of.E();
#pragma unroll
  for (int k = 0; k < of.most; ++k) {
    if (k >= E) continue;
    a.t.pre[n * E + k] = of.pre[k];
    if (a.t.coef == nullptr) continue;
    float* row = a.t.coef + (n * E + k) * (E + 2);
    row[0] = of.pre[k], row[E + 1] = of.post[k];
#pragma unroll
    for (int i = 0; i < of.most; ++i)
      if (i < E) row[1 + i] = of.comb[k * of.most + i];
  }
}

template <int exact, int width, class S>
__global__ void mhc_read_forward_kernel(const Kernel<S> a) {
  SHARED(logits, Array<Array<float, max_rows>, tokens_of_block>);
  const int E = number_of_streams<exact>(a.form.E), M = a.form.M, thread = threadIdx.y * warp_size + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_of_block;
  const int tokens = a.tokens(first);
  for (int token = static_cast<int>(threadIdx.y); token < tokens; token += warps) {
    norm_products<width>(a, first + token);
    __syncwarp();
    for (int m = static_cast<int>(threadIdx.x); m < M; m += warp_size) logits[token][m] = a.logit(first + token, m);
  }
  __syncthreads();
  if (thread < tokens) {
    Coefficients<exact> of{{}, {}, {}, a.form, nullptr, 0};
    of.compute(&logits[thread][0]);
    store_coefficients(a, of, first + thread);
  }
  __syncthreads();
  if (a.t.out == nullptr) return;
  for (int token = static_cast<int>(threadIdx.y); token < tokens; token += warps) {
    const int64_t n = first + token;
    const float* pre = a.t.pre + n * E;
    for (int64_t c = threadIdx.x * width; c < a.C; c += warp_size * width) {
      Columns<width> sum = {};
#pragma unroll
      for (int i = 0; i < max_of<exact>; ++i)
        if (i < E) add_scaled(sum, pre[i], load<width>(a.t.streams + (n * E + i) * a.C + c));
      store<width>(a.t.out + n * a.C + c, sum);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Backward.

template <class S>
struct Backward {
  Kernel<S> a;
  S* dstreams;
  bool add_streams;
  const S* dout;
  const float* dcoef;
  float *divisors, *partial, *along;  // (steps E, rows), (blocks, 2 M), (rows)
};

// A warp's token: dots (E) with dout, where there is one.
template <int exact, int width, class S>
__device__ __forceinline__ void stream_dots(float* dots, const Backward<S>& b, int64_t n) {
  const int E = number_of_streams<exact>(b.a.form.E);
  float sums[max_of<exact>] = {};
  for (int64_t c = threadIdx.x * width; c < b.a.C && b.dout != nullptr; c += warp_size * width) {
    const Columns<width> dy = load<width>(b.dout + n * b.a.C + c);
#pragma unroll
    for (int i = 0; i < max_of<exact>; ++i)
      if (i < E) sums[i] += dot(dy, load<width>(b.a.t.streams + (n * E + i) * b.a.C + c));
  }
  store_warp_sums<max_of<exact>>(dots, sums);
}

// A thread's token, whose dots are in dl: all of dl, and what the products with fn are to be multiplied with.
template <int exact, class S>
__device__ __forceinline__ void token_gradients(float* dl, float* l, const Backward<S>& b, int64_t n) {
  constexpr int most = max_of<exact>;
  const Form& form = b.a.form;
  const int E = number_of_streams<exact>(form.E), M = form.M;
  for (int m = 0; m < M; ++m) l[m] = b.a.logit(n, m);
  Coefficients<exact> of{{}, {}, {}, form, b.divisors + n, b.a.rows};
  of.compute(l);
  float g[most * most] = {};
#pragma unroll
  for (int k = 0; k < most; ++k) {
    if (k >= E || b.dcoef == nullptr) continue;
    const float* row = b.dcoef + (n * E + k) * (E + 2);
    dl[k] += row[0], dl[E + k] = row[E + 1];
#pragma unroll
    for (int i = 0; i < most; ++i) g[k * most + i] = i < E ? row[1 + i] : 0.f;
  }
  of.backward(dl, g, l);
  const float rho = b.a.t.rho[n];
  float along = 0;
  for (int m = 0; m < M; ++m) {
    const float dz = dl[m] * b.a.w.scale[mhc_group(m, E)];
    along += dz * b.a.t.z[n * M + m];
    b.a.products[n * b.a.stride + m] = rho * dz;
  }
  b.along[n] = along * rho * rho / static_cast<float>(E * b.a.C);
}

template <int exact, int width, class S>
__global__ void mhc_coefficients_backward_kernel(const Backward<S> b) {
  SHARED(gradients, Array<Array<float, max_rows>, tokens_of_block>);
  SHARED(logits, Array<Array<float, max_rows>, tokens_of_block>);
  const int M = b.a.form.M, thread = threadIdx.y * warp_size + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_of_block;
  const int tokens = b.a.tokens(first);
  for (int token = static_cast<int>(threadIdx.y); token < tokens; token += warps)
    stream_dots<exact, width>(&gradients[token][0], b, first + token);
  __syncthreads();
  if (thread < tokens) token_gradients<exact>(&gradients[thread][0], &logits[thread][0], b, first + thread);
  __syncthreads();
  if (thread >= M) return;
  float base = 0, scale = 0;
  for (int token = 0; token < tokens; ++token) {
    base += gradients[token][thread];
    scale += gradients[token][thread] * b.a.t.z[(first + token) * M + thread];
  }
  b.partial[static_cast<int64_t>(blockIdx.x) * 2 * M + thread] = base;
  b.partial[static_cast<int64_t>(blockIdx.x) * 2 * M + M + thread] = scale;
}

__global__ void mhc_scales_kernel(MhcWeights<float*> d, const float* sums, int M, int E) {
  for (int m = static_cast<int>(threadIdx.x); m < M && d.base != nullptr; m += warp_size) d.base[m] += sums[m];
  if (threadIdx.x > 2 || d.scale == nullptr) return;
  float sum = 0;
  for (int m = 0; m < M; ++m)
    if (mhc_group(m, E) == threadIdx.x) sum += sums[M + m];
  if (threadIdx.x < 2 ? M > static_cast<int>(threadIdx.x) * E : M > 2 * E) d.scale[threadIdx.x] += sum;
}

constexpr int tokens_of_tile = 64, tokens_at_once = 4;

// dstreams = or += pre dout + k fn - along x, in tiles of some tokens and, of E C, of 32 threads' columns, whose fn
// lies in shared memory; k is the products.
template <int width, class S>
__global__ void mhc_streams_backward_kernel(const Backward<S> b) {
  float* fn = dynamic_shared<float>();  // (M, columns)
  constexpr int columns = warp_size * width;
  const int E = b.a.form.E, M = b.a.form.M, EC = static_cast<int>(E * b.a.C);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * tokens_of_tile;
  const int64_t end = b.a.rows - first < tokens_of_tile ? b.a.rows : first + tokens_of_tile;
  const int tile = static_cast<int>(blockIdx.x) * columns, e = tile + static_cast<int>(threadIdx.x) * width;
  for (int i = threadIdx.y * warp_size + threadIdx.x; i < M * columns; i += threads)
    fn[i] = tile + i % columns < EC ? b.a.w.fn[static_cast<int64_t>(i / columns) * EC + tile + i % columns] : 0.f;
  __syncthreads();
  if (e >= EC) return;
  const int stream = e / static_cast<int>(b.a.C), c = e % static_cast<int>(b.a.C);
  for (int64_t n = first + threadIdx.y * tokens_at_once; n < end; n += warps * tokens_at_once) {
    Columns<width> sums[tokens_at_once] = {};
    for (int m = 0; m < M; ++m) {
      const Columns<width> of_fn = load<width>(fn + m * columns + threadIdx.x * width);
#pragma unroll
      for (int i = 0; i < tokens_at_once; ++i)
        if (n + i < end) add_scaled(sums[i], b.a.products[(n + i) * b.a.stride + m], of_fn);
    }
#pragma unroll
    for (int i = 0; i < tokens_at_once; ++i) {
      if (n + i >= end) continue;
      if (b.dout != nullptr)
        add_scaled(sums[i], b.a.t.pre[(n + i) * E + stream], load<width>(b.dout + (n + i) * b.a.C + c));
      const int64_t at = (n + i) * EC + e;
      add_scaled(sums[i], -b.along[n + i], load<width>(b.a.t.streams + at));
      store_or_accumulate<width>(b.dstreams + at, sums[i], b.add_streams);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Rows of `columns` floats, of which `width` are there, as the sum of two bf16, the second `apart` behind the first.
struct SplitShape {
  int64_t columns, width, from_stride, to_stride, apart;
};
__global__ void split_kernel(bf16* to, const float* from, SplitShape z, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  const int64_t r = i / z.columns, c = i % z.columns;
  const float x = c < z.width ? from[r * z.from_stride + c] : 0.f;
  bf16 high, low;
  from_float(high, x);
  from_float(low, x - to_float(high));
  to[r * z.to_stride + c] = high, to[r * z.to_stride + z.apart + c] = low;
}

__global__ void add_halves_kernel(float* to, const float* from, int64_t apart, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i < n) to[i] += from[i] + from[apart + i];
}

template <class S>
Kernel<S> kernel_of(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form, int64_t rows, int64_t E,
                    int64_t C) {
  const int M = static_cast<int>(mhc_rows(form.mixing, E));
  const auto of = [](const Tensor& tensor) { return data_or_null<float>(tensor); };
  return {{t.streams.as<S>(), of(t.squares), data_or_null<S>(t.out), of(t.coef), of(t.pre), of(t.z), of(t.rho)},
          mapped(w, data_or_null<const float>),
          {form.mixing, M, static_cast<int>(E), static_cast<int>(sinkhorn_steps(form.iterations)),
           static_cast<float>(form.eps), static_cast<float>(form.norm_eps)},
          rows,
          C,
          nullptr,
          1,
          M};
}

// products = streams fn^T, in float or in two parts of bf16.
template <class S>
void multiply_by_fn(Kernel<S>& a, const Tensor& streams, const Tensor& fn) {
  const int64_t M = a.form.M, EC = a.form.E * a.C;
  const bool split = streams.dtype == Dtype::bf16;
  a.parts = split ? 2 : 1, a.stride = split ? mhc_stride(M) : M;
  const int64_t columns = a.parts * a.stride;
  a.products = scratch<float>(a.rows * columns, product_slot);
  Matrix factor{fn.data, Dtype::f32, EC};
  if (split) {
    bf16* parts = scratch<bf16>(columns * EC, factor_slot);
    fill_device_memory(parts, 0, static_cast<size_t>(columns * EC) * sizeof(bf16));
    launch_elementwise("mhc_split", M * EC, 1, split_kernel, parts, fn.as<float>(),
                       SplitShape{EC, EC, EC, EC, a.stride * EC});
    factor = {parts, Dtype::bf16, EC};
  }
  multiply({a.products, Dtype::f32, columns}, {streams.data, streams.dtype, EC}, transposed(factor),
           {a.rows, columns, EC}, nullptr);
}

// dfn += products^T streams.
template <class S>
void add_to_fn(const Tensor& dfn, const Kernel<S>& a, const Tensor& streams) {
  const int64_t M = a.form.M, EC = a.form.E * a.C;
  const Matrix x{streams.data, streams.dtype, EC};
  if (streams.dtype == Dtype::f32) {
    multiply({dfn.data, Dtype::f32, EC}, transposed({a.products, Dtype::f32, M}), x, {M, EC, a.rows}, dfn.data);
    return;
  }
  const int64_t P = mhc_stride(M);
  bf16* parts = scratch<bf16>(2 * a.rows * P, factor_slot);
  launch_elementwise("mhc_split", a.rows * P, 1, split_kernel, parts, a.products, SplitShape{P, M, M, 2 * P, P});
  float* halves = scratch<float>(2 * P * EC, logits_slot);
  multiply({halves, Dtype::f32, EC}, transposed({parts, Dtype::bf16, 2 * P}), x, {2 * P, EC, a.rows}, nullptr);
  launch_elementwise("mhc_add_halves", M * EC, 1, add_halves_kernel, dfn.as<float>(), halves, P * EC);
}

}  // namespace

void mhc_read_forward_cuda(const MhcRead<Tensor>& t, const MhcWeights<Tensor>& w, const MhcForm& form, int64_t rows,
                           int64_t E, int64_t C) {
  with_instance(t.streams.dtype, E, C, {t.out.data, t.streams.data}, [&]<class S>(S, auto exact, auto wide) {
    Kernel<S> a = kernel_of<S>(t, w, form, rows, E, C);
    multiply_by_fn(a, t.streams, w.fn);
    launch({"mhc_read_forward", blocks_of(rows, tokens_of_block), dim3(warp_size, warps)},
           mhc_read_forward_kernel<exact, width_with_sums<exact, wide, S>, S>, a);
  });
}

void mhc_read_backward_cuda(const MhcGradients& g, const MhcWeights<Tensor>& d, const MhcRead<Tensor>& t,
                            const MhcWeights<Tensor>& w, const MhcForm& form, int64_t rows, int64_t E, int64_t C) {
  const uint32_t blocks = blocks_of(rows, tokens_of_block);
  with_instance(
      g.dstreams.dtype, E, C, {g.dout.data, g.dstreams.data, t.streams.data}, [&]<class S>(S, auto exact, auto wide) {
        constexpr int width = width_with_sums<exact, wide, S>;
        Kernel<S> a = kernel_of<S>(t, w, form, rows, E, C);
        const int64_t M = a.form.M;
        a.products = scratch<float>(rows * M, product_slot);
        float *partial = scratch<float>((blocks + 1) * 2 * M + rows, partial_slot), *total = partial + blocks * 2 * M;
        const Backward<S> b{a,
                            g.dstreams.as<S>(),
                            g.dstreams.accumulate,
                            data_or_null<S>(g.dout),
                            data_or_null<float>(g.dcoef),
                            scratch<float>(rows * a.form.steps * E, divisor_slot),
                            partial,
                            total + 2 * M};
        launch({"mhc_coefficients_backward", blocks, dim3(warp_size, warps)},
               mhc_coefficients_backward_kernel<exact, width, S>, b);
        fill_device_memory(total, 0, static_cast<size_t>(2 * M) * sizeof(float));
        add_rows(total, partial, blocks, 2 * M);
        launch({"mhc_scales", 1, warp_size}, mhc_scales_kernel, mapped(d, data_or_null<float>), total, a.form.M,
               static_cast<int>(E));
        if (d.fn.data != nullptr) add_to_fn(d.fn, a, t.streams);
        constexpr int columns = std::min(width, 4);
        const dim3 tiles(blocks_of(E * C, warp_size * columns), blocks_of(rows, tokens_of_tile));
        launch({"mhc_streams_backward", tiles, dim3(warp_size, warps),
                static_cast<size_t>(M * warp_size * columns) * sizeof(float)},
               mhc_streams_backward_kernel<columns, S>, b);
      });
}

}  // namespace crossply
