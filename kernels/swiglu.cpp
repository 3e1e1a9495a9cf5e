#include "kernels/swiglu.h"

#include "kernels/cpu.h"

namespace crossply {
namespace {

constexpr int64_t grain = 16384;

void swiglu_forward_cpu(float* out, const float* gate, const float* up, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] = gate[i] / (1.f + exp_f32(-gate[i])) * up[i];
  });
}

template <bool acc_gate, bool acc_up>
void swiglu_backward_cpu(float* dgate, float* dup, const float* dout, const float* gate, const float* up, int64_t n) {
  parallel_for(n, grain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float a = gate[i], e = exp_f32(-a), s = 1.f / (1.f + e);
      const float dg = dout[i] * up[i] * s * (1.f + a * (e * s));  // e s is 1 - s without the cancellation
      const float du = dout[i] * a * s;
      dgate[i] = acc_gate ? dgate[i] + dg : dg;
      dup[i] = acc_up ? dup[i] + du : du;
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void swiglu_forward(const Tensor& out, const Tensor& gate, const Tensor& up, Stream stream) {
  const int64_t n = out.numel();
  CHECK_THAT(gate.numel() == n && up.numel() == n, "swiglu_forward: out ", out.str(), " gate ", gate.str(), " up ",
             up.str());
  if (stream.backend == Backend::cpu)
    return swiglu_forward_cpu(out.as<float>(), gate.as<float>(), up.as<float>(), n);
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    swiglu_forward_ref(out.as<T>(), gate.as<T>(), up.as<T>(), n);
  });
}

void swiglu_backward(const Tensor& dgate, const Tensor& dup, const Tensor& dout, const Tensor& gate, const Tensor& up,
                     bool acc_gate, bool acc_up, Stream stream) {
  const int64_t n = dout.numel();
  CHECK_THAT(dgate.numel() == n && dup.numel() == n && gate.numel() == n && up.numel() == n, "swiglu_backward: dgate ",
             dgate.str(), " dup ", dup.str(), " dout ", dout.str(), " gate ", gate.str(), " up ", up.str());
  if (stream.backend == Backend::cpu) {
    auto backward = acc_gate ? acc_up ? swiglu_backward_cpu<true, true> : swiglu_backward_cpu<true, false>
                             : acc_up ? swiglu_backward_cpu<false, true> : swiglu_backward_cpu<false, false>;
    return backward(dgate.as<float>(), dup.as<float>(), dout.as<float>(), gate.as<float>(), up.as<float>(), n);
  }
  with_real(dout.dtype, [&](auto real) {
    using T = decltype(real);
    swiglu_backward_ref(dgate.as<T>(), dup.as<T>(), dout.as<T>(), gate.as<T>(), up.as<T>(), n, acc_gate, acc_up);
  });
}

}  // namespace crossply
