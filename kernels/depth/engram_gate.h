// How what a token's n-grams have looked up is written to its streams (Engram, arXiv 2601.07372): each of E streams
// takes the token's one value as far as it agrees with its key. N tokens of C channels, s a stream:
//
//   k_s = kv[n,s], s < E;  val = kv[n,E];  w = wq wk                     wq, wk: gains of stream and key
//   dot = sum_c x w k;  rx = 1 / sqrt(mean_c x^2 + eps);  rk the same of k;  q = dot rx rk / sqrt(C)
//   h   = sqrt(max(|q|, 1e-6)) with the sign of q, also of a zero;  gam = sigmoid(h)
//   out = x + gam val
//
// With dout, and t = <dout, val> gam (1 - gam) / (2 sqrt(|q|) sqrt(C)), 0 where |q| < 1e-6:
//
//   dx    = dout + t rx rk w k - x t dot rx^3 rk / C                     set, or added
//   dk_s  = t rx rk w x - k t dot rx rk^3 / C;  dval = sum_s gam dout    set, or added
//   dwq  += wk sum_n t rx rk x k;  dwk += wq sum_n t rx rk x k           always added
//
// x, dx, out, dout: (..., E, C), or (..., C) of one stream; kv, dkv: (..., E + 1, C): f32 or bf16. wq, wk, dwq, dwk:
// (E, C), f32. saved: (N, E, 4), f32: dot, gam, rx, rk. No output may alias anything. The slope of h is up to 500, so
// all of this is in f32 beside bf16, too. The sums over tokens go through a fixed number of partial sums, so they do
// not depend on the thread count.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply {

constexpr double engram_least_logit = 1e-6;  // of |q| below its root
constexpr int64_t engram_saved = 4;          // numbers of a stream and token

struct EngramGateInputs {
  Tensor x, kv, wq, wk;
};
void engram_gate_forward(const Tensor& out, const Tensor& saved, const EngramGateInputs& in, double eps, Stream stream);
void engram_gate_backward(const Grad& dx, const Grad& dkv, const Tensor& dwq, const Tensor& dwk, const Tensor& dout,
                          const EngramGateInputs& in, const Tensor& saved, Stream stream);

struct EngramGateSize {
  int64_t N, E, C;
};

// kernels/depth/engram_gate.cu. In bytes by slot: t rx rk of each stream and token, and of parts of the tokens the sums
// for the gains.
inline int64_t engram_gate_parts(int64_t N) { return std::clamp<int64_t>(N / 64, 1, 64); }
inline ScratchBytes engram_gate_scratch(const EngramGateSize& z) {
  return {static_cast<size_t>(z.N * z.E) * sizeof(float),
          static_cast<size_t>(engram_gate_parts(z.N) * z.E * z.C) * sizeof(float)};
}
CUDA_TWIN void engram_gate_forward_cuda(const Tensor& out, const Tensor& saved, const EngramGateInputs& in, double eps,
                                        const EngramGateSize& z);
CUDA_TWIN void engram_gate_backward_cuda(const Grad& dx, const Grad& dkv, const Tensor& dwq, const Tensor& dwk,
                                         const Tensor& dout, const EngramGateInputs& in, const Tensor& saved,
                                         const EngramGateSize& z);

// |q| and its sign; gam and what dq is of <dout, val>. For a complex T by its real part.
template <class T>
struct EngramGateRef {
  T gam, slope;
  explicit EngramGateRef(const T& q) {
    using std::exp, std::real, std::signbit, std::sqrt;
    const T sign = signbit(real(q)) ? T(-1) : T(1), size = sign * q;
    const bool clamped = real(size) < engram_least_logit;
    const T root = sqrt(clamped ? T(engram_least_logit) : size);
    gam = T(1) / (T(1) + exp(-sign * root));
    slope = clamped ? T(0) : gam * (T(1) - gam) / (T(2) * root);
  }
};

template <class T>
void engram_gate_forward_ref(T* out, T* saved, const T* x, const T* kv, const T* wq, const T* wk, double eps,
                             const EngramGateSize& z) {
  using std::sqrt;
  const T C(static_cast<double>(z.C));
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t s = 0; s < z.E; ++s) {
      const T *xs = x + (n * z.E + s) * z.C, *k = kv + (n * (z.E + 1) + s) * z.C,
              *val = kv + (n * (z.E + 1) + z.E) * z.C;
      T dot = 0, xx = 0, kk = 0;
      for (int64_t c = 0; c < z.C; ++c) {
        dot += xs[c] * wq[s * z.C + c] * wk[s * z.C + c] * k[c];
        xx += xs[c] * xs[c], kk += k[c] * k[c];
      }
      const T rx = T(1) / sqrt(xx / C + T(eps)), rk = T(1) / sqrt(kk / C + T(eps));
      const T gam = EngramGateRef<T>(dot * rx * rk / sqrt(C)).gam;
      for (int64_t c = 0; c < z.C; ++c) out[(n * z.E + s) * z.C + c] = xs[c] + gam * val[c];
      T* to = saved + (n * z.E + s) * engram_saved;
      to[0] = dot, to[1] = gam, to[2] = rx, to[3] = rk;
    }
}

template <class T>
void engram_gate_backward_ref(T* dx, bool dx_added, T* dkv, bool dkv_added, T* dwq, T* dwk, const T* dout, const T* x,
                              const T* kv, const T* wq, const T* wk, const T* saved, const EngramGateSize& z) {
  using std::sqrt;
  const T C(static_cast<double>(z.C));
  if (!dx_added) std::fill_n(dx, z.N * z.E * z.C, T(0));
  if (!dkv_added) std::fill_n(dkv, z.N * (z.E + 1) * z.C, T(0));
  for (int64_t n = 0; n < z.N; ++n)
    for (int64_t s = 0; s < z.E; ++s) {
      const int64_t at = (n * z.E + s) * z.C, key = (n * (z.E + 1) + s) * z.C, value = (n * (z.E + 1) + z.E) * z.C;
      const T* of = saved + (n * z.E + s) * engram_saved;
      const T dot = of[0], gam = of[1], rx = of[2], rk = of[3];
      T agreement = 0;
      for (int64_t c = 0; c < z.C; ++c) agreement += dout[at + c] * kv[value + c];
      const T t = agreement * EngramGateRef<T>(dot * rx * rk / sqrt(C)).slope / sqrt(C);
      for (int64_t c = 0; c < z.C; ++c) {
        const T gq = wq[s * z.C + c], gk = wk[s * z.C + c], a = x[at + c], k = kv[key + c], dy = dout[at + c];
        dx[at + c] += dy + t * rx * rk * gq * gk * k - a * t * dot * rx * rx * rx * rk / C;
        dkv[key + c] += t * rx * rk * gq * gk * a - k * t * dot * rx * rk * rk * rk / C;
        dkv[value + c] += gam * dy;
        dwq[s * z.C + c] += gk * t * rx * rk * a * k;
        dwk[s * z.C + c] += gq * t * rx * rk * a * k;
      }
    }
}

}  // namespace crossply
