#include "kernels/block/layernorm.h"

#include "tests/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
};
// Ends within a vector and beside one, several blocks; fewer rows for the emulator, which takes microseconds for each.
const std::vector<Size> sizes{{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {2000, 96}};
const std::vector<Size> gpu_sizes{{1, 1}, {1, 3}, {7, 8}, {5, 31}, {43, 32}, {3, 1027}, {3, 9000}, {30, 96}};

Op layernorm(const Size& s, double scale = 1, double eps = 1e-5) {
  const Shape shape{s.rows, s.C}, rows{s.rows};
  return {
      {input("inp", shape, scale), output("out", shape), saved("mean", rows), saved("rstd", rows)},
      [=](auto& t, Stream stream) { layernorm_forward(t["out"], t["mean"], t["rstd"], t["inp"], {}, {}, eps, stream); },
      [](auto& t, Stream stream) {
        layernorm_backward(t.grad("inp"), {}, {}, t["dout"], t["inp"], {}, t["mean"], t["rstd"], stream);
      },
      [=](auto& z) {
        decltype(&z["out"][0]) none = nullptr;
        layernorm_forward_ref(&z["out"][0], z["mean"], z["rstd"], z["inp"], none, none, s.rows, s.C, eps);
      }};
}

// For a Trial: moves the input away from 0.
std::function<void(Trial&)> with_offset(double offset) {
  return [=](Trial& trial) {
    for (double& x : trial.x["inp"]) x += offset;
    trial.x["inp"] = trial.rounded(trial.op->values[0], trial["inp"]);
  };
}

}  // namespace

TEST_CASE("layernorm: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 1}, {1, 3}, {3, 7}, {2, 31}})
      check_derivative(layernorm(size, scale), 1e-10);
}

TEST_CASE("layernorm: every row of the output has mean 0 and variance 1") {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Op op = layernorm({5, 700}, 1, 1e-12);
    Trial trial(op, Dtype::f32);
    with_offset(3)(trial);
    const auto& out = trial.forward(backend)["out"];
    for (size_t n = 0; n < 5; ++n) {
      double sum = 0, square = 0;
      for (size_t c = 0; c < 700; ++c) sum += out[n * 700 + c], square += out[n * 700 + c] * out[n * 700 + c];
      CHECK(std::abs(sum / 700) < 2e-6);  // the rounding of a mean of 3, in units of a standard deviation of 0.58
      CHECK(std::abs(square / 700 - 1) < 2e-6);
    }
  }
}

TEST_CASE("layernorm: NaN stays in its row, aliases are allowed, and the threads do not matter") {
  for (const Backend backend : fast_backends()) {
    const Op op = layernorm({backend == Backend::cpu ? 300 : 50, 133});
    check_in_place(op, Dtype::f32, backend, {{"out", "inp"}}, {{"dinp", "dout"}});
    check_nans(op, Dtype::f32, backend, {{"inp", {7 * 133 + 5}}},
               {{"out", in_row(7, 133)}, {"dinp", in_row(7, 133)}, {"mean", at({7})}, {"rstd", at({7})}});
  }
  check_threads(layernorm({300, 133}));
}

// It keeps 8 bits in bf16, so an offset of 100 deviations would leave inp nothing to normalise: 3 is large enough.
TEST_CASE_TEMPLATE("layernorm: the fast backends equal the reference, set and added, with and without an offset", T,
                   float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (double offset : {0.0, std::is_same_v<T, bf16> ? 3.0 : 100.0}) {
      CAPTURES(offset);
      // A few ulps (6e-8) of the result; an offset of 100 standard deviations makes a rounding of the mean that much
      // larger, and sums of C terms of that size add some. The mean, which is small by cancellation, is judged by what
      // is averaged.
      const double tolerance = offset == 0 ? 1e-6 : 1e-4;
      check_backend(layernorm(size), DtypeOf<T>::value, backend,
                    {{"out", tolerance}, {"mean", {0, 1e-6 * (1 + offset)}}, {"rstd", 1e-6}, {"dinp", 10 * tolerance}},
                    with_offset(offset));
    }
  });
}
