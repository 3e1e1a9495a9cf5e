#include "eval/inside/representation.h"

#include <algorithm>

#include "cli/format.h"
#include "engine/io/json.h"

namespace crossply {

// Four rows of a at a time, so that a row of b is read from memory once for all of them.
void row_products(const double* a, int64_t m, const double* b, int64_t n, int64_t k, double* out, int64_t stride) {
  for (int64_t i = 0; i < m; i += 4) {
    const int64_t rows = std::min<int64_t>(4, m - i);
    // Of fewer than four, the last one again.
    const double* const a0 = a + i * k;
    const double* const a1 = a + (i + std::min<int64_t>(1, rows - 1)) * k;
    const double* const a2 = a + (i + std::min<int64_t>(2, rows - 1)) * k;
    const double* const a3 = a + (i + rows - 1) * k;
    for (int64_t j = 0; j < n; ++j) {
      const double* const bj = b + j * k;
      double sums[4];
      double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
      for (int64_t c = 0; c < k; ++c)
        s0 += a0[c] * bj[c], s1 += a1[c] * bj[c], s2 += a2[c] * bj[c], s3 += a3[c] * bj[c];
      sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
      for (int64_t r = 0; r < rows; ++r) out[(i + r) * stride + j] = sums[r];
    }
  }
}

std::string hidden_text(const std::set<std::string>& archs) {
  std::string text = "The hidden state is what a block has put out, the last one before the final norm";
  if (archs.contains("hyper")) text += "; in hyper it is the sum of the streams";
  if (archs.contains("denseformer") || archs.contains("vertical") || archs.contains("mudd"))
    text += "; in denseformer, mudd and vertical, before the mixture over depth that the next block reads";
  if (archs.contains("denseformer") || archs.contains("mudd"))
    text += ", the last one in denseformer and mudd being the mixture that the final norm reads";
  return text + ".";
}

}  // namespace crossply
