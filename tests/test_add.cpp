#include "kernels/add.h"

#include "tests/check.h"

using namespace crossply;
using namespace crossply::test;

// One addition in float, rounded once, on every backend: the results must be equal, not just close.
TEST_CASE("add: forward adds, also in place") {
  for (Backend backend : {Backend::reference, Backend::cpu}) {
    for (int64_t n : {1, 17, 1000, 70001}) {
      CAPTURE(n);
      const auto a = random_vector<float>(n, 1), b = random_vector<float>(n, 2);
      auto want = poisoned<float>(n), out = poisoned<float>(n), in_place = a;
      for (size_t i = 0; i < want.size(); ++i) want[i] = a[i] + b[i];
      add_forward(view(out.data(), {n}), view(a.data(), {n}), view(b.data(), {n}), Stream{backend});
      CHECK(out == want);
      add_forward(view(in_place.data(), {n}), view(in_place.data(), {n}), view(b.data(), {n}), Stream{backend});
      CHECK(in_place == want);
    }
  }
}

TEST_CASE("add: accumulate sets or adds") {
  for (Backend backend : {Backend::reference, Backend::cpu}) {
    for (int64_t n : {1, 17, 1000, 70001}) {
      CAPTURE(n);
      const auto dout = random_vector<float>(n, 1), before = random_vector<float>(n, 2);
      auto dinp = poisoned<float>(n);
      accumulate(view(dinp.data(), {n}), view(dout.data(), {n}), false, Stream{backend});
      CHECK(dinp == dout);
      auto want = poisoned<float>(n);
      for (size_t i = 0; i < want.size(); ++i) want[i] = before[i] + dout[i];
      dinp = before;
      accumulate(view(dinp.data(), {n}), view(dout.data(), {n}), true, Stream{backend});
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
  add_forward(view(out.data(), {40}), view(a.data(), {40}), view(b.data(), {40}), Stream{});
  for (size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i == 33));
  CHECK_THROWS_AS(add_forward(view(out.data(), {40}), view(a.data(), {40}), view(b.data(), {39}), Stream{}), Error);
  CHECK_THROWS_AS(accumulate(view(out.data(), {40}), view(a.data(), {39}), true, Stream{}), Error);
}
