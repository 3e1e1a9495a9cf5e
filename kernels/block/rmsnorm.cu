#include "kernels/block/rmsnorm.h"

#include <bit>

#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

// A warp takes a row, or several that are short: `lanes` lanes, a power of two, take one, `width` columns a lane at a
// time. Bound by memory: each row once. Lanes whose row is beyond the last one take part in the sums of their warp.
constexpr int warps = 8, backward_warps = 4;

struct Rows {
  int64_t count, C;
  int lanes, log_lanes;
  // Of this lane and `width` columns a vector: the column of its first one, and how far it is to the next.
  template <int width>
  __device__ int64_t first() const {
    return static_cast<int>(threadIdx.x) % lanes * width;
  }
  template <int width>
  __device__ int64_t step() const {
    return int64_t{lanes} * width;
  }
  __device__ int64_t of_thread(int64_t warp) const { return (warp * warp_size + threadIdx.x) >> log_lanes; }
};

// Calls body(v, c) for a lane's vectors: the v-th begins at column c. held: how many they are at most, 0 for any.
template <int held, int width, class F>
__device__ __forceinline__ void for_vectors(const Rows& rows, F&& body) {
  const int64_t first = rows.first<width>(), step = rows.step<width>();
  if constexpr (held == 0) {
#pragma unroll 1
    for (int64_t c = first; c < rows.C; c += step) body(0, c);
  } else {
#pragma unroll
    for (int v = 0; v < held; ++v)
      if (first + v * step < rows.C) body(v, first + v * step);
  }
}

// A lane's vectors of a row, zeros if they are not wanted: in registers, or read again from the cache where held is 0.
template <int held, int width, class S>
struct Vectors {
  const S* row;
  bool wanted;
  Packed<width, S> x[held > 0 ? held : 1];
  __device__ Vectors(const S* begin, const Rows& rows, bool want) : row(begin), wanted(want) {
    if constexpr (held > 0) {
      const int64_t first = rows.first<width>(), step = rows.step<width>();
#pragma unroll
      for (int v = 0; v < held; ++v)
        x[v] = load_packed_if<width>(wanted && first + v * step < rows.C, row, first + v * step);
    }
  }
  __device__ Floats<width> at(int v, int64_t c) const {
    if constexpr (held > 0) return floats(x[v]);
    else return load_if<width>(wanted, row, c);
  }
};

template <int held, int width, class S>
__global__ void __launch_bounds__(warps* warp_size)
    rmsnorm_forward_kernel(S* out, float* rstd, const S* inp, const float* weight, Rows rows, float eps) {
  const int64_t n = rows.of_thread(static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y), C = rows.C;
  const bool there = n < rows.count;
  const Vectors<held, width, S> x(inp + (there ? n : 0) * C, rows, there);
  float sum = 0;
  for_vectors<held, width>(rows, [&](int v, int64_t c) {
    const Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) sum += value[i] * value[i];
  });
  const float scale = rsqrtf(group_sum(sum, rows.lanes) / static_cast<float>(C) + eps);
  if (!there) return;
  if (static_cast<int>(threadIdx.x) % rows.lanes == 0) rstd[n] = scale;
  for_vectors<held, width>(rows, [&](int v, int64_t c) {
    Floats<width> value = x.at(v, c);
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] *= scale;
    if (weight != nullptr) {
      const Floats<width> w = load<width>(weight + c);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] *= w[i];
    }
    store<width>(out + n * C + c, value);
  });
}

// Sums over rows (C), in shared memory. A vector's quarters lie apart, so that neighbours' are neighbours there.
template <int width>
struct Sums {
  static constexpr int part = width < 4 ? width : 4, planes = width / part;
  float* at;
  int64_t C;
  __device__ int64_t place(int64_t c) const { return c % width / part * (C / planes) + c / width * part + c % part; }
  __device__ void add(int64_t c, const Floats<width>& x) const {  // to columns c and on
#pragma unroll
    for (int p = 0; p < planes; ++p) {
      float* to = at + p * (C / planes) + c / planes;
      Floats<part> sum = load<part>(to);
#pragma unroll
      for (int i = 0; i < part; ++i) sum[i] += x[p * part + i];
      store<part, Space::shared>(to, sum);
    }
  }
};

