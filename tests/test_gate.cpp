#include "kernels/depth/gate.h"

#include "tests/depth_cases.h"

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

template <class T>
std::vector<Wide<T>> forward(const std::vector<T>& inp, const Size& size, Gate gate, Stream stream) {
  auto out = poisoned<Wide<T>>(size.rows * size.K);
  const Shape shape{1, size.rows, size.K};
  run_on(stream.backend, {view(out, shape), view(inp, shape)},
         [=](auto& t, Stream on) { gate_forward(t[0], t[1], gate, on); });
  return out;
}

template <class T>
std::vector<T> backward(std::vector<T> dinp, const std::vector<Wide<T>>& dout, const std::vector<T>& inp,
                        const Size& size, Gate gate, bool acc, Stream stream) {
  const Shape shape{1, size.rows, size.K};
  run_on(stream.backend, {view(dinp, shape), view(dout, shape), view(inp, shape)}, [=](auto& t, Stream on) {
    gate_backward({t[0], acc}, t[1], t[2], gate, on);
  });
  return dinp;
}

}  // namespace

TEST_CASE("gate: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 6.0}) {
    for (Gate gate : gates) {
      for (const Size& size : std::vector<Size>{{2, 1}, {3, 4}, {2, 7}}) {
        CAPTURES(scale, gate, size.K);
        const int64_t n = size.rows * size.K;
        const auto inp = random_vector<double>(n, 1, scale), dout = random_vector<double>(n, 2);
        const auto want = complex_step(inp, [&](auto& x) {
          std::vector<Complex> out(x.size());
          gate_forward_ref(out.data(), x.data(), size.rows, size.K, gate);
          return dot(dout, out);
        });
        check_close("dinp", backward(poisoned<double>(n), dout, inp, size, gate, false, reference), want, 1e-11);
      }
    }
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
    const auto out = forward(inp, {1, 4}, golden.gate, reference);
    const auto dinp = backward(poisoned<double>(4), dout, inp, {1, 4}, golden.gate, false, reference);
    for (size_t j = 0; j < 4; ++j) {  // half of the sixth digit
      CAPTURE(j);
      CHECK(std::abs(out[j] - golden.out[j]) <= 5.01e-7);
      CHECK(std::abs(dinp[j] - golden.dinp[j]) <= 5.01e-7);
    }
    for (const Backend backend : fast_backends()) {
      const Stream stream{backend};
      const auto out32 = forward(convert<float>(inp), {1, 4}, golden.gate, stream);
      const auto dinp32 =
          backward(poisoned<float>(4), convert<float>(dout), convert<float>(inp), {1, 4}, golden.gate, false, stream);
      for (size_t j = 0; j < 4; ++j) {  // and for f32 its rounding
        CAPTURE(j);
        CHECK(std::abs(static_cast<double>(out32[j]) - golden.out[j]) <= 9e-7);
        CHECK(std::abs(static_cast<double>(dinp32[j]) - golden.dinp[j]) <= 9e-7);
      }
    }
  }
}

// Also from bf16 out is f32 and computed from the same numbers; dinp is rounded once.
TEST_CASE_TEMPLATE("gate: the fast backends equal the reference, set and added", T, float, bf16) {
  constexpr bool narrow = std::is_same_v<T, bf16>;
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (double scale : {1e-3, 1.0, narrow ? 6.0 : 20.0}) {
      for (Gate gate : gates) {
        CAPTURES(scale, gate, size.K);
        const int64_t n = size.rows * size.K;
        const auto inp = random_vector<T>(n, 1, scale);
        const auto dout = random_vector<float>(n, 2);
        const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
        // An exp of 1.5 ulp and sums of up to 1100 terms in vector order: some ulps (6e-8) of the result.
        check_close("out", forward(inp, size, gate, Stream{backend}), forward(inp64, size, gate, reference), 1e-6);
        for (bool acc : {false, true}) {
          const auto dinp = acc ? random_vector<T>(n, 3) : poisoned<T>(n);
          auto got = backward(dinp, dout, inp, size, gate, acc, Stream{backend});
          auto want = backward(convert<double>(dinp), dout64, inp64, size, gate, acc, reference);
          if (narrow && !acc && size.K == 1 && gate == Gate::softmax) {  // the gradient of a constant
            for (float d : got) CHECK(std::abs(d) < 1e-6f);
            continue;
          }
          const bool row = gate == Gate::softmax || gate == Gate::softmax_sigmoid;
          if constexpr (!narrow)
            if (row && (scale > 1 || size.K == 1))  // all cancellation, perhaps: judge it beside its terms, K * dout
              for (float d : dout) {
                got.push_back(d * static_cast<float>(size.K));
                want.push_back(static_cast<double>(got.back()));
              }
          check_close("dinp", got, want, narrow ? 0x1p-8 : 2e-6);
        }
      }
    }
  });
}

