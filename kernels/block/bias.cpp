#include "kernels/block/bias.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

template <class S>
void bias_forward_cpu(S* out, const float* bias, int64_t rows, int64_t O) {
  parallel_for(rows, 32768 / O, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for_vectors(0, O, [=](int64_t o, auto part) {
        Vec16 x, b;
        load(x, out + n * O + o, part);
        load(b, bias + o, part);
        store(out + n * O + o, x + b, part);
      });
  });
}

template <class S>
void bias_backward_cpu(float* dbias, const S* dout, int64_t rows, int64_t O) {
  // One partial sum per block of rows; the number of blocks is fixed by the shape alone.
  const int64_t blocks = std::clamp<int64_t>(rows / 64, 1, 64);
  float* partial = scratch_f32(static_cast<size_t>(blocks * O));
  parallel_for(blocks, rows * O <= 32768 ? blocks : 1, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* sums = partial + b * O;
      std::fill(sums, sums + O, 0.f);
      for (int64_t n = rows * b / blocks; n < rows * (b + 1) / blocks; ++n)
        for_vectors(0, O, [=](int64_t o, auto part) {
          Vec16 x, sum;
          load(x, dout + n * O + o, part);
          load(sum, sums + o, part);
          store(sums + o, sum + x, part);
        });
    }
  });
  for (int64_t b = 0; b < blocks; ++b) {
#pragma omp simd
    for (int64_t o = 0; o < O; ++o) dbias[o] += partial[b * O + o];
  }
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void bias_forward(const Tensor& out, const Tensor& bias, Stream stream) {
  const int64_t O = bias.numel(), rows = out.numel() / O;
  CHECK_SHAPES(bias.shape.rank == 1 && out.numel() == rows * O, out, bias);
  dispatch(
      stream, out.dtype, [&] { CHECK_THAT(false, "on a GPU matmul_forward adds a bias"); },
      [&]<class S>(S) { bias_forward_cpu(out.as<S>(), bias.as<float>(), rows, O); },
      [&]<class T>(T) { bias_forward_ref(out.as<T>(), bias.as<T>(), rows, O); });
}

void bias_backward(const Tensor& dbias, const Tensor& dout, Stream stream) {
  const int64_t O = dbias.numel(), rows = dout.numel() / O;
  CHECK_SHAPES(dbias.shape.rank == 1 && dout.numel() == rows * O, dbias, dout);
  dispatch(
      stream, dout.dtype, [&] { bias_backward_cuda(dbias, dout, O); },
      [&]<class S>(S) { bias_backward_cpu(dbias.as<float>(), dout.as<S>(), rows, O); },
      [&]<class T>(T) { bias_backward_ref(dbias.as<T>(), dout.as<T>(), rows, O); });
}

}  // namespace crossply
