// Not yet run on hardware: only in the emulator.
#include "kernels/depth/depth_mix.h"

#include <cmath>

#include "kernels/depth/spans.cuh"

namespace crossply {
namespace {

// Read depth_mix_plain.cu first. All of these read every row of every input once and write one row: bytes bound them.
constexpr int threads = 256, warps = threads / warp_size;

// -----------------------------------------------------------------------------------------------------------------
// Weights that do not depend on the token: a block takes a tile of `vectors` accesses a thread.

constexpr int forward_vectors = 4, backward_vectors = 2;
template <int width, int vectors>
constexpr int64_t tile_size = threads* vectors* width;

// The plain kernel moves as many bytes, but has too few under way. A memory of 4.8 TB/s that answers after 0.6 us is
// busy only while 3 MB are asked for, some 22 KB by each multiprocessor. Here a thread asks for four times 16 bytes of
// two sources before it uses the first. The plain one asks for 2 or 4 bytes at a time.
template <int width, class S>
__global__ void __launch_bounds__(threads, 4)
    depth_mix_forward_kernel(S* out, const Pointers<const S> sources, const float* weights, int64_t size) {
  constexpr int vectors = forward_vectors;
  const int64_t first = blockIdx.x * tile_size<width, vectors> + threadIdx.x * width;
  Floats<width> sum[vectors];
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = first + v * threads * width;
    sum[v] = load_if<width>(at < size, sources.x[0], at);
#pragma unroll
    for (int i = 0; i < width; ++i) sum[v][i] *= weights[0];  // not 0 + a product, which would lose the sign of -0
  }
#pragma unroll 2
  for (int s = 1; s < sources.count; ++s) {
    const float w = weights[s];
    Floats<width> x[vectors];
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const int64_t at = first + v * threads * width;
      x[v] = load_if<width>(at < size, sources.x[s], at);
    }
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int i = 0; i < width; ++i) sum[v][i] += w * x[v][i];
    }
  }
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = first + v * threads * width;
    if (at < size) store<width>(out + at, sum[v]);
  }
}

template <class S>
struct DepthReaders {
  const S* dout[max_inputs];
  const float* weight[max_inputs];  // one number each
  int count;
};

// The plain backward reads every dout twice: for the dots, where a thread has a row, and for dinp. Here one read serves
// both, half the bytes, and adjacent threads load adjacent columns. Four readers at a time have their loads
// under way together, and their dots are added up across the warp together.
//
// partial: (readers, blocks).
template <int width, class S>
__global__ void __launch_bounds__(threads, 3)
    depth_mix_backward_kernel(S* dinp, float* partial, const S* inp, const DepthReaders<S> readers, int64_t size,
                              bool accumulate) {
  constexpr int vectors = backward_vectors;
  float* sums = dynamic_shared<float>();
  const int64_t first = blockIdx.x * tile_size<width, vectors> + threadIdx.x * width;
  Floats<width> x[vectors], total[vectors];
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = first + v * threads * width;
    x[v] = load_if<width>(at < size, inp, at);
    total[v] = load_if<width>(accumulate && at < size, dinp, at);
  }
#pragma unroll 1
  for (int r = 0; r < readers.count; r += group) {
    Floats<width> dy[group][vectors];
    float w[group], dots[group] = {};
#pragma unroll
    for (int j = 0; j < group; ++j) {
      const bool there = r + j < readers.count;
      w[j] = there ? *readers.weight[r + j] : 0.f;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int64_t at = first + v * threads * width;
        dy[j][v] = load_if<width>(there && at < size, readers.dout[r + j], at);
      }
    }
#pragma unroll
    for (int j = 0; j < group; ++j) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
#pragma unroll
        for (int i = 0; i < width; ++i) dots[j] += dy[j][v][i] * x[v][i], total[v][i] += w[j] * dy[j][v][i];
      }
    }
    add_dots(sums, dots, r, readers.count, true);
  }
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = first + v * threads * width;
    if (at < size) store<width>(dinp + at, total[v]);
  }
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < readers.count; r += threads)
    partial[static_cast<int64_t>(r) * gridDim.x + blockIdx.x] = sum_of_warps(sums, r, readers.count);
}

