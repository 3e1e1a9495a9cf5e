#include "engine/document_bounds.h"

namespace crossply {

void find_bounds(int32_t* bounds, const int32_t* tokens, int64_t T, const DocumentMark& mark) {
  const auto begins = [&](int64_t t) { return t == 0 || tokens[mark.before ? t : t - 1] == mark.eot; };
  for (int64_t t = 0, start = 0; t < T; ++t) bounds[2 * t] = static_cast<int32_t>(start = begins(t) ? t : start);
  for (int64_t t = T - 1, end = T; t >= 0; --t) {
    bounds[2 * t + 1] = static_cast<int32_t>(end);
    if (begins(t)) end = t;
  }
}

}  // namespace crossply
