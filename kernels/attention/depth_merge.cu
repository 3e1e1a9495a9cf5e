// Not yet run on hardware: only in the emulator.
#include "kernels/attention/depth_merge.h"

#include "kernels/depth/slots.cuh"

namespace crossply {
namespace {

// Bytes bound both. `lanes` threads, a power of two, take a row: a key/value head of a token, with all queries of its
// group, so that a slot's key and value come from memory once. Where they are needed again, for another query of the
// group, they come from the caches.
constexpr int threads = 128, together = 4;  // slots whose loads are under way together

// A row of this thread: where its slots and its queries begin, and whether there is one.
struct Row {
  int64_t n, slot, queries;
  int lane, lanes;
  bool there;
  __device__ Row(const DepthMergeSizes& z, int of_lanes)
      : n(row_of_lanes<threads>(of_lanes)),
        slot(n * z.D),
        queries(n * z.group * z.D),
        lane(static_cast<int>(threadIdx.x) % of_lanes),
        lanes(of_lanes),
        there(n < z.rows) {}
};

// dots (group, count) = <x[g], rows[s]>, x the group's rows of queries, or of what has their shape. All threads of the
// warp call this.
template <int width, class S>
__device__ __forceinline__ void dots_of(float* dots, const S* x, const S* const* rows, int count, const Row& row,
                                        const DepthMergeSizes& z) {
  for (int64_t begin = 0; begin < z.D; begin += row.lanes * width) {
    const int64_t c = begin + row.lane * width;
    const bool there = row.there && c < z.D;
    for (int first = 0; first < count; first += together) {
      Floats<width> y[together];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const int s = first + j < count ? first + j : first;
        y[j] = load_if<width>(there && first + j < count, rows[s], row.slot + c);
      }
      for (int64_t g = 0; g < z.group; ++g) {
        const Floats<width> own = load_if<width>(there, x, row.queries + g * z.D + c);
#pragma unroll
        for (int j = 0; j < together; ++j) {
          float dot = 0;
#pragma unroll
          for (int i = 0; i < width; ++i) dot += own[i] * y[j][i];
          dot = group_sum(dot, row.lanes);
          float& to = dots[g * count + (first + j < count ? first + j : first)];
          if (row.lane == 0 && first + j < count) to = begin == 0 ? dot : to + dot;
        }
      }
    }
  }
  __syncwarp();
}

// total += sum_s w[s] * rows[s], of `width` columns.
template <int width, class S>
__device__ __forceinline__ void add_weighted(Floats<width>& total, const float* w, const S* const* rows, int count,
                                             int64_t at) {
  for (int first = 0; first < count; first += together) {
    Floats<width> x[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int s = first + j < count ? first + j : first;
      x[j] = load_if<width>(first + j < count, rows[s], at);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) {
      if (first + j >= count) break;
#pragma unroll
      for (int i = 0; i < width; ++i) total[i] += w[first + j] * x[j][i];
    }
  }
}

template <int width, class S>
__global__ void depth_merge_forward_kernel(S* out, float* lse, const S* q, const Slots<S> slots, DepthMergeSizes z,
                                           float scale, int lanes) {
  const Row row(z, lanes);
  const int count = slots.count;
  float* w = dynamic_shared<float>() + threadIdx.x / lanes * z.group * count;
  dots_of<width>(w, q, slots.keys, count, row, z);
  for (int64_t g = 0; g < z.group; ++g, w += count) {
    const float l = row.there ? lse[z.lse_of(row.n, g)] : 0.f;
    float most = l, sum = 0;
    for (int s = row.lane; s < count; s += lanes) most = larger_or_nan(most, w[s] * scale);
    most = group_max(most, lanes);
    for (int s = row.lane; s < count; s += lanes) sum += w[s] = expf(w[s] * scale - most);
    const float of_sequence = expf(l - most);
    sum = of_sequence + group_sum(sum, lanes);
    for (int s = row.lane; s < count; s += lanes) w[s] /= sum;
    __syncwarp();
    const float share = of_sequence / sum;
    for (int64_t c = row.lane * width; c < z.D && row.there; c += lanes * width) {
      S* to = out + row.queries + g * z.D + c;
      Floats<width> total = load<width>(to);
#pragma unroll
      for (int i = 0; i < width; ++i) total[i] *= share;
      add_weighted<width>(total, w, slots.values, count, row.slot + c);
      store<width>(to, total);
    }
    if (row.lane == 0 && row.there) lse[z.lse_of(row.n, g)] = most + logf(sum);
  }
}

// What a slot's columns from c on get: sum_g w[g * apart] * rows[g] of the group.
template <int width, class S>
__device__ __forceinline__ void write_group_sum(S* to, bool add, const float* w, int apart, const S* rows, int64_t c,
                                                const Row& row, const DepthMergeSizes& z) {
  Floats<width> total = {};
  for (int64_t g = 0; g < z.group; ++g) {
    const Floats<width> x = load<width>(rows + row.queries + g * z.D + c);
#pragma unroll
    for (int i = 0; i < width; ++i) total[i] += w[g * apart] * x[i];
  }
  store_or_accumulate<width>(to + row.slot + c, total, add);
}

template <int width, class S>
__global__ void depth_merge_backward_kernel(S* dq, const SlotGradients<S> gradients, const S* dout, const S* out,
                                            const float* lse, const S* q, const Slots<S> slots, DepthMergeSizes z,
                                            float scale, int lanes) {
  const Row row(z, lanes);
  const int count = slots.count;
  float* p = dynamic_shared<float>() + threadIdx.x / lanes * 2 * z.group * count;
  float* ds = p + z.group * count;
  dots_of<width>(p, q, slots.keys, count, row, z);
  dots_of<width>(ds, dout, slots.values, count, row, z);
  for (int64_t g = 0; g < z.group; ++g) {
    float delta = 0;
    for (int64_t c = row.lane * width; c < z.D && row.there; c += lanes * width) {
      const Floats<width> dy = load<width>(dout + row.queries + g * z.D + c),
                          y = load<width>(out + row.queries + g * z.D + c);
#pragma unroll
      for (int i = 0; i < width; ++i) delta += dy[i] * y[i];
    }
    delta = group_sum(delta, lanes);
    const float l = row.there ? lse[z.lse_of(row.n, g)] : 0.f;
    for (int s = row.lane; s < count; s += lanes) {
      const int64_t i = g * count + s;
      p[i] = expf(p[i] * scale - l);
      ds[i] = scale * p[i] * (ds[i] - delta);
    }
  }
  __syncwarp();
  for (int64_t c = row.lane * width; c < z.D && row.there; c += lanes * width) {
    for (int64_t g = 0; g < z.group; ++g) {
      S* to = dq + row.queries + g * z.D + c;
      Floats<width> total = load<width>(to);
      add_weighted<width>(total, ds + g * count, slots.keys, count, row.slot + c);
      store<width>(to, total);
    }
    for (int s = 0; s < count; ++s) {
      write_group_sum<width>(gradients.keys[s], gradients.add_keys[s], ds + s, count, q, c, row, z);
      write_group_sum<width>(gradients.values[s], gradients.add_values[s], p + s, count, dout, c, row, z);
    }
  }
}

// `weights`: how many floats a row keeps for each query of its group and slot.
Launch launch_of(const char* name, const DepthMergeSizes& z, int lanes, int64_t weights) {
  const int64_t floats = threads / lanes * weights * z.group * z.S;
  return {name, blocks_of(z.rows * lanes, threads), threads, static_cast<size_t>(floats) * sizeof(float)};
}

// As few rows to a block as their weights leave room for: wider rows of lanes than D needs, if it must be.
int lanes_of(const DepthMergeSizes& z, int64_t columns, int64_t weights) {
  int lanes = lanes_of_row(columns);
  const auto bytes = [&] { return threads / lanes * weights * z.group * z.S * int64_t{sizeof(float)}; };
  while (lanes < warp_size && bytes() > 48 * 1024) lanes *= 2;
  return lanes;
}

}  // namespace

