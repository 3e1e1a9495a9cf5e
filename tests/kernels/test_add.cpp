#include "kernels/block/add.h"

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

// One addition in float, rounded once, to bf16 where that is the type: the results must be equal, not just close,
// except that of bf16 what is too small to be normal may be 0.
TEST_CASE_TEMPLATE("add: the sum is rounded once, set, added and in place", T, float, bf16) {
  for (const Backend backend : backends_of<T>()) {
    for (int64_t n : {1, 17, 1000, 70001, 70008}) {
      CAPTURES(backend, n);
      const auto a = random_vector<T>(n, 1), b = random_vector<T>(n, 2);
      auto sum = poisoned<T>(n), copy = sum, in_place = a, added = a;
      std::vector<float> want;
      for (size_t i = 0; i < a.size(); ++i) want.push_back(T(static_cast<float>(a[i]) + static_cast<float>(b[i])));
      run_on(backend, {view(sum), view(copy), view(in_place), view(added), view(a), view(b)},
             [](auto& t, Stream stream) {
               add_forward(t[0], t[4], t[5], stream);
               accumulate({t[1], false}, t[4], stream);
               add_forward(t[2], t[2], t[5], stream);
               accumulate({t[3], true}, t[5], stream);
             });
      CHECK(convert<float>(sum) == want);
      CHECK(convert<float>(copy) == convert<float>(a));
      CHECK(convert<float>(in_place) == want);
      CHECK(convert<float>(added) == want);
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

// The product may be rounded before the addition, by half a unit in its last place.
TEST_CASE_TEMPLATE("add_scaled: the fast backends equal the reference, set, added and in place", T, float, bf16) {
  const double unit = std::is_same_v<T, bf16> ? 0x1p-8 : 0x1p-23;
  for (const Backend backend : backends_of<T>())
    for (const double factor : {1.0, -0.7})
      for (int64_t n : {1, 17, 1000, 70001}) {
        CAPTURES(backend, n, factor);
        const auto a = random_vector<T>(n, 1), b = random_vector<T>(n, 2);
        auto sum = poisoned<T>(n), scaled = sum, in_place = a, added = a;
        auto want = poisoned<double>(n), want_scaled = want, want_added = convert<double>(a);
        add_scaled_forward_ref(want.data(), convert<double>(a).data(), convert<double>(b).data(), factor, n);
        accumulate_scaled_ref(want_scaled.data(), convert<double>(b).data(), factor, n, false);
        accumulate_scaled_ref(want_added.data(), convert<double>(b).data(), factor, n, true);
        run_on(backend, {view(sum), view(scaled), view(in_place), view(added), view(a), view(b)},
               [=](auto& t, Stream stream) {
                 add_scaled_forward(t[0], t[4], t[5], factor, stream);
                 accumulate_scaled({t[1], false}, t[5], factor, stream);
                 add_scaled_forward(t[2], t[2], t[5], factor, stream);
                 accumulate_scaled({t[3], true}, t[5], factor, stream);
               });
        check_close("sum", convert<double>(sum), want, unit);
        check_close("scaled", convert<double>(scaled), want_scaled, unit);
        check_close("in place", convert<double>(in_place), want, unit);
        check_close("added", convert<double>(added), want_added, unit);
      }
}

TEST_CASE("add_scaled: the backward is the derivative of the forward") {
  const auto a = random_vector<double>(7, 1), b = random_vector<double>(7, 2), dout = random_vector<double>(7, 3);
  auto loss = [&](const std::vector<Complex>& x, const std::vector<Complex>& y) {
    std::vector<Complex> out(x.size());
    add_scaled_forward_ref(out.data(), x.data(), y.data(), -0.7, 7);
    return dot(dout, out);
  };
  auto da = poisoned<double>(7), db = da;
  accumulate_ref(da.data(), dout.data(), 7, false);
  accumulate_scaled_ref(db.data(), dout.data(), -0.7, 7, false);
  check_close("da", da, complex_step(a, [&](auto& x) { return loss(x, convert<Complex>(b)); }), 1e-14);
  check_close("db", db, complex_step(b, [&](auto& y) { return loss(convert<Complex>(a), y); }), 1e-14);
}

TEST_CASE_TEMPLATE("add: NaN and infinity stay, and ties go to even", T, float, bf16) {
  // In bf16 one and a half units beyond 1, and half a unit, where a unit is 2^-7; one unit beyond the largest.
  std::vector<T> a(40, 1.f), b(40, 0x1p-8f);
  b[1] = 0x1.8p-7f, b[2] = NAN, b[3] = INFINITY, b[33] = b[39] = NAN;
  a[4] = b[4] = 0x1.fep127f;
  for (const Backend backend : backends_of<T>()) {
    auto out = poisoned<T>(40);
    run_on(backend, {view(out), view(a), view(b)},
           [](auto& t, Stream stream) { add_forward(t[0], t[1], t[2], stream); });
    CHECK(out[0] == (std::is_same_v<T, bf16> ? 1.f : 1.f + 0x1p-8f));
    CHECK(out[1] == 1.f + (std::is_same_v<T, bf16> ? 0x1p-6f : 0x1.8p-7f));
    CHECK(out[3] == INFINITY);
    CHECK(out[4] == INFINITY);
    for (size_t i = 0; i < out.size(); ++i) CHECK(is_nan(out[i]) == (i == 2 || i == 33 || i == 39));
  }
}

TEST_CASE("add: sizes and types must agree") {
  const std::vector<float> x(40), shorter(39);
  const std::vector<bf16> half(40);
  CHECK_THROWS_AS(add_forward(view(x), view(x), view(shorter), Stream{}), Error);
  CHECK_THROWS_AS(accumulate({view(x), true}, view(shorter), Stream{}), Error);
  CHECK_THROWS_AS(add_forward(view(half), view(x), view(half), Stream{}), Error);
  CHECK_THROWS_AS(add_forward(view(half), view(half), view(half), Stream{Backend::reference}), Error);
}
