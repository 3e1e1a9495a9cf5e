// Not yet run on hardware: only in the emulator.
#include "kernels/depth/value_mix.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// Every element is read and written once, and little is computed: bytes bound all of these. In the
// backward a thread has `vectors` accesses to each tensor under way.
constexpr int threads = 256, warps = threads / warp_size, vectors = 2;
template <int width>
constexpr int64_t tile_size = threads* vectors* width;

// out = own * v + first * v1; without v: first * v1.
template <int width, class S>
__global__ void mix_kernel(S* out, const S* v, const S* v1, const float* own, const float* first, int64_t n) {
  const float a = v == nullptr ? 0.f : *own, b = *first;
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    const int64_t at = blockIdx.x * tile_size<width> + (k * threads + threadIdx.x) * width;
    if (at >= n) return;
    Floats<width> y = load<width>(v1 + at);
    if (v == nullptr) {
#pragma unroll
      for (int i = 0; i < width; ++i) y[i] *= b;
    } else {
      const Floats<width> x = load<width>(v + at);
#pragma unroll
      for (int i = 0; i < width; ++i) y[i] = a * x[i] + b * y[i];
    }
    store<width>(out + at, y);
  }
}

// One of the two inputs: d = factor * dout, overwritten or accumulated, and <dout, x>.
template <class S>
struct Input {
  S* d;                 // null in v: there is no such input
  const S* x;           // null: the dot is not wanted
  const float* factor;  // one number
  bool accumulate;
};

// The sums over the block's threads, for the first one. The whole block calls this, once in a kernel.
__device__ __forceinline__ void sum_of_block(float& own, float& first) {
  SHARED(sums, Array<Array<float, warps>, 2>);
  own = warp_sum(own), first = warp_sum(first);
  if (threadIdx.x % warp_size == 0) sums[0][threadIdx.x / warp_size] = own, sums[1][threadIdx.x / warp_size] = first;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < warps; ++w) own += sums[0][w], first += sums[1][w];
}

// partial (2, blocks): the block's dots of v and v1. v's d may be dout.
template <int width, class S>
__global__ void __launch_bounds__(threads, 4)
    mix_backward_kernel(float* partial, const S* dout, const Input<S> v, const Input<S> v1, int64_t n) {
  float own = 0, first = 0;
  for (int64_t tile = blockIdx.x; tile * tile_size<width> < n; tile += gridDim.x) {
    const int64_t begin = tile * tile_size<width> + threadIdx.x * width;
    const float a = v.d == nullptr ? 0.f : *v.factor, b = *v1.factor;
    Floats<width> dy[vectors], x[vectors], x1[vectors], d[vectors], d1[vectors];
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int64_t at = begin + k * threads * width;
      dy[k] = load_if<width>(at < n, dout, at);
      x[k] = load_if<width>(at < n && v.x != nullptr, v.x, at);
      x1[k] = load_if<width>(at < n && v1.x != nullptr, v1.x, at);
      d[k] = load_if<width>(at < n && v.accumulate, v.d, at);
      d1[k] = load_if<width>(at < n && v1.accumulate, v1.d, at);
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int64_t at = begin + k * threads * width;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        own += dy[k][i] * x[k][i], first += dy[k][i] * x1[k][i];
        d[k][i] += a * dy[k][i], d1[k][i] += b * dy[k][i];
      }
      if (at < n && v.d != nullptr) store<width>(v.d + at, d[k]);
      if (at < n) store<width>(v1.d + at, d1[k]);
    }
  }
  sum_of_block(own, first);
  if (threadIdx.x == 0) partial[blockIdx.x] = own, partial[gridDim.x + blockIdx.x] = first;
}

// Adds the two sums of partial (2, blocks) to two numbers, which may be the same one. One block.
__global__ void add_partial_kernel(float* d_own, float* d_first, const float* partial, int64_t blocks) {
  float own = 0, first = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += threads) own += partial[b], first += partial[blocks + b];
  sum_of_block(own, first);
  if (threadIdx.x > 0) return;
  if (d_own != nullptr) *d_own += own;
  if (d_first != nullptr) *d_first += first;
}

template <int width, class S>
__global__ void gated_forward_kernel(S* out, const S* v, const S* v1, const float* alpha, int64_t n, int64_t D) {
  const auto row_vectors = static_cast<uint32_t>(D / width);
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    const int64_t vector = blockIdx.x * (tile_size<width> / width) + k * threads + threadIdx.x;
    if (vector * width >= n) return;
    const float a = alpha[static_cast<uint32_t>(vector) / row_vectors];
    Floats<width> y = load<width>(v + vector * width);
    const Floats<width> x = load<width>(v1 + vector * width);
#pragma unroll
    for (int i = 0; i < width; ++i) y[i] += a * x[i];
    store<width>(out + vector * width, y);
  }
}

