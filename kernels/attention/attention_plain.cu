// Attention in plain CUDA: the loops of attention.h, with the scores of all pairs of a query and a key in memory. Read
// it before attention.cu, attention_mma_forward.cu and attention_hopper_forward.cu, in this order. Tests hold all to
// the same reference, and `bench gpu --only plain` times one against the other. Training never calls this file.
//
// The price is memory for the scores: B H T T floats, written once and read by two more kernels, twice as many
// backward. At T = 8192 the scores of a head take 256 MiB. Its q, k, v and out in bf16 with D = 64 take 4 MiB.
// Not yet run on hardware: only in the emulator.
#include "kernels/attention/attention.h"
#include "kernels/cuda/cuda.cuh"

namespace crossply {
namespace {

constexpr int threads = 256;  // of a block

// s (B,H,T,T): a thread has a query t and a key j, and reads a row of q and a row of k for one number. What the query
// does not see stays as it was, and is read by nobody.
template <class S>
__global__ void attention_scores_kernel(float* s, const S* q, const S* k, AttentionSizes z, float scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t j = i % z.T, t = i / z.T % z.T, h = i / z.T / z.T % z.H, b = i / z.T / z.T / z.H;
  if (b >= z.B || j > t || j < z.lower(b, t)) return;
  q += ((b * z.T + t) * z.H + h) * z.D;
  k += ((b * z.T + j) * z.K + h / z.group) * z.D;
  float sum = 0;
  for (int64_t d = 0; d < z.D; ++d) sum += to_float(q[d]) * to_float(k[d]);
  s[i] = scale * sum;
}

// A thread has a query's row of scores, of which it makes weights.
__global__ void attention_softmax_kernel(float* p, float* lse, AttentionSizes z) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, t = i % z.T;
  if (i >= z.B * z.H * z.T) return;
  const int64_t lower = z.lower(i / z.T / z.H, t);
  p += i * z.T;
  float max = p[lower], sum = 0;
  for (int64_t j = lower + 1; j <= t; ++j) max = p[j] > max ? p[j] : max;
  for (int64_t j = lower; j <= t; ++j) sum += expf(p[j] - max);
  for (int64_t j = lower; j <= t; ++j) p[j] = expf(p[j] - max) / sum;
  lse[i] = max + logf(sum);
}

// A thread has an element of out.
template <class S>
__global__ void attention_out_kernel(S* out, const float* p, const S* v, AttentionSizes z) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i % z.D, h = i / z.D % z.H, t = i / z.D / z.H % z.T, b = i / z.D / z.H / z.T;
  if (b >= z.B) return;
  p += ((b * z.H + h) * z.T + t) * z.T;
  float sum = 0;
  for (int64_t j = z.lower(b, t); j <= t; ++j) sum += p[j] * to_float(v[((b * z.T + j) * z.K + h / z.group) * z.D + d]);
  from_float(out[i], sum);
}

// p, ds (B,H,T,T): a thread has a query and a key. All T threads of a query compute the same delta.
template <class S>
__global__ void attention_dscores_kernel(float* p, float* ds, const S* dout, const S* out, const S* q, const S* k,
                                         const S* v, const float* lse, AttentionSizes z, float scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t j = i % z.T, t = i / z.T % z.T, h = i / z.T / z.T % z.H, b = i / z.T / z.T / z.H;
  if (b >= z.B || j > t || j < z.lower(b, t)) return;
  const int64_t row = ((b * z.T + t) * z.H + h) * z.D, key = ((b * z.T + j) * z.K + h / z.group) * z.D;
  float s = 0, dp = 0, delta = 0;
  for (int64_t d = 0; d < z.D; ++d) {
    s += to_float(q[row + d]) * to_float(k[key + d]);
    dp += to_float(dout[row + d]) * to_float(v[key + d]);
    delta += to_float(dout[row + d]) * to_float(out[row + d]);
  }
  p[i] = expf(scale * s - lse[i / z.T]);
  ds[i] = scale * p[i] * (dp - delta);
}

