// Not yet run on hardware: only in the emulator.
#include "kernels/depth/streams/hyper.cuh"

namespace crossply {

using namespace hyper;

namespace {

// All of these are bound by memory: what is read is read once, what is written is written once. The pointers are
// restricted, as the contract says, so that the loads of a token need not wait for its stores.

// streams_i = or += x
template <int width, class S>
__global__ void streams_expand_kernel(S* __restrict__ streams, const S* __restrict__ x, int64_t rows, int E, int64_t C,
                                      bool accumulate) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  streams += n * E * C, x += n * C;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Columns<width> in = load<width>(x + c);
    for (int i = 0; i < E; ++i) store_or_accumulate<width>(streams + i * C + c, in, accumulate);
  }
}

// out = or += sum_i streams_i
template <int width, class S>
__global__ void streams_sum_kernel(S* out, const S* streams, int64_t rows, int E, int64_t C, bool accumulate) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  out += n * C, streams += n * E * C;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Columns<width> sum = {};
    if (accumulate) sum = load<width>(out + c);
#pragma unroll 4
    for (int i = 0; i < E; ++i) add_scaled(sum, 1.f, load<width>(streams + i * C + c));
    store<width>(out + c, sum);
  }
}

// The coefficients of the write, by target: a(most,most+2), row i holds A[0..E,i+1] and, at the end, b[i] and A[i,0];
// else 0.
template <int most>
__device__ __forceinline__ void gather_coefficients(float* a, const float* coef, int E) {
  for (int e = static_cast<int>(threadIdx.x); e < most * (most + 2); e += warp_size) {
    const int i = e / (most + 2), k = e % (most + 2);
    const int from = k == most ? i * (E + 2) + E + 1 : k > most ? i * (E + 2) : k * (E + 2) + i + 1;
    a[e] = i < E && (k < E || k >= most) ? coef[from] : 0.f;
  }
  __syncwarp();
}

// As it is stored.
template <class S, int64_t width>
__device__ __forceinline__ void round_to(Array<float, width>& x) {
#pragma unroll
  for (int i = 0; i < width; ++i) {
    S stored;
    from_float(stored, x[i]);
    x[i] = to_float(stored);
  }
}

// next_i = b[i] y + sum_k A[k,i+1] x_k; with `more` what else is wanted of WriteOutputs.
template <int exact, int width, bool more, class S>
__global__ void hyper_write_forward_kernel(S* __restrict__ next, S* __restrict__ read, float* __restrict__ squares,
                                           const S* __restrict__ streams, const float* __restrict__ coef,
                                           const S* __restrict__ y, int64_t rows, int given_E, int64_t C) {
  constexpr int most = max_of<exact>, row = most + 2;
  const int E = number_of_streams<exact>(given_E);
  SHARED(coefficients, Array<Array<float, most * row>, warps>);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  float* a = &coefficients[threadIdx.y][0];
  gather_coefficients<most>(a, coef + n * E * (E + 2), E);
  next += n * E * C, streams += n * E * C, y += n * C;
  float square = 0;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Columns<width> in = load<width>(y + c);
    Columns<width> mean = {};
    Array<Columns<width>, most> x;
    load_streams<most, width>(x, streams, E, C, c);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (i >= E) continue;
      Columns<width> sum = {};
      add_scaled(sum, a[i * row + most], in);
#pragma unroll
      for (int k = 0; k < most; ++k) add_scaled(sum, a[i * row + k], x[k]);
      store<width>(next + i * C + c, sum);
      if constexpr (!more) continue;
      round_to<S>(sum);
      square += dot(sum, sum);
      add_scaled(mean, a[i * row + most + 1], sum);
    }
    if (more && read != nullptr) store<width>(read + n * C + c, mean);
  }
  if constexpr (!more) return;
  square = warp_sum(square);
  if (squares != nullptr && threadIdx.x == 0) squares[n] = square;
}

// dx = or += sum_i A[k,i+1] g_i, with y as stream number `most`; dots[i] += x . g_i
template <int most, int width, class S>
__device__ __forceinline__ void write_back(S* dx, float* dots, const Packed<width, S>& x, const float* a, int k,
                                           const Array<Columns<width>, most>& g, bool accumulate) {
  const Columns<width> in = floats(x);
  Columns<width> sum = {};
#pragma unroll
  for (int i = 0; i < most; ++i) {
    dots[i] += dot(in, g[i]);
    add_scaled(sum, a[i * (most + 2) + k], g[i]);
  }
  store_or_accumulate<width, Space::any>(dx, sum,
                                         accumulate);  // by name of the memory, sm_100 would run out of registers
}

// dots[i] = next_i . dread, of a warp's token.
template <int most, int width, class S>
__device__ __forceinline__ void read_dots(float* dots, const S* next, const S* dread, int E, int64_t C) {
  float sums[most] = {};
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Columns<width> d = load<width>(dread + c);
    Array<Columns<width>, most> x;
    load_streams<most, width>(x, next, E, C, c);
#pragma unroll
    for (int i = 0; i < most; ++i) sums[i] += dot(d, x[i]);
  }
  store_warp_sums<most>(dots, sums);
}

