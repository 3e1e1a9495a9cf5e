#include "kernels/block/layernorm.h"

#include "tests/support/op.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
};
// Ends within a vector and beside one, several blocks.
const std::vector<Size> sizes{{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {2000, 96}};
// Fewer rows for the emulator, which takes microseconds for each; a kernel for each number of 16-byte vectors a lane:
// one, up to 4, up to 8, and more.
const std::vector<Size> gpu_sizes{{1, 1},    {1, 3},    {7, 8},   {5, 31},   {43, 32},  {100, 96}, {3, 1027},
                                  {40, 420}, {7, 1012}, {9, 840}, {5, 2024}, {3, 2056}, {2, 9000}};

enum Affine { none, gain, gain_and_bias };
constexpr Affine all_affine[] = {none, gain, gain_and_bias};

Op layernorm(const Size& s, Affine affine, double scale = 1, double eps = 1e-5) {
  const Shape shape{s.rows, s.C}, rows{s.rows};
  Op op{{input("inp", shape, scale), output("out", shape), saved("mean", rows), saved("rstd", rows)},
        [=](auto& t, Stream stream) {
          layernorm_forward(t["out"], t["mean"], t["rstd"], t["inp"], t["weight"], t["bias"], eps, stream);
        },
        [](auto& t, Stream stream) {
          layernorm_backward(t.grad("inp"), t["dweight"], t["dbias"], t["dout"], t["inp"], t["weight"], t["mean"],
                             t["rstd"], stream);
        },
        [=](auto& z) {
          layernorm_forward_ref(z["out"], z["mean"], z["rstd"], z["inp"], z["weight"], z["bias"], s.rows, s.C, eps);
        }};
  if (affine != none) op.values.push_back(parameter("weight", {s.C}));
  if (affine == gain_and_bias) op.values.push_back(parameter("bias", {s.C}));
  return op;
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
  for (const Affine affine : all_affine)
    for (double scale : {1e-3, 1.0, 1e3})
      for (const Size& size : std::vector<Size>{{1, 1}, {1, 3}, {3, 7}, {2, 31}})
        check_derivative(layernorm(size, affine, scale), {1e-10, size.C == 1 ? 1e-13 : 0});  // of one number: 0
}

TEST_CASE("layernorm: every row of the output has mean 0 and variance 1") {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Op op = layernorm({5, 700}, none, 1, 1e-12);
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

TEST_CASE("layernorm: a gain of ones and a bias of zeros are none, a bias moves columns") {
  for (const Backend backend : all_backends())
    for (const Size& size : std::vector<Size>{{1, 3}, {5, 31}, {40, 96}})
      for (const unsigned accumulate : {0u, 1u}) {
        CAPTURES(backend, size.C, accumulate);
        const Op with = layernorm(size, gain_and_bias), without = layernorm(size, none);
        Trial got(with, Dtype::f32, accumulate), want(without, Dtype::f32, accumulate);
        const size_t C = static_cast<size_t>(size.C);
        got.x["weight"].assign(C, 1.0), got.x["bias"].assign(C, 0.0);
        got.run(backend), want.run(backend);
        // The same sums, but a compiler may fuse and order them differently: some ulps (6e-8).
        check_close("out", got["out"], want["out"], 1e-6);
        check_close("dinp", got["dinp"], want["dinp"], 1e-6);
        const auto before = got["out"];
        got.x["bias"].assign(C, 2.0);
        got.forward(backend);
        for (size_t i = 0; i < before.size(); ++i) CHECK(got["out"][i] == doctest::Approx(before[i] + 2).epsilon(1e-6));
      }
}

TEST_CASE("layernorm: what has no gain has no bias, and what has data has a gradient") {
  const auto row = random_vector<float>(4, 1);
  const Tensor x = view(row, {1, 4}), w = view(row, {4}), r = view(row, {1});
  CHECK_THROWS_AS(layernorm_forward(x, r, r, x, {}, w, 1e-5, Stream{}), Error);
  CHECK_THROWS_AS(layernorm_backward({x, false}, w, {}, x, x, {}, r, r, Stream{}), Error);
  CHECK_THROWS_AS(layernorm_backward({x, false}, {}, w, x, x, {}, r, r, Stream{}), Error);
  CHECK_THROWS_AS(layernorm_backward({x, false}, {}, {}, x, x, w, r, r, Stream{}), Error);
}

TEST_CASE_TEMPLATE("layernorm: NaN stays in its row, aliases are allowed, and the threads do not matter", T, float,
                   bf16) {
  constexpr Dtype dtype = DtypeOf<T>::value;
  for (const Affine affine : all_affine) {
    for (const Backend backend : fast_backends())
      for (const int64_t C : {133, 96}) {
        const Op op = layernorm({backend == Backend::cpu ? 300 : 50, C}, affine);
        check_in_place(op, dtype, backend, {{"out", "inp"}}, {{"dinp", "dout"}});
        check_nans(op, dtype, backend, {{"inp", {static_cast<size_t>(7 * C + 5)}}},
                   {{"out", in_row(7, C)},
                    {"dinp", in_row(7, C)},
                    {"mean", at({7})},
                    {"rstd", at({7})},
                    {"dweight", everywhere}});
        check_nans(op, dtype, backend, {{"dout", {static_cast<size_t>(7 * C + 5)}}},
                   {{"dinp", in_row(7, C)}, {"dweight", at({5})}, {"dbias", at({5})}});
      }
    check_threads(layernorm({700, 203}, affine), dtype);  // enough for both directions to go parallel
    check_any_address(
        layernorm({9, 96}, affine), dtype,
        {{"out", 1e-6}, {"mean", 1e-6}, {"rstd", 1e-6}, {"dinp", 1e-5}, {"dweight", 1e-5}, {"dbias", 1e-5}});
  }
}

// It keeps 8 bits in bf16, so an offset of 100 deviations would leave inp nothing to normalise: 3 is large enough.
TEST_CASE_TEMPLATE("layernorm: the fast backends equal the reference, set and added, with and without an offset", T,
                   float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Affine affine : all_affine)
      for (double offset : {0.0, std::is_same_v<T, bf16> ? 3.0 : 100.0}) {
        CAPTURES(affine, offset);
        // A few ulps (6e-8) of the result; an offset of 100 standard deviations makes a rounding of the mean that much
        // larger, and sums of C terms of that size add some. The mean, which is small by cancellation, is judged by
        // what is averaged.
        const double tolerance = offset == 0 ? 1e-6 : 1e-4;
        // The gradient of a row of one number is 0: what is left is the rounding of one product, times rstd = 316.
        const double left = size.C == 1 ? 2e-5 : 0;
        check_backend(layernorm(size, affine), DtypeOf<T>::value, backend,
                      {{"out", tolerance},
                       {"mean", {0, 1e-6 * (1 + offset)}},
                       {"rstd", 1e-6},
                       {"dinp", {10 * tolerance, left}},
                       {"dweight", 10 * tolerance},
                       {"dbias", 1e-5}},
                      with_offset(offset));
      }
  });
}

TEST_CASE("layernorm: on a GPU, more columns than shared memory has sums for are refused with their number") {
  if (!available(Backend::cuda)) return;
  const Op wide = layernorm({1, 29060}, gain_and_bias);
  Trial trial(wide, Dtype::f32);
  check_fails(Exit::usage, {"C = 29060", "at most 29056"}, [&] { trial.run(Backend::cuda); });
}
