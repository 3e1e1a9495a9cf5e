#include "kernels/block/bias.h"

#include "kernels/cuda/cuda.cuh"

namespace crossply {

void bias_forward_cuda(const Tensor&, const Tensor&, int64_t) { CHECK_THAT(false, "not written yet"); }
void bias_backward_cuda(const Tensor&, const Tensor&, int64_t) { CHECK_THAT(false, "not written yet"); }

}  // namespace crossply
