#include "kernels/value_mix.h"

#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const Stream fast{Backend::cpu}, reference{Backend::reference};

struct Size {
  int64_t B, T, K, D;
  int64_t rows() const { return B * T * K; }
  int64_t numel() const { return rows() * D; }
};
const std::vector<Size> sizes{{1, 1, 1, 1}, {1, 3, 2, 5}, {2, 31, 3, 33}, {1, 700, 4, 16}, {2, 1500, 2, 64}};

template <class T>
MixWeight weight_at(const std::vector<T>& values, int64_t index) {
  return {values.empty() ? Tensor{} : view(values.data(), {static_cast<int64_t>(values.size())}), index};
}

// The trained numbers sit at elements 2 and 1 of vectors of three.
template <class T>
struct Mix {
  Shape shape;
  std::vector<T> v, v1, dout, out, dv, dv1;
  std::vector<Wide<T>> own, first, d_own, d_first;

  Mix(const Size& s, bool acc, double scale)
      : shape{s.B, s.T, s.K, s.D},
        v(random_vector<T>(s.numel(), 1, scale)),
        v1(random_vector<T>(s.numel(), 2, scale)),
        dout(random_vector<T>(s.numel(), 3)),
        out(poisoned<T>(s.numel())),
        dv(acc ? random_vector<T>(s.numel(), 6) : poisoned<T>(s.numel())),
        dv1(acc ? random_vector<T>(s.numel(), 7) : poisoned<T>(s.numel())),
        own(random_vector<Wide<T>>(3, 4)),
        first(random_vector<Wide<T>>(3, 5)),
        d_own(random_vector<Wide<T>>(3, 8)),
        d_first(random_vector<Wide<T>>(3, 9)) {}

  template <class From>
  explicit Mix(const Mix<From>& m)
      : shape(m.shape), v(convert<T>(m.v)), v1(convert<T>(m.v1)), dout(convert<T>(m.dout)), out(convert<T>(m.out)),
        dv(convert<T>(m.dv)), dv1(convert<T>(m.dv1)), own(convert<Wide<T>>(m.own)),
        first(convert<Wide<T>>(m.first)), d_own(convert<Wide<T>>(m.d_own)), d_first(convert<Wide<T>>(m.d_first)) {}

  Tensor at(const std::vector<T>& x) const { return x.empty() ? Tensor{} : view(x.data(), shape); }
  void forward(Stream stream) {
    value_mix_forward(at(out), at(v), at(v1), weight_at(own, 2), weight_at(first, 1), stream);
  }
  void backward(bool acc_v, bool acc_v1, Stream stream) {
    value_mix_backward(at(dv), at(dv1), weight_at(d_own, 2), weight_at(d_first, 1), at(dout), at(v), at(v1),
                       weight_at(own, 2), weight_at(first, 1), acc_v, acc_v1, stream);
  }
};

template <class T>
struct GatedMix {
  Shape shape, rows;
  std::vector<T> v, v1, dout, out, dv1;
  std::vector<Wide<T>> alpha, dalpha;

  GatedMix(const Size& s, bool acc_v1, bool acc_alpha, double scale)
      : shape{s.B, s.T, s.K, s.D},
        rows{s.B, s.T, s.K},
        v(random_vector<T>(s.numel(), 1, scale)),
        v1(random_vector<T>(s.numel(), 2, scale)),
        dout(random_vector<T>(s.numel(), 4)),
        out(poisoned<T>(s.numel())),
        dv1(acc_v1 ? random_vector<T>(s.numel(), 5) : poisoned<T>(s.numel())),
        alpha(random_vector<Wide<T>>(s.rows(), 3)),
        dalpha(acc_alpha ? random_vector<Wide<T>>(s.rows(), 6) : poisoned<Wide<T>>(s.rows())) {}

  template <class From>
  explicit GatedMix(const GatedMix<From>& m)
      : shape(m.shape), rows(m.rows), v(convert<T>(m.v)), v1(convert<T>(m.v1)), dout(convert<T>(m.dout)),
        out(convert<T>(m.out)), dv1(convert<T>(m.dv1)), alpha(convert<Wide<T>>(m.alpha)),
        dalpha(convert<Wide<T>>(m.dalpha)) {}

  void forward(Stream stream) {
    gated_mix_forward(view(out.data(), shape), view(v.data(), shape), view(v1.data(), shape), view(alpha.data(), rows),
                      stream);
  }
  void backward(bool acc_v1, bool acc_alpha, Stream stream) {
    gated_mix_backward(view(dv1.data(), shape), view(dalpha.data(), rows), view(dout.data(), shape),
                       view(v1.data(), shape), view(alpha.data(), rows), acc_v1, acc_alpha, stream);
  }
};

}  // namespace

