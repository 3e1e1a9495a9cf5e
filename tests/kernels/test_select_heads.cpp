#include "kernels/depth/select_heads.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Case {
  int64_t B, T, K, D;
  std::vector<HeadChoice> choice;
};
// Three sources; some heads are chosen several times, some never.
const std::vector<Case> cases{{1, 1, 1, 1, {{2, 0}}},
                              {2, 3, 2, 5, {{0, 1}, {2, 0}, {0, 1}, {0, 0}}},
                              {1, 700, 4, 33, {{1, 3}, {0, 0}, {0, 1}, {1, 3}, {2, 2}, {1, 3}, {1, 0}}},
                              {2, 300, 3, 64, {{2, 0}, {2, 1}, {2, 2}}}};

const std::vector<std::string> sources{"first", "second", "third"};

Op select_heads(const Case& c) {
  const Shape shape{c.B, c.T, c.K, c.D}, wide{c.B, c.T, static_cast<int64_t>(c.choice.size()), c.D};
  return {{input("first", shape), input("second", shape), input("third", shape), output("out", wide)},
          [=](auto& t, Stream stream) {
            select_heads_forward(t["out"], {t["first"], t["second"], t["third"]}, c.choice, stream);
          },
          [=](auto& t, Stream stream) {
            for (int s = 0; s < 3; ++s)
              select_heads_backward(t.grad(sources[static_cast<size_t>(s)]), t["dout"], c.choice, s, stream);
          },
          [=](auto& z) {
            select_heads_forward_ref(z["out"], {z["first"], z["second"], z["third"]}, c.choice, c.B * c.T, c.K, c.D);
          }};
}

}  // namespace

TEST_CASE("select_heads: reference backward is the derivative of the reference forward") {
  for (const Case& c : {cases[0], cases[1]}) check_derivative(select_heads(c), 1e-14);
}

TEST_CASE_TEMPLATE("select_heads: the fast backends equal the reference, set and added; a sum is rounded once", T,
                   float, bf16) {
  for_sizes(cases, cases, [](Backend backend, const Case& c) {
    for (const unsigned accumulates : {0u, 7u}) {
      CAPTURES(c.D, accumulates);
      const Op op = select_heads(c);
      Trial heads(op, DtypeOf<T>::value, accumulates);
      Trial want = std::is_same_v<T, float> ? heads : heads.exact();  // f32: the same sums in the same order
      heads.run(backend), want.run(Backend::reference);
      for (const auto& [name, type] : heads.results()) CHECK(heads[name] == convert<double>(convert<T>(want[name])));
    }
  });
}

TEST_CASE_TEMPLATE("select_heads: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  check_any_address(select_heads({1, 5, 2, 16, {{0, 1}, {1, 0}, {0, 1}}}), DtypeOf<T>::value);
}

TEST_CASE("select_heads: every element comes from where it should") {
  const Case c = cases[2];
  const Op op = select_heads(c);
  const int64_t J = static_cast<int64_t>(c.choice.size());
  for (const Backend backend : all_backends()) {
    Trial heads(op, Dtype::f32);
    heads.forward(backend);
    int64_t wrong = 0;
    for (int64_t i = 0; i < c.B * c.T * J * c.D; ++i) {
      const int64_t d = i % c.D, n = i / (J * c.D);
      const HeadChoice& from = c.choice[static_cast<size_t>(i / c.D % J)];
      const size_t source = static_cast<size_t>(from.source), at = static_cast<size_t>((n * c.K + from.head) * c.D + d);
      wrong += heads["out"][static_cast<size_t>(i)] != heads[sources[source]][at];
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("select_heads: a head that nobody chose gets zero when set, and keeps what it has when added to") {
  const Op op = select_heads(cases[1]);  // of the second source no head is chosen, of the third not the second
  for (const Backend backend : all_backends()) {
    Trial set(op, Dtype::f32), added(op, Dtype::f32, 7);
    const Trial before = added;
    set.backward(backend), added.backward(backend);
    CHECK(set["dsecond"] == std::vector<double>(set["dsecond"].size(), 0.0));
    CHECK(added["dsecond"] == before["dsecond"]);
    for (size_t i = 0; i < set["dthird"].size(); ++i) {
      const bool chosen = i / 5 % 2 == 0;
      CHECK((set["dthird"][i] != 0) == chosen);
      CHECK((added["dthird"][i] != before["dthird"][i]) == chosen);
    }
  }
}

TEST_CASE_TEMPLATE("select_heads: NaN shows where it was chosen, and the threads do not matter", T, float, bf16) {
  Case c = cases[2];
  check_threads(select_heads(c), DtypeOf<T>::value);
  c.T = 20;
  // Token 9: the head of the first source that nobody chose, and the one of the second that has three readers; dout's
  // head 5.
  const size_t head = (9 * 4 + 3) * 33, row = 9 * 7 * 33;
  for (const Backend backend : fast_backends())
    check_nans(select_heads(c), DtypeOf<T>::value, backend,
               {{"first", {head}}, {"second", {head}}, {"dout", {row + 5 * 33}}},
               {{"out", at({row, row + 3 * 33, row + 5 * 33})}, {"dsecond", at({head})}});
}

TEST_CASE("select_heads: wrong shapes and choices are errors") {
  const std::vector<float> x(24);
  const Tensor a = view(x.data(), {1, 3, 2, 4}), b = view(x.data(), {1, 3, 4, 2}), flat = view(x.data(), {3, 2, 4});
  const std::vector<std::vector<HeadChoice>> wrong{
      {}, {{0, 0}}, {{0, 0}, {0, 2}}, {{0, -1}, {0, 0}}, {{1, 0}, {0, 0}}, {{-1, 0}, {0, 0}}};
  for (const std::vector<HeadChoice>& choice : wrong)
    CHECK_THROWS_AS(select_heads_forward(a, {a}, choice, fast), Error);
  const std::vector<HeadChoice> good{{0, 0}, {0, 1}};
  CHECK_THROWS_AS(select_heads_forward(a, {}, good, fast), Error);
  CHECK_THROWS_AS(select_heads_forward(a, {b}, good, fast), Error);
  CHECK_THROWS_AS(select_heads_forward(a, {a, flat}, good, fast), Error);
  CHECK_THROWS_AS(select_heads_backward({a, false}, b, good, 0, fast), Error);
  CHECK_THROWS_AS(select_heads_backward({a, false}, a, {{0, 0}, {1, 2}}, 0, fast), Error);
  const std::vector<bf16> half(24);
  const Tensor bf16_view = view(half.data(), a.shape);
  CHECK_THROWS_AS(select_heads_forward(bf16_view, {a}, good, fast), Error);
  CHECK_THROWS_AS(select_heads_backward({bf16_view, false}, a, good, 0, fast), Error);
  CHECK_THROWS_AS(select_heads_forward(bf16_view, {bf16_view}, good, reference), Error);
}
