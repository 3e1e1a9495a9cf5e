// Not yet run on hardware: only in the emulator.
#include "kernels/depth/depth_attention.h"

#include <cmath>

#include "kernels/depth/slots.cuh"

namespace crossply {
namespace {

// Bytes bound both. `lanes` threads, a power of two, take a row: a head of 64 numbers in bf16 has eight, so that their
// loads of four slots are under way together. What a row needs twice is short, and comes from the caches.
constexpr int threads = 128, group = 4;

// A row's columns from c on of the mean of its queries: zeros if not there.
template <int width, class S>
__device__ __forceinline__ Floats<width> mean_query(bool there, const S* q, int64_t row, int64_t c,
                                                    const DepthAttentionSize& z) {
  Floats<width> mean = {};
  for (int64_t g = 0; g < z.G; ++g) {
    const Floats<width> x = load_if<width>(there, q, (row * z.G + g) * z.D + c);
#pragma unroll
    for (int i = 0; i < width; ++i) mean[i] += x[i];
  }
#pragma unroll
  for (int i = 0; i < width; ++i) mean[i] /= static_cast<float>(z.G);
  return mean;
}

// dots[s] (+)= <x, rows[s]> over the columns that the lanes have from c on. All threads of the warp call this.
template <int width, class S>
__device__ __forceinline__ void add_dots(float* dots, const Floats<width>& x, const S* const* rows, int count,
                                         bool there, int64_t at, bool set, int lanes) {
  for (int first = 0; first < count; first += group) {
    Floats<width> y[group];
#pragma unroll
    for (int j = 0; j < group; ++j) {
      const int s = first + j < count ? first + j : first;
      y[j] = load_if<width>(there && first + j < count, rows[s], at);
    }
#pragma unroll
    for (int j = 0; j < group; ++j) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < width; ++i) dot += x[i] * y[j][i];
      dot = group_sum(dot, lanes);
      if (threadIdx.x % lanes == 0 && first + j < count) dots[first + j] = set ? dot : dots[first + j] + dot;
    }
  }
}

// sum_s w[s] * rows[s], of `width` columns.
template <int width, class S>
__device__ __forceinline__ Floats<width> weighted_sum(const float* w, const S* const* rows, int count, bool there,
                                                      int64_t at) {
  Floats<width> total;
#pragma unroll
  for (int i = 0; i < width; ++i) total[i] = -0.f;  // plus the first product is that, -0 as well
  for (int first = 0; first < count; first += group) {
    Floats<width> x[group];
#pragma unroll
    for (int j = 0; j < group; ++j) {
      const int s = first + j < count ? first + j : first;
      x[j] = load_if<width>(there && first + j < count, rows[s], at);
    }
#pragma unroll
    for (int j = 0; j < group; ++j) {
      if (first + j >= count) break;
#pragma unroll
      for (int i = 0; i < width; ++i) total[i] += w[first + j] * x[j][i];
    }
  }
  return total;
}

