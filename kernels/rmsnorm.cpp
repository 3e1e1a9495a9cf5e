#include "kernels/rmsnorm.h"

#include <algorithm>

#include "kernels/cpu.h"

namespace crossply {
namespace {

void rmsnorm_forward_cpu(float* out, float* rstd, const float* inp, const float* weight, int64_t rows, int64_t C,
                         float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* x = inp + n * C;
      float* y = out + n * C;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < C; ++c) sum += x[c] * x[c];
      const float r = 1.f / std::sqrt(sum / static_cast<float>(C) + eps);
      rstd[n] = r;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) y[c] = weight[c] * x[c] * r;
    }
  });
}

void rmsnorm_backward_cpu(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                          const float* rstd, int64_t rows, int64_t C, bool acc) {
  // One partial dweight per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = scratch_f32(static_cast<size_t>(blocks * C));
  parallel_for(blocks, rows * C <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* dw = partial + b * C;
      std::fill(dw, dw + C, 0.f);
      for (int64_t n = rows * b / blocks; n < rows * (b + 1) / blocks; ++n) {
        const float* x = inp + n * C;
        const float* dy = dout + n * C;
        float* dx = dinp + n * C;
        const float r = rstd[n];
        float mean = 0;
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; ++c) {
          const float g = dy[c] * x[c];
          mean += g * weight[c];
          dw[c] += g * r;
        }
        mean *= r * r / static_cast<float>(C);
        if (acc) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) dx[c] += r * (dy[c] * weight[c] - x[c] * mean);
        } else {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) dx[c] = r * (dy[c] * weight[c] - x[c] * mean);
        }
      }
    }
  });
  for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) dweight[c] += partial[b * C + c];
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& inp, const Tensor& weight, double eps,
                     Stream stream) {
  const int64_t C = weight.numel(), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && out.numel() == rows * C, "rmsnorm_forward: out ", out.str(), " rstd ",
             rstd.str(), " inp ", inp.str(), " weight ", weight.str());
  if (stream.backend == Backend::cpu)
    return rmsnorm_forward_cpu(out.as<float>(), rstd.as<float>(), inp.as<float>(), weight.as<float>(), rows, C,
                               static_cast<float>(eps));
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_forward_ref(out.as<T>(), rstd.as<T>(), inp.as<T>(), weight.as<T>(), rows, C, eps);
  });
}

void rmsnorm_backward(const Tensor& dinp, const Tensor& dweight, const Tensor& dout, const Tensor& inp,
                      const Tensor& weight, const Tensor& rstd, bool acc, Stream stream) {
  const int64_t C = weight.numel(), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && dinp.numel() == rows * C && dout.numel() == rows * C && dweight.numel() == C,
             "rmsnorm_backward: dinp ", dinp.str(), " dout ", dout.str(), " inp ", inp.str(), " weight ",
             weight.str());
  if (stream.backend == Backend::cpu)
    return rmsnorm_backward_cpu(dinp.as<float>(), dweight.as<float>(), dout.as<float>(), inp.as<float>(),
                                weight.as<float>(), rstd.as<float>(), rows, C, acc);
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    rmsnorm_backward_ref(dinp.as<T>(), dweight.as<T>(), dout.as<T>(), inp.as<T>(), weight.as<T>(), rstd.as<T>(), rows,
                         C, acc);
  });
}

}  // namespace crossply