// All that a step reads, but what it adds to, is asked for before any of it is used. Not restricted: so the loads stay
// before the stores. reads: there is a dx, and there may be no dnext.
template <int exact, int width, bool reads, class S>
__global__ void __launch_bounds__(warps* warp_size, max_of<exact> == 8 ? 1 : 2)
    hyper_write_backward_kernel(S* dstreams, float* dcoef, S* dy, WrittenNumbers<S> written, const S* streams,
                                const float* coef, const S* y, int64_t rows, int given_E, int64_t C,
                                bool accumulate_streams, bool accumulate_coef, bool accumulate_y) {
  constexpr int most = max_of<exact>, row = most + 2;
  const int E = number_of_streams<exact>(given_E);
  SHARED(coefficients, Array<Array<float, most * row>, warps>);
  SHARED(sums, Array<Array<float, most * row>, warps>);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  float *a = &coefficients[threadIdx.y][0], *products = &sums[threadIdx.y][0];
  gather_coefficients<most>(a, coef + n * E * (E + 2), E);
  if constexpr (reads)
    read_dots<most, width>(products + most * (most + 1), written.next + n * E * C, written.dx + n * C, E, C);
  dstreams += n * E * C, streams += n * E * C, dy += n * C, y += n * C;
  const S* dnext = written.dnext + n * E * C;
  const int written_E = !reads || written.dnext != nullptr ? E : 0;
  float dots[(most + 1) * most] = {};
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Array<Packed<width, S>, most> raw_g, x;
    load_streams<most, width>(raw_g, dnext + c, written_E, static_cast<int>(C));
    load_streams<most, width>(x, streams + c, E, static_cast<int>(C));
    const Packed<width, S> in = load_packed<width>(y + c), read = load_packed_if<width>(reads, written.dx, n * C + c);
    Array<Columns<width>, most> g;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      g[i] = floats(raw_g[i]);
      if constexpr (reads) add_scaled(g[i], a[i * row + most + 1], floats(read));
    }
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (k < E) write_back<most, width>(dstreams + k * C + c, dots + k * most, x[k], a, k, g, accumulate_streams);
    write_back<most, width>(dy + c, dots + most * most, in, a, most, g, accumulate_y);
  }
  store_warp_sums<(most + 1) * most>(products, dots);
  __syncwarp();
  for (int e = static_cast<int>(threadIdx.x); e < E * (E + 2); e += warp_size) {
    const int k = e / (E + 2), j = e % (E + 2);
    const int of_read = most * (most + 1) + k;
    const float own = j > E   ? products[most * most + k]
                      : j > 0 ? products[k * most + j - 1]
                      : reads ? products[of_read]
                              : 0.f;
    float& d = dcoef[n * E * (E + 2) + e];
    d = (accumulate_coef ? d : 0.f) + own;
  }
}

template <int exact, int width, class S>
__global__ void hyper_reread_forward_kernel(S* __restrict__ read, const S* __restrict__ streams,
                                            const float* __restrict__ coef, int64_t rows, int given_E, int64_t C) {
  constexpr int most = max_of<exact>;
  const int E = number_of_streams<exact>(given_E);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    Columns<width> sum = {};
    Array<Columns<width>, most> x;
    load_streams<most, width>(x, streams + n * E * C, E, C, c);
#pragma unroll
    for (int i = 0; i < most; ++i)
      if (i < E) add_scaled(sum, coef[(n * E + i) * (E + 2)], x[i]);
    store<width>(read + n * C + c, sum);
  }
}

