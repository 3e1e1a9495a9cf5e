#include "kernels/block/layernorm.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
  int64_t numel() const { return rows * C; }
};

// Ends within a vector and beside one, several blocks; fewer rows for the emulator, which takes microseconds for each.
std::vector<Size> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {2000, 96}};
  return {{1, 1}, {1, 3}, {7, 8}, {5, 31}, {43, 32}, {3, 1027}, {3, 9000}, {30, 96}};
}

template <class T>
struct Result {
  std::vector<T> out, dinp;
  std::vector<Wide<T>> mean, rstd;
};

// Of dinp, to which is added, or NaN.
template <class T>
Result<T> run(const std::vector<T>& dinp, const std::vector<T>& dout, const std::vector<T>& inp, const Size& size,
              bool add, Backend backend, double eps = 1e-5) {
  Result<T> r{poisoned<T>(size.numel()), dinp, poisoned<Wide<T>>(size.rows), poisoned<Wide<T>>(size.rows)};
  const Shape shape{size.rows, size.C};
  run_on(backend,
         {view(r.out, shape), view(r.mean), view(r.rstd), view(inp, shape), view(r.dinp, shape), view(dout, shape)},
         [=](auto& t, Stream stream) {
           layernorm_forward(t[0], t[1], t[2], t[3], eps, stream);
           layernorm_backward({t[4], add}, t[5], t[3], t[1], t[2], stream);
         });
  return r;
}

}  // namespace

TEST_CASE("layernorm: reference backward is the derivative of the reference forward") {
  const double eps = 1e-5;
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 1}, {1, 3}, {3, 7}, {2, 31}}) {
      CAPTURES(scale, size.rows, size.C);
      const auto inp = random_vector<double>(size.numel(), 1, scale), dout = random_vector<double>(size.numel(), 2);
      const auto want = complex_step(inp, [&](const std::vector<Complex>& x) {
        std::vector<Complex> out(x.size()), mean(x.size()), rstd(x.size());
        layernorm_forward_ref(out.data(), mean.data(), rstd.data(), x.data(), size.rows, size.C, eps);
        return dot(dout, out);
      });
      const auto dinp = poisoned<double>(size.numel());
      check_close("dinp", run(dinp, dout, inp, size, false, Backend::reference, eps).dinp, want, 1e-10);
    }
  }
}

TEST_CASE("layernorm: every row of the output has mean 0 and variance 1") {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Size size{5, 700};
    auto inp = random_vector<float>(size.numel(), 1);
    for (auto& x : inp) x += 3;
    const auto out = run(inp, inp, inp, size, false, backend, 1e-12).out;
    for (int64_t n = 0; n < size.rows; ++n) {
      double sum = 0, square = 0;
      for (int64_t c = 0; c < size.C; ++c) {
        const double y = out[static_cast<size_t>(n * size.C + c)];
        sum += y, square += y * y;
      }
      CHECK(std::abs(sum / 700) < 2e-6);  // the rounding of a mean of 3, in units of a standard deviation of 0.58
      CHECK(std::abs(square / 700 - 1) < 2e-6);
    }
  }
}

TEST_CASE("layernorm: NaN stays in its row, aliases are allowed, and the threads do not matter") {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Size size{backend == Backend::cpu ? 300 : 50, 133};
    const Shape shape{size.rows, size.C};
    auto inp = random_vector<float>(size.numel(), 1);
    const auto dout = random_vector<float>(size.numel(), 2);
    auto both = [&] {
      const auto r = run(poisoned<float>(size.numel()), dout, inp, size, false, backend);
      return joined(r.out, r.dinp);
    };
    auto out = inp, dinp = dout, mean = poisoned<float>(size.rows), rstd = mean;
    run_on(backend, {view(out, shape), view(mean), view(rstd), view(inp, shape), view(dinp, shape)},
           [](auto& t, Stream stream) {
             layernorm_forward(t[0], t[1], t[2], t[0], 1e-5, stream);
             layernorm_backward({t[4], false}, t[4], t[3], t[1], t[2], stream);
           });
    CHECK(both() == joined(out, dinp));
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(both);
    inp[7 * 133 + 5] = NAN;
    const auto spoilt = both();
    for (int64_t i = 0; i < 2 * size.numel(); ++i)
      CHECK_MESSAGE(std::isnan(spoilt[static_cast<size_t>(i)]) == (i / size.C % size.rows == 7), "element " << i);
  }
}

// In bf16 results are rounded once. It keeps 8 bits, so an offset of 100 deviations would leave inp nothing to
// normalise: 3 is large enough.
TEST_CASE_TEMPLATE("layernorm: the fast backends equal the reference, set and added, with and without an offset", T,
                   float, bf16) {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    for (const Size& size : sizes_for(backend)) {
      for (double offset : {0.0, std::is_same_v<T, bf16> ? 3.0 : 100.0}) {
        CAPTURES(size.rows, size.C, offset);
        auto inp = random_vector<T>(size.numel(), 1);
        for (auto& x : inp) x += static_cast<float>(offset);
        const auto dout = random_vector<T>(size.numel(), 2);
        // A few ulps (6e-8) of the result; an offset of 100 standard deviations makes a rounding of the mean that much
        // larger, and sums of C terms of that size add some.
        const double tolerance = offset == 0 ? 1e-6 : 1e-4;
        for (bool add : {false, true}) {
          const auto dinp = add ? random_vector<T>(size.numel(), 3) : poisoned<T>(size.numel());
          const auto got = run(dinp, dout, inp, size, add, backend);
          const auto want =
              run(convert<double>(dinp), convert<double>(dout), convert<double>(inp), size, add, Backend::reference);
          check_close("out", got.out, want.out, tolerance_or_rounding<T>(tolerance));
          // Not relative to the mean, which is small by cancellation, but to what is averaged.
          for (size_t n = 0; n < got.mean.size(); ++n)
            CHECK(std::abs(got.mean[n] - want.mean[n]) <= 1e-6 * (1 + offset));
          check_close("rstd", got.rstd, want.rstd, 1e-6);
          check_close("dinp", got.dinp, want.dinp, tolerance_or_rounding<T>(10 * tolerance));
        }
      }
    }
  }
}
