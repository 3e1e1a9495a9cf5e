#include "kernels/depth/engram_gate.h"

#include <deque>

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr double eps = 1e-6;

// One stream and several; ragged rows; one part of the tokens or many.
const std::vector<EngramGateSize> sizes{{1, 1, 1}, {3, 1, 20}, {300, 2, 33}, {5000, 1, 16}, {70, 4, 768}, {129, 3, 48}};
const std::vector<EngramGateSize> gpu_sizes{{1, 1, 1}, {3, 1, 20}, {150, 2, 33}, {70, 4, 64}, {9, 1, 520}};

Op engram_gate(const EngramGateSize& s, double scale = 1) {
  const Shape streams{1, s.N, s.E, s.C}, gains{s.E, s.C};
  return {{input("x", streams, scale), input("kv", {1, s.N, s.E + 1, s.C}, scale), parameter("wq", gains),
           parameter("wk", gains), saved("saved", {1, s.N, s.E, engram_saved}), output("out", streams)},
          [=](auto& t, Stream stream) {
            engram_gate_forward(t["out"], t["saved"], {t["x"], t["kv"], t["wq"], t["wk"]}, eps, stream);
          },
          [=](auto& t, Stream stream) {
            engram_gate_backward(t.grad("x"), t.grad("kv"), t["dwq"], t["dwk"], t["dout"],
                                 {t["x"], t["kv"], t["wq"], t["wk"]}, t["saved"], stream);
          },
          [=](auto& z) { engram_gate_forward_ref(z["out"], z["saved"], z["x"], z["kv"], z["wq"], z["wk"], eps, s); }};
}

// Keys that are like their streams, or the opposite, as far from that as half of it, and gains about 1: logits are then
// far from 0, where the gate's slope makes much of every rounding.
void make_clear(Trial& trial, const EngramGateSize& s) {
  for (const char* gains : {"wq", "wk"})
    for (double& gain : trial.x[gains]) gain = 1 + 0.2 * std::tanh(gain);
  std::vector<double>& kv = trial.x["kv"];
  for (int64_t row = 0; row < s.N * s.E; ++row)
    for (int64_t c = 0; c < s.C; ++c) {
      double& k = kv[static_cast<size_t>((row / s.E * (s.E + 1) + row % s.E) * s.C + c)];
      k = 0.5 * std::tanh(k) + (row % 3 == 0 ? -1 : 1) * trial.x["x"][static_cast<size_t>(row * s.C + c)];
    }
  kv = loaded(stored(kv, trial.dtype), trial.dtype);
  for (const char* gains : {"wq", "wk"}) trial.x[gains] = loaded(stored(trial.x[gains], Dtype::f32), Dtype::f32);
}

const Tolerances tolerances{{"saved", {2e-6, 2e-6}}, {"out", {2e-6, 2e-6}}, {"dx", {4e-6, 4e-6}},
                            {"dkv", {4e-6, 4e-6}},   {"dwq", 2e-5},         {"dwk", 2e-5}};

Trial computed(const EngramGateSize& s, Backend backend, const Numbers& given) {
  static std::deque<Op> ops;
  Trial trial(ops.emplace_back(engram_gate(s)), Dtype::f32);
  for (const auto& [name, numbers] : given) trial.x[name] = numbers;
  return trial.run(backend);
}

}  // namespace

TEST_CASE("engram_gate: reference backward is the derivative of the reference forward") {
  for (const EngramGateSize& size : std::vector<EngramGateSize>{{1, 1, 3}, {4, 1, 5}, {3, 4, 2}, {2, 3, 7}})
    for (const double scale : {0.01, 1.0, 10.0}) check_derivative(engram_gate(size, scale), 2e-11);
}

TEST_CASE("engram_gate: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const EngramGateSize& size) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})  // sums of C terms, and for the gains of up to 5,000
      check_backend(engram_gate(size), dtype, backend, tolerances, [&](Trial& trial) { make_clear(trial, size); });
  });
}

