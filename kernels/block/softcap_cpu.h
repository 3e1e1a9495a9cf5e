// The cap of a row of logits on the CPU, and its slope, for the losses that have it in themselves.
#pragma once

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"

namespace crossply {

// capped[v] = cap tanh(z[v] / cap), good to 2e-7 cap; a cap of 0 copies. capped may be z.
template <class To, class From>
void cap_row(To* capped, const From* z, int64_t V, double cap) {
  if (cap == 0) return copy_row(capped, z, V);
  const auto c = static_cast<float>(cap), per_c = static_cast<float>(1 / cap);
#pragma omp simd
  for (int64_t v = 0; v < V; ++v) capped[v] = To(c * tanh_f32(per_c * static_cast<float>(z[v])));
}

// What a loss multiplies dz by where logits are not capped: nothing.
struct NoSlope {
  float at(int64_t) const { return 1; }
  template <class Part>
  void multiply(Vec16&, int64_t, Part) const {}
};
// And where they are: 1 - (z'/c)^2, of the capped logits z. A cap of 0 is a slope of 1.
class CapSlope {
 public:
  CapSlope(const float* capped, double cap) : z_(capped), k_(cap == 0 ? 0 : static_cast<float>(1 / (cap * cap))) {}
  float at(int64_t v) const { return 1 - k_ * z_[v] * z_[v]; }
  template <class Part>
  void multiply(Vec16& dz, int64_t v, Part part) const {
    Vec16 z;
    load(z, z_ + v, part);
    dz *= 1.f - k_ * z * z;
  }

 private:
  const float* z_;  // (V)
  float k_;
};

}  // namespace crossply
