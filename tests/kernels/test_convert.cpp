#include "kernels/optim/convert.h"

#include <bit>
#include <cmath>

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// By definition: the nearest of the two neighbours in bf16, the even one in the middle.
float nearest(float x) {
  const uint32_t low = std::bit_cast<uint32_t>(x) & 0xFFFF0000u;
  const float a = std::bit_cast<float>(low), b = std::bit_cast<float>(low + 0x10000u);
  const double to_a = std::abs(static_cast<double>(x) - static_cast<double>(a));
  const double to_b = std::abs(static_cast<double>(b) - static_cast<double>(x));
  if (to_a != to_b) return to_a < to_b ? a : b;
  return (low >> 16) % 2 == 0 ? a : b;
}

}  // namespace

TEST_CASE("convert: to the nearest, fast and reference") {
  std::vector<float> inp = random_vector<float>(70001, 1, 3.0);
  for (const float special : {0.f, -0.f, 1.f, 1.00390625f, 1.01171875f, -1.00390625f, 3.0e38f, 1.2e-38f, INFINITY})
    inp.push_back(special);
  for (const auto& [backend, n] : std::vector<std::pair<Backend, int64_t>>{
           {Backend::cpu, 70010}, {Backend::reference, 70010}, {Backend::cuda, 70010}, {Backend::cuda, 70008}}) {
    if (!available(backend)) continue;
    REQUIRE(n <= static_cast<int64_t>(inp.size()));
    inp.erase(inp.begin(), inp.end() - n);
    std::vector<bf16> out(inp.size(), bf16(NAN));
    run_on(backend, {view(out), view(inp)}, [](auto& t, Stream stream) { convert(t[0], t[1], stream); });
    int64_t wrong = 0;
    for (size_t i = 0; i < inp.size(); ++i) {
      const float want = std::isinf(inp[i]) ? inp[i] : nearest(inp[i]);
      wrong += !(static_cast<float>(out[i]) == want && std::signbit(static_cast<float>(out[i])) == std::signbit(want));
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("convert: every NaN stays one, what is too large becomes infinite") {
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0xFF800001u})
    CHECK(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(bits)))));
  CHECK(static_cast<float>(bf16(3.4e38f)) == INFINITY);
  CHECK(static_cast<float>(bf16(-3.4e38f)) == -INFINITY);
}
