// What the analyses of hidden states and values share.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace crossply {

// out[i * stride + j] = the product of row i of a (m, k) and row j of b (n, k).
void row_products(const double* a, int64_t m, const double* b, int64_t n, int64_t k, double* out, int64_t stride);

// For a caption: what hidden state i is, and what else it is in these architectures.
std::string hidden_text(const std::set<std::string>& archs);
// The same of what an analysis has of each model.
template <class OfModel>
std::string hidden_text(const std::vector<OfModel>& all) {
  std::set<std::string> archs;
  for (const OfModel& m : all) archs.insert(m.arch);
  return hidden_text(archs);
}

}  // namespace crossply