// *to[r] += the sum of partial[r, :]; a block for each r.
__global__ void add_partial_kernel(const Pointers<float> to, const float* partial, int64_t blocks) {
  const float* from = partial + blockIdx.x * blocks;
  float sum = 0;
#pragma unroll 4
  for (int64_t b = threadIdx.x; b < blocks; b += threads) sum += from[b];
  sum = block_sum<warps>(sum);
  if (threadIdx.x == 0 && to.x[blockIdx.x] != nullptr) *to.x[blockIdx.x] += sum;
}

// -----------------------------------------------------------------------------------------------------------------
// Vertical attention. A thread takes a span of a row's columns at a time, whether it may load it at once (whole) or
// not, and vertical_dot divides a row among threads as the backward does, so that dots are summed in the same order
// wherever tensors lie: pbar then is exactly the dot of the backward if there is one source.

// The plain kernel gives a row to one thread: a load of a warp touches 32 cache lines for one element each. Here the
// threads of a block share four rows and use every line whole.
//
// A block takes `group` rows.
template <bool whole, class S>
__global__ void __launch_bounds__(threads, 3)
    vertical_dot_kernel(float* dots, const S* a, const S* b, int64_t N, int64_t C) {
  SHARED(sums, Array<float, warps * group>);
  const int64_t n = static_cast<int64_t>(blockIdx.x) * group;
  for (int64_t begin = 0; begin < C; begin += blockDim.x * widest<S>) {
    const int64_t c = begin + threadIdx.x * widest<S>;
    Floats<widest<S>> x[group], y[group];
    float dot[group] = {};
#pragma unroll
    for (int j = 0; j < group; ++j) {
      x[j] = load_span<whole>(n + j < N, a, n + j, c, C);
      y[j] = load_span<whole>(n + j < N, b, n + j, c, C);
    }
#pragma unroll
    for (int j = 0; j < group; ++j) {
#pragma unroll
      for (int i = 0; i < widest<S>; ++i) dot[j] += x[j][i] * y[j][i];
    }
    add_dots(sums.x, dot, 0, group, begin == 0);
  }
  __syncthreads();
  const int j = static_cast<int>(threadIdx.x);
  if (j < group && n + j < N) dots[n + j] = sum_of_warps(sums.x, j, group);
}

// In the plain version a thread has a token's whole softmax, and another kernel reads the weights back. Here a warp has
// the softmax and the row: weights stay in shared memory, and the exponentials of the scores, the same for all tokens,
// are computed once a block.
//
// A warp takes a row. softmax(score - 1/2 ln(square)) without the logarithm: exp(score) / sqrt(square), normalised.
// exp(score) is at most 1, relative to the largest. The division makes the weight of a single source exactly 1.
template <bool whole, class S>
__global__ void vertical_forward_kernel(S* out, float* weights, const NormedSources<S> sources, const float* scores,
                                        int64_t N, int64_t C, float eps) {
  const int count = sources.count, lane = static_cast<int>(threadIdx.x);
  const float** squares = dynamic_shared<const float*>();
  float* exp_scores = reinterpret_cast<float*>(squares + count);
  float* w = exp_scores + (1 + threadIdx.y) * count;
  float most = -INFINITY;
  for (int s = lane; s < count && scores != nullptr; s += warp_size) most = larger_or_nan(most, scores[s]);
  most = warp_max(most);
  for (int s = static_cast<int>(threadIdx.y) * warp_size + lane; s < count; s += threads) {
    exp_scores[s] = scores == nullptr ? 1.f : expf(scores[s] - most);
    squares[s] = sources.squares[s];
  }
  __syncthreads();
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.y; n < N;
       n += static_cast<int64_t>(gridDim.x) * warps) {
    float sum = 0;
    for (int s = lane; s < count; s += warp_size) sum += w[s] = exp_scores[s] / sqrtf(squares[s][n] + eps);
    sum = warp_sum(sum);
    for (int s = lane; s < count; s += warp_size) weights[n * count + s] = w[s] /= sum;
    __syncwarp();
    mix_row_of_warp<whole>(out, w, sources, n, C);
    __syncwarp();
  }
}