void depth_merge_forward_cuda(const Tensor& out, const Tensor& lse, const Tensor& q, const std::vector<Tensor>& keys,
                              const std::vector<Tensor>& values, const DepthMergeSizes& z, float scale) {
  const int64_t columns = columns_of(z.D, keys, values);
  with_access(out.dtype, columns, {out.data, q.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of(z, z.D / width, 1);
    launch(launch_of("depth_merge_forward", z, lanes, 1), depth_merge_forward_kernel<width, S>, out.as<S>(),
           lse.as<float>(), q.as<S>(), Slots<S>("depth_merge_forward", keys, values), z, scale, lanes);
  });
}

void depth_merge_backward_cuda(const Tensor& dq, const std::vector<Grad>& dkeys, const std::vector<Grad>& dvalues,
                               const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q,
                               const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                               const DepthMergeSizes& z, float scale) {
  const int64_t columns = columns_of(z.D, keys, values, dkeys, dvalues);
  with_access(dout.dtype, columns, {dq.data, dout.data, out.data, q.data}, [&]<class S>(S, auto width) {
    const int lanes = lanes_of(z, z.D / width, 2);
    launch(launch_of("depth_merge_backward", z, lanes, 2), depth_merge_backward_kernel<width, S>, dq.as<S>(),
           SlotGradients<S>(dkeys, dvalues), dout.as<S>(), out.as<S>(), lse.as<float>(), q.as<S>(),
           Slots<S>("depth_merge_backward", keys, values), z, scale, lanes);
  });
}

}  // namespace crossply
