// Device memory filled with numbers that a rule gives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/device.h"

namespace crossply {

// to[i] = T(number(i)) for i < count, to: device memory. By all threads, so number has no state; in pieces, so that the
// host holds little beside them, and the first of them are on their way while the next are made.
template <class T, class F>
void generate(Device& device, void* to, int64_t count, F&& number) {
  constexpr int64_t piece = int64_t{4} << 20;
  std::vector<T> host(static_cast<size_t>(std::min(count, piece)));
  for (int64_t begin = 0; begin < count; begin += piece) {
    const int64_t n = std::min(piece, count - begin);
#pragma omp parallel for
    for (int64_t i = 0; i < n; ++i) host[static_cast<size_t>(i)] = static_cast<T>(number(begin + i));
    device.copy_in(static_cast<T*>(to) + begin, host.data(), static_cast<size_t>(n) * sizeof(T));
  }
}

}  // namespace crossply
