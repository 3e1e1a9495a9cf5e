// Runs one computation on one, two and three threads and requires the same bits.
#pragma once

#include <doctest/doctest.h>
#include <omp.h>

#include <cstring>
#include <functional>
#include <vector>

namespace crossply::test {

template <class T>
void check_same_bits_on_any_threads(const std::function<std::vector<T>()>& compute) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::vector<T> want = compute();
  for (int threads : {2, 3}) {
    CAPTURE(threads);
    omp_set_num_threads(threads);
    const std::vector<T> got = compute();
    REQUIRE(got.size() == want.size());
    CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(T)) == 0);
  }
  omp_set_num_threads(before);
}

}  // namespace crossply::test
