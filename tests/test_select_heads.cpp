#include "kernels/depth/select_heads.h"

#include "tests/depth_cases.h"

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

template <class T>
struct Heads {
  Shape shape, wide;
  std::vector<HeadChoice> choice;
  std::vector<std::vector<T>> source, dsource;
  std::vector<T> out, dout;
  auto members() { return std::tie(source, dsource, out, dout); }

  Heads(const Case& c, bool add)
      : shape{c.B, c.T, c.K, c.D}, wide{c.B, c.T, static_cast<int64_t>(c.choice.size()), c.D}, choice(c.choice) {
    for (uint64_t s = 0; s < 3; ++s) {
      source.push_back(random_vector<T>(shape.numel(), s + 1));
      dsource.push_back(add ? random_vector<T>(shape.numel(), s + 4) : poisoned<T>(shape.numel()));
    }
    out = poisoned<T>(wide.numel());
    dout = random_vector<T>(wide.numel(), 7);
  }
  void forward(Stream stream) {
    run_on(stream.backend, joined<Tensor>({tensor_of(out, wide)}, tensors_of(source, shape)),
           [&](auto& t, Stream there) {
             select_heads_forward(t[0], {t.begin() + 1, t.end()}, choice, there);
           });
  }
  void backward(bool add, Stream stream) {
    for (int s = 0; s < 3; ++s)
      run_on(stream.backend, {tensor_of(dsource[static_cast<size_t>(s)], shape), tensor_of(dout, wide)},
             [&](auto& t, Stream there) {
               select_heads_backward({t[0], add}, t[1], choice, s, there);
             });
  }
};

}  // namespace

TEST_CASE("select_heads: reference backward is the derivative of the reference forward") {
  for (const Case& c : {cases[0], cases[1]}) {
    Heads<double> heads(c, false);
    const size_t n = heads.source[0].size();
    const auto want = complex_step(joined(heads.source), [&](auto& x) {
      std::vector<Complex> out(heads.out.size());
      select_heads_forward_ref(out.data(), {x.data(), x.data() + n, x.data() + 2 * n}, c.choice, c.B * c.T, c.K, c.D);
      return dot(heads.dout, out);
    });
    heads.backward(false, reference);
    check_close("dsource", joined(heads.dsource), want, 1e-14);
  }
}

TEST_CASE_TEMPLATE("select_heads: the fast backends equal the reference, set and added; a sum is rounded once", T,
                   float, bf16) {
  using Want = std::conditional_t<std::is_same_v<T, float>, float, double>;  // f32: the same sums in the same order
  for_sizes(cases, cases, [](Backend backend, const Case& c) {
    for (bool add : {false, true}) {
      CAPTURES(c.D, add);
      Heads<T> heads(c, add);
      Heads<Want> want(c, add);
      convert_members(want, heads);
      heads.forward(Stream{backend});
      want.forward(reference);
      CHECK(heads.out == convert<T>(want.out));
      heads.backward(add, Stream{backend});
      want.backward(add, reference);
      for (size_t s = 0; s < 3; ++s) CHECK(heads.dsource[s] == convert<T>(want.dsource[s]));
    }
  });
}

TEST_CASE_TEMPLATE("select_heads: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  const Case c{1, 5, 2, 16, {{0, 1}, {1, 0}, {0, 1}}};
  const auto one = random_vector<T>(161, 1), other = random_vector<T>(160, 2), dout = random_vector<T>(241, 3);
  std::vector<T> want, want_d;
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<T>(241), d = poisoned<T>(161);
    run_on(backend, {tensor_of(out), tensor_of(one), tensor_of(other), tensor_of(dout), tensor_of(d)},
           [&](auto& t, Stream stream) {
             const auto at = [&](size_t i, int64_t first, int64_t heads) {
               return view(t[i].template as<T>() + first, {1, 5, heads, 16});
             };
             select_heads_forward(at(0, 1, 3), {at(1, 1, 2), at(2, 0, 2)}, c.choice, stream);
             select_heads_backward({at(4, 1, 2), false}, at(3, 1, 3), c.choice, 0, stream);
           });
    out = one_earlier(out), d = one_earlier(d);
    CHECK(nans_of(joined(out, d)).empty());
    if (backend == Backend::cpu) want = out, want_d = d;
    CHECK(out == want);
    CHECK(d == want_d);
  }
}

TEST_CASE("select_heads: every element comes from where it should") {
  const Case c = cases[2];
  const int64_t J = static_cast<int64_t>(c.choice.size());
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    Heads<float> heads(c, false);
    heads.forward(stream);
    int64_t wrong = 0;
    for (int64_t i = 0; i < heads.wide.numel(); ++i) {
      const int64_t d = i % c.D, n = i / (J * c.D);
      const HeadChoice& from = c.choice[static_cast<size_t>(i / c.D % J)];
      const size_t at = static_cast<size_t>((n * c.K + from.head) * c.D + d);
      wrong += heads.out[static_cast<size_t>(i)] != heads.source[static_cast<size_t>(from.source)][at];
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("select_heads: a head that nobody chose gets zero when set, and keeps what it has when added to") {
  const Case c = cases[1];  // of source 1 no head is chosen, of source 2 not the second
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    Heads<float> set(c, false), added(c, true), before(c, true);
    set.backward(false, stream);
    added.backward(true, stream);
    CHECK(set.dsource[1] == std::vector<float>(set.dsource[1].size(), 0.f));
    CHECK(added.dsource[1] == before.dsource[1]);
    for (size_t i = 0; i < set.dsource[2].size(); ++i) {
      const bool chosen = i / 5 % 2 == 0;
      CHECK((set.dsource[2][i] != 0.f) == chosen);
      CHECK((added.dsource[2][i] != before.dsource[2][i]) == chosen);
    }
  }
}

TEST_CASE_TEMPLATE("select_heads: NaN shows where it was chosen, and the threads do not matter", T, float, bf16) {
  const Case c = cases[2];
  auto run = [&](bool spoilt, Stream stream) {
    Heads<T> heads(c, false);
    // Token 9: the head of source 0 that nobody chose, and the one of source 1 that has three readers; dout's head 5.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const size_t head = (9 * 4 + 3) * 33;
    if (spoilt) heads.source[0][head] = heads.source[1][head] = heads.dout[(9 * 7 + 5) * 33] = nan;
    heads.forward(stream);
    heads.backward(false, stream);
    return joined(heads.out, joined(heads.dsource));
  };
  check_same_bits_on_any_threads<T>([&] { return run(false, fast); });
  for (const Backend backend : fast_backends()) {
    const size_t row = 9 * 7 * 33, dsource1 = 700 * (7 + 4) * 33;
    CHECK(nans_of(run(true, Stream{backend})) ==
          std::vector<size_t>{row, row + 3 * 33, row + 5 * 33, dsource1 + (9 * 4 + 3) * 33});
  }
}

TEST_CASE("select_heads: wrong shapes and choices are errors") {
  const std::vector<float> x(24);
  const Tensor a = view(x, {1, 3, 2, 4}), b = view(x, {1, 3, 4, 2}), flat = view(x, {3, 2, 4});
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
  const Tensor narrow = view(half, a.shape);
  CHECK_THROWS_AS(select_heads_forward(narrow, {a}, good, fast), Error);
  CHECK_THROWS_AS(select_heads_backward({narrow, false}, a, good, 0, fast), Error);
  CHECK_THROWS_AS(select_heads_forward(narrow, {narrow}, good, reference), Error);
}
