#include "kernels/block/swiglu.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

template <class T>
struct Grads {
  std::vector<T> dgate, dup;
};
struct Adds {
  bool gate, up;
};
const std::vector<Adds> all_adds{{false, false}, {true, false}, {false, true}, {true, true}};

template <class T>
std::vector<T> forward(const std::vector<T>& gate, const std::vector<T>& up, Backend backend) {
  auto out = poisoned<T>(static_cast<int64_t>(gate.size()));
  run_on(backend, {view(out), view(gate), view(up)},
         [](auto& t, Stream stream) { swiglu_forward(t[0], t[1], t[2], stream); });
  return out;
}

// What is set is NaN before.
template <class T>
Grads<T> backward(const std::vector<T>& before, const std::vector<T>& dout, const std::vector<T>& gate,
                  const std::vector<T>& up, Adds add, Backend backend) {
  const auto set = poisoned<T>(static_cast<int64_t>(gate.size()));
  Grads<T> d{add.gate ? before : set, add.up ? before : set};
  run_on(backend, {view(d.dgate), view(d.dup), view(dout), view(gate), view(up)}, [=](auto& t, Stream stream) {
    swiglu_backward({t[0], add.gate}, {t[1], add.up}, t[2], t[3], t[4], stream);
  });
  return d;
}

// Below and beside a vector; several threads, or several blocks with both widths of access.
std::vector<int64_t> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {1, 31, 1000, 40001};
  return {1, 31, 1000, 5001, 5008};
}

}  // namespace

TEST_CASE("swiglu: reference forward, by values known in closed form") {
  const double log3 = std::log(3.0);  // its logistic is 3/4
  const std::vector<double> gate{0.0, log3, -log3, 800.0, -800.0}, up{5.0, 2.0, 2.0, 0.5, 0.5};
  check_close("out", forward(gate, up, Backend::reference),
              std::vector<double>{0.0, 1.5 * log3, -0.5 * log3, 400.0, 0.0}, 1e-15);
}

TEST_CASE("swiglu: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 30.0}) {
    for (int64_t n : {1, 7, 33}) {
      CAPTURES(scale, n);
      const auto gate = random_vector<double>(n, 1, scale), up = random_vector<double>(n, 2, scale);
      const auto dout = random_vector<double>(n, 3), before = random_vector<double>(n, 4);
      auto loss = [&](const std::vector<Complex>& g, const std::vector<Complex>& u) {
        std::vector<Complex> out(g.size());
        swiglu_forward_ref(out.data(), g.data(), u.data(), n);
        return dot(dout, out);
      };
      const auto want_dgate = complex_step(gate, [&](auto& g) { return loss(g, convert<Complex>(up)); });
      const auto want_dup = complex_step(up, [&](auto& u) { return loss(convert<Complex>(gate), u); });
      for (const Adds& add : all_adds) {
        CAPTURES(add.gate, add.up);
        auto [dgate, dup] = backward(before, dout, gate, up, add, Backend::reference);
        for (size_t i = 0; i < before.size(); ++i) {
          if (add.gate) dgate[i] -= before[i];
          if (add.up) dup[i] -= before[i];
        }
        // What was there before is of size 1, so taking it off again costs digits when the gradient is smaller.
        check_close("dgate", dgate, want_dgate, 1e-12 / std::min(scale, 1.0));
        check_close("dup", dup, want_dup, 1e-12 / std::min(scale, 1.0));
      }
    }
  }
}

// exp is good to 1.5 units of 2^-24 and at most eight more roundings follow: 1e-6 is about 17 units. In bf16
// the result is rounded once.
TEST_CASE_TEMPLATE("swiglu: fast backends equal the reference, set and added", T, float, bf16) {
  const double tolerance = tolerance_or_rounding<T>(1e-6);
  for (const Backend backend : fast_backends()) {
    for (double scale : {1e-3, 1.0, 12.0, 200.0}) {
      for (int64_t n : sizes_for(backend)) {
        CAPTURES(backend, scale, n);
        const auto gate = random_vector<T>(n, 1, scale), up = random_vector<T>(n, 2);
        const auto dout = random_vector<T>(n, 3), before = random_vector<T>(n, 4);
        const auto gate64 = convert<double>(gate), up64 = convert<double>(up), dout64 = convert<double>(dout);
        check_close("out", forward(gate, up, backend), forward(gate64, up64, Backend::reference), tolerance);
        for (const Adds& add : all_adds) {
          CAPTURES(add.gate, add.up);
          const auto got = backward(before, dout, gate, up, add, backend);
          const auto want = backward(convert<double>(before), dout64, gate64, up64, add, Backend::reference);
          check_close("dgate", got.dgate, want.dgate, tolerance);
          check_close("dup", got.dup, want.dup, tolerance);
        }
      }
    }
  }
}

TEST_CASE("swiglu: gradients written over the inputs are the same bits") {
  for (const Backend backend : all_backends()) {
    const int64_t n = 1003;
    const auto gate = random_vector<float>(n, 1, 4), up = random_vector<float>(n, 2), dout = random_vector<float>(n, 3);
    const auto want = backward({}, dout, gate, up, {false, false}, backend);
    Grads<float> over{gate, up};
    const Tensor g = view(over.dgate), u = view(over.dup);
    run_on(backend, {g, u, view(dout), g, u}, [](auto& t, Stream stream) {
      swiglu_backward({t[0], false}, {t[1], false}, t[2], t[3], t[4], stream);
    });
    CHECK(over.dgate == want.dgate);
    CHECK(over.dup == want.dup);
  }
}

TEST_CASE("swiglu: NaN in any input reaches the outputs it should, and threads do not matter") {
  for (const Backend backend : fast_backends()) {
    const int64_t n = sizes_for(backend).back();
    auto gate = random_vector<float>(n, 1, 4), up = random_vector<float>(n, 2), dout = random_vector<float>(n, 3);
    gate[5] = up[20] = dout.back() = NAN;
    gate[6] = 1e30f, gate[7] = -1e30f;  // whose exponentials overflow
    auto run = [&] {
      const auto d = backward({}, dout, gate, up, {false, false}, backend);
      return joined(forward(gate, up, backend), d.dgate, d.dup);
    };
    const auto all = run();
    for (int64_t i = 0; i < n; ++i) {
      const size_t k = static_cast<size_t>(i), width = static_cast<size_t>(n);
      REQUIRE(std::isnan(all[k]) == (i == 5 || i == 20));
      REQUIRE(std::isnan(all[width + k]) == (i == 5 || i == 20 || i == n - 1));
      REQUIRE(std::isnan(all[2 * width + k]) == (i == 5 || i == n - 1));
    }
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
  }
}
