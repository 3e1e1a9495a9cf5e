#include "kernels/block/gelu.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

template <class T>
std::vector<T> forward(const std::vector<T>& inp, Backend backend) {
  auto out = poisoned<T>(static_cast<int64_t>(inp.size()));
  run_on(backend, {view(out), view(inp)}, [](auto& t, Stream stream) { gelu_forward(t[0], t[1], stream); });
  return out;
}

template <class T>
std::vector<T> backward(std::vector<T> dinp, const std::vector<T>& dout, const std::vector<T>& inp, bool add,
                        Backend backend) {
  run_on(backend, {view(dinp), view(dout), view(inp)}, [=](auto& t, Stream stream) {
    gelu_backward({t[0], add}, t[1], t[2], stream);
  });
  return dinp;
}

// Below and beside a vector; several threads, or several blocks with both widths of access.
std::vector<int64_t> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {1, 31, 1000, 40001};
  return {1, 31, 1000, 5001, 5008};
}

// The largest |got - want| over all i; NaN if any is.
double worst_difference(const std::vector<float>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(difference <= worst)) worst = difference;
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

// Every multiple of 1/1024 in [-14, 14], and small numbers of both signs.
std::vector<float> sweep() {
  std::vector<float> x;
  for (int i = -14 * 1024; i <= 14 * 1024; ++i) x.push_back(static_cast<float>(i) / 1024);
  for (float tiny = 1e-30f; tiny < 1e-2f; tiny *= 1.7f) x.insert(x.end(), {tiny, -tiny});
  return x;
}

}  // namespace

TEST_CASE("gelu: reference forward, by values from tables of the normal distribution") {
  const std::vector<double> inp{0.0, 1.0, -1.0, 2.0, -6.0, 40.0, -40.0};
  const std::vector<double> phi{
      0.5, 0.841344746068542948, 0.158655253931457051, 0.977249868051820793, 9.8658764503769814e-10, 1.0, 0.0};
  const auto out = forward(inp, Backend::reference);
  for (size_t i = 0; i < 7; ++i) CHECK(std::abs(out[i] - inp[i] * phi[i]) <= 1e-14 * std::abs(inp[i] * phi[i]));
}

TEST_CASE("gelu: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 5.0, 12.0}) {
    for (int64_t n : {1, 7, 33}) {
      CAPTURES(scale, n);
      const auto inp = random_vector<double>(n, 1, scale), dout = random_vector<double>(n, 2);
      const auto want = complex_step(inp, [&](const std::vector<Complex>& x) {
        std::vector<Complex> out(x.size());
        gelu_forward_ref(out.data(), x.data(), n);
        return dot(dout, out);
      });
      const auto dinp = backward(poisoned<double>(n), dout, inp, false, Backend::reference);
      check_close("dinp", dinp, want, 1e-13);
      const auto before = random_vector<double>(n, 3);
      auto added = backward(before, dout, inp, true, Backend::reference);
      for (size_t i = 0; i < added.size(); ++i) added[i] -= before[i];
      check_close("dinp, added", added, dinp, 1e-12);
    }
  }
}

// The tail is good to 6e-8 (8 + z^2 / 2) of itself, which is at most 1/2; the last product or sum rounds once more.
TEST_CASE("gelu: the fast backends equal the reference to 1e-7, everywhere") {
  const auto inp = sweep();
  const int64_t n = static_cast<int64_t>(inp.size());
  const auto inp64 = convert<double>(inp), ones = std::vector<double>(inp.size(), 1.0);
  const auto want = forward(inp64, Backend::reference);
  const auto want_slope = backward(poisoned<double>(n), ones, inp64, false, Backend::reference);
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const auto out = forward(inp, backend);
    const auto slope = backward(poisoned<float>(n), convert<float>(ones), inp, false, backend);
    CHECK(worst_difference(slope, want_slope) < 2e-7);
    double worst = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const double difference = std::abs(static_cast<double>(out[i]) - want[i]) / std::max(1.0, std::abs(inp64[i]));
      REQUIRE(std::isfinite(out[i]));
      worst = std::max(worst, difference);
      // Also relative: what is left of a large negative number, or of a small one, has its digits.
      if (inp64[i] > -12) {
        const double allowed = 6e-8 * (9 + 0.5 * inp64[i] * inp64[i]) * std::abs(want[i]);
        const double error = std::abs(static_cast<double>(out[i]) - want[i]);
        REQUIRE_MESSAGE(error <= allowed, "gelu(" << inp[i] << ") = " << out[i]);
      }
    }
    CAPTURE(worst);
    CHECK(worst < 1e-7);
  }
}

// In bf16 the result is rounded once.
TEST_CASE_TEMPLATE("gelu: the fast backends equal the reference, set and added, and NaN shows", T, float, bf16) {
  const double tolerance = tolerance_or_rounding<T>(1e-6);
  for (const Backend backend : fast_backends()) {
    for (double scale : {1e-3, 1.0, 12.0, 200.0}) {
      for (int64_t n : sizes_for(backend)) {
        CAPTURES(backend, scale, n);
        auto inp = random_vector<T>(n, 1, scale);
        const auto dout = random_vector<T>(n, 2), before = random_vector<T>(n, 3);
        const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
        check_close("out", forward(inp, backend), forward(inp64, Backend::reference), tolerance);
        for (bool add : {false, true}) {
          const auto dinp = add ? before : poisoned<T>(n);
          const auto want = backward(convert<double>(dinp), dout64, inp64, add, Backend::reference);
          check_close("dinp", backward(dinp, dout, inp, add, backend), want, tolerance);
        }
        inp.back() = NAN;
        CHECK(is_nan(forward(inp, backend).back()));
      }
    }
  }
}

TEST_CASE("gelu: NaN shows, very large numbers are harmless, and threads do not matter") {
  for (const Backend backend : fast_backends()) {
    const int64_t n = sizes_for(backend).back();
    auto inp = random_vector<float>(n, 1, 4), dout = random_vector<float>(n, 2);
    inp[5] = dout.back() = NAN;
    inp[16] = INFINITY, inp[17] = -INFINITY, inp[18] = 3e38f, inp[19] = -3e38f;
    auto run = [&] { return joined(forward(inp, backend), backward(poisoned<float>(n), dout, inp, false, backend)); };
    const auto all = run();
    for (int64_t i = 0; i < n; ++i) {
      REQUIRE(std::isnan(all[static_cast<size_t>(i)]) == (i == 5));
      REQUIRE(std::isnan(all[static_cast<size_t>(n + i)]) == (i == 5 || i == n - 1));
    }
    CHECK(all[16] == INFINITY);
    CHECK(all[18] == 3e38f);
    for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(all[i]) < 1e-31f);
    for (size_t i : {size_t{16}, size_t{18}}) CHECK(all[static_cast<size_t>(n) + i] == dout[i]);
    for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(all[static_cast<size_t>(n) + i]) < 1e-30f);
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
  }
}