// A thread has an element of dq.
template <class S>
__global__ void attention_dq_kernel(S* dq, const float* ds, const S* k, AttentionSizes z, bool accumulate) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i % z.D, h = i / z.D % z.H, t = i / z.D / z.H % z.T, b = i / z.D / z.H / z.T;
  if (b >= z.B) return;
  ds += ((b * z.H + h) * z.T + t) * z.T;
  float sum = accumulate ? to_float(dq[i]) : 0.f;
  for (int64_t j = z.lower(b, t); j <= t; ++j)
    sum += ds[j] * to_float(k[((b * z.T + j) * z.K + h / z.group) * z.D + d]);
  from_float(dq[i], sum);
}

// A thread has an element of dk and of dv: of key j, of the key/value head kv.
template <class S>
__global__ void attention_dkdv_kernel(S* dk, S* dv, const float* p, const float* ds, const S* dout, const S* q,
                                      AttentionSizes z, bool accumulate_k, bool accumulate_v) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t d = i % z.D, kv = i / z.D % z.K, j = i / z.D / z.K % z.T, b = i / z.D / z.K / z.T;
  if (b >= z.B) return;
  const int64_t upper = z.upper(b, j);
  float sum_k = accumulate_k ? to_float(dk[i]) : 0.f, sum_v = accumulate_v ? to_float(dv[i]) : 0.f;
  for (int64_t h = kv * z.group; h < (kv + 1) * z.group; ++h)
    for (int64_t t = j; t <= upper; ++t) {
      const int64_t row = ((b * z.T + t) * z.H + h) * z.D + d, pair = ((b * z.H + h) * z.T + t) * z.T + j;
      sum_k += ds[pair] * to_float(q[row]);
      sum_v += p[pair] * to_float(dout[row]);
    }
  from_float(dk[i], sum_k);
  from_float(dv[i], sum_v);
}

}  // namespace

void attention_forward_plain(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                             const AttentionSizes& z, float scale) {
  const int64_t rows = z.B * z.H * z.T;
  float* p = scratch<float>(rows * z.T);
  with_storage(out.dtype, [&]<class S>(S) {
    launch({"attention_scores_plain", blocks_of(rows * z.T, threads), threads}, attention_scores_kernel<S>, p,
           q.as<S>(), k.as<S>(), z, scale);
    launch({"attention_softmax_plain", blocks_of(rows, threads), threads}, attention_softmax_kernel, p, lse.as<float>(),
           z);
    launch({"attention_out_plain", blocks_of(rows * z.D, threads), threads}, attention_out_kernel<S>, out.as<S>(), p,
           v.as<S>(), z);
  });
}

void attention_backward_plain(const Grad& dq, const Grad& dk, const Grad& dv, const Tensor& dout, const Tensor& out,
                              const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                              const AttentionSizes& z, float scale) {
  const int64_t pairs = z.B * z.H * z.T * z.T;
  float *p = scratch<float>(2 * pairs), *ds = p + pairs;
  with_storage(dq.dtype, [&]<class S>(S) {
    launch({"attention_dscores_plain", blocks_of(pairs, threads), threads}, attention_dscores_kernel<S>, p, ds,
           dout.as<S>(), out.as<S>(), q.as<S>(), k.as<S>(), v.as<S>(), lse.as<float>(), z, scale);
    launch({"attention_dq_plain", blocks_of(dq.numel(), threads), threads}, attention_dq_kernel<S>, dq.as<S>(), ds,
           k.as<S>(), z, dq.accumulate);
    launch({"attention_dkdv_plain", blocks_of(dk.numel(), threads), threads}, attention_dkdv_kernel<S>, dk.as<S>(),
           dv.as<S>(), p, ds, dout.as<S>(), q.as<S>(), z, dk.accumulate, dv.accumulate);
  });
}

}  // namespace crossply
