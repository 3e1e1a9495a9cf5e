// What hyper_read.cu, hyper_read_mma.cu and hyper_read_backward_mma.cu share.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/depth/streams/hyper.cuh"

namespace crossply::hyper {

constexpr int threads = warps * warp_size;

// The parameters as the kernels want them. projection (E+2,C): with the norm's gain folded in; for LayerNorm without
// their own means: that changes no product with a normalised stream, and saves the backward the mean of dNh. offset
// (E+2): norm_bias . projection. Both null for static connections.
struct DeviceReadPlan {
  HyperWeights<const float*> w;
  float *projection, *offset;
};

// Coefficient (i,j) without its tanh, and what the tanh is multiplied by.
__device__ __forceinline__ float static_part(const DeviceReadPlan& plan, int i, int j, int E) {
  return j <= E ? plan.w.static_alpha[i * (E + 1) + j] : plan.w.static_beta[i];
}
__device__ __forceinline__ float scale_of(const DeviceReadPlan& plan, int j, int E) {
  return j <= E ? *plan.w.alpha_scale : *plan.w.beta_scale;
}

template <class S>
struct Read {
  S* out;               // (rows,C)
  float *coef, *stats;  // coef (rows,E,E+2), stats (rows,E,E+4)
  const S* streams;
  int64_t rows, C;
  int E;
  float eps;
  bool centred;
};

template <class S>
struct ReadBackward {
  S* dstreams;         // (rows,E,C)
  const S* dout;       // (rows,C)
  const float* dcoef;  // (rows,E,E+2)
  const S* streams;
  const float *coef, *stats;  // stats (rows,E,E+4)
  float* partial;             // (blocks,row): as in ReadSums; for the projections k_j d_i
  int64_t row, rows, C;
  int E;
  bool centred, accumulate, sums_in_shared;
};

// Is there a tensor core kernel for this instance (with_instance of hyper.cuh)?
template <int exact, bool wide, class S>
constexpr bool for_tensor_cores = wide && (exact == 2 || exact == 4) && std::is_same_v<S, bf16>;
// The forward of such an instance on tensor cores. False, and nothing done, without projections, with more columns than
// this, or where shared memory is too small.
constexpr int max_mma_columns = 2048;
bool read_on_tensor_cores(const Read<bf16>& r, const DeviceReadPlan& plan);
// The backward: the blocks it took, at most so many; or 0, also where dcoef, coef or stats do not lie at multiples of
// 16 bytes.
int64_t read_backward_on_tensor_cores(const ReadBackward<bf16>& b, const DeviceReadPlan& plan, int64_t max_blocks);

}  // namespace crossply::hyper
