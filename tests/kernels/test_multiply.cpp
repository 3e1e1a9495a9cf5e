#include "kernels/block/multiply.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Op multiply(int64_t n) {
  return {
      {input("a", {n}), input("b", {n}), output("out", {n})},
      [](auto& t, Stream stream) { multiply_forward(t["out"], t["a"], t["b"], stream); },
      [](auto& t, Stream stream) { multiply_backward(t.grad("a"), t.grad("b"), t["dout"], t["a"], t["b"], stream); },
      [=](auto& z) { multiply_forward_ref(z["out"], z["a"], z["b"], n); }};
}

}  // namespace

TEST_CASE("multiply: the reference backward is the derivative of the reference forward") {
  for (int64_t n : {1, 7, 33}) check_derivative(multiply(n), 1e-14);
}

// One rounding each, and one more where a gradient is added.
TEST_CASE_TEMPLATE("multiply: fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(std::vector<int64_t>{1, 31, 1000, 40001}, std::vector<int64_t>{1, 31, 1000, 5001, 5008},
            [](Backend backend, int64_t n) {
              check_backend(multiply(n), DtypeOf<T>::value, backend, {{"out", 2e-7}, {"da", 2e-7}, {"db", 2e-7}});
            });
}

TEST_CASE(
    "multiply: gradients written over the inputs are the same bits; NaN stays where it is; threads do not matter") {
  for (const Backend backend : all_backends())
    check_in_place(multiply(1003), Dtype::f32, backend, {}, {{"da", "a"}, {"db", "b"}});
  for (const Backend backend : fast_backends()) {
    const size_t n = is_slow(backend) ? 5008 : 40001;
    check_nans(multiply(static_cast<int64_t>(n)), Dtype::f32, backend, {{"a", {5}}, {"b", {20}}, {"dout", {n - 1}}},
               {{"out", at({5, 20})}, {"da", at({20, n - 1})}, {"db", at({5, n - 1})}});
  }
  check_threads(multiply(40001));
}