// C = 1 and x = k = 1, where both norms are 1 but for eps, so q is the product of the gains: 2.25, one that is small,
// and one below the least, of both signs.
TEST_CASE("engram_gate: worked out by hand") {
  for (const Backend backend : all_backends())
    for (const double q : {2.25, 4e-4, 5e-7, -2.25, -4e-4, -5e-7}) {
      CAPTURES(backend, q);
      const double h = std::sqrt(std::max(std::abs(q), 1e-6)), gam = 1 / (1 + std::exp(q < 0 ? h : -h));
      const double slope = std::abs(q) < 1e-6 ? 0 : gam * (1 - gam) / (2 * h);
      const Trial got =
          computed({1, 1, 1}, backend,
                   {{"x", {1}}, {"kv", {1, 4}}, {"wq", {q}}, {"wk", {1}}, {"dout", {0.5}}, {"dwq", {0}}, {"dwk", {0}}});
      const auto near = [](double number) { return doctest::Approx(number).epsilon(3e-6); };
      CHECK(got["out"][0] - 1 == near(4 * gam));
      CHECK(got["dkv"][1] == near(0.5 * gam));
      CHECK(got["dwq"][0] == near(2 * slope));
      CHECK(got["dwk"][0] == near(q * 2 * slope));
      CHECK(std::abs(got["dx"][0] - 0.5) < 2e-5);  // of one channel only the sign is left by its norm
    }
}

// A key of zeros: the sigmoid of a thousandth, and no gradient to dot; of a value of zeros nothing is added.
TEST_CASE("engram_gate: dead keys pass a half, values of zeros change no bit") {
  const EngramGateSize s{2, 1, 4};
  const std::vector<double> x{1, -2, 3, 0.5, 1, 1, -1, 2};
  std::vector<double> dead(16, 0.0), still = random_vector<double>(16, 5);
  for (const size_t n : {0, 1})
    for (size_t c = 0; c < 4; ++c) dead[8 * n + 4 + c] = 1, still[8 * n + 4 + c] = 0;
  for (const Backend backend : all_backends()) {
    CAPTURES(backend);
    const std::vector<double> dout(8, 1.0);
    const Trial half = computed(s, backend, {{"x", x}, {"kv", dead}, {"dout", dout}});
    for (size_t i = 0; i < 8; ++i) {
      CHECK(half["out"][i] - x[i] == doctest::Approx(1 / (1 + std::exp(-1e-3))).epsilon(1e-6));
      CHECK(half["dx"][i] == 1);
    }
    CHECK(computed(s, backend, {{"x", x}, {"kv", still}})["out"] == x);
  }
}

TEST_CASE("engram_gate: the threads do not matter") { check_threads(engram_gate({700, 2, 40})); }

TEST_CASE("engram_gate: where memory begins does not matter but for rounding") {
  Tolerances wide = tolerances;  // logits near 0 are among these
  for (auto& [name, tolerance] : wide) tolerance = {1e-4, 1e-4};
  check_any_address(engram_gate({60, 2, 32}), Dtype::f32, wide, {"saved"});
}

TEST_CASE("engram_gate: a NaN stays in its stream, and wrong shapes are errors") {
  const EngramGateSize s{4, 2, 6};
  for (const Backend backend : all_backends())
    check_nans(engram_gate(s), Dtype::f32, backend, {{"x", {(2 * 2 + 1) * 6 + 3}}},  // of token 2, stream 1
               {{"out", in_row(5, 6)},
                {"saved", [](size_t i) { return i / 4 == 5 && i % 4 != 3; }},
                {"dx", in_row(5, 6)},
                {"dkv", [](size_t i) { return i / 6 == 2 * 3 + 1 || i / 6 == 2 * 3 + 2; }},
                {"dwq", in_row(1, 6)},
                {"dwk", in_row(1, 6)}});
  const std::vector<float> x(64);
  const Tensor streams = view(x.data(), {4, 2, 6}), gains = view(x.data(), {2, 6}), stats = view(x.data(), {4, 2, 4});
  const EngramGateInputs narrow{streams, view(x.data(), {4, 2, 6}), gains, gains};
  CHECK_THROWS_AS(engram_gate_forward(streams, stats, narrow, eps, fast), Error);
  const EngramGateInputs right{streams, view(x.data(), {4, 3, 6}), gains, gains};
  CHECK_THROWS_AS(engram_gate_forward(streams, gains, right, eps, fast), Error);
}