template <class S>
struct VerticalReaders {
  const S* dout[max_inputs];
  const float* weights[max_inputs];  // weights[r][n * stride[r]]
  const float* pbar[max_inputs];
  int32_t stride[max_inputs];
  int count;
};

// The plain backward reads every dout twice, for the dots and for dinp, because the last term of dinp needs all dots.
// Here one read serves both: the rest of dinp waits in shared memory until the dots are there.
//
// A block takes a row. A thread keeps its columns of dinp without the last term in shared memory until all dots are
// there, and gets x for that term once more, mostly from the caches. partial: (readers, N), the q of every row.
template <bool whole, class S>
__global__ void __launch_bounds__(threads, 3)
    vertical_backward_kernel(S* dinp, float* partial, const S* inp, const float* squares,
                             const VerticalReaders<S> readers, int64_t N, int64_t C, int64_t padded, float eps,
                             bool accumulate) {
  float* totals = dynamic_shared<float>();  // (C), and up to whole spans: padded
  float* sums = totals + padded;            // (warps, readers)
  const int64_t n = blockIdx.x, step = blockDim.x * widest<S>, own = threadIdx.x * widest<S>;
  const float square = squares[n];
  gather_row<whole>(totals, sums, inp, dinp, readers, n, C, accumulate);
  __syncthreads();
  float q = 0;  // every warp makes the sum of all for itself
  for (int r = static_cast<int>(threadIdx.x) % warp_size; r < readers.count; r += warp_size) {
    const float dot = sum_of_warps(sums, r, readers.count);
    const float q_r = readers.weights[r][n * readers.stride[r]] * (dot - readers.pbar[r][n]);
    if (threadIdx.x < warp_size) partial[r * N + n] = q_r;
    q += q_r;
  }
  const float scale = warp_sum(q) / (square + eps);
  for (int64_t c = own; c < C; c += step) {
    const Floats<widest<S>> x = load_span<whole>(true, inp, n, c, C);
    Floats<widest<S>> total = load<widest<S>>(totals + c);
#pragma unroll
    for (int i = 0; i < widest<S>; ++i) total[i] -= scale * x[i];
    store_span<whole>(dinp + n * C, c, C, total);
  }
}

// -----------------------------------------------------------------------------------------------------------------

// Adds the sum of partial (readers, blocks) to what each reader trains, if it does: this source's number of it.
void add_partial(const std::vector<DepthReader>& readers, const float* partial, int64_t blocks) {
  Pointers<float> to;
  for (const DepthReader& r : readers)
    to.x[to.count++] = r.dtrained.data == nullptr ? nullptr : r.dtrained.as<float>() + r.column;
  launch({"depth_mix_add_partial", static_cast<uint32_t>(to.count), threads}, add_partial_kernel, to, partial, blocks);
}

}  // namespace

void depth_mix_forward_cuda(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights) {
  with_access(out.dtype, aligned16(sources) ? out.numel() : 1, {out.data}, [&]<class S>(S, auto width) {
    launch({"depth_mix_forward", blocks_of(out.numel(), tile_size<width, forward_vectors>), threads},
           depth_mix_forward_kernel<width, S>, out.as<S>(), pointers_to<const S>("depth_mix_forward", sources),
           weights.as<float>(), out.numel());
  });
}

