#include "kernels/block/add.h"

#include "tests/backends.h"
#include "tests/check.h"

using namespace crossply;
using namespace crossply::test;

// One addition in float, rounded once, on every backend: the results must be equal, not just close.
TEST_CASE("add: forward adds, also in place") {
  for (const Backend backend : all_backends()) {
    for (int64_t n : {1, 17, 1000, 70001, 70008}) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(n);
      const auto a = random_vector<float>(n, 1), b = random_vector<float>(n, 2);
      auto want = poisoned<float>(n), out = poisoned<float>(n), in_place = a;
      for (size_t i = 0; i < want.size(); ++i) want[i] = a[i] + b[i];
      const auto add = [](auto& t, Stream stream) { add_forward(t[0], t[1], t[2], stream); };
      run_on(backend, {view(out.data(), {n}), view(a.data(), {n}), view(b.data(), {n})}, add);
      CHECK(out == want);
      run_on(backend, {view(in_place.data(), {n}), view(in_place.data(), {n}), view(b.data(), {n})}, add);
      CHECK(in_place == want);
    }
  }
}

TEST_CASE("add: accumulate sets or adds") {
  for (const Backend backend : all_backends()) {
    for (int64_t n : {1, 17, 1000, 70001, 70008}) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(n);
      const auto dout = random_vector<float>(n, 1), before = random_vector<float>(n, 2);
      auto dinp = poisoned<float>(n);
      const Tensor dx = view(dinp.data(), {n}), dy = view(dout.data(), {n});
      run_on(backend, {dx, dy}, [](auto& t, Stream stream) { accumulate(t[0], t[1], false, stream); });
      CHECK(dinp == dout);
      auto want = poisoned<float>(n);
      for (size_t i = 0; i < want.size(); ++i) want[i] = before[i] + dout[i];
      dinp = before;
      run_on(backend, {dx, dy}, [](auto& t, Stream stream) { accumulate(t[0], t[1], true, stream); });
      CHECK(dinp == want);
    }
  }
}

TEST_CASE("add: accumulate is the derivative of the forward") {
  const auto a = random_vector<double>(7, 1), b = random_vector<double>(7, 2), dout = random_vector<double>(7, 3);
  auto loss = [&](const std::vector<Complex>& x, const std::vector<Complex>& y) {
    std::vector<Complex> out(x.size());
    add_forward_ref(out.data(), x.data(), y.data(), 7);
    return dot(dout, out);
  };
  auto dinp = poisoned<double>(7);
  accumulate_ref(dinp.data(), dout.data(), 7, false);
  check_close("da", dinp, complex_step(a, [&](auto& x) { return loss(x, convert<Complex>(b)); }), 1e-14);
  check_close("db", dinp, complex_step(b, [&](auto& y) { return loss(convert<Complex>(a), y); }), 1e-14);
}

TEST_CASE("add: NaN stays, and sizes must agree") {
  std::vector<float> a(40, 1.f), b(40, 2.f), out(40);
  b[33] = std::numeric_limits<float>::quiet_NaN();
  for (const Backend backend : fast_backends()) {
    run_on(backend, {view(out.data(), {40}), view(a.data(), {40}), view(b.data(), {40})},
           [](auto& t, Stream stream) { add_forward(t[0], t[1], t[2], stream); });
    for (size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i == 33));
  }
  CHECK_THROWS_AS(add_forward(view(out.data(), {40}), view(a.data(), {40}), view(b.data(), {39}), Stream{}), Error);
  CHECK_THROWS_AS(accumulate(view(out.data(), {40}), view(a.data(), {39}), true, Stream{}), Error);
}

// A sum of two bf16 numbers in float, rounded to bf16 once: equal, except that what is too small to be normal may be 0.
TEST_CASE("add: in bf16 the sum is rounded once") {
  for (const Backend backend : fast_backends()) {
    for (int64_t n : {1, 17, 1000, 70001, 70008}) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(n);
      const auto a = random_vector<bf16>(n, 1), b = random_vector<bf16>(n, 2);
      auto sum = poisoned<bf16>(n), copy = poisoned<bf16>(n), in_place = a;
      std::vector<float> want;
      for (size_t i = 0; i < a.size(); ++i) want.push_back(bf16(static_cast<float>(a[i]) + static_cast<float>(b[i])));
      run_on(backend,
             {view(sum.data(), {n}), view(copy.data(), {n}), view(in_place.data(), {n}), view(a.data(), {n}),
              view(b.data(), {n})},
             [](auto& t, Stream stream) {
               add_forward(t[0], t[3], t[4], stream);
               accumulate(t[1], t[3], false, stream);
               accumulate(t[2], t[4], true, stream);
             });
      CHECK(convert<float>(sum) == want);
      CHECK(convert<float>(copy) == convert<float>(a));
      CHECK(convert<float>(in_place) == want);
    }
  }
  const auto f32 = random_vector<float>(3, 1);
  const auto half = random_vector<bf16>(3, 1);
  const Tensor x = view(f32.data(), {3}), y = view(half.data(), {3});
  CHECK_THROWS_AS(add_forward(y, x, y, Stream{}), Error);
  CHECK_THROWS_AS(add_forward(y, y, y, Stream{Backend::reference}), Error);
}

TEST_CASE("add: in bf16 NaN and infinity stay, and ties go to even") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  // One and a half units beyond 1, and half a unit, where a unit is 2^-7; one unit beyond the largest.
  std::vector<bf16> a(40, 1.f), b(40, 0x1p-8f);
  b[1] = 0x1.8p-7f, b[2] = nan, b[3] = inf, b[39] = nan;
  a[4] = b[4] = 0x1.fep127f;
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<bf16>(40);
    run_on(backend, {view(out.data(), {40}), view(a.data(), {40}), view(b.data(), {40})},
           [](auto& t, Stream stream) { add_forward(t[0], t[1], t[2], stream); });
    CHECK(out[0] == 1.f);
    CHECK(out[1] == 1.f + 0x1p-6f);
    CHECK(out[3] == inf);
    CHECK(out[4] == inf);
    for (size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(static_cast<float>(out[i])) == (i == 2 || i == 39));
  }
}