// dweight is summed up in shared memory, by each group of lanes for its rows; the block adds the groups' sums in order
// and writes one row of `partial` (blocks, C). Without weight there is neither.
template <int held, int width, class S>
__global__ void __launch_bounds__(backward_warps* warp_size)
    rmsnorm_backward_kernel(S* dinp, float* partial, const S* dout, const S* inp, const float* weight,
                            const float* rstd, Rows rows, bool acc) {
  const int64_t C = rows.C, groups = static_cast<int64_t>(blockDim.y) * warp_size >> rows.log_lanes;
  const Sums<width> sums{dynamic_shared<float>() + rows.of_thread(threadIdx.y) * C, C};
  if (weight != nullptr)
    for (int64_t c = static_cast<int>(threadIdx.x) % rows.lanes; c < C; c += rows.lanes) sums.at[c] = 0;
  __syncwarp();
  for (int64_t n0 = blockIdx.x * groups; n0 < rows.count; n0 += gridDim.x * groups) {
    const int64_t n = n0 + rows.of_thread(threadIdx.y);
    const bool there = n < rows.count;
    const float r = there ? rstd[n] : 0.f;
    const int64_t at = (there ? n : 0) * C;
    const Vectors<held, width, S> dy(dout + at, rows, there), x(inp + at, rows, there),
        before(dinp + at, rows, acc && there);
    float dot = 0;
    for_vectors<held, width>(rows, [&](int v, int64_t c) {
      const Floats<width> d = dy.at(v, c), value = x.at(v, c);
      Floats<width> g;
#pragma unroll
      for (int i = 0; i < width; ++i) g[i] = d[i] * value[i];
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          dot += g[i] * w[i];
          g[i] *= r;
        }
        sums.add(c, g);
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) dot += g[i];
      }
    });
    const float mean = group_sum(dot, rows.lanes) * r * r / static_cast<float>(C);
    if (!there) continue;
    for_vectors<held, width>(rows, [&](int v, int64_t c) {
      Floats<width> d = dy.at(v, c);
      const Floats<width> value = x.at(v, c), sum_so_far = before.at(v, c);
      if (weight != nullptr) {
        const Floats<width> w = load<width>(weight + c);
#pragma unroll
        for (int i = 0; i < width; ++i) d[i] *= w[i];
      }
#pragma unroll
      for (int i = 0; i < width; ++i) d[i] = sum_so_far[i] + r * (d[i] - value[i] * mean);
      store<width>(dinp + at + c, d);
    });
  }
  if (weight == nullptr) return;
  __syncthreads();
  const float* first = dynamic_shared<float>();
  for (int64_t c = threadIdx.y * warp_size + threadIdx.x; c < C; c += blockDim.y * warp_size) {
    float sum = 0;
    for (int64_t g = 0; g < groups; ++g) sum += first[g * C + sums.place(c)];
    partial[blockIdx.x * C + c] = sum;
  }
}

// Calls body(held, width, lanes), the first two constants.
template <class S, class F>
void with_vectors(int64_t C, std::initializer_list<const void*> tensors, F&& body) {
  with_width<S>(C, tensors, [&](auto width) {
    const int lanes = lanes_of_row(C / width);
    const int64_t vectors = blocks_of(C / width, lanes);
    if constexpr (width == widest<S>) {
      if (vectors == 1) return body(std::integral_constant<int, 1>{}, width, lanes);
      if (vectors <= 4) return body(std::integral_constant<int, 4>{}, width, lanes);
      if (vectors <= 8) return body(std::integral_constant<int, 8>{}, width, lanes);
    }
    body(std::integral_constant<int, 0>{}, width, lanes);
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void rmsnorm_forward_cuda(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, int64_t C,
                          double eps) {
  const int64_t rows = rstd.numel();
  with_storage(out.dtype, [&]<class S>(S) {
    with_vectors<S>(C, {out.data, inp.data}, [&](auto held, auto width, int lanes) {
      launch({"rmsnorm_forward", blocks_of(rows * lanes, warps * warp_size), dim3(warp_size, warps)},
             rmsnorm_forward_kernel<held, width, S>, out.as<S>(), rstd.as<float>(), inp.as<S>(),
             data_or_null<float>(weight), Rows{rows, C, lanes, std::countr_zero(static_cast<unsigned>(lanes))},
             static_cast<float>(eps));
    });
  });
}

void rmsnorm_backward_cuda(const Grad& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                           const Tensor& weight, const Tensor& rstd, int64_t C) {
  const int64_t rows = rstd.numel();
  const bool gain = weight.data != nullptr;
  with_storage(dinp.dtype, [&]<class S>(S) {
    with_vectors<S>(C, {dinp.data, dout.data, inp.data}, [&](auto held, auto width, int lanes) {
      // So many warps as have room for their sums, and so many blocks that each has rows to share the sums' cost.
      const int64_t warp_bytes = warp_size / lanes * C * static_cast<int64_t>(sizeof(float));
      const int64_t room = 64 * 1024 / warp_bytes;
      const auto at_once = static_cast<uint32_t>(gain ? std::clamp<int64_t>(room, 1, backward_warps) : backward_warps);
      const int64_t groups = at_once * warp_size / lanes;
      const int64_t most = held == 1 ? 4 * 396 : 396;  // as run at once on an H200, more where a lane asks for little
      const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(rows / (8 * groups), 1, most));
      float* partial = gain ? scratch<float>(blocks * C) : nullptr;
      const size_t shared = gain ? at_once * static_cast<size_t>(warp_bytes) : 0;
      launch({"rmsnorm_backward", blocks, dim3(warp_size, at_once), shared}, rmsnorm_backward_kernel<held, width, S>,
             dinp.as<S>(), partial, dout.as<S>(), inp.as<S>(), data_or_null<float>(weight), rstd.as<float>(),
             Rows{rows, C, lanes, std::countr_zero(static_cast<unsigned>(lanes))}, dinp.add);
      if (gain) add_rows(dweight.as<float>(), partial, blocks, C);
    });
  });
}

}  // namespace crossply
