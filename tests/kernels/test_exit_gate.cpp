#include "kernels/block/exit_gate.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t N, exits;
};
constexpr double scale = 0.37, beta = 0.3;
const std::vector<Size> sizes{{1, 2}, {7, 3}, {300, 4}, {33, 16}}, gpu_sizes{{1, 2}, {7, 3}, {300, 4}, {33, 16}};

// Every fifth token is not scored.
std::vector<int32_t> targets_of(int64_t N) {
  std::vector<int32_t> targets(static_cast<size_t>(N));
  for (size_t n = 0; n < targets.size(); ++n) targets[n] = n % 5 == 4 ? -1 : 0;
  return targets;
}

// The loss of several exits, whose gradient is the scale; magnitude: of the gates' logits.
Op exit_op(const Size& s, double magnitude = 1) {
  Operand losses = in_f32(output("losses", {s.N}));
  losses.cotangent = scale;
  std::vector<Operand> values = {losses};
  for (int64_t t = 0; t < s.exits; ++t) {
    values.push_back(in_f32(unchanged(str("ce", t), {s.N}, 3)));
    if (t + 1 < s.exits) values.push_back(never_added(input(str("z", t), {s.N}, magnitude)));
  }
  const auto call = [=](const Tensors& t, Stream stream, bool gradients) {
    const auto get = [&](const std::string& name) { return t[name]; };
    run_on(stream, {view(targets_of(s.N))}, [&](const std::vector<Tensor>& list) {
      exit_loss(t["losses"], gradients ? several(s.exits - 1, "dz", get) : std::vector<Tensor>{},
                several(s.exits, "ce", get), several(s.exits - 1, "z", get), list[0], beta, scale, stream);
    });
  };
  return {values, [=](auto& t, Stream stream) { call(t, stream, false); },
          [=](auto& t, Stream stream) { call(t, stream, true); },
          [=](auto& z) {
            const std::vector<int32_t> targets = targets_of(s.N);
            for (int64_t n = 0; n < s.N; ++n) {
              std::vector<Complex> ce, logits;
              for (int64_t t = 0; t < s.exits; ++t) ce.push_back(z[str("ce", t)][n]);
              for (int64_t t = 0; t + 1 < s.exits; ++t) logits.push_back(z[str("z", t)][n]);
              const Complex loss = exit_loss_row_ref<Complex>(nullptr, ce.data(), logits.data(), beta, s.exits);
              z["losses"][n] = targets[static_cast<size_t>(n)] < 0 ? Complex(0) : loss;
            }
          }};
}

}  // namespace

TEST_CASE("exit_gate: by hand") {
  // sigmoid(ln 3) is 3/4: 3/4 of the token leave at once, half of what is left at the second exit.
  const double z[] = {std::log(3.0), 0.0}, ce[] = {1, 2, 3};
  double log_p[3];
  exit_log_weights_ref(log_p, z, 3);
  CHECK(std::exp(log_p[0]) == doctest::Approx(0.75));
  CHECK(std::exp(log_p[1]) == doctest::Approx(0.125));
  CHECK(std::exp(log_p[2]) == doctest::Approx(0.125));
  const double entropy = -0.75 * std::log(0.75) - 0.25 * std::log(0.125);
  CHECK(exit_loss_row_ref<double>(nullptr, ce, z, 0, 3) == doctest::Approx(0.75 + 0.25 + 0.375));
  CHECK(exit_loss_row_ref<double>(nullptr, ce, z, 0.5, 3) == doctest::Approx(1.375 - 0.5 * entropy));
  double sum = 0;
  const double far[] = {800, -800, 30};
  double all[4];
  exit_log_weights_ref(all, far, 4);
  for (const double l : all) sum += std::exp(l);
  CHECK((sum == doctest::Approx(1) && std::isfinite(exit_loss_row_ref<double>(nullptr, ce, z, 0.5, 3))));
}

TEST_CASE("exit_gate: reference backward is the derivative of the reference forward") {
  for (const double magnitude : {1e-3, 1.0, 20.0})
    for (const Size& s : std::vector<Size>{{1, 2}, {6, 3}, {4, 16}})
      check_derivative(exit_op(s, magnitude), {1e-13, 1e-16});
}

TEST_CASE_TEMPLATE("exit_gate: the fast backends equal the reference", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const double magnitude : {1e-3, 1.0, 8.0}) {
      Tolerances tolerances = {{"losses", {1e-6, 1e-6}}};
      for (int64_t t = 0; t + 1 < size.exits; ++t) tolerances.emplace(str("dz", t), Tolerance{2e-6, 1e-6});
      check_backend(exit_op(size, magnitude), DtypeOf<T>::value, backend, tolerances);
    }
  });
}

TEST_CASE("exit_gate: weights add up to 1 on every backend, also where a gate is sure") {
  for (const Backend backend : fast_backends()) {
    const std::vector<float> z0 = {0, 90, -90, 3}, z1 = {0, -2, 90, 500};
    std::vector<float> p[3] = {std::vector<float>(4), std::vector<float>(4), std::vector<float>(4)};
    run_on(Stream{backend}, {view(z0), view(z1), view(p[0]), view(p[1]), view(p[2])},
           [&](const std::vector<Tensor>& list) {
             exit_weights({list[2], list[3], list[4]}, {list[0], list[1]}, Stream{backend});
           });
    for (size_t n = 0; n < 4; ++n) CHECK(p[0][n] + p[1][n] + p[2][n] == doctest::Approx(1).epsilon(1e-6));
    CHECK(p[0][0] == doctest::Approx(0.5));
    CHECK(p[1][0] == doctest::Approx(0.25));
    CHECK(p[0][1] == doctest::Approx(1));
    CHECK(p[1][2] == doctest::Approx(1));
  }
}

TEST_CASE("exit_gate: a NaN shows in its token and nowhere else, and threads do not matter") {
  for (const Backend backend : fast_backends())
    check_nans(exit_op({20, 3}), Dtype::f32, backend, {{"z1", {7}}, {"ce0", {11}}},
               {{"losses", at({7, 11})}, {"dz0", at({7, 11})}, {"dz1", at({7})}});
  check_threads(exit_op({3000, 4}));
}
