// What the tests share: random data, NaN-poisoned outputs, comparators that fail on NaN, and the complex-step oracle.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <complex>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/stream.h"
#include "engine/tensor.h"

namespace crossply::test {

using Complex = std::complex<double>;

// Deterministic numbers in (-1, 1) times `scale`, the same on every machine.
template <class T>
std::vector<T> random_vector(int64_t n, uint64_t seed, double scale = 1.0) {
  std::vector<T> out(static_cast<size_t>(n));
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  for (auto& x : out) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    x = T(scale * (static_cast<double>((state * 0x2545F4914F6CDD1Dull) >> 11) * 0x1p-52 - 1.0));
  }
  return out;
}

template <class T>
std::vector<T> poisoned(int64_t n) {
  return std::vector<T>(static_cast<size_t>(n), T(std::numeric_limits<double>::quiet_NaN()));
}

template <class To, class From>
std::vector<To> convert(const std::vector<From>& from) {
  return std::vector<To>(from.begin(), from.end());
}

// The first vector with the elements of all others behind its own.
template <class T, class... More>
std::vector<T> joined(std::vector<T> all, const More&... more) {
  (all.insert(all.end(), more.begin(), more.end()), ...);
  return all;
}

// The words of a text between its spaces.
inline std::vector<std::string> split_words(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

// The whole vector as a tensor.
using crossply::view;
template <class T>
Tensor view(const std::vector<T>& x, const Shape& shape) {
  return view(x.data(), shape);
}
template <class T>
Tensor view(const std::vector<T>& x) {
  return view(x.data(), {static_cast<int64_t>(x.size())});
}

inline bool is_nan(float x) { return std::isnan(x); }  // of bf16, too

// What kernels keep in f32 beside activations in bf16: parameters, statistics, coefficients, and their gradients.
template <class T>
using AccumulationType = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

// Twice the error of rounding an exact result: for check_close.
template <class T>
constexpr double tolerance_or_rounding(double tolerance) {
  return std::is_same_v<T, bf16> ? 0x1p-8 : tolerance;
}

// Every element: |got - want| <= tolerance * max(|want|, scale), where scale is the root mean square of want: an
// element that is small by cancellation is judged by the size of its neighbours. A difference of `absolute` is always
// allowed. NaN fails.
template <class A, class B>
void check_close(const std::string& what, const std::vector<A>& got, const std::vector<B>& want, double tolerance,
                 double absolute = 0) {
  REQUIRE_MESSAGE(got.size() == want.size(), what << ": sizes " << got.size() << " and " << want.size());
  double square = 0;
  for (const B& w : want) square += static_cast<double>(w) * static_cast<double>(w);
  const double scale = want.empty() ? 0 : std::sqrt(square / static_cast<double>(want.size()));
  for (size_t i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    const double allowed = std::max(tolerance * std::max(std::abs(w), scale), absolute);
    if (!(std::abs(g - w) <= allowed)) {
      FAIL_CHECK(what << "[" << i << "]: got " << g << ", want " << w << ", allowed difference " << allowed);
      return;  // the first wrong element is enough
    }
  }
  CHECK(true);
}

// The Euclidean distance; NaN where either has one.
template <class A>
double distance(const std::vector<A>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  double sum = 0;
  for (size_t i = 0; i < want.size(); ++i)
    sum += std::pow(static_cast<double>(static_cast<float>(got[i])) - want[i], 2);
  return std::sqrt(sum);
}
inline double size_of(const std::vector<double>& x) { return distance(std::vector<float>(x.size()), x); }

// The derivative of loss(x) with respect to every x[i], exact to rounding: imag(loss(x + ih)) / h with h = 1e-50.
// The forward must be analytic code: comparisons by real part, no abs of values.
inline std::vector<double> complex_step(const std::vector<double>& x,
                                        const std::function<Complex(const std::vector<Complex>&)>& loss) {
  constexpr double h = 1e-50;
  std::vector<Complex> z(x.begin(), x.end());
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    z[i] = Complex(x[i], h);
    gradient[i] = loss(z).imag() / h;
    z[i] = x[i];
  }
  return gradient;
}

// sum_i cotangent[i] * out[i]: turns any output into a scalar loss whose gradient with respect to `out` is `cotangent`.
inline Complex dot(const std::vector<double>& cotangent, const std::vector<Complex>& out) {
  Complex sum = 0;
  for (size_t i = 0; i < out.size(); ++i) sum += cotangent[i] * out[i];
  return sum;
}

}  // namespace crossply::test
