#include "kernels/block/top_k.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, width, k;
};

// k = 1, all of a row, more than are positive; rows shorter and longer than a block of the GPU.
const std::vector<Size> sizes{{1, 1, 1},     {3, 2, 1},      {5, 7, 7},   {600, 33, 5},
                              {40, 300, 32}, {17, 2048, 32}, {3, 4099, 1}};
const std::vector<Size> gpu_sizes{{1, 1, 1}, {3, 2, 1}, {5, 7, 7}, {9, 33, 5}, {3, 300, 32}, {2, 515, 8}};

Op top_k(const Size& s, double scale = 1) {
  const Shape shape{1, s.rows, s.width};
  return {{input("inp", shape, scale), output("out", shape)},
          [=](auto& t, Stream stream) { top_k_forward(t["out"], t["inp"], s.k, stream); },
          [=](auto& t, Stream stream) { top_k_backward(t.grad("inp"), t["dout"], t["out"], stream); },
          [=](auto& z) { top_k_forward_ref(z["out"], z["inp"], s.rows, s.width, s.k); }};
}

std::vector<double> forward(const std::vector<double>& inp, int64_t k, Backend backend) {
  const Op op = top_k({1, std::ssize(inp), k});
  Trial trial(op, Dtype::f32);
  trial.x["inp"] = inp;
  return trial.forward(backend)["out"];
}

}  // namespace

TEST_CASE("top_k: reference backward is the derivative of the reference forward") {
  for (const double scale : {1e-3, 1.0, 30.0})
    for (const Size& size : std::vector<Size>{{1, 1, 1}, {3, 2, 1}, {4, 7, 3}, {2, 31, 31}, {5, 40, 4}})
      check_derivative(top_k(size, scale), 1e-15);
}

// Nothing is computed: out is exact, and dinp but for a sum. In bf16 many entries are equal.
TEST_CASE_TEMPLATE("top_k: the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    const Op op = top_k(size);
    check_backend(op, DtypeOf<T>::value, backend, {{"out", 0x1p-60}, {"dinp", 1e-7}});
    Trial got(op, DtypeOf<T>::value), want = got.exact();
    CHECK(got.forward(backend)["out"] == want.forward(Backend::reference)["out"]);
  });
}

TEST_CASE("top_k: by hand; of equal entries the first ones stay; what is not positive is 0") {
  for (const Backend backend : all_backends()) {
    CAPTURE(static_cast<int>(backend));
    const std::vector<double> inp{2, -5, 3, 2, 0, 1, 2, -1};
    CHECK(forward(inp, 1, backend) == std::vector<double>{0, 0, 3, 0, 0, 0, 0, 0});
    CHECK(forward(inp, 2, backend) == std::vector<double>{2, 0, 3, 0, 0, 0, 0, 0});
    CHECK(forward(inp, 3, backend) == std::vector<double>{2, 0, 3, 2, 0, 0, 0, 0});
    CHECK(forward(inp, 7, backend) == std::vector<double>{2, 0, 3, 2, 0, 1, 2, 0});
    CHECK(forward(inp, 8, backend) == std::vector<double>{2, 0, 3, 2, 0, 1, 2, 0});
    CHECK(forward({-1, -2, -3}, 2, backend) == std::vector<double>{0, 0, 0});
    std::vector<double> equal(700, 0.25), first(700, 0.0), rising, last(700, 0.0);
    std::fill_n(first.begin(), 40, 0.25);
    CHECK(forward(equal, 40, backend) == first);
    for (int i = 0; i < 700; ++i) rising.push_back(1e-30 + i * 1e-3);
    for (const bool falling : {false, true}) {  // the largest come last, or first
      std::vector<double> x = rising;
      if (falling) std::reverse(x.begin(), x.end());
      const auto out = forward(x, 40, backend);
      for (size_t i = 0; i < 700; ++i) CHECK((out[i] != 0) == (falling ? i < 40 : i >= 660));
    }
  }
}

TEST_CASE("top_k: a NaN stays, infinity is a number, and threads do not matter") {
  for (const Backend backend : fast_backends())
    for (const int64_t k : {1, 3}) {
      const Op op = top_k({20, 50, k});
      const Trial all = check_nans(op, Dtype::f32, backend, {{"inp", {7 * 50 + 5}}},
                                   {{"out", at({7 * 50 + 5})}, {"dinp", at({7 * 50 + 5})}},
                                   [](Trial& trial) { trial.x["inp"][3] = INFINITY, trial.x["inp"][4] = -INFINITY; });
      CHECK(all["out"][3] == INFINITY);
      CHECK(all["out"][4] == 0);
    }
  check_threads(top_k({600, 133, 9}));
}

TEST_CASE("top_k: wrong shapes and numbers are errors") {
  const std::vector<float> x(6), five(5);
  CHECK_THROWS_AS(top_k_forward(view(x, {2, 3}), view(five), 1, Stream{}), Error);
  CHECK_THROWS_AS(top_k_forward(view(x, {2, 3}), view(x, {2, 3}), 4, Stream{}), Error);
  CHECK_THROWS_AS(top_k_forward(view(x, {2, 3}), view(x, {2, 3}), 0, Stream{}), Error);
  CHECK_THROWS_AS(top_k_backward({view(x), false}, view(five), view(x), Stream{}), Error);
}
