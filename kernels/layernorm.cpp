#include "kernels/layernorm.h"

#include "kernels/cpu.h"

namespace crossply {
namespace {

template <class S>
void layernorm_forward_cpu(S* out, float* mean, float* rstd, const S* inp, int64_t rows, int64_t C, float eps) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const S* x = inp + n * C;
      S* y = out + n * C;
      float sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < C; ++c) sum += x[c];
      const float m = sum / static_cast<float>(C);
#pragma omp simd reduction(+ : square)
      for (int64_t c = 0; c < C; ++c) square += (x[c] - m) * (x[c] - m);
      const float r = 1.f / std::sqrt(square / static_cast<float>(C) + eps);
      mean[n] = m;
      rstd[n] = r;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) y[c] = (x[c] - m) * r;
    }
  });
}

template <class S>
void layernorm_backward_cpu(S* dinp, const S* dout, const S* inp, const float* mean, const float* rstd, int64_t rows,
                            int64_t C, bool acc) {
  parallel_for(rows, 32768 / C, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const S* x = inp + n * C;
      const S* dy = dout + n * C;
      S* dx = dinp + n * C;
      const float m = mean[n], r = rstd[n];
      float along_one = 0, along_out = 0;
#pragma omp simd reduction(+ : along_one, along_out)
      for (int64_t c = 0; c < C; ++c) {
        along_one += dy[c];
        along_out += dy[c] * (x[c] - m);
      }
      along_one /= static_cast<float>(C);
      along_out *= r * r / static_cast<float>(C);
      if (acc) {
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) dx[c] += r * (dy[c] - along_one - (x[c] - m) * along_out);
      } else {
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) dx[c] = r * (dy[c] - along_one - (x[c] - m) * along_out);
      }
    }
  });
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points: check shapes, choose the backend.

void layernorm_forward(const Tensor& out, const Tensor& mean, const Tensor& rstd, const Tensor& inp, double eps,
                       Stream stream) {
  const int rank = inp.shape.rank;
  CHECK_THAT(rank >= 1, "layernorm_forward: inp ", inp.str());
  const int64_t C = inp.dim(rank - 1), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && out.numel() == rows * C && mean.numel() == rows, "layernorm_forward: out ",
             out.str(), " mean ", mean.str(), " rstd ", rstd.str(), " inp ", inp.str());
  if (stream.backend == Backend::cpu)
    return with_storage(out.dtype, [&](auto storage) {
      using S = decltype(storage);
      layernorm_forward_cpu(out.as<S>(), mean.as<float>(), rstd.as<float>(), inp.as<S>(), rows, C,
                            static_cast<float>(eps));
    });
  with_real(out.dtype, [&](auto real) {
    using T = decltype(real);
    layernorm_forward_ref(out.as<T>(), mean.as<T>(), rstd.as<T>(), inp.as<T>(), rows, C, eps);
  });
}

void layernorm_backward(const Tensor& dinp, const Tensor& dout, const Tensor& inp, const Tensor& mean,
                        const Tensor& rstd, bool acc, Stream stream) {
  const int rank = inp.shape.rank;
  CHECK_THAT(rank >= 1, "layernorm_backward: inp ", inp.str());
  const int64_t C = inp.dim(rank - 1), rows = rstd.numel();
  CHECK_THAT(inp.numel() == rows * C && dinp.numel() == rows * C && dout.numel() == rows * C && mean.numel() == rows,
             "layernorm_backward: dinp ", dinp.str(), " dout ", dout.str(), " inp ", inp.str(), " mean ", mean.str(),
             " rstd ", rstd.str());
  if (stream.backend == Backend::cpu)
    return with_storage(dinp.dtype, [&](auto storage) {
      using S = decltype(storage);
      layernorm_backward_cpu(dinp.as<S>(), dout.as<S>(), inp.as<S>(), mean.as<float>(), rstd.as<float>(), rows, C, acc);
    });
  with_real(dinp.dtype, [&](auto real) {
    using T = decltype(real);
    layernorm_backward_ref(dinp.as<T>(), dout.as<T>(), inp.as<T>(), mean.as<T>(), rstd.as<T>(), rows, C, acc);
  });
}

}  // namespace crossply
