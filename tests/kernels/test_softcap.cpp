#include "kernels/block/softcap.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Op softcap_op(int64_t n, double magnitude, double cap) {
  const auto call = [=](const Tensors& t, Stream stream) { softcap_forward(t["out"], t["inp"], cap, stream); };
  return {{unchanged("inp", {n}, magnitude), output("out", {n})}, call, call, [=](auto& z) {
            for (int64_t i = 0; i < n; ++i) z["out"][i] = softcap_ref(z["inp"][i], cap);
          }};
}

}  // namespace

TEST_CASE_TEMPLATE("softcap: every backend gives cap tanh(inp / cap), also in place", T, float, bf16) {
  for (const Backend backend : fast_backends())
    for (const int64_t n : {1, 7, 64, 1037})
      for (const double magnitude : {1e-3, 1.0, 100.0})
        for (const double cap : {0.5, 15.0, 1e4}) {
          CAPTURES(magnitude, cap);
          const Op op = softcap_op(n, magnitude, cap);
          // tanh is good to 2 units in the last place, each up to 2^-23; 1 / cap and two products are rounded.
          check_backend(op, DtypeOf<T>::value, backend, {{"out", 7 * 0x1p-24}});
          check_in_place(op, DtypeOf<T>::value, backend, {{"out", "inp"}}, {});
          check_any_address(op, DtypeOf<T>::value);
        }
}

TEST_CASE("softcap: infinities become the cap, NaN stays, and the slope is that of the complex step") {
  for (const Backend backend : fast_backends()) {
    const std::vector<float> inp = {INFINITY, -INFINITY, NAN, 0};
    std::vector<float> out(4, NAN);
    run_on(backend, {view(out), view(inp)},
           [&](const std::vector<Tensor>& t, Stream stream) { softcap_forward(t[0], t[1], 15, stream); });
    CHECK((out[0] == 15 && out[1] == -15 && std::isnan(out[2]) && out[3] == 0));
  }
  for (const double cap : {0.0, 0.7, 30.0})
    for (const double z : {-3.0, -1e-3, 0.0, 0.5, 20.0}) {
      const double want = softcap_ref(Complex(z, 1e-50), cap).imag() / 1e-50;
      CHECK(softcap_slope_ref(softcap_ref(z, cap), cap) == doctest::Approx(want).epsilon(1e-10));
    }
  CHECK_THROWS_AS(softcap_forward({}, {}, 0, fast), Error);
}
