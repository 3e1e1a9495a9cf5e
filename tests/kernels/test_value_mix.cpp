#include "kernels/depth/value_mix.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, K, D;
  int64_t rows() const { return B * T * K; }
  Shape shape() const { return {B, T, K, D}; }
};
const std::vector<Size> sizes{{1, 1, 1, 1}, {1, 3, 2, 5}, {2, 31, 3, 33}, {1, 700, 4, 16}, {2, 1500, 2, 64}};
// Several blocks and several rounds, both widths, rows for one lane, for a few, and for more than a warp.
const std::vector<Size> gpu_sizes{{1, 1, 1, 1},   {1, 3, 2, 5},    {2, 31, 1, 33},
                                  {1, 70, 3, 16}, {2, 150, 1, 64}, {1, 3, 2, 520}};

// The trained numbers sit at elements 2 and 1 of vectors of three.
Op value_mix(const Size& s, double scale = 1) {
  return {{parameter("w", {3}), parameter("w1", {3}), input("v", s.shape(), scale), input("v1", s.shape(), scale),
           output("out", s.shape())},
          [](auto& t, Stream stream) {
            value_mix_forward(t["out"], t["v"], t["v1"], {t["w"], 2}, {t["w1"], 1}, stream);
          },
          [](auto& t, Stream stream) {
            value_mix_backward(t.grad("v"), t.grad("v1"), {t["dw"], 2}, {t["dw1"], 1}, t["dout"], t["v"], t["v1"],
                               {t["w"], 2}, {t["w1"], 1}, stream);
          },
          [=](auto& z) { value_mix_forward_ref(z["out"], z["v"], z["v1"], z["w"][2], z["w1"][1], s.shape().numel()); }};
}

// Both numbers are the same element of one vector.
Op tied_mix(const Size& s) {
  return {{input("v", s.shape()), input("v1", s.shape()), output("out", s.shape()), parameter("both", {3})},
          [](auto& t, Stream stream) {
            value_mix_forward(t["out"], t["v"], t["v1"], {t["both"], 1}, {t["both"], 1}, stream);
          },
          [](auto& t, Stream stream) {
            value_mix_backward(t.grad("v"), t.grad("v1"), {t["dboth"], 1}, {t["dboth"], 1}, t["dout"], t["v"], t["v1"],
                               {t["both"], 1}, {t["both"], 1}, stream);
          },
          [=](auto& z) {
            value_mix_forward_ref(z["out"], z["v"], z["v1"], z["both"][1], z["both"][1], s.shape().numel());
          }};
}

Op gated_mix(const Size& s, double scale = 1) {
  return {{unchanged("v", s.shape(), scale), input("v1", s.shape(), scale), output("out", s.shape()),
           in_f32(input("alpha", {s.B, s.T, s.K}))},
          [](auto& t, Stream stream) { gated_mix_forward(t["out"], t["v"], t["v1"], t["alpha"], stream); },
          [](auto& t, Stream stream) {
            gated_mix_backward(t.grad("v1"), t.grad("alpha"), t["dout"], t["v1"], t["alpha"], stream);
          },
          [=](auto& z) { gated_mix_forward_ref(z["out"], z["v"], z["v1"], z["alpha"], s.rows(), s.D); }};
}

Op scale_op(int64_t n, double scale = 1, bool trained = true) {
  Operand factor = parameter("factor", {1});
  if (!trained) factor.role = OperandRole::constant;
  return {{input("inp", {n}, scale), output("out", {n}), factor},
          [](auto& t, Stream stream) { scale_forward(t["out"], t["inp"], t["factor"], stream); },
          [](auto& t, Stream stream) {
            scale_backward(t.grad("inp"), t["dfactor"], t["dout"], t["inp"], t["factor"], stream);
          },
          [=](auto& z) { scale_forward_ref(z["out"], z["inp"], z["factor"][0], n); }};
}

// Two products and a sum.
Tolerances tolerances(const Size& s) {
  // A sum of n numbers of either sign is about sqrt(n) / 3 in size, whatever is left of it by chance. A plain sum of
  // 2048 numbers in f32 errs by some 1e-6 of that, one in vector lanes by less.
  const double sum = 3e-6 * std::max(1.0, std::sqrt(static_cast<double>(s.shape().numel())) / 3);
  return {{"out", 3e-7},    {"dv", 3e-7},      {"dv1", 3e-7},          {"dalpha", 1e-6},
          {"dw", {0, sum}}, {"dw1", {0, sum}}, {"dboth", {0, 2 * sum}}};
}

}  // namespace

TEST_CASE("value_mix: reference backwards are the derivatives of the reference forwards") {
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& size : std::vector<Size>{{1, 1, 1, 1}, {1, 2, 3, 5}}) {
      check_derivative(value_mix(size, scale), 1e-14, {{"dw", 1e-13}, {"dw1", 1e-13}});
      check_derivative(gated_mix(size, scale), 1e-14, {{"dalpha", 1e-13}});
      check_derivative(scale_op(size.shape().numel(), scale), 1e-14, {{"dfactor", 1e-13}});
      check_derivative(scale_op(size.shape().numel(), scale, false), 1e-14);
    }
}

TEST_CASE_TEMPLATE("value_mix: the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    check_backend(value_mix(size), DtypeOf<T>::value, backend, tolerances(size));
    check_backend(gated_mix(size), DtypeOf<T>::value, backend, tolerances(size));
  });
}

