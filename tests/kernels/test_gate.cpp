#include "kernels/depth/gate.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, K;
};
const std::vector<Gate> gates{Gate::relu, Gate::sigmoid, Gate::softmax, Gate::softmax_sigmoid,
                              Gate::tanh, Gate::identity};
const std::vector<Size> sizes{{1, 1}, {5, 3}, {5000, 4}, {700, 8}, {33, 31}, {2, 1100}};
// One lane a row to several columns a lane; several blocks, with both widths of access.
const std::vector<Size> gpu_sizes{{1, 1}, {5, 3}, {140, 8}, {11, 31}, {1, 130}};

Op gate_op(Gate gate, const Size& s, double scale = 1) {
  const Shape shape{1, s.rows, s.K};
  return {{input("inp", shape, scale), in_f32(output("out", shape))},
          [=](auto& t, Stream stream) { gate_forward(t["out"], t["inp"], gate, stream); },
          [=](auto& t, Stream stream) { gate_backward(t.grad("inp"), t["dout"], t["inp"], gate, stream); },
          [=](auto& z) { gate_forward_ref(z["out"], z["inp"], s.rows, s.K, gate); }};
}

// s (1 - s) = e r^2 with e = exp(-|x|), r = 1 / (1 + e), in units of 2^-24 = 6e-8. On a GPU e and r are off by up to 2
// units in the last place of the rounded value, so by 5, and a rounding of 1 + e and of each product adds one: 2 (5 +
// 1) of r^2, 5 (1 - e) / (1 + e) of e, also by way of r, and 2: at most 19.
double slope_tolerance(Backend backend) { return backend == Backend::cuda ? 19 * 0x1p-24 : 5e-7; }

bool has_softmax(Gate gate) { return gate == Gate::softmax || gate == Gate::softmax_sigmoid; }

Trial computed(const Op& op, Dtype dtype, const std::vector<double>& inp, const std::vector<double>& dout,
               Backend backend) {
  Trial trial(op, dtype);
  trial.x["inp"] = inp, trial.x["dout"] = dout;
  return trial.run(backend);
}

}  // namespace

TEST_CASE("gate: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 6.0})
    for (Gate gate : gates)
      for (const Size& size : std::vector<Size>{{2, 1}, {3, 4}, {2, 7}}) {
        CAPTURES(scale, gate);
        check_derivative(gate_op(gate, size, scale), 1e-11);
      }
}

TEST_CASE("gate: golden values") {
  struct Golden {
    Gate gate;
    std::vector<double> out, dinp;
  };
  const std::vector<Golden> table{
      {Gate::relu, {0, 0.3, 2, 0}, {0, -1, 0.25, 0}},
      {Gate::sigmoid, {0.231475, 0.574443, 0.880797, 0.475021}, {0.088947, -0.244458, 0.026248, 0.498752}},
      {Gate::softmax, {0.121145, 0.542933, 2.971984, 0.363939}, {0.030634, -0.677107, 0.008535, 0.637938}},
      {Gate::softmax_sigmoid, {0.028042, 0.311884, 2.617715, 0.172878}, {0.003526, -0.539936, 0.210615, 0.463371}},
      {Gate::tanh, {-0.833655, 0.291313, 0.964028, -0.099668}, {0.152510, -0.915137, 0.017663, 1.980133}},
      {Gate::identity, {-1.2, 0.3, 2, -0.1}, {0.5, -1, 0.25, 2}}};
  const std::vector<double> inp{-1.2, 0.3, 2.0, -0.1}, dout{0.5, -1, 0.25, 2};
  for (const Golden& golden : table) {
    CAPTURE(static_cast<int>(golden.gate));
    const Op op = gate_op(golden.gate, {1, 4});
    for (const Backend backend : all_backends()) {
      const bool exact = backend == Backend::reference;
      const Trial got = computed(op, exact ? Dtype::f64 : Dtype::f32, inp, dout, backend);
      // Half of the sixth digit, and for f32 its rounding; on a GPU also 13 units of 2^-24 of a softmax (5 of exp, 6 of
      // their sum, 2 of division and product) that is multiplied to at most 3, or those of a slope.
      const double allowed = exact ? 5.01e-7 : backend == Backend::cuda ? 3e-6 : 9e-7;
      for (size_t j = 0; j < 4; ++j) {
        CAPTURES(backend, j);
        CHECK(std::abs(got["out"][j] - golden.out[j]) <= allowed);
        CHECK(std::abs(got["dinp"][j] - golden.dinp[j]) <= allowed);
      }
    }
  }
}

