#include "kernels/rmsnorm.h"

#include <algorithm>

#include "kernels/cpu.h"

namespace crossply {
namespace {

template <class S, bool gain>
void rmsnorm_forward_cpu(S* out, float* rstd, const S* inp, const float* weight, int64_t rows, int64_t C, float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const S* x = inp + n * C;
      S* y = out + n * C;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < C; ++c) sum += x[c] * x[c];
      const float r = 1.f / std::sqrt(sum / static_cast<float>(C) + eps);
      rstd[n] = r;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) y[c] = gain ? weight[c] * x[c] * r : x[c] * r;
    }
  });
}

template <class S, bool gain>
void rmsnorm_backward_cpu(S* dinp, float* dweight, const S* dout, const S* inp, const float* weight, const float* rstd,
                          int64_t rows, int64_t C, bool acc) {
  // One partial dweight per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = gain ? scratch_f32(static_cast<size_t>(blocks * C)) : nullptr;
  parallel_for(blocks, rows * C <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* dw = partial + b * C;
      if (gain) std::fill(dw, dw + C, 0.f);
      for (int64_t n = rows * b / blocks; n < rows * (b + 1) / blocks; ++n) {
        const S* x = inp + n * C;
        const S* dy = dout + n * C;
        S* dx = dinp + n * C;
        const float r = rstd[n];
        float mean = 0;
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; ++c) {
          const float g = dy[c] * x[c];
          mean += gain ? g * weight[c] : g;
          if (gain) dw[c] += g * r;
        }
        mean *= r * r / static_cast<float>(C);
        if (acc) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) dx[c] += r * (dy[c] * (gain ? weight[c] : 1.f) - x[c] * mean);
        } else {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) dx[c] = r * (dy[c] * (gain ? weight[c] : 1.f) - x[c] * mean);
        }
      }
    }
  });
  for (int64_t b = 0; b < blocks && gain; ++b) {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) dweight[c] += partial[b * C + c];
  }
}

int64_t width_of(const Tensor& inp, const Tensor& weight) {
  if (weight.data != nullptr) return weight.numel();
  CHECK_THAT(inp.shape.rank >= 1, "rmsnorm: inp ", inp.str());
  return inp.dim(inp.shape.rank - 1);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, double eps,
                     Stream stream) {
  const int64_t C = width_of(inp, weight), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && out.numel() == rows * C, "rmsnorm_forward: out ", out.str(), " rstd ",
             rstd.str(), " inp ", inp.str(), " weight ", weight.str());
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto forward = weight.data != nullptr ? rmsnorm_forward_cpu<S, true> : rmsnorm_forward_cpu<S, false>;
      forward(out.as<S>(), rstd.as<float>(), inp.as<S>(), data_or_null<float>(weight), rows, C,
              static_cast<float>(eps));
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_forward_ref(out.as<T>(), rstd.as<T>(), inp.as<T>(), data_or_null<T>(weight), rows, C, eps);
  });
}

void rmsnorm_backward(const Tensor& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                      const Tensor& weight, const Tensor& rstd, bool acc, Stream stream) {
  const int64_t C = width_of(inp, weight), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && dinp.numel() == rows * C && dout.numel() == rows * C, "rmsnorm_backward: dinp ",
             dinp.str(), " dout ", dout.str(), " inp ", inp.str(), " weight ", weight.str());
  const bool gain = weight.data != nullptr;
  CHECK_THAT(gain ? dweight.numel() == C : dweight.data == nullptr, "rmsnorm_backward: dweight ", dweight.str(),
             " weight ", weight.str());
  if (stream.backend == Backend::cpu)
    return with_storage(dinp.dtype, [&](auto storage) {
      using S = decltype(storage);
      auto backward = gain ? rmsnorm_backward_cpu<S, true> : rmsnorm_backward_cpu<S, false>;
      backward(dinp.as<S>(), data_or_null<float>(dweight), dout.as<S>(), inp.as<S>(), data_or_null<float>(weight),
               rstd.as<float>(), rows, C, acc);
    });
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_backward_ref(dinp.as<T>(), data_or_null<T>(dweight), dout.as<T>(), inp.as<T>(), data_or_null<T>(weight),
                         rstd.as<T>(), rows, C, acc);
  });
}

}  // namespace crossply