template <int exact, int width, class S>
__global__ void hyper_reread_backward_kernel(S* dstreams, float* dcoef, const S* __restrict__ dread,
                                             const S* __restrict__ streams, const float* __restrict__ coef,
                                             int64_t rows, int given_E, int64_t C, bool accumulate_streams,
                                             bool accumulate_coef) {
  constexpr int most = max_of<exact>;
  const int E = number_of_streams<exact>(given_E);
  SHARED(sums, Array<Array<float, most>, warps>);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y;
  if (n >= rows) return;
  if (dcoef != nullptr) read_dots<most, width>(&sums[threadIdx.y][0], streams + n * E * C, dread + n * C, E, C);
  for (int64_t c = threadIdx.x * width; c < C; c += warp_size * width) {
    const Columns<width> d = load<width>(dread + n * C + c);
    for (int i = 0; i < E; ++i) {
      Columns<width> part = {};
      add_scaled(part, coef[(n * E + i) * (E + 2)], d);
      store_or_accumulate<width>(dstreams + (n * E + i) * C + c, part, accumulate_streams);
    }
  }
  __syncwarp();
  for (int e = static_cast<int>(threadIdx.x); dcoef != nullptr && e < E * (E + 2); e += warp_size) {
    float& d = dcoef[n * E * (E + 2) + e];
    d = (accumulate_coef ? d : 0.f) + (e % (E + 2) == 0 ? sums[threadIdx.y][e / (E + 2)] : 0.f);
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void streams_expand_cuda(const Grad& streams, const Tensor& x, int64_t rows, int64_t E, int64_t C) {
  with_access(x.dtype, C, {streams.data, x.data}, [&]<class S>(S, auto width) {
    launch({"streams_expand", blocks_of(rows, warps), dim3(warp_size, warps)}, streams_expand_kernel<width, S>,
           streams.as<S>(), x.as<S>(), rows, static_cast<int>(E), C, streams.accumulate);
  });
}

void streams_sum_cuda(const Grad& out, const Tensor& streams, int64_t rows, int64_t E, int64_t C) {
  with_access(out.dtype, C, {out.data, streams.data}, [&]<class S>(S, auto width) {
    launch({"streams_sum", blocks_of(rows, warps), dim3(warp_size, warps)}, streams_sum_kernel<width, S>, out.as<S>(),
           streams.as<S>(), rows, static_cast<int>(E), C, out.accumulate);
  });
}

void hyper_write_forward_cuda(const WriteOutputs& out, const Tensor& streams, const Tensor& coef, const Tensor& y,
                              int64_t rows, int64_t E, int64_t C) {
  const bool more = out.x.data != nullptr || out.squares.data != nullptr;
  const std::initializer_list<const void*> tensors = {out.next.data, out.x.data, streams.data, y.data};
  with_instance(out.next.dtype, E, C, tensors, [&]<class S>(S, auto exact, auto wide) {
    constexpr int width = wide ? widest<S> : 1;
    launch(
        {"hyper_write_forward", blocks_of(rows, warps), dim3(warp_size, warps)},
        more ? hyper_write_forward_kernel<exact, width, true, S> : hyper_write_forward_kernel<exact, width, false, S>,
        out.next.as<S>(), data_or_null<S>(out.x), data_or_null<float>(out.squares), streams.as<S>(), coef.as<float>(),
        y.as<S>(), rows, static_cast<int>(E), C);
  });
}

void hyper_write_backward_cuda(const Grad& dstreams, const Grad& dcoef, const Grad& dy, const Written& written,
                               const Tensor& streams, const Tensor& coef, const Tensor& y, int64_t rows, int64_t E,
                               int64_t C) {
  const std::initializer_list<const void*> tensors = {
      dstreams.data, dy.data, written.next.data, written.dnext.data, written.dx.data, streams.data, y.data};
  with_instance(dstreams.dtype, E, C, tensors, [&]<class S>(S, auto exact, auto wide) {
    constexpr int width = width_with_sums<exact, wide, S>;
    const WrittenNumbers<S> numbers{data_or_null<const S>(written.next), data_or_null<const S>(written.dnext),
                                    data_or_null<const S>(written.dx)};
    launch({"hyper_write_backward", blocks_of(rows, warps), dim3(warp_size, warps)},
           numbers.dx != nullptr ? hyper_write_backward_kernel<exact, width, true, S>
                                 : hyper_write_backward_kernel<exact, width, false, S>,
           dstreams.as<S>(), dcoef.as<float>(), dy.as<S>(), numbers, streams.as<S>(), coef.as<float>(), y.as<S>(), rows,
           static_cast<int>(E), C, dstreams.accumulate, dcoef.accumulate, dy.accumulate);
  });
}

void hyper_reread_forward_cuda(const Tensor& x, const Tensor& streams, const Tensor& coef, int64_t rows, int64_t E,
                               int64_t C) {
  with_instance(x.dtype, E, C, {x.data, streams.data}, [&]<class S>(S, auto exact, auto wide) {
    constexpr int width = wide ? widest<S> : 1;
    launch({"hyper_reread_forward", blocks_of(rows, warps), dim3(warp_size, warps)},
           hyper_reread_forward_kernel<exact, width, S>, x.as<S>(), streams.as<S>(), coef.as<float>(), rows,
           static_cast<int>(E), C);
  });
}

void hyper_reread_backward_cuda(const Grad& dstreams, const Grad& dcoef, const Tensor& dx, const Tensor& streams,
                                const Tensor& coef, int64_t rows, int64_t E, int64_t C) {
  with_instance(dx.dtype, E, C, {dstreams.data, dx.data, streams.data}, [&]<class S>(S, auto exact, auto wide) {
    constexpr int width = width_with_sums<exact, wide, S>;
    launch({"hyper_reread_backward", blocks_of(rows, warps), dim3(warp_size, warps)},
           hyper_reread_backward_kernel<exact, width, S>, dstreams.as<S>(), data_or_null<float>(dcoef), dx.as<S>(),
           streams.as<S>(), coef.as<float>(), rows, static_cast<int>(E), C, dstreams.accumulate, dcoef.accumulate);
  });
}

}  // namespace crossply
