#include "kernels/block/bias.h"

#include "kernels/block/add.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, O;
};
// Ends within a vector and beside one; blocks of rows, whole and ragged, and several columns of blocks.
const std::vector<Size> sizes{{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {2000, 96}, {9000, 7}};
const std::vector<Size> gpu_sizes{{1, 1}, {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {33, 520}, {200, 96}};

// The op changes what is there: here a copy of inp. On a GPU, where products add their biases, the copy alone.
Op bias(const Size& s, double scale = 1) {
  const Shape shape{s.rows, s.O};
  return {{input("inp", shape, scale), output("out", shape), parameter("bias", {s.O}, scale)},
          [](auto& t, Stream stream) {
            accumulate({t["out"], false}, t["inp"], stream);
            if (stream.backend != Backend::cuda) bias_forward(t["out"], t["bias"], stream);
          },
          [](auto& t, Stream stream) {
            accumulate(t.grad("inp"), t["dout"], stream);
            bias_backward(t["dbias"], t["dout"], stream);
          },
          [=](auto& z) {
            std::copy_n(&z["inp"][0], s.rows * s.O, &z["out"][0]);
            bias_forward_ref(z["out"], z["bias"], s.rows, s.O);
          }};
}

// The same with nothing added anywhere.
Op gradient_of_bias(const Size& s) {
  Op op = bias(s);
  op.forward = [](auto& t, Stream stream) { accumulate({t["out"], false}, t["inp"], stream); };
  return op;
}

}  // namespace

TEST_CASE("bias: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 1}, {1, 3}, {3, 7}, {6, 31}})
      check_derivative(bias(size, scale), 1e-13);
}

// One rounding forward; sums of up to 9000 numbers, which in f32 are some ulps (6e-8) off.
TEST_CASE_TEMPLATE("bias: the fast backends equal the reference, at any address", T, float, bf16) {
  const Tolerances tolerances{{"out", 1e-7}, {"dinp", 1e-7}, {"dbias", 1e-5}};
  for_sizes(sizes, gpu_sizes, [&](Backend backend, const Size& size) {
    const bool on_gpu = backend == Backend::cuda;
    check_backend(on_gpu ? gradient_of_bias(size) : bias(size), DtypeOf<T>::value, backend, tolerances);
  });
  for (const Size& size : std::vector<Size>{{9, 96}, {70, 64}})
    check_any_address(bias(size), DtypeOf<T>::value, tolerances);
}

TEST_CASE_TEMPLATE("bias: NaN stays in its column, and the threads do not matter", T, float, bf16) {
  constexpr Dtype dtype = DtypeOf<T>::value;
  const auto column = [](size_t i) { return i % 133 == 5; };
  for (const Backend backend : fast_backends()) {
    const Op op = bias({backend == Backend::cpu ? 700 : 100, 133});
    if (backend == Backend::cpu) check_nans(op, dtype, backend, {{"bias", {5}}}, {{"out", column}});
    check_nans(op, dtype, backend, {{"dout", {7 * 133 + 5}}}, {{"dinp", at({7 * 133 + 5})}, {"dbias", at({5})}});
  }
  check_threads(bias({700, 203}), dtype);  // enough for both directions to go parallel
}

TEST_CASE("bias: any rank flattens, and wrong shapes are refused") {
  const auto numbers = random_vector<float>(24, 1);
  const Tensor out = view(numbers, {2, 3, 4}), row = view(numbers, {4}), wrong = view(numbers, {5}),
               flat = view(numbers, {1, 4});
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    bias_forward(out, row, Stream{backend});
    for (const Tensor& other : {wrong, flat}) {
      CHECK_THROWS_AS(bias_forward(out, other, Stream{backend}), Error);
      CHECK_THROWS_AS(bias_backward(other, out, Stream{backend}), Error);
    }
  }
}
