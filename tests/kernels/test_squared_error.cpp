#include "kernels/block/squared_error.h"

#include "engine/tape.h"
#include "kernels/block/ops.h"
#include "kernels/devices.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
};

const std::vector<Size> sizes{{1, 1}, {3, 2}, {5, 7}, {2000, 4}, {300, 33}, {17, 128}, {2, 1300}};
const std::vector<Size> gpu_sizes{{1, 1}, {3, 2}, {5, 7}, {30, 4}, {9, 33}, {3, 128}, {1, 400}};
constexpr double scale = 0.37;

// The losses' gradient is the scale.
Op squared_error(const Size& s, double size = 1) {
  const Shape shape{s.rows, s.C};
  Operand losses = in_f32(output("losses", {s.rows}));
  losses.cotangent = scale;
  return {{input("inp", shape, size), unchanged("target", shape, size), losses},
          [=](auto& t, Stream stream) { squared_error_forward(t["losses"], t["inp"], t["target"], stream); },
          [=](auto& t, Stream stream) { squared_error_backward(t.grad("inp"), t["inp"], t["target"], scale, stream); },
          [=](auto& z) { squared_error_forward_ref(z["losses"], z["inp"], z["target"], s.rows, s.C); }};
}

}  // namespace

TEST_CASE("squared_error: reference backward is the derivative of the reference forward") {
  for (const double size : {1e-3, 1.0, 30.0})
    for (const Size& s : std::vector<Size>{{1, 1}, {3, 2}, {4, 7}}) check_derivative(squared_error(s, size), 1e-14);
}

TEST_CASE_TEMPLATE("squared_error: the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const double magnitude : {1e-3, 1.0, 100.0})  // positive sums of up to 1300 terms, in vector order
      check_backend(squared_error(size, magnitude), DtypeOf<T>::value, backend,
                    {{"losses", 2e-6}, {"dinp", {3e-7, 1e-7 * magnitude}}});
  });
}

TEST_CASE("squared_error: a NaN shows in its row and its gradient, memory anywhere, and threads do not matter") {
  for (const Backend backend : fast_backends())
    check_nans(squared_error({20, 9}), Dtype::f32, backend, {{"inp", {7 * 9 + 5}}, {"target", {11 * 9}}},
               {{"losses", at({7, 11})}, {"dinp", at({7 * 9 + 5, 11 * 9})}});
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    check_any_address(squared_error({5, 24}), dtype, {{"losses", 1e-6}, {"dinp", 1e-6}});
  check_threads(squared_error({2000, 33}));
}

TEST_CASE("squared_error: on a tape it is a loss, whose gradients are those of grad_scale times the sum") {
  const auto device = make_device("cpu");
  ParameterTable params;
  params.add("w", Shape{2, 3}, Init::normal(1), Role::head);
  Tape tape(Dtype::f32);
  auto* tokens = tape.input("tokens", Shape{1, 4}, Dtype::i32);
  auto* target = tape.input("target", Shape{1, 4, 3}, Dtype::f32);
  auto* rows = ops::embedding(tape, "rows", tokens, tape.parameter(params.at("w")));
  auto* losses = ops::squared_error(tape, "loss", rows, target, Shape{1, 4});
  params.allocate(*device, Dtype::f32, true);
  params.initialise(1);
  tape.differentiate(), tape.plan(PlanMode::poison), tape.allocate(*device);
  const std::vector<int32_t> ids{1, 0, 1, 1};
  const auto y = random_vector<float>(12, 1);
  device->copy_in(tokens->tensor.data, ids.data(), 16), device->copy_in(target->tensor.data, y.data(), 48);
  params.zero_gradients();
  tape.run(Step{true, 0.25});
  const auto w = params.read(params.at("w").value), dw = params.read(params.at("w").grad);
  std::vector<double> want(4, 0.0), dwant(6, 0.0);
  for (size_t n = 0; n < 4; ++n)
    for (size_t c = 0; c < 3; ++c) {
      const size_t at = static_cast<size_t>(ids[n]) * 3 + c;
      const double e = static_cast<double>(w[at]) - static_cast<double>(y[n * 3 + c]);
      want[n] += e * e, dwant[at] += 0.25 * 2 * e;
    }
  check_close("losses", params.read(losses->tensor), want, 1e-6);
  check_close("dw", dw, dwant, 1e-6);
}

TEST_CASE("squared_error: wrong shapes are errors") {
  const std::vector<float> x(6), five(5), two(2);
  CHECK_THROWS_AS(squared_error_forward(view(two), view(x, {2, 3}), view(five), Stream{}), Error);
  CHECK_THROWS_AS(squared_error_backward({view(x), false}, view(x), view(five), 1, Stream{}), Error);
}
