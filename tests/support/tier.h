// The two tiers of tests: `make test` takes minutes, `make test-second` does what takes longer.
#pragma once

#include <cstdlib>
#include <cstring>
#include <vector>

namespace crossply::test {

// Whether this is the second tier, or somebody who wants all of a test: CROSSPLY_TESTS=everything. The first looks at a
// part where the whole takes many seconds. ctest runs a file that asks twice, in either tier.
inline bool everything() {
  static const bool all = [] {
    const char* tests = std::getenv("CROSSPLY_TESTS");
    return tests != nullptr && std::strcmp(tests, "everything") == 0;
  }();
  return all;
}

// In the first tier one in n of a list, beginning with the first.
template <class T>
std::vector<T> one_in(size_t n, const std::vector<T>& list) {
  if (everything()) return list;
  std::vector<T> part;
  for (size_t i = 0; i < list.size(); i += n) part.push_back(list[i]);
  return part;
}

}  // namespace crossply::test