TEST_CASE("value_mix: reference backwards are the derivatives of the reference forwards") {
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 1, 1, 1}, {1, 2, 3, 5}}) {
      CAPTURE(scale);
      CAPTURE(size.D);
      const int64_t n = size.numel();
      Mix<double> mix(size, false, scale);
      mix.d_own[2] = mix.d_first[1] = 0;
      mix.backward(false, false, reference);
      auto mixed = [&](const std::vector<Complex>& v, const std::vector<Complex>& v1, Complex own, Complex first) {
        std::vector<Complex> out(v.size());
        value_mix_forward_ref(out.data(), v.data(), v1.data(), own, first, n);
        return dot(mix.dout, out);
      };
      const auto v = convert<Complex>(mix.v), v1 = convert<Complex>(mix.v1);
      const std::vector<double> weights{mix.own[2], mix.first[1]};
      check_close("dv", mix.dv, complex_step(mix.v, [&](auto& x) { return mixed(x, v1, weights[0], weights[1]); }),
                  1e-14);
      check_close("dv1", mix.dv1, complex_step(mix.v1, [&](auto& x) { return mixed(v, x, weights[0], weights[1]); }),
                  1e-14);
      check_close("d_own and d_first", std::vector<double>{mix.d_own[2], mix.d_first[1]},
                  complex_step(weights, [&](auto& w) { return mixed(v, v1, w[0], w[1]); }), 1e-13);

      GatedMix<double> gated(size, false, false, scale);
      gated.backward(false, false, reference);
      auto gate = [&](const std::vector<Complex>& x1, const std::vector<Complex>& alpha) {
        std::vector<Complex> out(v.size());
        gated_mix_forward_ref(out.data(), v.data(), x1.data(), alpha.data(), size.rows(), size.D);
        return dot(gated.dout, out);
      };
      const auto alpha = convert<Complex>(gated.alpha);
      check_close("gated dv1", gated.dv1, complex_step(gated.v1, [&](auto& x) { return gate(x, alpha); }), 1e-14);
      check_close("dalpha", gated.dalpha,
                  complex_step(gated.alpha, [&](auto& a) { return gate(convert<Complex>(gated.v1), a); }), 1e-13);

      auto dinp = poisoned<double>(n), dfactor = std::vector<double>(1, 0.0);
      const std::vector<double> factor{0.7};
      scale_backward_ref(dinp.data(), dfactor.data(), mix.dout.data(), mix.v.data(), factor[0], n, false);
      auto scaled = [&](const std::vector<Complex>& x, Complex f) {
        std::vector<Complex> out(x.size());
        scale_forward_ref(out.data(), x.data(), f, n);
        return dot(mix.dout, out);
      };
      check_close("dinp", dinp, complex_step(mix.v, [&](auto& x) { return scaled(x, factor[0]); }), 1e-14);
      check_close("dfactor", dfactor, complex_step(factor, [&](auto& f) { return scaled(v, f[0]); }), 1e-13);
    }
  }
}

TEST_CASE_TEMPLATE("value_mix: fast CPU equals the reference, set and added", T, float, bf16) {
  const double rounding = tolerance_or_rounding<T>(3e-7);  // two products and a sum
  for (const Size& size : sizes) {
    for (bool acc_v : {false, true}) {
      for (bool acc_v1 : {false, true}) {
        CAPTURE(size.D);
        CAPTURE(acc_v);
        CAPTURE(acc_v1);
        Mix<T> mix(size, acc_v, 1.0);
        if (acc_v1 != acc_v) mix.dv1 = acc_v1 ? random_vector<T>(size.numel(), 7) : poisoned<T>(size.numel());
        Mix<double> want(mix);
        mix.forward(fast);
        want.forward(reference);
        mix.backward(acc_v, acc_v1, fast);
        want.backward(acc_v, acc_v1, reference);
        check_close("out", mix.out, want.out, rounding);
        check_close("dv", mix.dv, want.dv, rounding);
        check_close("dv1", mix.dv1, want.dv1, rounding);
        // A sum of n numbers of either sign is about sqrt(n) / 3 in size, whatever is left of it by chance. A plain
        // sum of 2048 numbers in f32 errs by some 1e-6 of that, one in vector lanes by less.
        const double allowed = 3e-6 * std::max(1.0, std::sqrt(static_cast<double>(size.numel())) / 3);
        for (size_t i = 0; i < 3; ++i) {
          CHECK(std::abs(static_cast<double>(mix.d_own[i]) - want.d_own[i]) <= allowed);
          CHECK(std::abs(static_cast<double>(mix.d_first[i]) - want.d_first[i]) <= allowed);
        }

        GatedMix<T> gated(size, acc_v1, acc_v, 1.0);
        GatedMix<double> gated_want(gated);
        gated.forward(fast);
        gated_want.forward(reference);
        gated.backward(acc_v1, acc_v, fast);
        gated_want.backward(acc_v1, acc_v, reference);
        check_close("gated out", gated.out, gated_want.out, rounding);
        check_close("gated dv1", gated.dv1, gated_want.dv1, rounding);
        check_close("dalpha", gated.dalpha, gated_want.dalpha, 1e-6);
      }
    }
  }
}

