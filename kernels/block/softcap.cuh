// The cap of a logit on a GPU. Kernels are compiled for both types, so that logits without a cap cost nothing.
// Not yet run on hardware: only in the emulator.
#pragma once

#include "kernels/cuda/cuda.cuh"

namespace crossply {

struct Uncapped {
  __device__ float operator()(float z) const { return z; }
};

// A cap of 0 leaves z as it is: of two models in one kernel only one may have a cap.
struct Capped {
  float c, per_c;
  explicit Capped(double cap) : c(static_cast<float>(cap)), per_c(cap == 0 ? 0.f : static_cast<float>(1 / cap)) {}
  __device__ float operator()(float z) const { return c == 0 ? z : c * tanhf(per_c * z); }
  // What dz is multiplied by, of a logit that is capped.
  __device__ float slope(float capped) const {
    const float t = per_c * capped;
    return 1.f - t * t;
  }
};

// Logits v and on, capped; beyond the last they are minus infinity, as they came.
template <int width>
__device__ __forceinline__ Floats<width> capped(const Floats<width>& z, int64_t, int64_t, Uncapped) {
  return z;
}
template <int width>
__device__ __forceinline__ Floats<width> capped(Floats<width> z, int64_t v, int64_t V, const Capped& cap) {
#pragma unroll
  for (int i = 0; i < width; ++i)
    if (v + i < V) z[i] = cap(z[i]);
  return z;
}

}  // namespace crossply
