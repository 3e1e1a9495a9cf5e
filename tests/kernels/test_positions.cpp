#include "kernels/block/positions.h"

#include "kernels/block/ops.h"
#include "kernels/devices.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, C, pos = 0;
};
// Ends within a vector and beside one; work for several threads or blocks.
const std::vector<Size> sizes{{1, 1, 1},   {2, 3, 5},     {3, 7, 8},      {1, 33, 31},    {5, 2, 1027},
                              {9, 65, 96}, {1, 1, 32, 7}, {2, 3, 31, 40}, {70, 16, 33, 1}};
const std::vector<Size> gpu_sizes{{1, 1, 1},    {2, 3, 5},  {3, 7, 8},     {1, 33, 31},
                                  {5, 2, 1027}, {6, 9, 96}, {1, 1, 32, 7}, {2, 3, 31, 40}};

// The table has `more` rows behind the last position. The backward is training's, at position 0.
Op positions(const Size& s, double scale = 1, int64_t more = 2) {
  const Shape shape{s.B, s.T, s.C};
  return {{unchanged("inp", shape, scale), output("out", shape), parameter("weight", {s.pos + s.T + more, s.C}, scale)},
          [=](auto& t, Stream stream) { positions_forward(t["out"], t["inp"], t["weight"], s.pos, stream); },
          [](auto& t, Stream stream) { positions_backward(t["dweight"], t["dout"], stream); },
          [=](auto& z) { positions_forward_ref(z["out"], z["inp"], z["weight"], s.B, s.T, s.C, s.pos); }};
}

}  // namespace

TEST_CASE("positions: each token gets the row of its position") {
  const Op op = positions({2, 3, 2, 4});
  Trial trial(op, Dtype::f64);
  trial.x["inp"] = {1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60};
  for (size_t i = 0; i < trial["weight"].size(); ++i) trial.x["weight"][i] = 100 * static_cast<double>(i / 2);
  const std::vector<double> want{401, 402, 503, 504, 605, 606, 410, 420, 530, 540, 650, 660};
  CHECK(trial.forward(Backend::reference)["out"] == want);
}

TEST_CASE("positions: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 1, 1}, {1, 3, 7}, {4, 2, 5}})
      check_derivative(positions(size, scale), 1e-13);
}

// One rounding forward; a sum of up to 70 numbers.
TEST_CASE_TEMPLATE("positions: the fast backends equal the reference, from any position, at any address, in place", T,
                   float, bf16) {
  constexpr Dtype dtype = DtypeOf<T>::value;
  const Tolerances tolerances{{"out", 1e-7}, {"dweight", 1e-6}};
  for_sizes(sizes, gpu_sizes, [&](Backend backend, const Size& size) {
    check_backend(positions(size), dtype, backend, tolerances);
    check_in_place(positions(size), dtype, backend, {{"out", "inp"}}, {});
  });
  check_any_address(positions({3, 4, 16, 5}), dtype);
}

TEST_CASE_TEMPLATE("positions: what is beyond the last position keeps its gradient", T, float, bf16) {
  for (const Backend backend : all_backends()) {
    const Op op = positions({3, 5, 24}, 1, 9);
    const Dtype dtype = backend == Backend::reference ? Dtype::f32 : DtypeOf<T>::value;
    const Trial before(op, dtype);
    const Trial after = Trial(before).backward(backend);
    for (size_t i = 0; i < after["dweight"].size(); ++i)
      CHECK((after["dweight"][i] == before["dweight"][i]) == (i >= 5 * 24));
  }
}

TEST_CASE_TEMPLATE("positions: a token after the other sees what the whole sequence sees", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    const Op whole = positions({1, 6, 24});
    const auto all = Trial(whole, DtypeOf<T>::value).forward(backend);
    for (int64_t pos = 0; pos < 6; ++pos) {
      const Op op = positions({1, 1, 24, pos}, 1, 7 - pos);
      Trial one(op, DtypeOf<T>::value);
      const auto row = [&](const std::vector<double>& x) {
        return std::vector<double>(x.begin() + pos * 24, x.begin() + (pos + 1) * 24);
      };
      one.x["inp"] = row(all["inp"]), one.x["weight"] = all["weight"];
      CHECK(one.forward(backend)["out"] == row(all["out"]));
    }
  }
}

TEST_CASE("positions: recorded for generation, they are those behind the cache") {
  const auto inp = random_vector<float>(2 * 3, 1), table = random_vector<float>(7 * 3, 2);
  for (const std::string& name : fast_devices())
    for (const int64_t position : {0, 4, 5}) {
      CAPTURES(name, position);
      const auto device = make_device(name);
      Tape tape(Dtype::f32, 7);
      Value *x = tape.input("x", {1, 2, 3}, Dtype::f32), *weight = tape.input("weight", {7, 3}, Dtype::f32);
      const Value* out = ops::positions(tape, "placed", ops::copy(tape, "copy", x), weight);
      tape.plan(PlanMode::reuse);
      tape.allocate(*device);
      device->copy_in(x->tensor.data, inp.data(), x->bytes());
      device->copy_in(weight->tensor.data, table.data(), weight->bytes());
      tape.forward(Step{false, 1, position});
      std::vector<float> got(6);
      device->copy_out(got.data(), out->tensor.data, out->bytes());
      for (size_t i = 0; i < 6; ++i) CHECK(got[i] == inp[i] + table[static_cast<size_t>(position) * 3 + i]);
    }
}

TEST_CASE_TEMPLATE("positions: NaN stays at its place, and the threads do not matter", T, float, bf16) {
  constexpr Dtype dtype = DtypeOf<T>::value;
  for (const Backend backend : fast_backends()) {
    const Op op = positions({3, 4, 33});
    check_nans(op, dtype, backend, {{"inp", {5}}, {"weight", {34}}, {"dout", {2 * 4 * 33 + 7}}},
               {{"out", at({5, 34, 34 + 4 * 33, 34 + 8 * 33})}, {"dweight", at({7})}});
  }
  check_threads(positions({9, 65, 203}), dtype);  // enough for both directions to go parallel
}

TEST_CASE("positions: tables that are too short or too narrow are refused") {
  const auto numbers = random_vector<float>(24, 1);
  const Tensor x = view(numbers, {2, 3, 4}), table = view(numbers, {5, 4}), narrow = view(numbers, {5, 3}),
               small = view(numbers, {2, 4});
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    const Stream stream{backend};
    positions_forward(x, x, table, 2, stream);
    for (const int64_t pos : {-1, 3, 5}) CHECK_THROWS_AS(positions_forward(x, x, table, pos, stream), Error);
    for (const Tensor& wrong : {narrow, small}) {
      CHECK_THROWS_AS(positions_forward(x, x, wrong, 0, stream), Error);
      CHECK_THROWS_AS(positions_backward(wrong, x, stream), Error);
    }
  }
}