TEST_CASE_TEMPLATE("value_mix: only the gradients that have data are written, and v is not needed without d_own", T,
                   float, bf16) {
  const Op op = value_mix({1, 50, 3, 33});
  for (const Backend backend : backends_of<T>()) {
    Trial all(op, DtypeOf<T>::value), none = all, only_first = all;
    const auto before = all["dw"];
    all.backward(backend);
    none.x["dw"].clear(), none.x["dw1"].clear(), none.x["v"].clear();
    none.backward(backend);
    only_first.x["dw"].clear(), only_first.x["v"].clear();
    only_first.backward(backend);
    CHECK(none["dv"] == all["dv"]);
    CHECK(none["dv1"] == all["dv1"]);
    CHECK(only_first["dw1"] == all["dw1"]);
    for (size_t i = 0; i < 3; ++i) CHECK((all["dw"][i] != before[i]) == (i == 2));
  }
}

TEST_CASE("value_mix: one tensor may hold both numbers, even the same one") {
  const Size size{1, 5, 2, 7};
  check_derivative(tied_mix(size), 1e-13);
  for (const Backend backend : fast_backends()) check_backend(tied_mix(size), Dtype::f32, backend, tolerances(size));
}

TEST_CASE_TEMPLATE("value_mix: out may be v, and dv may be dout", T, float, bf16) {
  for (const Backend backend : backends_of<T>())
    for (const Size& size : sizes_of(backend, sizes, gpu_sizes)) {
      check_in_place(value_mix(size), DtypeOf<T>::value, backend, {{"out", "v"}}, {{"dv", "dout"}});
      check_in_place(gated_mix(size), DtypeOf<T>::value, backend, {{"out", "v"}}, {});
    }
}

TEST_CASE_TEMPLATE("value_mix: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  const Size size{1, 9, 2, 16};
  check_any_address(value_mix(size), DtypeOf<T>::value,
                    {{"out", 3e-7}, {"dv", 3e-7}, {"dv1", 3e-7}, {"dw", 2e-6}, {"dw1", 2e-6}});
  check_any_address(gated_mix(size), DtypeOf<T>::value, {{"out", 3e-7}, {"dv1", 3e-7}, {"dalpha", 1e-6}});
}

TEST_CASE_TEMPLATE("value_mix: scale, set and added", T, float, bf16) {
  for (const Backend backend : fast_backends())
    for (int64_t n : {1, 3, 24, 1000, 1001, 40001})  // the last: more blocks of a GPU than a warp has lanes
      for (const bool trained : {false, true})
        check_backend(scale_op(n, 1, trained), DtypeOf<T>::value, backend,
                      {{"out", 1e-7}, {"dinp", 3e-7}, {"dfactor", n < 2000 ? 2e-6 : 1e-5}});  // products mostly cancel
}

TEST_CASE_TEMPLATE("value_mix: own 1 and first 0, and a closed gate, are exactly no mixing", T, float, bf16) {
  const Size size{1, 40, 2, 33};
  const Op op = value_mix(size), gated_op = gated_mix(size);
  for (const Backend backend : fast_backends()) {
    Trial mix(op, DtypeOf<T>::value), gated(gated_op, DtypeOf<T>::value);
    mix.x["w"][2] = 1, mix.x["w1"][1] = 0;
    mix.run(backend);
    CHECK(mix["out"] == mix["v"]);
    CHECK(mix["dv"] == mix["dout"]);
    gated.x["alpha"].assign(gated["alpha"].size(), 0.0);
    gated.forward(backend);
    CHECK(gated["out"] == gated["v"]);
  }
}

TEST_CASE_TEMPLATE("value_mix: NaN shows, and the threads do not matter", T, float, bf16) {
  const Size large{2, 1500, 2, 64};
  check_threads(value_mix(large), DtypeOf<T>::value);
  check_threads(gated_mix(large), DtypeOf<T>::value);
  for (const Backend backend : fast_backends()) {
    const Size size{2, is_slow(backend) ? 70 : 300, 2, 64};
    const size_t where = static_cast<size_t>(size.shape().numel() / 2 + 100);
    check_nans(value_mix(size), DtypeOf<T>::value, backend, {{"v1", {where}}, {"dout", {7}}},
               {{"out", at({where})}, {"dv", at({7})}, {"dv1", at({7})}, {"dw", at({2})}, {"dw1", at({1})}});
    check_nans(gated_mix(size), DtypeOf<T>::value, backend, {{"v1", {where}}},
               {{"out", at({where})}, {"dalpha", at({where / 64})}});
  }
}

TEST_CASE("value_mix: wrong shapes and indices are errors") {
  const std::vector<float> x(12);
  const Tensor a = view(x.data(), {1, 2, 2, 3}), b = view(x.data(), {11}), w = view(x.data(), {3});
  CHECK_THROWS_AS(value_mix_forward(a, a, b, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 3}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 0}, {w, -1}, fast), Error);
  const Grad d{a, false};
  CHECK_THROWS_AS(value_mix_backward(d, d, {w, 0}, {}, a, {}, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_backward(d, d, {w, 3}, {}, a, a, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(a, a, a, w, fast), Error);
  CHECK_THROWS_AS(gated_mix_backward(d, {w, false}, a, a, view(x.data(), {1, 2, 2}), fast), Error);
  CHECK_THROWS_AS(scale_forward(a, a, w, fast), Error);
  const std::vector<bf16> half(12);
  const Tensor n = view(half.data(), a.shape), few = view(half.data(), {3});
  CHECK_THROWS_AS(value_mix_forward(n, n, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(n, n, n, {few, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(n, n, n, view(half.data(), {1, 2, 2}), fast), Error);
  CHECK_THROWS_AS(scale_backward(d, w, a, a, view(x.data(), {1}), fast), Error);
}
