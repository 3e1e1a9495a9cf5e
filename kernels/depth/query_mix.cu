// Not yet run on hardware: only in the emulator.
#include "kernels/depth/query_mix.h"

#include <cmath>

#include "kernels/depth/spans.cuh"

namespace crossply {
namespace {

// As depth_mix.cu: bytes bound all of these. A row that is needed a second time comes from the caches.
constexpr int threads = 256, warps = threads / warp_size;

__global__ void query_kernel(float* query, const float* proj, const float* gain, int64_t C) {
  const int64_t c = first_of_thread<1>();
  if (c < C) query[c] = proj[c] * gain[c];
}

// The logits of a warp's row: z[s], in shared memory.
template <bool whole, class S>
__device__ __forceinline__ void logits_of_row(float* z, const float* query, const NormedSources<S>& sources, int64_t n,
                                              int64_t C, float eps) {
  const int count = sources.count, lane = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int first = 0; first < count; first += group) {
    float dots[group] = {};
    for (int64_t c = lane * widest<S>; c < C; c += warp_size * widest<S>) {
      Floats<widest<S>> x[group], u;
#pragma unroll
      for (int i = 0; i < widest<S>; ++i) u[i] = whole || c + i < C ? query[c + i] : 0.f;
#pragma unroll
      for (int j = 0; j < group; ++j) x[j] = load_span<whole>(first + j < count, sources.x[first + j], n, c, C);
#pragma unroll
      for (int j = 0; j < group; ++j) {
#pragma unroll
        for (int i = 0; i < widest<S>; ++i) dots[j] += u[i] * x[j][i];
      }
    }
    __syncwarp();
    const float dot = warp_sums<group>(dots);
    if (lane < group && first + lane < count)
      z[first + lane] = dot / sqrtf(sources.squares[first + lane][n] / static_cast<float>(C) + eps);
  }
  __syncwarp();
}

// A warp takes a row.
template <bool whole, class S>
__global__ void query_mix_forward_kernel(S* out, float* logits, float* weights, const float* query,
                                         const NormedSources<S> sources, int64_t N, int64_t C, float eps) {
  const int count = sources.count, lane = static_cast<int>(threadIdx.x);
  float* w = dynamic_shared<float>() + threadIdx.y * count;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y; n < N;
       n += static_cast<int64_t>(gridDim.x) * warps) {
    logits_of_row<whole>(w, query, sources, n, C, eps);
    float most = -INFINITY, sum = 0;
    for (int s = lane; s < count; s += warp_size) most = larger_or_nan(most, w[s]);
    most = warp_max(most);
    for (int s = lane; s < count; s += warp_size) {
      logits[n * count + s] = w[s];
      sum += w[s] = expf(w[s] - most);
    }
    sum = warp_sum(sum);
    for (int s = lane; s < count; s += warp_size) weights[n * count + s] = w[s] /= sum;
    __syncwarp();
    mix_row_of_warp<whole>(out, w, sources, n, C);
    __syncwarp();
  }
}

template <class S>
struct QueryReaderTable {
  const S* dout[max_inputs];
  const float* weights[max_inputs];  // weights[r][n * stride[r]], and so logits
  const float* logits[max_inputs];
  const float* pbar[max_inputs];
  const float* query[max_inputs];
  int32_t stride[max_inputs];
  int count;
};

