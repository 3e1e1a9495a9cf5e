// Not yet run on hardware: only in the emulator.
#include "kernels/block/cross_entropy.h"

#include "kernels/block/cross_entropy.cuh"
#include "kernels/block/matmul.cuh"

namespace crossply {
namespace {

// What only some losses have, of each row; null for none.
struct LossRows {
  const float* weights;
  float* squares;
  float z_loss;
};

// Read cross_entropy_plain.cu first. There one thread reads a row of logits three times, and no two threads of a warp
// share a cache line. Here a block shares the row and finds the largest logit and the sum in one read: when a larger
// one comes, the sum so far is rescaled. The second read is from shared memory. So z is read once and written once.
//
// The three products around this kernel go to tensor cores, by tiles in which an element, once loaded, serves about a
// hundred multiply-adds. In the plain kernels it serves one. Rows come in chunks, and z takes at most 1 GiB.
//
// A block for each row of logits z (rows, V), rows `stride` apart: the loss, and z becomes dz if want_dz. The first
// `kept` logits of a row wait in shared memory for the second pass; the rows of all blocks together are as large as the
// L2 cache, so that those behind them may come from memory again. What bounds it is one read and one write of z. Rows
// with target -1 get 0 and zeros; a target that is no token gets NaN, as the host cannot look. What waits is not capped
// yet: in bf16 it would be rounded once more.
template <int width, class S, class Cap>
__global__ void __launch_bounds__(row_threads, 2)
    loss_kernel(float* losses, S* z, const int32_t* targets, float scale, LossRows more, Cap cap, int64_t V,
                int64_t stride, int64_t kept, bool want_dz) {
  SHARED(parts, SoftmaxParts);
  S* row = dynamic_shared<S>();  // (kept)
  const int64_t n = blockIdx.x;
  const int32_t target = targets[n];
  z += n * stride;
  if (target < 0) {
    if (threadIdx.x == 0) losses[n] = target == -1 ? 0.f : nanf("");
    if (threadIdx.x == 0 && more.squares != nullptr) more.squares[n] = 0;
    if (want_dz)
      for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) store<width>(z + v, Floats<width>{});
    return;
  }
  const float at_target = target < V ? cap(to_float(z[target])) : nanf("");  // before anybody writes dz
  const OnlineSoftmax all = softmax_of_row<width>(z, V, per_ln_2, cap, parts, [=](int64_t v, const Floats<width>& x) {
    if (v < kept) store<width, Space::shared>(row + v, x);
  });
  if (threadIdx.x == 0) losses[n] = ln_2 * (log2f(all.sum) - fmaf(per_ln_2, at_target, -all.largest));
  const auto lse = [&] { return ln_2 * (log2f(all.sum) + all.largest); };
  if (threadIdx.x == 0 && more.squares != nullptr) more.squares[n] = lse() * lse();
  if (!want_dz) return;
  if (more.weights != nullptr) scale *= more.weights[n];
  float factor = scale / all.sum;
  if (more.z_loss > 0) factor *= 1.f + 2.f * more.z_loss * lse();
  for (int64_t v = threadIdx.x * width; v < V; v += row_threads * width) {
    const Floats<width> waited = v < kept ? load<width>(row + v) : load_logits<width>(z, v, V);
    Floats<width> x = capped<width>(waited, v, V, cap);
    const int at = target - static_cast<int>(v);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      float dz = factor * exp2_fast(fmaf(per_ln_2, x[i], -all.largest));
      if (i == at) dz -= scale;
      if constexpr (std::is_same_v<Cap, Capped>) dz *= v + i < V ? cap.slope(x[i]) : 0.f;
      x[i] = dz;
    }
    store<width>(z + v, x);
  }
}

// How much of a row has room where two blocks share a multiprocessor, of which one computes while the other waits for
// memory.
template <class S>
int64_t logits_kept(int64_t V) {
  constexpr int64_t others = 4096;  // bytes of both blocks, and of what the hardware takes
  const int64_t room = (max_shared_bytes() - others) / 2 / static_cast<int64_t>(sizeof(S));
  return std::min(V + widest<S> - 1, room) / widest<S> * widest<S>;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void cross_entropy_forward_cuda(const Tensor& losses, const Tensor& dinp, const Grad& dweight, const Tensor& inp,
                                const Tensor& weight, const Tensor& targets, double scale,
                                const CrossEntropyOptions& options) {
  const int64_t V = weight.dim(0), C = weight.dim(1), rows = targets.numel();
  const bool want_dz = dinp.data != nullptr;
  const auto* weights = data_or_null<float>(options.row_weights);
  auto* squares = data_or_null<float>(options.squares);
  with_storage(inp.dtype, [&]<class S>(S) {
    constexpr int width = widest<S>;
    const auto [most, stride] = logit_chunk(rows, V, inp.dtype);
    S* logits = scratch<S>(most * stride, cross_entropy_slot);
    const int64_t kept = want_dz ? logits_kept<S>(V) : 0;
    const Matrix z{logits, inp.dtype, stride}, w{weight.data, weight.dtype, C};
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      const Matrix x{inp.as<S>() + begin * C, inp.dtype, C};
      multiply(z, x, transposed(w), {count, V, C}, nullptr);
      const LossRows more{weights == nullptr ? nullptr : weights + begin,
                          squares == nullptr ? nullptr : squares + begin, static_cast<float>(options.z_loss)};
      const auto with = [&]<class Cap>(const Cap& cap) {
        launch({"loss", static_cast<uint32_t>(count), row_threads, static_cast<size_t>(kept) * sizeof(S)},
               loss_kernel<width, S, Cap>, losses.as<float>() + begin, logits, targets.as<int32_t>() + begin,
               static_cast<float>(scale), more, cap, V, stride, kept, want_dz);
      };
      options.softcap == 0 ? with(Uncapped{}) : with(Capped(options.softcap));
      if (!want_dz) continue;
      multiply({dweight.data, dweight.dtype, C}, transposed(z), x, {V, C, count},
               dweight.accumulate || begin > 0 ? dweight.data : nullptr);
      multiply({dinp.as<S>() + begin * C, dinp.dtype, C}, z, w, {count, C, V}, nullptr);
    }
  });
}

}  // namespace crossply