TEST_CASE("gate: tanh and the slopes are accurate everywhere") {
  std::vector<float> z;
  for (float x = 1e-20f; x < 80.f; x *= 1.01f) z.insert(z.end(), {x, -x});
  const Size size{static_cast<int64_t>(z.size()), 1};
  const std::vector<float> ones(z.size(), 1.f);
  for (const Backend backend : fast_backends()) {
    const Stream stream{backend};
    CAPTURE(static_cast<int>(stream.backend));
    const auto out = forward(z, size, Gate::tanh, stream);
    const auto tanh_slope = backward(poisoned<float>(size.rows), ones, z, size, Gate::tanh, false, stream);
    const auto sigmoid_slope = backward(poisoned<float>(size.rows), ones, z, size, Gate::sigmoid, false, stream);
    for (size_t i = 0; i < z.size(); ++i) {
      CAPTURE(z[i]);
      const double x = static_cast<double>(z[i]), e = std::exp(-std::abs(x));
      CHECK(std::abs(static_cast<double>(out[i]) / std::tanh(x) - 1) < 4e-7);
      CHECK(std::abs(static_cast<double>(sigmoid_slope[i]) / (e / ((1 + e) * (1 + e))) - 1) < 5e-7);
      if (std::abs(x) < 43)  // beyond, exp(-2|z|) is below the smallest float
        CHECK(std::abs(static_cast<double>(tanh_slope[i]) * std::pow(std::cosh(x), 2) - 1) < 5e-7);
    }
  }
}

TEST_CASE("gate: relu at zero, and zero gates are exactly zero") {
  const std::vector<float> zero(5, 0.f), ones(5, 1.f);
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    CHECK(backward(poisoned<float>(5), ones, zero, {1, 5}, Gate::relu, false, stream) == zero);
    for (Gate gate : {Gate::relu, Gate::tanh, Gate::identity}) CHECK(forward(zero, {1, 5}, gate, stream) == zero);
    CHECK(forward(zero, {1, 5}, Gate::softmax, stream)[3] == doctest::Approx(1.0));
  }
}

TEST_CASE("gate: NaN stays, and the threads do not matter") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    CAPTURE(static_cast<int>(stream.backend));
    const Size size{stream.backend == Backend::cuda ? 100 : 5000, 4};
    for (Gate gate : gates) {
      CAPTURE(static_cast<int>(gate));
      auto inp = random_vector<float>(size.rows * size.K, 1);
      const auto dout = random_vector<float>(size.rows * size.K, 2);
      auto run = [&] {
        return joined(forward(inp, size, gate, stream),
                      backward(poisoned<float>(size.rows * size.K), dout, inp, size, gate, false, stream));
      };
      if (stream.backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
      inp[7 * 4 + 1] = nan;
      const auto both = run();
      const bool row = gate == Gate::softmax || gate == Gate::softmax_sigmoid;
      const size_t n = both.size() / 2;
      for (size_t i = 0; i < both.size(); ++i) {
        if (gate == Gate::identity && i >= n) continue;  // its dinp is dout, whatever inp is
        CHECK_MESSAGE(std::isnan(both[i]) == (row ? i % n / 4 == 7 : i % n == 29), "element " << i);
      }
    }
  }
}

TEST_CASE("gate: wrong shapes are errors") {
  const std::vector<float> x(6);
  const Tensor six = view(x, {2, 3}), five = view(x, {5});
  CHECK_THROWS_AS(gate_forward(six, five, Gate::relu, fast), Error);
  CHECK_THROWS_AS(gate_backward({six, false}, five, six, Gate::relu, fast), Error);
}