// Also from bf16 out is f32 and computed from the same numbers.
TEST_CASE_TEMPLATE("gate: the fast backends equal the reference, set and added", T, float, bf16) {
  constexpr bool in_bf16 = std::is_same_v<T, bf16>;
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (double scale : {1e-3, 1.0, in_bf16 ? 6.0 : 20.0})
      for (Gate gate : gates) {
        CAPTURES(scale, gate);
        // All cancellation, perhaps, or the gradient of a constant: beside its terms, K * dout, of size 0.58 K.
        const bool cancels = has_softmax(gate) && (size.K == 1 || (!in_bf16 && scale > 1));
        const double terms = cancels ? 0.4 * static_cast<double>(size.K) : 0;
        // A slope of at most 1 times a dout of at most 1 may cancel with the gradient that it is added to.
        const double slope = gate == Gate::sigmoid || gate == Gate::tanh ? slope_tolerance(backend) : 0;
        // An exp of 1.5 ulp, of 2.5 on a GPU, and sums of up to 1100 terms in vector order: some ulps (6e-8) of the
        // result.
        check_backend(gate_op(gate, size, scale), DtypeOf<T>::value, backend,
                      {{"out", 1e-6}, {"dinp", {2e-6, std::max(2e-6 * terms, slope)}}});
      }
  });
}

TEST_CASE("gate: tanh and the slopes are accurate everywhere") {
  std::vector<double> z;
  for (float x = 1e-20f; x < 80.f; x *= 1.01f) z.insert(z.end(), {static_cast<double>(x), -static_cast<double>(x)});
  const Size size{static_cast<int64_t>(z.size()), 1};
  const std::vector<double> ones(z.size(), 1.0);
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Trial tanh = computed(gate_op(Gate::tanh, size), Dtype::f32, z, ones, backend);
    const Trial sigmoid = computed(gate_op(Gate::sigmoid, size), Dtype::f32, z, ones, backend);
    for (size_t i = 0; i < z.size(); ++i) {
      CAPTURE(z[i]);
      const double x = z[i], e = std::exp(-std::abs(x));
      CHECK(std::abs(tanh["out"][i] / std::tanh(x) - 1) < 4e-7);  // on a GPU 5 units of 2^-24
      CHECK(std::abs(sigmoid["dinp"][i] / (e / ((1 + e) * (1 + e))) - 1) < slope_tolerance(backend));
      if (std::abs(x) < 43)  // beyond, exp(-2|z|) is below the smallest float
        CHECK(std::abs(tanh["dinp"][i] * std::pow(std::cosh(x), 2) - 1) < slope_tolerance(backend));
    }
  }
}

TEST_CASE("gate: relu at zero, and zero gates are exactly zero") {
  const std::vector<double> zero(5, 0.0), ones(5, 1.0);
  for (const Backend backend : all_backends()) {
    const auto at_zero = [&](Gate gate) { return computed(gate_op(gate, {1, 5}), Dtype::f32, zero, ones, backend); };
    CHECK(at_zero(Gate::relu)["dinp"] == zero);
    for (Gate gate : {Gate::relu, Gate::tanh, Gate::identity}) CHECK(at_zero(gate)["out"] == zero);
    CHECK(at_zero(Gate::softmax)["out"][3] == doctest::Approx(1.0));
  }
}

TEST_CASE("gate: NaN stays, and the threads do not matter") {
  for (Gate gate : gates) {
    CAPTURE(static_cast<int>(gate));
    const Where where = has_softmax(gate) ? in_row(7, 4) : at({29});
    for (const Backend backend : all_backends())
      check_nans(gate_op(gate, {is_slow(backend) ? 100 : 5000, 4}), Dtype::f32, backend, {{"inp", {29}}},
                 {{"out", where}, {"dinp", gate == Gate::identity ? at({}) : where}});
    check_threads(gate_op(gate, {5000, 4}));
  }
}

TEST_CASE("gate: wrong shapes are errors") {
  const std::vector<float> x(6);
  const Tensor six = view(x.data(), {2, 3}), five = view(x.data(), {5});
  CHECK_THROWS_AS(gate_forward(six, five, Gate::relu, fast), Error);
  CHECK_THROWS_AS(gate_backward({six, false}, five, six, Gate::relu, fast), Error);
}
