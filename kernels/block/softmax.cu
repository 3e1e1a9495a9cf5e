// Not yet run on hardware: only in the emulator.
#include "kernels/block/softmax.h"

#include "kernels/block/softmax.cuh"

namespace crossply {
namespace {

// to = values times the mask of alpha. A thread takes an entry and sums up all that come before it in descending order,
// in double, so that the order of the sum does not matter.
__global__ void prune_kernel(float* to, const float* values, const float* alpha, double most, int64_t S, int64_t n) {
  const int64_t i = first_of_thread<1>();
  if (i >= n) return;
  const int64_t own = i % S;
  const float* row = alpha + (i - own);
  const float weight = row[own];
  double before = 0;
  for (int64_t m = 0; m < S; ++m)
    if (row[m] > weight || (row[m] == weight && m > own)) before += static_cast<double>(row[m]);
  to[i] = before > most ? values[i] * 0.f : values[i];  // a product: NaN must stay
}

// Divides each row by its sum.
__global__ void renormalize_kernel(float* values, int64_t rows, int64_t S, int lanes) {
  const SoftmaxRow r = row_of_lanes(rows, S, lanes);
  float* row = values + r.n * S;
  float sum = 0;
  for (int64_t m = r.lane; m < r.width; m += lanes) sum += row[m];
  const float scale = 1.f / group_sum(sum, lanes);
  for (int64_t m = r.lane; m < r.width; m += lanes) row[m] *= scale;
}

template <class X>
__global__ void softmax_forward_kernel(float* out, const X* inp, int64_t rows, int64_t S, int lanes) {
  const SoftmaxRow r = softmax_of_row(inp, rows, S, lanes);
  for (int64_t m = r.n * S + r.lane; m < r.n * S + r.width; m += lanes)
    out[m] = expf(to_float(inp[m]) - r.largest) * r.scale;
}

// da: dout after pruning. weights: what stands in for the softmax of inp, if it is not null.
template <class X>
__global__ void softmax_backward_kernel(X* dinp, const float* da, const X* inp, const float* weights, int64_t rows,
                                        int64_t S, bool accumulate, int lanes) {
  const SoftmaxRow r = softmax_of_row(inp, rows, S, lanes);
  const auto alpha = [&](int64_t m) {
    return weights != nullptr ? weights[m] : expf(to_float(inp[m]) - r.largest) * r.scale;
  };
  float mean = 0;
  for (int64_t m = r.n * S + r.lane; m < r.n * S + r.width; m += lanes) mean += alpha(m) * da[m];
  mean = group_sum(mean, lanes);
  for (int64_t m = r.n * S + r.lane; m < r.n * S + r.width; m += lanes)
    store_or_accumulate<1>(dinp + m, Floats<1>{{alpha(m) * (da[m] - mean)}}, accumulate);
}

template <class X>
void launch_softmax(float* out, const X* inp, int64_t rows, int64_t S) {
  const int lanes = lanes_of_row(S);
  launch(launch_of_rows("softmax_forward", rows, lanes), softmax_forward_kernel<X>, out, inp, rows, S, lanes);
}

void launch_prune(float* to, const float* values, const float* alpha, double top_p, int64_t rows, int64_t S) {
  launch_elementwise("prune", rows * S, 1, prune_kernel, to, values, alpha, top_p + top_p_slack, S);
}

// to = the pruned weights of alpha.
void launch_prune_weights(float* to, const float* alpha, const Pruning& pruning, int64_t rows, int64_t S) {
  launch_prune(to, alpha, alpha, pruning.top_p, rows, S);
  if (!pruning.renormalize) return;
  const int lanes = lanes_of_row(S);
  launch(launch_of_rows("renormalize", rows, lanes), renormalize_kernel, to, rows, S, lanes);
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void softmax_forward_cuda(const Tensor& out, const Tensor& inp, int64_t S, const Pruning& pruning) {
  const int64_t rows = inp.numel() / S;
  float* to = out.as<float>();
  float* alpha = pruning.top_p < 1 ? scratch<float>(rows * S) : to;
  with_storage(inp.dtype, [&]<class X>(X) { launch_softmax(alpha, inp.as<X>(), rows, S); });
  if (pruning.top_p < 1) launch_prune_weights(to, alpha, pruning, rows, S);
}

void softmax_backward_cuda(const Grad& dinp, const Tensor& dout, const Tensor& inp, int64_t S, const Pruning& pruning) {
  const int64_t rows = inp.numel() / S;
  with_storage(inp.dtype, [&]<class X>(X) {
    const float *da = dout.as<float>(), *weights = nullptr;
    if (pruning.top_p < 1) {
      float *alpha = scratch<float>(2 * rows * S), *pruned = alpha + rows * S;
      launch_softmax(alpha, inp.as<X>(), rows, S);
      if (pruning.renormalize) launch_prune_weights(pruned, alpha, pruning, rows, S);
      else launch_prune(pruned, da, alpha, pruning.top_p, rows, S);
      (pruning.renormalize ? weights : da) = pruned;
    }
    const int lanes = lanes_of_row(S);
    launch(launch_of_rows("softmax_backward", rows, lanes), softmax_backward_kernel<X>, dinp.as<X>(), da, inp.as<X>(),
           weights, rows, S, dinp.accumulate, lanes);
  });
}

}  // namespace crossply