TEST_CASE_TEMPLATE("value_mix: only the gradients that have data are written, and v is not needed without d_own", T,
                   float, bf16) {
  const Size size{1, 50, 3, 33};
  for (Stream stream : {fast, reference}) {
    if (std::is_same_v<T, bf16> && stream.backend == Backend::reference) continue;
    Mix<T> all(size, false, 1.0), none(size, false, 1.0), only_first(size, false, 1.0);
    const auto before = all.d_own;
    all.backward(false, false, stream);
    none.d_own.clear(), none.d_first.clear(), none.v.clear();
    none.backward(false, false, stream);
    only_first.d_own.clear(), only_first.v.clear();
    only_first.backward(false, false, stream);
    CHECK(none.dv == all.dv);
    CHECK(none.dv1 == all.dv1);
    CHECK(only_first.d_first == all.d_first);
    for (size_t i = 0; i < 3; ++i) CHECK((all.d_own[i] != before[i]) == (i == 2));
  }
}

TEST_CASE("value_mix: one tensor may hold both numbers, even the same one") {
  const Size size{1, 5, 2, 7};
  for (Stream stream : {fast, reference}) {
    Mix<float> mix(size, false, 1.0);
    std::vector<float> d(3, 0.f);
    mix.d_own[2] = mix.d_first[1] = 0;
    mix.backward(false, false, stream);
    const MixWeight both = weight_at(mix.own, 1), d_both = weight_at(d, 1);
    value_mix_backward(mix.at(mix.dv), mix.at(mix.dv1), d_both, d_both, mix.at(mix.dout), mix.at(mix.v), mix.at(mix.v1),
                       both, both, false, false, stream);
    CHECK(d[1] == doctest::Approx(mix.d_own[2] + mix.d_first[1]));
    CHECK(d[0] + d[2] == 0.f);
  }
}

TEST_CASE_TEMPLATE("value_mix: out may be v, and dv may be dout", T, float, bf16) {
  for (const Size& size : sizes) {
    for (Stream stream : {fast, reference}) {
      if (std::is_same_v<T, bf16> && stream.backend == Backend::reference) continue;
      Mix<T> mix(size, false, 1.0), in_place(size, false, 1.0);
      mix.forward(stream);
      mix.backward(false, false, stream);
      const Tensor dy = in_place.at(in_place.dout), v = in_place.at(in_place.v), v1 = in_place.at(in_place.v1);
      const MixWeight own = weight_at(in_place.own, 2), first = weight_at(in_place.first, 1);
      const MixWeight d_own = weight_at(in_place.d_own, 2), d_first = weight_at(in_place.d_first, 1);
      value_mix_backward(dy, in_place.at(in_place.dv1), d_own, d_first, dy, v, v1, own, first, false, false, stream);
      CHECK(in_place.dout == mix.dv);
      CHECK(in_place.dv1 == mix.dv1);
      CHECK(in_place.d_own == mix.d_own);
      CHECK(in_place.d_first == mix.d_first);
      value_mix_forward(v, v, v1, own, first, stream);
      CHECK(in_place.v == mix.out);

      GatedMix<T> gated(size, false, false, 1.0), gated_in_place(size, false, false, 1.0);
      gated.forward(stream);
      gated_in_place.out = gated_in_place.v;
      const Tensor out = view(gated_in_place.out.data(), gated.shape);
      gated_mix_forward(out, out, view(gated.v1.data(), gated.shape), view(gated.alpha.data(), gated.rows), stream);
      CHECK(gated_in_place.out == gated.out);
    }
  }
}