// `lanes` threads, a power of two, take a row.
template <int width, class S>
__global__ void gated_backward_kernel(S* dv1, float* dalpha, const S* dout, const S* v1, const float* alpha,
                                      int64_t rows, int64_t D, int lanes, bool accumulate_v1, bool accumulate_alpha) {
  const int64_t row = row_of_lanes<threads>(lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float dot = 0;
  if (row < rows) {
    const float a = alpha[row];
    for (int64_t at = row * D + lane * width; at < (row + 1) * D; at += lanes * width) {
      const Floats<width> dy = load<width>(dout + at), x = load<width>(v1 + at);
      Floats<width> d = load_if<width>(accumulate_v1, dv1, at);
#pragma unroll
      for (int i = 0; i < width; ++i) dot += dy[i] * x[i], d[i] += a * dy[i];
      store<width>(dv1 + at, d);
    }
  }
  dot = group_sum(dot, lanes);
  if (lane == 0 && row < rows) dalpha[row] = accumulate_alpha ? dalpha[row] + dot : dot;
}

// -----------------------------------------------------------------------------------------------------------------

template <class S>
void pass_back(float* d_own, float* d_first, const Tensor& dout, const Input<S>& v, const Input<S>& v1) {
  const int64_t n = dout.numel();
  with_width<S>(n, {dout.data, v.d, v.x, v1.d, v1.x}, [&](auto width) {
    const int64_t tiles = blocks_of(n, tile_size<width>), blocks = std::clamp<int64_t>(tiles / 2, 1, 1056);
    float* partial = scratch<float>(2 * blocks);
    launch({"value_mix_backward", static_cast<uint32_t>(blocks), threads}, mix_backward_kernel<width, S>, partial,
           dout.as<S>(), v, v1, n);
    if (d_own != nullptr || d_first != nullptr)
      launch({"value_mix_add_partial", 1, threads}, add_partial_kernel, d_own, d_first, partial, blocks);
  });
}

}  // namespace

void value_mix_forward_cuda(const Tensor& out, const Tensor& v, const Tensor& v1, const MixWeight& own,
                            const MixWeight& first) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, v.data, v1.data}, [&]<class S>(S, auto width) {
    launch({"value_mix_forward", blocks_of(n, tile_size<width>), threads}, mix_kernel<width, S>, out.as<S>(), v.as<S>(),
           v1.as<S>(), number_of<float>(own), number_of<float>(first), n);
  });
}

void value_mix_backward_cuda(const Grad& dv, const Grad& dv1, const MixWeight& d_own, const MixWeight& d_first,
                             const Tensor& dout, const Tensor& v, const Tensor& v1, const MixWeight& own,
                             const MixWeight& first) {
  float *to_own = number_of<float>(d_own), *to_first = number_of<float>(d_first);
  with_storage(dout.dtype, [&]<class S>(S) {
    pass_back<S>(to_own, to_first, dout,
                 {dv.as<S>(), to_own == nullptr ? nullptr : v.as<S>(), number_of<float>(own), dv.accumulate},
                 {dv1.as<S>(), to_first == nullptr ? nullptr : v1.as<S>(), number_of<float>(first), dv1.accumulate});
  });
}

void gated_mix_forward_cuda(const Tensor& out, const Tensor& v, const Tensor& v1, const Tensor& alpha, int64_t D) {
  const int64_t n = out.numel();
  with_access(out.dtype, D, {out.data, v.data, v1.data}, [&]<class S>(S, auto width) {
    CHECK_THAT(n / width < int64_t{1} << 32, "gated_mix_forward: ", out.str(), " is too large for a GPU");
    launch({"gated_mix_forward", blocks_of(n, tile_size<width>), threads}, gated_forward_kernel<width, S>, out.as<S>(),
           v.as<S>(), v1.as<S>(), alpha.as<float>(), n, D);
  });
}

void gated_mix_backward_cuda(const Grad& dv1, const Grad& dalpha, const Tensor& dout, const Tensor& v1,
                             const Tensor& alpha, int64_t D) {
  const int64_t rows = alpha.numel();
  with_access(dout.dtype, D, {dv1.data, dout.data, v1.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of_row(D / width);
    launch({"gated_mix_backward", blocks_of(rows * lanes, threads), threads}, gated_backward_kernel<width, S>,
           dv1.as<S>(), dalpha.as<float>(), dout.as<S>(), v1.as<S>(), alpha.as<float>(), rows, D, lanes, dv1.accumulate,
           dalpha.accumulate);
  });
}

void scale_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& factor) {
  const int64_t n = out.numel();
  with_access(out.dtype, n, {out.data, inp.data}, [&]<class S>(S, auto width) {
    launch({"scale_forward", blocks_of(n, tile_size<width>), threads}, mix_kernel<width, S>, out.as<S>(), nullptr,
           inp.as<S>(), nullptr, factor.as<float>(), n);
  });
}

void scale_backward_cuda(const Grad& dinp, const Tensor& dfactor, const Tensor& dout, const Tensor& inp,
                         const Tensor& factor) {
  with_storage(dinp.dtype, [&]<class S>(S) {
    pass_back<S>(nullptr, data_or_null<float>(dfactor), dout, {},
                 {dinp.as<S>(), inp.as<S>(), factor.as<float>(), dinp.accumulate});
  });
}

}  // namespace crossply