// A block takes a row, as in vertical_backward. pulls: (N, readers), q times the row's scale.
template <bool whole, class S>
__global__ void __launch_bounds__(threads, 3)
    query_mix_backward_kernel(S* dinp, float* pulls, const S* inp, const float* squares,
                              const QueryReaderTable<S> readers, int64_t C, int64_t padded, float eps,
                              bool accumulate) {
  float* totals = dynamic_shared<float>();                      // (C), and up to whole spans: padded
  float* sums = totals + padded;                                // (warps, readers)
  float* pull = sums + blockDim.x / warp_size * readers.count;  // (readers)
  const int64_t n = blockIdx.x, step = blockDim.x * widest<S>, own = threadIdx.x * widest<S>;
  const float scale = rsqrtf(squares[n] / static_cast<float>(C) + eps);
  gather_row<whole>(totals, sums, inp, dinp, readers, n, C, accumulate);
  __syncthreads();
  float through_norm = 0;  // every warp makes the sum of all for itself
  for (int r = static_cast<int>(threadIdx.x) % warp_size; r < readers.count; r += warp_size) {
    const int64_t at = n * readers.stride[r];
    const float q = readers.weights[r][at] * (sum_of_warps(sums, r, readers.count) - readers.pbar[r][n]);
    if (threadIdx.x < warp_size) pull[r] = pulls[n * readers.count + r] = q * scale;
    through_norm += q * readers.logits[r][at];
  }
  const float factor = warp_sum(through_norm) * scale * scale / static_cast<float>(C);
  __syncthreads();
  for (int64_t c = own; c < C; c += step) {
    const Floats<widest<S>> x = load_span<whole>(true, inp, n, c, C);
    Floats<widest<S>> total = load<widest<S>>(totals + c);
#pragma unroll
    for (int i = 0; i < widest<S>; ++i) total[i] -= factor * x[i];
    for (int r = 0; r < readers.count; ++r) {
#pragma unroll
      for (int i = 0; i < widest<S>; ++i)
        if (whole || c + i < C) total[i] += pull[r] * readers.query[r][c + i];
    }
    store_span<whole>(dinp + n * C, c, C, total);
  }
}

constexpr int readers_at_once = 8;

// partial[part, r, c] = sum over the part's rows n of pulls[n, r] * inp[n, c]: a thread takes a column, a block of the
// grid's y a part, of its z some readers.
template <class S>
__global__ void query_gradient_kernel(float* partial, const S* inp, const float* pulls, int readers, int64_t N,
                                      int64_t C) {
  const int64_t c = first_of_thread<1>();
  if (c >= C) return;
  const int64_t begin = N * blockIdx.y / gridDim.y, end = N * (blockIdx.y + 1) / gridDim.y;
  const int first = static_cast<int>(blockIdx.z) * readers_at_once;
  float sums[readers_at_once] = {};
#pragma unroll 2
  for (int64_t n = begin; n < end; ++n) {
    const float x = to_float(inp[n * C + c]);
#pragma unroll
    for (int j = 0; j < readers_at_once; ++j)
      if (first + j < readers) sums[j] += pulls[n * readers + first + j] * x;
  }
#pragma unroll
  for (int j = 0; j < readers_at_once; ++j)
    if (first + j < readers) partial[(static_cast<int64_t>(blockIdx.y) * readers + first + j) * C + c] = sums[j];
}

struct Trained {
  const float* proj[max_inputs];
  const float* gain[max_inputs];
  float* dproj[max_inputs];
  float* dgain[max_inputs];
};

// The grid's y is the reader.
__global__ void add_to_trained_kernel(const Trained trained, const float* partial, int64_t parts, int64_t C) {
  const int64_t c = first_of_thread<1>(), r = blockIdx.y, readers = gridDim.y;
  if (c >= C) return;
  float sum = 0;
  for (int64_t part = 0; part < parts; ++part) sum += partial[(part * readers + r) * C + c];
  trained.dproj[r][c] += sum * trained.gain[r][c];
  trained.dgain[r][c] += sum * trained.proj[r][c];
}

template <class S>
QueryReaderTable<S> table_of(const std::vector<QueryReader>& readers, int64_t N) {
  QueryReaderTable<S> table;
  table.count = 0;
  for (const QueryReader& r : readers) {
    const int i = table.count++;
    table.dout[i] = r.dout.as<S>();
    table.weights[i] = r.mix.weights.as<float>() + r.column;
    table.logits[i] = r.mix.logits.as<float>() + r.column;
    table.pbar[i] = r.pbar.as<float>();
    table.query[i] = r.mix.query.as<float>();
    table.stride[i] = static_cast<int32_t>(r.mix.weights.numel() / N);
  }
  return table;
}

