#include "kernels/block/layernorm.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {
struct Size {
  int64_t rows, C;
};

// Ends within a vector and beside one, several blocks; fewer rows for the emulator, which takes microseconds for each.
std::vector<Size> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {2000, 96}};
  return {{1, 1}, {1, 3}, {7, 8}, {5, 31}, {43, 32}, {3, 1027}, {3, 9000}, {30, 96}};
}

// Of: out, mean, rstd, inp.
void forward(Backend backend, const std::vector<Tensor>& tensors, double eps = 1e-5) {
  run_on(backend, tensors, [=](auto& t, Stream stream) { layernorm_forward(t[0], t[1], t[2], t[3], eps, stream); });
}
// Of: dinp, dout, inp, mean, rstd.
void backward(Backend backend, const std::vector<Tensor>& tensors, bool acc) {
  run_on(backend, tensors,
         [=](auto& t, Stream stream) { layernorm_backward(t[0], t[1], t[2], t[3], t[4], acc, stream); });
}
}  // namespace

TEST_CASE("layernorm: reference backward is the derivative of the reference forward") {
  const double eps = 1e-5;
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 1}, {1, 3}, {3, 7}, {2, 31}}) {
      const int64_t rows = size.rows, C = size.C;
      CAPTURE(scale);
      CAPTURE(rows);
      CAPTURE(C);
      const auto inp = random_vector<double>(rows * C, 1, scale), dout = random_vector<double>(rows * C, 2);
      const auto want = complex_step(inp, [&](const std::vector<Complex>& x) {
        std::vector<Complex> out(x.size()), mean(static_cast<size_t>(rows)), rstd(static_cast<size_t>(rows));
        layernorm_forward_ref(out.data(), mean.data(), rstd.data(), x.data(), rows, C, eps);
        return dot(dout, out);
      });
      auto out = poisoned<double>(rows * C), mean = poisoned<double>(rows), rstd = poisoned<double>(rows);
      auto dinp = poisoned<double>(rows * C);
      layernorm_forward_ref(out.data(), mean.data(), rstd.data(), inp.data(), rows, C, eps);
      layernorm_backward_ref(dinp.data(), dout.data(), inp.data(), mean.data(), rstd.data(), rows, C, false);
      check_close("dinp", dinp, want, 1e-10);
    }
  }
}

TEST_CASE("layernorm: every row of the output has mean 0 and variance 1") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    const int64_t rows = 5, C = 700;
    auto inp = random_vector<float>(rows * C, 1);
    for (auto& x : inp) x += 3;
    auto out = poisoned<float>(rows * C), mean = poisoned<float>(rows), rstd = poisoned<float>(rows);
    forward(backend,
            {view(out.data(), {rows, C}), view(mean.data(), {rows}), view(rstd.data(), {rows}),
             view(inp.data(), {rows, C})},
            1e-12);
    for (int64_t n = 0; n < rows; ++n) {
      double sum = 0, square = 0;
      for (int64_t c = 0; c < C; ++c) {
        const double y = out[static_cast<size_t>(n * C + c)];
        sum += y, square += y * y;
      }
      CHECK(std::abs(sum / C) < 2e-6);  // the rounding of a mean of 3, in units of a standard deviation of 0.58
      CHECK(std::abs(square / C - 1) < 2e-6);
    }
  }
}

TEST_CASE("layernorm: NaN stays in its row, aliases are allowed, and the threads do not matter") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    const int64_t rows = backend == Backend::cpu ? 300 : 50, C = 133;
    auto inp = random_vector<float>(rows * C, 1);
    const auto dout = random_vector<float>(rows * C, 2);
    auto run = [&](bool alias) {
      auto out = alias ? inp : poisoned<float>(rows * C), dinp = alias ? dout : poisoned<float>(rows * C);
      auto mean = poisoned<float>(rows), rstd = poisoned<float>(rows);
      const Tensor y = view(out.data(), {rows, C}), m = view(mean.data(), {rows}), r = view(rstd.data(), {rows});
      const Tensor x = view(inp.data(), {rows, C}), dx = view(dinp.data(), {rows, C});
      forward(backend, {y, m, r, alias ? y : x});
      backward(backend, {dx, alias ? dx : view(dout.data(), {rows, C}), x, m, r}, false);
      out.insert(out.end(), dinp.begin(), dinp.end());
      return out;
    };
    CHECK(run(false) == run(true));
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>([&] { return run(false); });
    inp[static_cast<size_t>(7 * C + 5)] = std::numeric_limits<float>::quiet_NaN();
    const auto spoilt = run(false);
    for (int64_t i = 0; i < 2 * rows * C; ++i)
      CHECK_MESSAGE(std::isnan(spoilt[static_cast<size_t>(i)]) == (i / C % rows == 7), "element " << i);
  }
}