namespace {
template <class S>
void check_scale(double out_tolerance, double dinp_tolerance) {
  for (int64_t n : {1, 3, 24, 1000}) {
    const auto inp = random_vector<S>(n, 1), dout = random_vector<S>(n, 2);
    const auto factor = random_vector<float>(1, 3);
    for (bool acc : {false, true}) {
      auto out = poisoned<S>(n), dinp = acc ? random_vector<S>(n, 4) : poisoned<S>(n);
      std::vector<float> dfactor{0.5f};
      auto out64 = poisoned<double>(n), dinp64 = convert<double>(dinp), dfactor64 = convert<double>(dfactor);
      const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout), factor64 = convert<double>(factor);
      scale_forward(view(out.data(), {n}), view(inp.data(), {n}), view(factor.data(), {1}), fast);
      scale_backward(view(dinp.data(), {n}), view(dfactor.data(), {1}), view(dout.data(), {n}), view(inp.data(), {n}),
                     view(factor.data(), {1}), acc, fast);
      scale_forward(view(out64.data(), {n}), view(inp64.data(), {n}), view(factor64.data(), {1}), reference);
      scale_backward(view(dinp64.data(), {n}), view(dfactor64.data(), {1}), view(dout64.data(), {n}),
                     view(inp64.data(), {n}), view(factor64.data(), {1}), acc, reference);
      check_close("out", out, out64, out_tolerance);
      check_close("dinp", dinp, dinp64, dinp_tolerance);
      check_close("dfactor", dfactor, dfactor64, 2e-6);
    }
  }
}
}  // namespace

TEST_CASE("value_mix: scale, set and added") {
  check_scale<float>(1e-7, 3e-7);
  check_scale<bf16>(0x1p-8, 0x1p-8);
}

TEST_CASE_TEMPLATE("value_mix: own 1 and first 0, and a closed gate, are exactly no mixing", T, float, bf16) {
  const Size size{1, 40, 2, 33};
  Mix<T> mix(size, false, 1.0);
  mix.own[2] = 1, mix.first[1] = 0;
  mix.forward(fast);
  mix.backward(false, false, fast);
  CHECK(mix.out == mix.v);
  CHECK(mix.dv == mix.dout);
  GatedMix<T> gated(size, false, false, 1.0);
  std::fill(gated.alpha.begin(), gated.alpha.end(), 0.f);
  gated.forward(fast);
  CHECK(gated.out == gated.v);
}

TEST_CASE_TEMPLATE("value_mix: NaN shows, and the threads do not matter", T, float, bf16) {
  const Size size{2, 1500, 2, 64};
  auto run = [&](bool spoilt) {
    Mix<T> mix(size, false, 1.0);
    GatedMix<T> gated(size, false, false, 1.0);
    if (spoilt) mix.v1[100000] = gated.v1[100000] = mix.dout[7] = std::numeric_limits<float>::quiet_NaN();
    mix.forward(fast);
    mix.backward(false, false, fast);
    gated.forward(fast);
    gated.backward(false, false, fast);
    std::vector<float> all;
    const auto append = [&](const auto& part) { all.insert(all.end(), part.begin(), part.end()); };
    append(mix.out), append(mix.dv), append(mix.dv1), append(mix.d_own), append(mix.d_first);
    append(gated.out), append(gated.dv1), append(gated.dalpha);
    return all;
  };
  check_same_bits_on_any_threads<float>([&] { return run(false); });
  const size_t n = static_cast<size_t>(size.numel()), gated = 3 * n + 6;
  // In out, dv, dv1, d_own[2], d_first[1]; in the gated out and dalpha.
  const std::vector<size_t> want{100000,    n + 7,          2 * n + 7, 3 * n + 2,
                                 3 * n + 4, gated + 100000, gated + 2 * n + 100000 / 64};
  std::vector<size_t> got;
  const auto all = run(true);
  for (size_t i = 0; i < all.size(); ++i)
    if (is_nan(all[i])) got.push_back(i);
  CHECK(got == want);
}

TEST_CASE("value_mix: wrong shapes and indices are errors") {
  const std::vector<float> x(12);
  const Tensor a = view(x.data(), {1, 2, 2, 3}), b = view(x.data(), {11}), w = view(x.data(), {3});
  CHECK_THROWS_AS(value_mix_forward(a, a, b, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 3}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 0}, {w, -1}, fast), Error);
  CHECK_THROWS_AS(value_mix_backward(a, a, {w, 0}, {}, a, {}, a, {w, 0}, {w, 0}, false, false, fast), Error);
  CHECK_THROWS_AS(value_mix_backward(a, a, {w, 3}, {}, a, a, a, {w, 0}, {w, 0}, false, false, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(a, a, a, w, fast), Error);
  CHECK_THROWS_AS(gated_mix_backward(a, w, a, a, view(x.data(), {1, 2, 2}), false, false, fast), Error);
  CHECK_THROWS_AS(scale_forward(a, a, w, fast), Error);
  const std::vector<bf16> half(12);
  const Tensor n = view(half.data(), a.shape), few = view(half.data(), {3});
  CHECK_THROWS_AS(value_mix_forward(n, n, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(n, n, n, {few, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(n, n, n, view(half.data(), {1, 2, 2}), fast), Error);
  CHECK_THROWS_AS(scale_backward(a, w, a, a, view(x.data(), {1}), false, fast), Error);
}