void depth_mix_backward_cuda(const Grad& dinp, const Tensor& inp, const std::vector<DepthReader>& readers) {
  check_inputs("depth_mix_backward", readers.size());
  if (readers.empty() && !dinp.accumulate) fill_device_memory(dinp.data, 0, dinp.bytes());
  if (readers.empty()) return;
  const int64_t size = dinp.numel();
  with_access(dinp.dtype, columns_of(readers, size), {dinp.data, inp.data}, [&]<class S>(S, auto width) {
    DepthReaders<S> from;
    from.count = 0;
    for (const DepthReader& r : readers) {
      from.dout[from.count] = r.dout.as<S>();
      from.weight[from.count++] = r.weights.as<float>() + r.column;
    }
    // A block a tile: however many the readers, none waits long for the last one.
    const int64_t blocks = blocks_of(size, tile_size<width, backward_vectors>);
    float* partial = scratch<float>(blocks * from.count);
    launch({"depth_mix_backward", static_cast<uint32_t>(blocks), threads, warps * readers.size() * sizeof(float)},
           depth_mix_backward_kernel<width, S>, dinp.as<S>(), partial, inp.as<S>(), from, size, dinp.accumulate);
    add_partial(readers, partial, blocks);
  });
}

void vertical_dot_cuda(const Tensor& dots, const Tensor& a, const Tensor& b, int64_t N, int64_t C) {
  with_storage(a.dtype, [&]<class S>(S) {
    with_whole<S>(C, {a.data, b.data}, [&](auto whole) {
      launch({"vertical_dot", blocks_of(N, group), threads_of_row(C, widest<S>, threads)},
             vertical_dot_kernel<whole, S>, dots.as<float>(), a.as<S>(), b.as<S>(), N, C);
    });
  });
}

void vertical_forward_cuda(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                           const std::vector<Tensor>& squares, const Tensor& scores, int64_t N, int64_t C, double eps) {
  with_storage(out.dtype, [&]<class S>(S) {
    const NormedSources<S> from("vertical_forward", sources, squares);
    // Each has the scores' exponentials to make.
    const auto blocks = static_cast<uint32_t>(std::clamp<int64_t>(N / (2 * warps), 1, 1056));
    const size_t shared = sources.size() * (sizeof(float*) + (1 + warps) * sizeof(float));
    with_whole<S>(aligned16(sources) ? C : 1, {out.data}, [&](auto whole) {
      launch({"vertical_forward", blocks, dim3(warp_size, warps), shared}, vertical_forward_kernel<whole, S>,
             out.as<S>(), weights.as<float>(), from, data_or_null<float>(scores), N, C, static_cast<float>(eps));
    });
  });
}

void vertical_backward_cuda(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                            const std::vector<DepthReader>& readers, int64_t N, int64_t C, double eps) {
  check_inputs("vertical_backward", readers.size());
  if (readers.empty() && !dinp.accumulate) fill_device_memory(dinp.data, 0, dinp.bytes());
  if (readers.empty()) return;
  with_storage(dinp.dtype, [&]<class S>(S) {
    VerticalReaders<S> from;
    from.count = 0;
    for (const DepthReader& r : readers) {
      from.dout[from.count] = r.dout.as<S>();
      from.weights[from.count] = r.weights.as<float>() + r.column;
      from.pbar[from.count] = r.pbar.as<float>();
      from.stride[from.count++] = static_cast<int32_t>(r.weights.numel() / N);
    }
    const int64_t padded = blocks_of(C, widest<S>) * widest<S>;
    const uint32_t row_threads = threads_of_row(C, widest<S>, threads);
    const size_t shared = static_cast<size_t>(padded + row_threads / warp_size * from.count) * sizeof(float);
    CHECK_THAT(static_cast<int64_t>(shared) < max_shared_bytes() - 1024, "vertical_backward: rows of ", C,
               " are too wide for a GPU");
    float* partial = scratch<float>(N * from.count);
    with_whole<S>(columns_of(readers, C), {dinp.data, inp.data}, [&](auto whole) {
      launch({"vertical_backward", static_cast<uint32_t>(N), row_threads, shared}, vertical_backward_kernel<whole, S>,
             dinp.as<S>(), partial, inp.as<S>(), squares.as<float>(), from, N, C, padded, static_cast<float>(eps),
             dinp.accumulate);
    });
    add_partial(readers, partial, N);
  });
}

}  // namespace crossply
