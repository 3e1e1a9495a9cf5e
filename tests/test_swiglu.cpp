#include "kernels/block/swiglu.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {
// Below and beside a vector; several threads, or several blocks with both widths of access.
std::vector<int64_t> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {1, 31, 1000, 40001};
  return {1, 31, 1000, 5001, 5008};
}
}  // namespace

TEST_CASE("swiglu: reference forward, by values known in closed form") {
  const double log3 = std::log(3.0);  // its logistic is 3/4
  const std::vector<double> gate{0.0, log3, -log3, 800.0, -800.0}, up{5.0, 2.0, 2.0, 0.5, 0.5};
  auto out = poisoned<double>(5);
  swiglu_forward_ref(out.data(), gate.data(), up.data(), 5);
  check_close("out", out, std::vector<double>{0.0, 1.5 * log3, -0.5 * log3, 400.0, 0.0}, 1e-15);
}

TEST_CASE("swiglu: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 30.0}) {
    for (int64_t n : {1, 7, 33}) {
      CAPTURE(scale);
      CAPTURE(n);
      const auto gate = random_vector<double>(n, 1, scale), up = random_vector<double>(n, 2, scale);
      const auto dout = random_vector<double>(n, 3);
      auto loss = [&](const std::vector<Complex>& g, const std::vector<Complex>& u) {
        std::vector<Complex> out(g.size());
        swiglu_forward_ref(out.data(), g.data(), u.data(), n);
        return dot(dout, out);
      };
      const auto want_dgate = complex_step(gate, [&](auto& g) { return loss(g, convert<Complex>(up)); });
      const auto want_dup = complex_step(up, [&](auto& u) { return loss(convert<Complex>(gate), u); });
      for (int flags = 0; flags < 4; ++flags) {
        CAPTURE(flags);
        const bool acc_gate = flags & 1, acc_up = flags & 2;
        const auto before = random_vector<double>(n, 4);
        auto dgate = acc_gate ? before : poisoned<double>(n), dup = acc_up ? before : poisoned<double>(n);
        swiglu_backward_ref(dgate.data(), dup.data(), dout.data(), gate.data(), up.data(), n, acc_gate, acc_up);
        for (size_t i = 0; i < before.size(); ++i) {
          if (acc_gate) dgate[i] -= before[i];
          if (acc_up) dup[i] -= before[i];
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
        CAPTURE(static_cast<int>(backend));
        CAPTURE(scale);
        CAPTURE(n);
        const auto gate = random_vector<T>(n, 1, scale), up = random_vector<T>(n, 2);
        const auto dout = random_vector<T>(n, 3), before = random_vector<T>(n, 4);
        const auto gate64 = convert<double>(gate), up64 = convert<double>(up), dout64 = convert<double>(dout);
        auto out = poisoned<T>(n);
        auto want = poisoned<double>(n);
        const Tensor dy = view(dout.data(), {n}), g = view(gate.data(), {n}), u = view(up.data(), {n});
        run_on(backend, {view(out.data(), {n}), g, u},
               [](auto& t, Stream stream) { swiglu_forward(t[0], t[1], t[2], stream); });
        swiglu_forward_ref(want.data(), gate64.data(), up64.data(), n);
        check_close("out", out, want, tolerance);
        for (int flags = 0; flags < 4; ++flags) {
          CAPTURE(flags);
          const bool acc_gate = flags & 1, acc_up = flags & 2;
          auto dgate = acc_gate ? before : poisoned<T>(n), dup = acc_up ? before : poisoned<T>(n);
          auto dgate64 = convert<double>(dgate), dup64 = convert<double>(dup);
          run_on(backend, {view(dgate.data(), {n}), view(dup.data(), {n}), dy, g, u}, [=](auto& t, Stream stream) {
            swiglu_backward(t[0], t[1], t[2], t[3], t[4], acc_gate, acc_up, stream);
          });
          swiglu_backward_ref(dgate64.data(), dup64.data(), dout64.data(), gate64.data(), up64.data(), n, acc_gate,
                              acc_up);
          check_close("dgate", dgate, dgate64, tolerance);
          check_close("dup", dup, dup64, tolerance);
        }
      }
    }
  }
}

TEST_CASE("swiglu: gradients written over the inputs are the same bits") {
  for (const Backend backend : all_backends()) {
    const int64_t n = 1003;
    auto gate = random_vector<float>(n, 1, 4), up = random_vector<float>(n, 2);
    const auto dout = random_vector<float>(n, 3);
    auto dgate = poisoned<float>(n), dup = poisoned<float>(n);
    const Tensor dy = view(dout.data(), {n}), g = view(gate.data(), {n}), u = view(up.data(), {n});
    const auto backward = [](auto& t, Stream stream) {
      swiglu_backward(t[0], t[1], t[2], t[3], t[4], false, false, stream);
    };
    run_on(backend, {view(dgate.data(), {n}), view(dup.data(), {n}), dy, g, u}, backward);
    run_on(backend, {g, u, dy, g, u}, backward);
    CHECK(gate == dgate);
    CHECK(up == dup);
  }
}

TEST_CASE("swiglu: NaN in any input reaches the outputs it should, and threads do not matter") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Backend backend : fast_backends()) {
    const int64_t n = sizes_for(backend).back();
    auto gate = random_vector<float>(n, 1, 4), up = random_vector<float>(n, 2), dout = random_vector<float>(n, 3);
    gate[5] = up[20] = dout.back() = nan;
    gate[6] = 1e30f, gate[7] = -1e30f;  // whose exponentials overflow
    auto run = [&] {
      auto out = poisoned<float>(n), dgate = out, dup = out;
      run_on(backend,
             {view(out.data(), {n}), view(dgate.data(), {n}), view(dup.data(), {n}), view(dout.data(), {n}),
              view(gate.data(), {n}), view(up.data(), {n})},
             [](auto& t, Stream stream) {
               swiglu_forward(t[0], t[4], t[5], stream);
               swiglu_backward(t[1], t[2], t[3], t[4], t[5], false, false, stream);
             });
      out.insert(out.end(), dgate.begin(), dgate.end());
      out.insert(out.end(), dup.begin(), dup.end());
      return out;
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
