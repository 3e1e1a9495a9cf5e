#include "kernels/optim/clip.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace crossply {

void clip_factor(const Tensor& factor, const Tensor& scale, const Tensor& sums, const Tensor& largest, double clip,
                 Stream stream) {
  CHECK_THAT(factor.numel() == 1 && scale.numel() == 1 && sums.numel() >= 1, "factor ", factor.str(), ", scale ",
             scale.str(), ", sums ", sums.str());
  double* to = factor.as<double>();
  if (stream.backend == Backend::cuda) return clip_factor_cuda(to, scale.as<double>(), sums, largest, clip);
  const auto finite = [](auto x) { return std::isfinite(x); };
  const double* of = sums.as<double>();
  const float* others = data_or_null<float>(largest);
  const bool all_finite = std::all_of(of, of + sums.numel(), finite) &&
                          (others == nullptr || std::all_of(others, others + largest.numel(), finite));
  const double by = *scale.as<double>(), norm = by * std::sqrt(of[0]);
  *to = !all_finite ? std::numeric_limits<double>::quiet_NaN()
        : clip > 0  ? by * std::min(1.0, clip / (norm + 1e-6))
                    : by;
}

}  // namespace crossply
