// The mixtures over depth in plain CUDA: the loops of depth_mix.h, the outer ones spread over threads. Read it before
// depth_mix.cu. Tests hold both to the same reference, and `bench gpu --only plain` times one against the other.
// Training never calls this file.
//
// Both kinds of mixture run through the same kernels: a weight lies at weights[n * stride], with stride 0 where all
// tokens share it. Sums are in double: one thread may add up thousands of terms, and a float would lose digits.
// Not yet run on hardware: only in the emulator.
#include <cmath>

#include "kernels/cuda/cuda.cuh"
#include "kernels/depth/depth_mix.h"

namespace crossply {
namespace {

constexpr int threads = 256;  // of a block

// What read a source, for kernels to take by value.
template <class S>
struct DepthReaderTable {
  const S* dout[max_inputs];
  const float* weights[max_inputs];  // at this source's column
  const float* pbar[max_inputs];     // null if not vertical
  float* dtrained[max_inputs];       // one number each, or null
  int stride[max_inputs];
  int count = 0;
};

// A thread has an element of out: one column of one token.
template <class S>
__global__ void depth_mix_kernel(S* out, const Pointers<const S> sources, const float* weights, int64_t stride,
                                 int64_t N, int64_t C) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = i / C;
  if (n >= N) return;
  double sum = weights[n * stride] * to_float(sources.x[0][i]);  // not 0 + a product, which would lose the sign of -0
  for (int s = 1; s < sources.count; ++s) sum += weights[n * stride + s] * to_float(sources.x[s][i]);
  from_float(out[i], static_cast<float>(sum));
}

// A thread has a token's softmax. exp(score - 1/2 ln(square + eps)) is exp(score) / sqrt(square + eps).
__global__ void vertical_weights_kernel(float* weights, const Pointers<const float> squares, const float* scores,
                                        int64_t N, float eps) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  float* w = weights + n * squares.count;
  float max = -INFINITY;
  double sum = 0;
  for (int s = 0; s < squares.count; ++s) max = scores != nullptr && scores[s] > max ? scores[s] : max;
  for (int s = 0; s < squares.count; ++s) {
    w[s] = (scores == nullptr ? 1.f : expf(scores[s] - max)) / sqrtf(squares.x[s][n] + eps);
    sum += w[s];
  }
  for (int s = 0; s < squares.count; ++s) w[s] /= static_cast<float>(sum);
}

// A thread has a row.
template <class S>
__global__ void vertical_dot_kernel(float* dots, const S* a, const S* b, int64_t N, int64_t C) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  double dot = 0;
  for (int64_t c = 0; c < C; ++c) dot += to_float(a[n * C + c]) * to_float(b[n * C + c]);
  dots[n] = static_cast<float>(dot);
}

// q (readers,N): a thread has a row of a reader, of which it computes what that reader's weight gets. Each reader's
// dout is read here, and again by the kernel of dinp.
template <class S>
__global__ void depth_mix_q_kernel(float* q, const S* inp, const DepthReaderTable<S> readers, int64_t N, int64_t C) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = i % N;
  if (i >= readers.count * N) return;
  const auto r = static_cast<int>(i / N);
  double sum = 0;
  for (int64_t c = 0; c < C; ++c) sum += to_float(readers.dout[r][n * C + c]) * to_float(inp[n * C + c]);
  const auto dot = static_cast<float>(sum);
  const float w = readers.weights[r][n * readers.stride[r]];
  q[i] = readers.pbar[r] == nullptr ? dot : w * (dot - readers.pbar[r][n]);
}

// A thread has a reader, and adds up N numbers.
template <class S>
__global__ void depth_mix_dtrained_kernel(const DepthReaderTable<S> readers, const float* q, int64_t N) {
  const auto r = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (r >= readers.count || readers.dtrained[r] == nullptr) return;
  double sum = 0;
  for (int64_t n = 0; n < N; ++n) sum += q[r * N + n];
  *readers.dtrained[r] += static_cast<float>(sum);
}

// A thread has an element of dinp. squares: null if not vertical.
template <class S>
__global__ void depth_mix_dinp_kernel(S* dinp, const S* inp, const float* squares, const float* q,
                                      const DepthReaderTable<S> readers, int64_t N, int64_t C, float eps,
                                      bool accumulate) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, n = i / C;
  if (n >= N) return;
  double sum = accumulate ? to_float(dinp[i]) : 0.f;
  for (int r = 0; r < readers.count; ++r)
    sum += readers.weights[r][n * readers.stride[r]] * to_float(readers.dout[r][i]);
  if (squares != nullptr)
    for (int r = 0; r < readers.count; ++r) sum -= q[r * N + n] * to_float(inp[i]) / (squares[n] + eps);
  from_float(dinp[i], static_cast<float>(sum));
}

