#include "kernels/cpu/cpu.h"

#include "tests/support/check.h"

using namespace crossply;

namespace {

// exp_f32 over an array, in the kind of loop the kernels have: the vector code is what must be right.
std::vector<float> exp_all(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  const float* in = x.data();
  float* out = y.data();
#pragma omp simd
  for (size_t i = 0; i < x.size(); ++i) out[i] = exp_f32(in[i]);
  return y;
}

// The distance of `got` from `want` in units of the last place of the float nearest `want`.
double ulps(float got, double want) {
  const float nearest = static_cast<float>(want);
  const double ulp = static_cast<double>(std::nextafter(nearest, INFINITY)) - static_cast<double>(nearest);
  return std::abs(static_cast<double>(got) - want) / ulp;
}

}  // namespace

TEST_CASE("cpu: exp_f32 is within 1.5 units in the last place over its range") {
  std::vector<float> x;
  for (int64_t i = -87 * 4096; i <= 88 * 4096; ++i) x.push_back(static_cast<float>(i) / 4096 + 1e-4f);
  for (float tiny = 1e-30f; tiny < 1e-2f; tiny *= 1.7f) x.insert(x.end(), {tiny, -tiny});
  x.insert(x.end(), {0.f, -0.f, -87.f, 88.f, 0.34657359f, -0.34657359f});
  const std::vector<float> y = exp_all(x);
  double worst = 0;
  float worst_at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double distance = ulps(y[i], std::exp(static_cast<double>(x[i])));
    REQUIRE_MESSAGE(std::isfinite(distance), "exp_f32(" << x[i] << ") = " << y[i]);
    if (distance > worst) worst = distance, worst_at = x[i];
  }
  CAPTURE(worst);
  CAPTURE(worst_at);
  CHECK(worst < 1.5);
  CHECK(exp_f32(0.f) == 1.f);
}

TEST_CASE("cpu: exp_f32 keeps NaN, and is positive and finite for everything else") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  // Twice a vector's length, so that the vector loop sees every one of them.
  const std::vector<float> y =
      exp_all({nan, -nan, inf, -inf, 1e30f, -1e30f, 89.f, -88.f, nan, -nan, inf, -inf, 1e30f, -1e30f, 89.f, -88.f,
               nan, -nan, inf, -inf, 1e30f, -1e30f, 89.f, -88.f, nan, -nan, inf, -inf, 1e30f, -1e30f, 89.f, -88.f});
  for (size_t i = 0; i < y.size(); ++i) {
    CAPTURE(i);
    if (i % 8 < 2) {
      CHECK(std::isnan(y[i]));
    } else if (i % 2 == 0) {
      CHECK(y[i] == doctest::Approx(std::exp(88.7)).epsilon(1e-5));
      CHECK(std::isfinite(y[i]));
    } else {
      CHECK(y[i] == doctest::Approx(std::exp(-87.3)).epsilon(1e-5));
      CHECK(y[i] > 0.f);
    }
  }
}

TEST_CASE("cpu: parallel_for visits everything once") {
  for (int64_t n : {0, 1, 2, 3, 1000}) {
    for (int64_t grain : {0, 1, 2, 5000}) {
      CAPTURE(n);
      CAPTURE(grain);
      std::vector<int> visits(static_cast<size_t>(n), 0);
      parallel_for(n, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      CHECK(visits == std::vector<int>(static_cast<size_t>(n), 1));
    }
  }
}