TEST_CASE("layernorm: the fast backends equal the reference, set and added, with and without an offset") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    for (const Size& size : sizes_for(backend)) {
      for (float offset : {0.f, 100.f}) {
        const int64_t rows = size.rows, C = size.C;
        CAPTURE(rows);
        CAPTURE(C);
        CAPTURE(offset);
        auto inp = random_vector<float>(rows * C, 1);
        for (auto& x : inp) x += offset;
        const auto dout = random_vector<float>(rows * C, 2), before = random_vector<float>(rows * C, 3);
        const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
        // A few ulps (6e-8) of the result; an offset of 100 standard deviations makes a rounding of the mean that much
        // larger, and sums of C terms of that size add some.
        const double tolerance = offset == 0.f ? 1e-6 : 1e-4;
        for (bool acc : {false, true}) {
          auto out = poisoned<float>(rows * C), mean = poisoned<float>(rows), rstd = poisoned<float>(rows);
          auto dinp = acc ? before : poisoned<float>(rows * C);
          auto out64 = poisoned<double>(rows * C), mean64 = poisoned<double>(rows), rstd64 = poisoned<double>(rows);
          auto dinp64 = convert<double>(dinp);
          const Tensor m = view(mean.data(), {rows}), r = view(rstd.data(), {rows}), x = view(inp.data(), {rows, C});
          forward(backend, {view(out.data(), {rows, C}), m, r, x});
          layernorm_forward_ref(out64.data(), mean64.data(), rstd64.data(), inp64.data(), rows, C, 1e-5);
          check_close("out", out, out64, tolerance);
          // Not relative to the mean, which is small by cancellation, but to what is averaged.
          for (size_t n = 0; n < mean.size(); ++n) CHECK(std::abs(mean[n] - mean64[n]) <= 1e-6 * (1 + offset));
          check_close("rstd", rstd, rstd64, 1e-6);
          const Tensor dx = view(dinp.data(), {rows, C}), dy = view(dout.data(), {rows, C});
          backward(backend, {dx, dy, x, m, r}, acc);
          layernorm_backward_ref(dinp64.data(), dout64.data(), inp64.data(), mean64.data(), rstd64.data(), rows, C,
                                 acc);
          check_close("dinp", dinp, dinp64, 10 * tolerance);
        }
      }
    }
  }
}

// bf16 keeps 8 bits, so an offset of 100 deviations would leave inp nothing to normalise: 3 is large enough.
TEST_CASE("layernorm: in bf16 the fast backends equal the reference, rounded once") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    for (const Size& size : sizes_for(backend)) {
      for (double offset : {0.0, 3.0}) {
        const int64_t rows = size.rows, C = size.C;
        CAPTURE(rows);
        CAPTURE(C);
        CAPTURE(offset);
        auto inp = random_vector<bf16>(rows * C, 1);
        for (auto& x : inp) x += static_cast<float>(offset);
        const auto dout = random_vector<bf16>(rows * C, 2);
        const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
        for (bool acc : {false, true}) {
          auto out = poisoned<bf16>(rows * C), dinp = acc ? random_vector<bf16>(rows * C, 3) : poisoned<bf16>(rows * C);
          auto mean = poisoned<float>(rows), rstd = poisoned<float>(rows);
          auto out64 = poisoned<double>(rows * C), mean64 = poisoned<double>(rows), rstd64 = poisoned<double>(rows);
          auto dinp64 = convert<double>(dinp);
          const Tensor m = view(mean.data(), {rows}), r = view(rstd.data(), {rows}), x = view(inp.data(), {rows, C});
          forward(backend, {view(out.data(), {rows, C}), m, r, x});
          const Tensor dx = view(dinp.data(), {rows, C}), dy = view(dout.data(), {rows, C});
          backward(backend, {dx, dy, x, m, r}, acc);
          layernorm_forward_ref(out64.data(), mean64.data(), rstd64.data(), inp64.data(), rows, C, 1e-5);
          layernorm_backward_ref(dinp64.data(), dout64.data(), inp64.data(), mean64.data(), rstd64.data(), rows, C,
                                 acc);
          check_close("out", out, out64, 0x1p-8);
          for (size_t n = 0; n < mean.size(); ++n) CHECK(std::abs(mean[n] - mean64[n]) <= 1e-6 * (1 + offset));
          check_close("rstd", rstd, rstd64, 1e-6);
          check_close("dinp", dinp, dinp64, 0x1p-8);
        }
      }
    }
  }
}
