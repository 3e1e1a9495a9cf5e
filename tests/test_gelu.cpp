#include "kernels/block/gelu.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

template <class T>
std::vector<T> forward(const std::vector<T>& inp, Backend backend) {
  const int64_t n = static_cast<int64_t>(inp.size());
  auto out = poisoned<T>(n);
  run_on(backend, {view(out.data(), {n}), view(inp.data(), {n})},
         [](auto& t, Stream stream) { gelu_forward(t[0], t[1], stream); });
  return out;
}

template <class T>
std::vector<T> backward(std::vector<T> dinp, const std::vector<T>& dout, const std::vector<T>& inp, bool acc,
                        Backend backend) {
  const int64_t n = static_cast<int64_t>(inp.size());
  run_on(backend, {view(dinp.data(), {n}), view(dout.data(), {n}), view(inp.data(), {n})},
         [=](auto& t, Stream stream) { gelu_backward(t[0], t[1], t[2], acc, stream); });
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
  auto out = poisoned<double>(7);
  gelu_forward_ref(out.data(), inp.data(), 7);
  for (size_t i = 0; i < 7; ++i) CHECK(std::abs(out[i] - inp[i] * phi[i]) <= 1e-14 * std::abs(inp[i] * phi[i]));
}

TEST_CASE("gelu: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 5.0, 12.0}) {
    for (int64_t n : {1, 7, 33}) {
      CAPTURE(scale);
      CAPTURE(n);
      const auto inp = random_vector<double>(n, 1, scale), dout = random_vector<double>(n, 2);
      const auto want = complex_step(inp, [&](const std::vector<Complex>& x) {
        std::vector<Complex> out(x.size());
        gelu_forward_ref(out.data(), x.data(), n);
        return dot(dout, out);
      });
      auto dinp = poisoned<double>(n);
      gelu_backward_ref(dinp.data(), dout.data(), inp.data(), n, false);
      check_close("dinp", dinp, want, 1e-13);
      const auto before = random_vector<double>(n, 3);
      auto added = before;
      gelu_backward_ref(added.data(), dout.data(), inp.data(), n, true);
      for (size_t i = 0; i < added.size(); ++i) added[i] -= before[i];
      check_close("dinp, added", added, dinp, 1e-12);
    }
  }
}

// The tail is good to 6e-8 (8 + z^2 / 2) of itself, which is at most 1/2; the last product or sum rounds once more.
TEST_CASE("gelu: the fast backends equal the reference to 1e-7, everywhere") {
  const auto inp = sweep();
  const int64_t n = static_cast<int64_t>(inp.size());
  const auto inp64 = convert<double>(inp);
  const std::vector<float> dout(inp.size(), 1.f);
  auto want = poisoned<double>(n), want_slope = poisoned<double>(n);
  gelu_forward_ref(want.data(), inp64.data(), n);
  gelu_backward_ref(want_slope.data(), convert<double>(dout).data(), inp64.data(), n, false);
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    const auto out = forward(inp, backend), slope = backward(poisoned<float>(n), dout, inp, false, backend);
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
        CAPTURE(static_cast<int>(backend));
        CAPTURE(scale);
        CAPTURE(n);
        auto inp = random_vector<T>(n, 1, scale);
        const auto dout = random_vector<T>(n, 2), before = random_vector<T>(n, 3);
        const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
        auto out64 = poisoned<double>(n);
        gelu_forward_ref(out64.data(), inp64.data(), n);
        check_close("out", forward(inp, backend), out64, tolerance);
        for (bool acc : {false, true}) {
          const auto dinp = acc ? before : poisoned<T>(n);
          auto dinp64 = convert<double>(dinp);
          gelu_backward_ref(dinp64.data(), dout64.data(), inp64.data(), n, acc);
          check_close("dinp", backward(dinp, dout, inp, acc, backend), dinp64, tolerance);
        }
        inp.back() = std::numeric_limits<float>::quiet_NaN();
        CHECK(is_nan(forward(inp, backend).back()));
      }
    }
  }
}

TEST_CASE("gelu: NaN shows, very large numbers are harmless, and threads do not matter") {
  for (const Backend backend : fast_backends()) {
    const int64_t n = sizes_for(backend).back();
    auto inp = random_vector<float>(n, 1, 4), dout = random_vector<float>(n, 2);
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    inp[5] = dout.back() = nan;
    inp[16] = inf, inp[17] = -inf, inp[18] = 3e38f, inp[19] = -3e38f;
    auto run = [&] {
      auto all = forward(inp, backend);
      const auto dinp = backward(poisoned<float>(n), dout, inp, false, backend);
      all.insert(all.end(), dinp.begin(), dinp.end());
      return all;
    };
    const auto all = run();
    for (int64_t i = 0; i < n; ++i) {
      REQUIRE(std::isnan(all[static_cast<size_t>(i)]) == (i == 5));
      REQUIRE(std::isnan(all[static_cast<size_t>(n + i)]) == (i == 5 || i == n - 1));
    }
    CHECK(all[16] == inf);
    CHECK(all[18] == 3e38f);
    for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(all[i]) < 1e-31f);
    for (size_t i : {size_t{16}, size_t{18}}) CHECK(all[static_cast<size_t>(n) + i] == dout[i]);
    for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(all[static_cast<size_t>(n) + i]) < 1e-30f);
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
  }
}
