#include "kernels/block/rmsnorm.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
};

Op rmsnorm(const Size& s, bool gain, double scale = 1, Kernels kernels = Kernels::fast) {
  const Shape shape{1, s.rows, s.C};
  Op op{{input("inp", shape, scale), output("out", shape), saved("rstd", {s.rows})},
        [=](auto& t, Stream stream) {
          const Tensor out = t["out"], rstd = t["rstd"], inp = t["inp"], weight = t["weight"];
          if (is_plain(kernels, stream)) rmsnorm_forward_plain(out, rstd, inp, weight, s.C, 1e-6);
          else rmsnorm_forward(out, rstd, inp, weight, 1e-6, stream);
        },
        [=](auto& t, Stream stream) {
          const Tensor dweight = t["dweight"], dout = t["dout"], inp = t["inp"], weight = t["weight"], rstd = t["rstd"];
          if (is_plain(kernels, stream)) rmsnorm_backward_plain(t.grad("inp"), dweight, dout, inp, weight, rstd, s.C);
          else rmsnorm_backward(t.grad("inp"), dweight, dout, inp, weight, rstd, stream);
        },
        [=](auto& z) { rmsnorm_forward_ref(z["out"], z["rstd"], z["inp"], z["weight"], s.rows, s.C, 1e-6); }};
  if (gain) op.values.push_back(parameter("weight", {s.C}));
  return op;
}

}  // namespace

TEST_CASE("rmsnorm: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 3}, {3, 7}, {2, 31}})
      for (const bool gain : {true, false}) check_derivative(rmsnorm(size, gain, scale), 1e-10);
}

TEST_CASE_TEMPLATE("rmsnorm: NaN stays in its row, dinp may alias dout, and the threads do not matter", T, float,
                   bf16) {
  constexpr Dtype dtype = DtypeOf<T>::value;
  for (const bool gain : {true, false}) {
    const Op op = rmsnorm({700, 203}, gain);  // enough for both directions to go parallel
    check_in_place(op, dtype, Backend::cpu, {}, {{"dinp", "dout"}});
    check_threads(op, dtype);
    check_nans(op, dtype, Backend::cpu, {{"inp", {7 * 203 + 202}}},
               {{"out", in_row(7, 203)}, {"dinp", in_row(7, 203)}, {"rstd", at({7})}, {"dweight", everywhere}});
  }
}

TEST_CASE_TEMPLATE("rmsnorm: on a GPU, too, dinp may alias dout", T, float, bf16) {
  if (!available(Backend::cuda)) return;
  for (const Kernels kernels : kernels_of(Backend::cuda))
    check_in_place(rmsnorm({9, 40}, true, 1, kernels), DtypeOf<T>::value, Backend::cuda, {}, {{"dinp", "dout"}});
}

// f32 sums of up to 1028 terms in vector order: some ulps (6e-8) of the result; the backward sums rows too. What is
// stored as f32 is as close in bf16.
TEST_CASE_TEMPLATE("rmsnorm: the fast backends equal the reference, set and added, with a gain and without", T, float,
                   bf16) {
  // A GPU has a kernel for each number of 16-byte vectors a lane: one, up to 4, up to 8, and more.
  const int64_t wide = std::is_same_v<T, bf16> ? 2 : 1;
  const std::vector<Size> sizes{{1, 3},           {5, 31},          {301, 32},
                                {7, 8},           {3, 1027},        {2000 / wide, 96},
                                {70, 420 * wide}, {7, 1012 * wide}, {5, 1028 * wide}};
  for_sizes(sizes, sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (const bool gain : {true, false}) {
        CAPTURE(static_cast<int>(kernels));
        check_backend(rmsnorm(size, gain, 1, kernels), DtypeOf<T>::value, backend,
                      {{"out", 1e-6}, {"rstd", 1e-6}, {"dinp", 1e-5}, {"dweight", 1e-5}});
      }
  });
}

TEST_CASE("rmsnorm: without a gain it is the norm with a gain of ones") {
  for (Backend backend : {Backend::cpu, Backend::reference})
    for (const Size& size : std::vector<Size>{{1, 3}, {5, 31}, {300, 32}, {2000, 96}})
      for (const unsigned accumulate : {0u, 1u}) {
        CAPTURES(backend, size.C, accumulate);
        const Op with = rmsnorm(size, true), without = rmsnorm(size, false);
        Trial want(with, Dtype::f32, accumulate), got(without, Dtype::f32, accumulate);
        want.x["weight"].assign(static_cast<size_t>(size.C), 1.0);
        want.run(backend), got.run(backend);
        // The same sums, but a compiler may fuse and order them differently: some ulps (6e-8).
        check_close("out", got["out"], want["out"], 1e-6);
        check_close("dinp", got["dinp"], want["dinp"], 1e-6);
      }
  const auto row = random_vector<float>(4, 1);
  const Tensor x = view(row, {1, 4}), r = view(row, {1});
  CHECK_THROWS_AS(rmsnorm_backward({x, false}, x, x, x, Tensor{}, r, Stream{}), Error);
}
