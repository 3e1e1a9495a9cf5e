#include "kernels/block/quantize.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// What a code without its sign stands for, by definition: with M bits of mantissa, NaN above `most`.
template <class S>
double value_of(int code) {
  constexpr bool fine = std::is_same_v<S, e4m3>;
  constexpr int M = fine ? 3 : 2, bias = fine ? 7 : 15;
  const int exponent = code >> M, fraction = code & ((1 << M) - 1);
  if (fine && code == 0x7F) return NAN;
  if (!fine && exponent == 31) return fraction == 0 ? INFINITY : NAN;
  if (exponent == 0) return std::ldexp(fraction, 1 - bias - M);
  return std::ldexp((1 << M) + fraction, exponent - bias - M);
}
template <class S>
constexpr int largest_code = std::is_same_v<S, e4m3> ? 0x7E : 0x7B;

// The nearest of all finite numbers, the even code in the middle.
template <class S>
int nearest(float x) {
  if (std::isnan(x)) return 0x7F;
  const double size = std::min(std::abs(static_cast<double>(x)), value_of<S>(largest_code<S>));
  int best = 0;
  for (int code = 1; code <= largest_code<S>; ++code) {
    const double to_best = std::abs(size - value_of<S>(best)), to_code = std::abs(size - value_of<S>(code));
    if (to_code < to_best || (to_code == to_best && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

template <class S>
void check_codes() {
  CHECK(static_cast<double>(S::largest) == value_of<S>(largest_code<S>));
  for (int code = 0; code < 256; ++code) {
    CAPTURE(code);
    S x;
    x.bits = static_cast<uint8_t>(code);
    const double size = value_of<S>(code & 0x7F), value = code < 0x80 ? size : -size;
    const float got = x;
    if (std::isnan(value)) {
      CHECK(std::isnan(got));
      CHECK(S(got).bits == 0x7F);
      continue;
    }
    CHECK(static_cast<double>(got) == value);
    CHECK(std::signbit(got) == (code >= 0x80));
    CHECK(S(got).bits == (std::isinf(value) ? largest_code<S> | (code & 0x80) : code));
  }
}

template <class S>
void check_rounding() {
  std::vector<float> all = {0.f, 1e-45f, 1.2e-38f, 1e30f, 3.4e38f, INFINITY, NAN, 1.001f * S::largest};
  for (int code = 0; code < largest_code<S>; ++code)
    for (const double x : {value_of<S>(code), (value_of<S>(code) + value_of<S>(code + 1)) / 2, value_of<S>(code + 1)}) {
      const auto exact = static_cast<float>(x);
      REQUIRE(static_cast<double>(exact) == x);
      all.insert(all.end(), {exact, std::nextafter(exact, 0.f), std::nextafter(exact, INFINITY)});
    }
  const auto random = random_vector<float>(100000, 1);
  for (size_t i = 0; i < random.size(); ++i) all.push_back(std::ldexp(random[i], static_cast<int>(i % 50) - 30));
  int64_t wrong = 0;
  for (const float x : all) wrong += (S(x).bits != nearest<S>(x)) + (S(-x).bits != nearest<S>(-x));
  CHECK(wrong == 0);
}

// A tensor that lies in a larger one, so many elements from its beginning.
Tensor inside(const Tensor& whole, int64_t beside, const Shape& shape) {
  return {static_cast<std::byte*>(whole.data) + static_cast<size_t>(beside) * size_of(whole.dtype), whole.dtype, shape};
}
template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Between `beside` numbers that nobody may write, or read: they are NaN.
template <class S>
void check_quantize(Backend backend, const std::vector<bf16>& numbers, int64_t rows, int64_t C, bool straight,
                    bool transposed, float scale, int64_t beside) {
  CAPTURES(backend, rows, C, straight, transposed, scale, beside);
  const int64_t n = rows * C, all = n + 2 * beside;
  REQUIRE(static_cast<int64_t>(numbers.size()) == n);
  auto x = poisoned<bf16>(all);
  std::copy(numbers.begin(), numbers.end(), x.begin() + beside);
  auto to = poisoned<S>(all), to_transposed = poisoned<S>(all), want = to, want_transposed = to_transposed;
  std::vector<float> amax{0.25f}, want_amax = amax;
  quantize_ref<S>(straight ? want.data() + beside : nullptr, transposed ? want_transposed.data() + beside : nullptr,
                  want_amax.data(), numbers.data(), scale, rows, C);
  run_on(backend, {view(to), view(to_transposed), view(amax), view(x), view(std::vector<float>{scale})},
         [&](auto& t, Stream stream) {
           quantize(straight ? inside(t[0], beside, {rows, C}) : Tensor(),
                    transposed ? inside(t[1], beside, {C, rows}) : Tensor(), t[2], inside(t[3], beside, {rows, C}),
                    t[4], stream);
         });
  CHECK(same_bytes(to, want));
  CHECK(same_bytes(to_transposed, want_transposed));
  CHECK(same_bytes(amax, want_amax));
}

// Random numbers, and such as are subnormal, zero or too large after scaling.
std::vector<bf16> numbers_for(int64_t n) {
  auto x = convert<bf16>(random_vector<float>(n, static_cast<uint64_t>(n), 3));
  for (size_t i = 0; i < x.size(); i += 3) x[i] = std::ldexp(static_cast<float>(x[i]), static_cast<int>(i % 40) - 25);
  for (size_t i = 4; i < x.size(); i += 11) x[i] = i % 2 == 0 ? -0.f : 1e-40f;
  return x;
}

template <class S>
void check_sizes(Backend backend) {
  for (const auto& [rows, C] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 5}, {16, 16}, {64, 64}, {65, 130}, {200, 48}, {304, 136}, {1, 72}, {144, 1}})
    for (const auto& [straight, transposed] :
         {std::pair(true, true), std::pair(true, false), std::pair(false, true), std::pair(false, false)})
      for (const int64_t beside : {16, 1})  // 1: where no wide access is aligned
        check_quantize<S>(backend, numbers_for(rows * C), rows, C, straight, transposed, 32, beside);
  for (const float scale : {0x1p-100f, 0x1p100f})
    check_quantize<S>(backend, numbers_for(256), 16, 16, true, true, scale, 16);
  // Wherever the largest number is, or one that is not finite.
  const std::vector<float> large = {1e4f, INFINITY, -1e4f, NAN, -INFINITY, -NAN};
  const auto x = numbers_for(144 * 72);
  for (size_t at = 0; at < x.size(); at += 337) {
    auto other = x;
    other[at] = large[at % large.size()];
    check_quantize<S>(backend, other, 144, 72, true, true, 2, 16);
  }
}

}  // namespace

TEST_CASE("quantize: all codes of both types") {
  check_codes<e4m3>();
  check_codes<e5m2>();
  CHECK(size_of(Dtype::e4m3) == sizeof(e4m3));
  CHECK(size_of(Dtype::e5m2) == sizeof(e5m2));
  CHECK(view(std::vector<e4m3>(6), {2, 3}).str() == "e4m3(2, 3)");
  CHECK(view(std::vector<e5m2>(1)).str() == "e5m2(1)");
}

TEST_CASE("quantize: to the nearest of all codes") {
  check_rounding<e4m3>();
  check_rounding<e5m2>();
}

TEST_CASE("quantize: as the reference, and nothing else is written") {
  for (const Backend backend : fast_backends()) {
    check_sizes<e4m3>(backend);
    check_sizes<e5m2>(backend);
  }
}

TEST_CASE("quantize: amax is of all calls") {
  for (const Backend backend : all_backends()) {
    CAPTURES(backend);
    std::vector<e4m3> to(3);
    std::vector<float> amax{0}, scale{1};
    const auto after = [&](const std::vector<bf16>& x) {
      run_on(backend, {view(to), view(amax), view(x, {1, 3}), view(scale)},
             [](auto& t, Stream stream) { quantize(t[0], Tensor(), t[1], t[2], t[3], stream); });
      return amax[0];
    };
    CHECK(after({1.f, -3.f, 2.f}) == 3);
    CHECK(after({-0.5f, 0.f, 0.25f}) == 3);
    CHECK(after({0.f, 4.f, -7.f}) == 7);
    CHECK(std::isinf(after({1.f, -INFINITY, 0.f})));
    CHECK(std::isinf(after({1.f, 2.f, 0.f})));
    CHECK(std::isnan(after({1.f, 2.f, NAN})));
    CHECK(std::isnan(after({INFINITY, 2.f, 0.f})));
  }
}

TEST_CASE("quantize: what does not fit is refused") {
  const Stream stream;
  std::vector<bf16> x(6);
  std::vector<e4m3> a(6);
  std::vector<e5m2> b(6);
  std::vector<float> one{1}, two{1, 1};
  const Tensor in = view(x, {2, 3}), none;
  CHECK_THROWS_AS(quantize(none, view(a, {2, 3}), view(one), in, view(one), stream), Error);
  CHECK_THROWS_AS(quantize(view(a, {5}), none, view(one), in, view(one), stream), Error);
  CHECK_THROWS_AS(quantize(view(a), view(b, {3, 2}), view(one), in, view(one), stream), Error);
  CHECK_THROWS_AS(quantize(view(x), none, view(one), in, view(one), stream), Error);
  CHECK_THROWS_AS(quantize(view(a), none, view(two), in, view(one), stream), Error);
  CHECK_THROWS_AS(quantize(view(a), none, view(one), in, view(two), stream), Error);
}
