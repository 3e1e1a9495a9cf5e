#include "kernels/depth/head_scale.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t tokens, K, D;
};
// A lane or several for each row, both widths of access; one block of partial sums or many.
const std::vector<Size> sizes{{1, 1, 1}, {3, 2, 5}, {70, 3, 16}, {900, 4, 24}, {5000, 1, 7}};
const std::vector<Size> gpu_sizes{{1, 1, 1}, {3, 2, 5}, {70, 3, 16}, {40, 4, 24}, {5, 2, 300}};

// The backward of a factor that is not trained gets no inp either.
Op head_scale(const Size& s, double scale, bool trained = true) {
  const Shape shape{s.tokens, s.K, s.D};
  Operand factor = parameter("factor", {s.K}, scale);
  if (!trained) factor.role = OperandRole::constant;
  return {{input("inp", shape, scale), output("out", shape), factor},
          [](auto& t, Stream stream) { head_scale_forward(t["out"], t["inp"], t["factor"], stream); },
          [=](auto& t, Stream stream) {
            const Tensor inp = trained ? t["inp"] : Tensor{};
            head_scale_backward(t.grad("inp"), t["dfactor"], t["dout"], inp, t["factor"], stream);
          },
          [=](auto& z) { head_scale_forward_ref(z["out"], z["inp"], z["factor"], s.tokens * s.K, s.K, s.D); }};
}

}  // namespace

TEST_CASE("head_scale: reference backward is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 1, 1}, {3, 4, 2}, {2, 3, 5}})
    for (const double scale : {1e-3, 1.0, 50.0}) {
      check_derivative(head_scale(size, scale), 1e-13, {{"dfactor", 1e-12}});
      check_derivative(head_scale(size, scale, false), 1e-13);
    }
}

TEST_CASE("head_scale: the fast backends equal the reference, set and added, with and without a trained factor") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const double scale : {1e-3, 1.0, 50.0})
      for (const bool trained : {false, true})
        for (const Dtype dtype : {Dtype::f32, Dtype::bf16})  // dfactor: sums of up to 35,000 terms
          check_backend(head_scale(size, scale, trained), dtype, backend,
                        {{"out", 4e-7}, {"dinp", 4e-7}, {"dfactor", 8e-6}});
  });
}

TEST_CASE("head_scale: the threads do not matter") {
  for (const Size& size : std::vector<Size>{{5000, 3, 8}, {70, 2, 600}}) check_threads(head_scale(size, 1));
}

TEST_CASE("head_scale: NaN stays, and wrong shapes are errors") {
  const Where head = [](size_t i) { return i / 5 % 3 == 1; };
  for (const Backend backend : all_backends())
    check_nans(head_scale({4, 3, 5}, 1), Dtype::f32, backend, {{"factor", {1}}}, {{"out", head}, {"dinp", head}});
  const std::vector<float> x(12);
  const Tensor heads = view(x.data(), {2, 3, 2}), two = view(x.data(), {2}), three = view(x.data(), {3});
  CHECK_THROWS_AS(head_scale_forward(heads, heads, view(x.data(), {4}), Stream{}), Error);
  CHECK_THROWS_AS(head_scale_forward(three, heads, three, Stream{}), Error);
  CHECK_THROWS_AS(head_scale_backward({heads, false}, two, heads, heads, three, Stream{}), Error);
  CHECK_THROWS_AS(head_scale_backward({heads, false}, three, heads, Tensor{}, three, Stream{}), Error);
}