void add_to_trained(const std::vector<QueryReader>& readers, const float* partial, int64_t parts, int64_t C) {
  Trained trained;
  for (size_t i = 0; i < readers.size(); ++i) {
    trained.proj[i] = readers[i].mix.proj.as<float>(), trained.gain[i] = readers[i].mix.gain.as<float>();
    trained.dproj[i] = readers[i].dproj.as<float>(), trained.dgain[i] = readers[i].dgain.as<float>();
  }
  const dim3 grid(blocks_of(C, elementwise_threads), static_cast<uint32_t>(readers.size()));
  launch({"query_mix_add_to_trained", grid, elementwise_threads}, add_to_trained_kernel, trained, partial, parts, C);
}

}  // namespace

void query_mix_forward_cuda(const Tensor& out, const QueryMix& mix, const std::vector<Tensor>& sources,
                            const std::vector<Tensor>& squares, int64_t N, int64_t C, double eps) {
  launch_elementwise("query", C, 1, query_kernel, mix.query.as<float>(), mix.proj.as<float>(), mix.gain.as<float>());
  with_storage(out.dtype, [&]<class S>(S) {
    const NormedSources<S> from("query_mix_forward", sources, squares);
    const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>((N + warps - 1) / warps, 1, 1056));
    with_whole<S>(aligned16(sources) ? C : 1, {out.data}, [&](auto whole) {
      launch({"query_mix_forward", blocks, dim3(warp_size, warps), sources.size() * warps * sizeof(float)},
             query_mix_forward_kernel<whole, S>, out.as<S>(), mix.logits.as<float>(), mix.weights.as<float>(),
             mix.query.as<float>(), from, N, C, static_cast<float>(eps));
    });
  });
}

void query_mix_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                             const std::vector<QueryReader>& readers, int64_t N, int64_t C, double eps) {
  check_inputs("query_mix_backward", readers.size());
  if (readers.empty() && !dinp.accumulate) fill_device_memory(dinp.data, 0, dinp.bytes());
  if (readers.empty()) return;
  const int64_t R = static_cast<int64_t>(readers.size()), parts = query_mix_parts(N);
  float *pulls = scratch<float>(N * R), *partial = scratch<float>(parts * R * C, 1);
  with_storage(dinp.dtype, [&]<class S>(S) {
    const int64_t padded = blocks_of(C, widest<S>) * widest<S>;
    const uint32_t row_threads = threads_of_row(C, widest<S>, threads);
    const size_t shared = static_cast<size_t>(padded + (row_threads / warp_size + 1) * R) * sizeof(float);
    CHECK_THAT(static_cast<int64_t>(shared) < max_shared_bytes() - 1024, "query_mix_backward: rows of ", C,
               " are too wide for a GPU");
    with_whole<S>(columns_of(readers, C), {dinp.data, inp.data}, [&](auto whole) {
      launch({"query_mix_backward", static_cast<uint32_t>(N), row_threads, shared}, query_mix_backward_kernel<whole, S>,
             dinp.as<S>(), pulls, inp.as<S>(), squares.as<float>(), table_of<S>(readers, N), C, padded,
             static_cast<float>(eps), dinp.accumulate);
    });
    const dim3 grid(blocks_of(C, elementwise_threads), static_cast<uint32_t>(parts), blocks_of(R, readers_at_once));
    launch({"query_mix_query_gradient", grid, elementwise_threads}, query_gradient_kernel<S>, partial, inp.as<S>(),
           pulls, static_cast<int>(R), N, C);
  });
  add_to_trained(readers, partial, parts, C);
}

}  // namespace crossply