// squares: null if not vertical.
void backward(const char* name, const Grad& dinp, const Tensor& inp, const float* squares,
              const std::vector<DepthReader>& readers, int64_t N, int64_t C, double eps) {
  check_inputs(name, readers.size());
  if (readers.empty() && !dinp.accumulate) fill_device_memory(dinp.data, 0, dinp.bytes());
  if (readers.empty()) return;
  with_storage(dinp.dtype, [&]<class S>(S) {
    DepthReaderTable<S> from;
    for (const DepthReader& r : readers) {
      from.dout[from.count] = r.dout.as<S>();
      from.weights[from.count] = r.weights.as<float>() + r.column;
      from.pbar[from.count] = squares == nullptr ? nullptr : r.pbar.as<float>();
      from.dtrained[from.count] = r.dtrained.data == nullptr ? nullptr : r.dtrained.as<float>() + r.column;
      from.stride[from.count++] = squares == nullptr ? 0 : static_cast<int>(r.weights.numel() / N);
    }
    float* q = scratch<float>(from.count * N);
    launch({"depth_mix_q_plain", blocks_of(from.count * N, threads), threads}, depth_mix_q_kernel<S>, q, inp.as<S>(),
           from, N, C);
    launch({"depth_mix_dtrained_plain", blocks_of(from.count, threads), threads}, depth_mix_dtrained_kernel<S>, from, q,
           N);
    launch({"depth_mix_dinp_plain", blocks_of(N * C, threads), threads}, depth_mix_dinp_kernel<S>, dinp.as<S>(),
           inp.as<S>(), squares, q, from, N, C, static_cast<float>(eps), dinp.accumulate);
  });
}

}  // namespace

void depth_mix_forward_plain(const Tensor& out, const std::vector<Tensor>& sources, const Tensor& weights) {
  with_storage(out.dtype, [&]<class S>(S) {  // all elements as one row: they share the weights
    launch({"depth_mix_forward_plain", blocks_of(out.numel(), threads), threads}, depth_mix_kernel<S>, out.as<S>(),
           pointers_to<const S>("depth_mix_forward_plain", sources), weights.as<float>(), 0, 1, out.numel());
  });
}

void depth_mix_backward_plain(const Grad& dinp, const Tensor& inp, const std::vector<DepthReader>& readers) {
  const int64_t C = inp.dim(inp.shape.rank - 1);
  backward("depth_mix_backward_plain", dinp, inp, nullptr, readers, inp.numel() / C, C, 0);
}

void vertical_dot_plain(const Tensor& dots, const Tensor& a, const Tensor& b, int64_t N, int64_t C) {
  with_storage(a.dtype, [&]<class S>(S) {
    launch({"vertical_dot_plain", blocks_of(N, threads), threads}, vertical_dot_kernel<S>, dots.as<float>(), a.as<S>(),
           b.as<S>(), N, C);
  });
}

void vertical_forward_plain(const Tensor& out, const Tensor& weights, const std::vector<Tensor>& sources,
                            const std::vector<Tensor>& squares, const Tensor& scores, int64_t N, int64_t C,
                            double eps) {
  const auto count = static_cast<int64_t>(sources.size());
  launch({"vertical_weights_plain", blocks_of(N, threads), threads}, vertical_weights_kernel, weights.as<float>(),
         pointers_to<const float>("vertical_forward_plain", squares), data_or_null<float>(scores), N,
         static_cast<float>(eps));
  with_storage(out.dtype, [&]<class S>(S) {
    launch({"vertical_forward_plain", blocks_of(N * C, threads), threads}, depth_mix_kernel<S>, out.as<S>(),
           pointers_to<const S>("vertical_forward_plain", sources), weights.as<float>(), count, N, C);
  });
}

void vertical_backward_plain(const Grad& dinp, const Tensor& inp, const Tensor& squares,
                             const std::vector<DepthReader>& readers, int64_t N, int64_t C, double eps) {
  backward("vertical_backward_plain", dinp, inp, squares.as<float>(), readers, N, C, eps);
}

}  // namespace crossply