template <int width, class S>
__global__ void depth_attention_forward_kernel(S* out, float* weights, const S* q, const Slots<S> slots,
                                               DepthAttentionSize z, float scale, int lanes) {
  const int64_t row = row_of_lanes<threads>(lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes, count = slots.count;
  float* w = dynamic_shared<float>() + threadIdx.x / lanes * count;
  for (int64_t begin = 0; begin < z.D; begin += lanes * width) {
    const int64_t c = begin + lane * width;
    const bool there = row < z.N && c < z.D;
    add_dots<width>(w, mean_query<width>(there, q, row, c, z), slots.keys, count, there, row * z.D + c, begin == 0,
                    lanes);
  }
  __syncwarp();
  float most = -INFINITY, sum = 0;
  for (int s = lane; s < count; s += lanes) most = larger_or_nan(most, w[s] * scale);
  most = group_max(most, lanes);
  for (int s = lane; s < count; s += lanes) sum += w[s] = expf(w[s] * scale - most);
  sum = group_sum(sum, lanes);
  for (int s = lane; s < count; s += lanes) {
    w[s] /= sum;
    if (row < z.N) weights[row * count + s] = w[s];
  }
  __syncwarp();
  for (int64_t c = lane * width; c < z.D && row < z.N; c += lanes * width)
    store<width>(out + row * z.D + c, weighted_sum<width>(w, slots.values, count, true, row * z.D + c));
}

// What a row's columns from c on get: x * factor.
template <int width, class S>
__device__ __forceinline__ void write_scaled(S* to, Floats<width> x, float factor, bool add) {
#pragma unroll
  for (int i = 0; i < width; ++i) x[i] *= factor;
  store_or_accumulate<width>(to, x, add);
}

template <int width, class S>
__global__ void depth_attention_backward_kernel(S* dq, bool add_q, const SlotGradients<S> gradients, const S* dout,
                                                const float* weights, const S* q, const Slots<S> slots,
                                                DepthAttentionSize z, float scale, int lanes) {
  const int64_t row = row_of_lanes<threads>(lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes, count = slots.count;
  float* dz = dynamic_shared<float>() + threadIdx.x / lanes * count;
  for (int64_t begin = 0; begin < z.D; begin += lanes * width) {
    const int64_t c = begin + lane * width;
    const bool there = row < z.N && c < z.D;
    add_dots<width>(dz, load_if<width>(there, dout, row * z.D + c), slots.values, count, there, row * z.D + c,
                    begin == 0, lanes);
  }
  __syncwarp();
  const auto weight = [&](int s) { return row < z.N ? weights[row * count + s] : 0.f; };
  float total = 0;
  for (int s = lane; s < count; s += lanes) total += weight(s) * dz[s];
  total = group_sum(total, lanes);
  for (int s = lane; s < count; s += lanes) dz[s] = weight(s) * (dz[s] - total) * scale;
  __syncwarp();
  for (int64_t c = lane * width; c < z.D && row < z.N; c += lanes * width) {
    const int64_t at = row * z.D + c;
    const Floats<width> mean = mean_query<width>(true, q, row, c, z), dy = load<width>(dout + at);
    const Floats<width> dmean = weighted_sum<width>(dz, slots.keys, count, true, at);
    for (int s = 0; s < count; ++s) {
      write_scaled<width>(gradients.values[s] + at, dy, weight(s), gradients.add_values[s]);
      write_scaled<width>(gradients.keys[s] + at, mean, dz[s], gradients.add_keys[s]);
    }
    for (int64_t g = 0; g < z.G; ++g)
      write_scaled<width>(dq + (row * z.G + g) * z.D + c, dmean, 1.f / static_cast<float>(z.G), add_q);
  }
}

Launch launch_of(const char* name, const DepthAttentionSize& z, int lanes) {
  const size_t rows = static_cast<size_t>(threads / lanes);
  return {name, blocks_of(z.N * lanes, threads), threads, rows * static_cast<size_t>(z.S) * sizeof(float)};
}
float scale_of(const DepthAttentionSize& z) { return 1.f / std::sqrt(static_cast<float>(z.D)); }

}  // namespace

void depth_attention_forward_cuda(const Tensor& out, const Tensor& weights, const Tensor& q,
                                  const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                                  const DepthAttentionSize& z) {
  const int64_t columns = columns_of(z.D, keys, values);
  with_access(out.dtype, columns, {out.data, q.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of_row(z.D / width);
    launch(launch_of("depth_attention_forward", z, lanes), depth_attention_forward_kernel<width, S>, out.as<S>(),
           weights.as<float>(), q.as<S>(), Slots<S>("depth_attention_forward", keys, values), z, scale_of(z), lanes);
  });
}

void depth_attention_backward_cuda(const Grad& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                                   const Tensor& dout, const Tensor& weights, const Tensor& q,
                                   const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                                   const DepthAttentionSize& z) {
  const int64_t columns = columns_of(z.D, keys, values, dkeys, dvalues);
  with_access(dout.dtype, columns, {dq.data, dout.data, q.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of_row(z.D / width);
    launch(launch_of("depth_attention_backward", z, lanes), depth_attention_backward_kernel<width, S>, dq.as<S>(),
           dq.accumulate, SlotGradients<S>(dkeys, dvalues), dout.as<S>(), weights.as<float>(), q.as<S>(),
           Slots<S>("depth_attention_backward", keys, values), z, scale_of(z), lanes);
  });
}

}  // namespace crossply
