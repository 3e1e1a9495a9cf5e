#include "kernels/block/swiglu.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Op swiglu(int64_t n, double gate_scale = 1, double up_scale = 1) {
  return {{input("gate", {n}, gate_scale), input("up", {n}, up_scale), output("out", {n})},
          [](auto& t, Stream stream) { swiglu_forward(t["out"], t["gate"], t["up"], stream); },
          [](auto& t, Stream stream) {
            swiglu_backward(t.grad("gate"), t.grad("up"), t["dout"], t["gate"], t["up"], stream);
          },
          [=](auto& z) { swiglu_forward_ref(z["out"], z["gate"], z["up"], n); }};
}

// Below and beside a vector; several threads, or several blocks with both widths of access.
const std::vector<int64_t> sizes{1, 31, 1000, 40001}, gpu_sizes{1, 31, 1000, 5001, 5008};

}  // namespace

TEST_CASE("swiglu: reference forward, by values known in closed form") {
  const double log3 = std::log(3.0);  // its logistic is 3/4
  const Op op = swiglu(5);
  Trial trial(op, Dtype::f64);
  trial.x["gate"] = {0.0, log3, -log3, 800.0, -800.0}, trial.x["up"] = {5.0, 2.0, 2.0, 0.5, 0.5};
  check_close("out", trial.forward(Backend::reference)["out"],
              std::vector<double>{0.0, 1.5 * log3, -0.5 * log3, 400.0, 0.0}, 1e-15);
}

TEST_CASE("swiglu: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 30.0})
    for (int64_t n : {1, 7, 33}) check_derivative(swiglu(n, scale, scale), 1e-12);
}

// exp is good to 1.5 units of 2^-24 and at most eight more roundings follow: 1e-6 is about 17 units.
TEST_CASE_TEMPLATE("swiglu: fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, int64_t n) {
    for (double scale : {1e-3, 1.0, 12.0, 200.0})
      check_backend(swiglu(n, scale), DtypeOf<T>::value, backend, {{"out", 1e-6}, {"dgate", 1e-6}, {"dup", 1e-6}});
  });
}

TEST_CASE("swiglu: gradients written over the inputs are the same bits") {
  for (const Backend backend : all_backends())
    check_in_place(swiglu(1003, 4), Dtype::f32, backend, {}, {{"dgate", "gate"}, {"dup", "up"}});
}

TEST_CASE("swiglu: NaN in any input reaches the outputs it should, and threads do not matter") {
  for (const Backend backend : fast_backends()) {
    const size_t n = is_slow(backend) ? 5008 : 40001;
    check_nans(swiglu(static_cast<int64_t>(n), 4), Dtype::f32, backend,
               {{"gate", {5}}, {"up", {20}}, {"dout", {n - 1}}},
               {{"out", at({5, 20})}, {"dgate", at({5, 20, n - 1})}, {"dup", at({5, n - 1})}},
               [](Trial& trial) { trial.x["gate"][6] = 1e30, trial.x["gate"][7] = -1e30; });  // exponentials overflow
  }
  check_threads(swiglu(40001, 4));
}
