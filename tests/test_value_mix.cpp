#include "kernels/depth/value_mix.h"

#include "tests/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, K, D;
  int64_t rows() const { return B * T * K; }
  int64_t numel() const { return rows() * D; }
};
const std::vector<Size> sizes{{1, 1, 1, 1}, {1, 3, 2, 5}, {2, 31, 3, 33}, {1, 700, 4, 16}, {2, 1500, 2, 64}};
// Several blocks and several rounds, both widths, rows for one lane, for a few, and for more than a warp.
const std::vector<Size> gpu_sizes{{1, 1, 1, 1},   {1, 3, 2, 5},    {2, 31, 1, 33},
                                  {1, 70, 3, 16}, {2, 150, 1, 64}, {1, 3, 2, 520}};

// The trained numbers sit at elements 2 and 1 of vectors of three.
template <class T>
struct Mix {
  Shape shape;
  std::vector<T> v, v1, dout, out, dv, dv1;
  std::vector<Wide<T>> own, first, d_own, d_first;
  auto members() { return std::tie(v, v1, dout, out, dv, dv1, own, first, d_own, d_first); }

  Mix(const Size& s, bool add, double scale)
      : shape{s.B, s.T, s.K, s.D},
        v(random_vector<T>(s.numel(), 1, scale)),
        v1(random_vector<T>(s.numel(), 2, scale)),
        dout(random_vector<T>(s.numel(), 3)),
        out(poisoned<T>(s.numel())),
        dv(add ? random_vector<T>(s.numel(), 6) : poisoned<T>(s.numel())),
        dv1(add ? random_vector<T>(s.numel(), 7) : poisoned<T>(s.numel())),
        own(random_vector<Wide<T>>(3, 4)),
        first(random_vector<Wide<T>>(3, 5)),
        d_own(random_vector<Wide<T>>(3, 8)),
        d_first(random_vector<Wide<T>>(3, 9)) {}
  template <class From>
  explicit Mix(Mix<From>& from) : shape(from.shape) {
    convert_members(*this, from);
  }

  Tensor at(const std::vector<T>& x) const { return tensor_of(x, shape); }
  void forward(Stream stream) { forward(at(out), stream); }
  void forward(const Tensor& to, Stream stream) {
    run_on(stream.backend, {to, at(v), at(v1), tensor_of(own), tensor_of(first)}, [](auto& t, Stream there) {
      value_mix_forward(t[0], t[1], t[2], {t[3], 2}, {t[4], 1}, there);
    });
  }
  void backward(bool add_v, bool add_v1, Stream stream) { backward(at(dv), add_v, add_v1, stream); }
  void backward(const Tensor& to_v, bool add_v, bool add_v1, Stream stream) {
    run_on(stream.backend,
           {to_v, at(dv1), tensor_of(d_own), tensor_of(d_first), at(dout), at(v), at(v1), tensor_of(own),
            tensor_of(first)},
           [=](auto& t, Stream there) {
             value_mix_backward({t[0], add_v}, {t[1], add_v1}, {t[2], 2}, {t[3], 1}, t[4], t[5], t[6], {t[7], 2},
                                {t[8], 1}, there);
           });
  }
};

template <class T>
struct GatedMix {
  Shape shape, rows;
  std::vector<T> v, v1, dout, out, dv1;
  std::vector<Wide<T>> alpha, dalpha;
  auto members() { return std::tie(v, v1, dout, out, dv1, alpha, dalpha); }

  GatedMix(const Size& s, bool add_v1, bool add_alpha, double scale)
      : shape{s.B, s.T, s.K, s.D},
        rows{s.B, s.T, s.K},
        v(random_vector<T>(s.numel(), 1, scale)),
        v1(random_vector<T>(s.numel(), 2, scale)),
        dout(random_vector<T>(s.numel(), 4)),
        out(poisoned<T>(s.numel())),
        dv1(add_v1 ? random_vector<T>(s.numel(), 5) : poisoned<T>(s.numel())),
        alpha(random_vector<Wide<T>>(s.rows(), 3)),
        dalpha(add_alpha ? random_vector<Wide<T>>(s.rows(), 6) : poisoned<Wide<T>>(s.rows())) {}
  template <class From>
  explicit GatedMix(GatedMix<From>& from) : shape(from.shape), rows(from.rows) {
    convert_members(*this, from);
  }

  Tensor at(const std::vector<T>& x) const { return tensor_of(x, shape); }
  void forward(Stream stream) { forward(at(out), stream); }
  void forward(const Tensor& to, Stream stream) {
    run_on(stream.backend, {to, at(v), at(v1), tensor_of(alpha, rows)},
           [](auto& t, Stream there) { gated_mix_forward(t[0], t[1], t[2], t[3], there); });
  }
  void backward(bool add_v1, bool add_alpha, Stream stream) {
    run_on(stream.backend, {at(dv1), tensor_of(dalpha, rows), at(dout), at(v1), tensor_of(alpha, rows)},
           [=](auto& t, Stream there) {
             gated_mix_backward({t[0], add_v1}, {t[1], add_alpha}, t[2], t[3], t[4], there);
           });
  }
};

}  // namespace

TEST_CASE("value_mix: reference backwards are the derivatives of the reference forwards") {
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 1, 1, 1}, {1, 2, 3, 5}}) {
      CAPTURES(scale, size.D);
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

namespace {

template <class T>
void check_against_reference(const Size& size, bool add_v, bool add_v1, Stream stream) {
  const double rounding = tolerance_or_rounding<T>(3e-7);  // two products and a sum
  Mix<T> mix(size, add_v, 1.0);
  if (add_v1 != add_v) mix.dv1 = add_v1 ? random_vector<T>(size.numel(), 7) : poisoned<T>(size.numel());
  Mix<double> want(mix);
  mix.forward(stream);
  want.forward(reference);
  mix.backward(add_v, add_v1, stream);
  want.backward(add_v, add_v1, reference);
  check_close("out", mix.out, want.out, rounding);
  check_close("dv", mix.dv, want.dv, rounding);
  check_close("dv1", mix.dv1, want.dv1, rounding);
  // A sum of n numbers of either sign is about sqrt(n) / 3 in size, whatever is left of it by chance. A plain sum of
  // 2048 numbers in f32 errs by some 1e-6 of that, one in vector lanes by less.
  const double allowed = 3e-6 * std::max(1.0, std::sqrt(static_cast<double>(size.numel())) / 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(std::abs(static_cast<double>(mix.d_own[i]) - want.d_own[i]) <= allowed);
    CHECK(std::abs(static_cast<double>(mix.d_first[i]) - want.d_first[i]) <= allowed);
  }

  GatedMix<T> gated(size, add_v1, add_v, 1.0);
  GatedMix<double> gated_want(gated);
  gated.forward(stream);
  gated_want.forward(reference);
  gated.backward(add_v1, add_v, stream);
  gated_want.backward(add_v1, add_v, reference);
  check_close("gated out", gated.out, gated_want.out, rounding);
  check_close("gated dv1", gated.dv1, gated_want.dv1, rounding);
  check_close("dalpha", gated.dalpha, gated_want.dalpha, 1e-6);
}

}  // namespace

TEST_CASE_TEMPLATE("value_mix: the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (bool add_v : {false, true})
      for (bool add_v1 : {false, true}) {
        CAPTURES(size.D, add_v, add_v1);
        check_against_reference<T>(size, add_v, add_v1, Stream{backend});
      }
  });
}

TEST_CASE_TEMPLATE("value_mix: only the gradients that have data are written, and v is not needed without d_own", T,
                   float, bf16) {
  const Size size{1, 50, 3, 33};
  for (const Backend backend : backends_of<T>()) {
    const Stream stream{backend};
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
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    Mix<float> mix(size, false, 1.0);
    std::vector<float> d(3, 0.f);
    mix.d_own[2] = mix.d_first[1] = 0;
    mix.backward(false, false, stream);
    run_on(stream.backend,
           {mix.at(mix.dv), mix.at(mix.dv1), tensor_of(d), mix.at(mix.dout), mix.at(mix.v), mix.at(mix.v1),
            tensor_of(mix.own)},
           [](auto& t, Stream there) {
             value_mix_backward({t[0], false}, {t[1], false}, {t[2], 1}, {t[2], 1}, t[3], t[4], t[5], {t[6], 1},
                                {t[6], 1}, there);
           });
    CHECK(d[1] == doctest::Approx(mix.d_own[2] + mix.d_first[1]));
    CHECK(d[0] + d[2] == 0.f);
  }
}

TEST_CASE_TEMPLATE("value_mix: out may be v, and dv may be dout", T, float, bf16) {
  for (const Backend backend : backends_of<T>()) {
    const Stream stream{backend};
    for (const Size& size : backend == Backend::cuda ? gpu_sizes : sizes) {
      Mix<T> mix(size, false, 1.0), in_place(size, false, 1.0);
      mix.forward(stream);
      mix.backward(false, false, stream);
      in_place.backward(in_place.at(in_place.dout), false, false, stream);
      CHECK(in_place.dout == mix.dv);
      CHECK(in_place.dv1 == mix.dv1);
      CHECK(in_place.d_own == mix.d_own);
      CHECK(in_place.d_first == mix.d_first);
      in_place.forward(in_place.at(in_place.v), stream);
      CHECK(in_place.v == mix.out);

      GatedMix<T> gated(size, false, false, 1.0), gated_in_place(size, false, false, 1.0);
      gated.forward(stream);
      gated_in_place.forward(view(gated_in_place.v.data(), gated.shape), stream);
      CHECK(gated_in_place.v == gated.out);
    }
  }
}

TEST_CASE_TEMPLATE("value_mix: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  if (!available(Backend::cuda)) return;
  const Size size{1, 9, 2, 16};
  const int64_t n = size.numel();
  Mix<T> mix(size, false, 1.0);
  GatedMix<T> gated(size, false, false, 1.0);
  mix.forward(fast), mix.backward(false, false, fast);
  gated.forward(fast), gated.backward(false, false, fast);
  const auto v = one_later(mix.v), v1 = one_later(mix.v1), dout = one_later(mix.dout);
  const auto gated_dout = one_later(gated.dout);
  auto out = poisoned<T>(n + 1), dv = out, dv1 = out, gated_out = out, gated_dv1 = out;
  auto dalpha = poisoned<float>(size.rows()), d_own = random_vector<float>(3, 8), d_first = random_vector<float>(3, 9);
  run_on(Backend::cuda,
         {tensor_of(out), tensor_of(dv), tensor_of(dv1), tensor_of(gated_out), tensor_of(gated_dv1), tensor_of(v),
          tensor_of(v1), tensor_of(dout), tensor_of(gated_dout), tensor_of(mix.own), tensor_of(mix.first),
          tensor_of(d_own), tensor_of(d_first), view(gated.alpha.data(), gated.rows), view(dalpha, gated.rows)},
         [&](auto t, Stream stream) {
           for (size_t i = 0; i < 9; ++i) t[i] = from_second<T>(t[i], mix.shape);
           value_mix_forward(t[0], t[5], t[6], {t[9], 2}, {t[10], 1}, stream);
           value_mix_backward({t[1], false}, {t[2], false}, {t[11], 2}, {t[12], 1}, t[7], t[5], t[6], {t[9], 2},
                              {t[10], 1}, stream);
           gated_mix_forward(t[3], t[5], t[6], t[13], stream);
           gated_mix_backward({t[4], false}, {t[14], false}, t[8], t[6], t[13], stream);
         });
  const auto check = [&](const char* what, const std::vector<T>& got, const std::vector<T>& want) {
    check_close(what, one_earlier(got), convert<double>(want), tolerance_or_rounding<T>(3e-7));
  };
  check("out", out, mix.out), check("dv", dv, mix.dv), check("dv1", dv1, mix.dv1);
  check("gated out", gated_out, gated.out), check("gated dv1", gated_dv1, gated.dv1);
  check_close("dalpha", dalpha, convert<double>(gated.dalpha), 1e-6);
  check_close("d_own", d_own, convert<double>(mix.d_own), 2e-6);
  check_close("d_first", d_first, convert<double>(mix.d_first), 2e-6);
}

namespace {
template <class S>
void check_scale(double out_tolerance, double dinp_tolerance, Backend backend) {
  for (int64_t n : {1, 3, 24, 1000, 1001, 40001}) {  // the last: more blocks of a GPU than a warp has lanes
    const auto inp = random_vector<S>(n, 1), dout = random_vector<S>(n, 2);
    const auto factor = random_vector<float>(1, 3);
    for (bool add : {false, true}) {
      auto out = poisoned<S>(n), dinp = add ? random_vector<S>(n, 4) : poisoned<S>(n);
      std::vector<float> dfactor{0.5f};
      auto out64 = poisoned<double>(n), dinp64 = convert<double>(dinp), dfactor64 = convert<double>(dfactor);
      const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout), factor64 = convert<double>(factor);
      run_on(backend,
             {tensor_of(out), tensor_of(dinp), tensor_of(dfactor), tensor_of(dout), tensor_of(inp), tensor_of(factor)},
             [&](auto& t, Stream stream) {
               scale_forward(t[0], t[4], t[5], stream);
               scale_backward({t[1], add}, t[2], t[3], t[4], t[5], stream);
             });
      scale_forward(tensor_of(out64), tensor_of(inp64), tensor_of(factor64), reference);
      scale_backward({tensor_of(dinp64), add}, tensor_of(dfactor64), tensor_of(dout64), tensor_of(inp64),
                     tensor_of(factor64), reference);
      check_close("out", out, out64, out_tolerance);
      check_close("dinp", dinp, dinp64, dinp_tolerance);
      check_close("dfactor", dfactor, dfactor64, n < 2000 ? 2e-6 : 1e-5);  // of products that mostly cancel
    }
  }
}
}  // namespace

TEST_CASE("value_mix: scale, set and added") {
  for (const Backend backend : fast_backends()) {
    check_scale<float>(1e-7, 3e-7, backend);
    check_scale<bf16>(0x1p-8, 0x1p-8, backend);
  }
}

TEST_CASE_TEMPLATE("value_mix: own 1 and first 0, and a closed gate, are exactly no mixing", T, float, bf16) {
  const Size size{1, 40, 2, 33};
  for (const Backend backend : fast_backends()) {
    Mix<T> mix(size, false, 1.0);
    mix.own[2] = 1, mix.first[1] = 0;
    mix.forward(Stream{backend});
    mix.backward(false, false, Stream{backend});
    CHECK(mix.out == mix.v);
    CHECK(mix.dv == mix.dout);
    GatedMix<T> gated(size, false, false, 1.0);
    std::fill(gated.alpha.begin(), gated.alpha.end(), 0.f);
    gated.forward(Stream{backend});
    CHECK(gated.out == gated.v);
  }
}

TEST_CASE_TEMPLATE("value_mix: NaN shows, and the threads do not matter", T, float, bf16) {
  auto run = [&](const Size& size, size_t where, Stream stream) {  // where: in v1, or 0
    Mix<T> mix(size, false, 1.0);
    GatedMix<T> gated(size, false, false, 1.0);
    if (where > 0) mix.v1[where] = gated.v1[where] = mix.dout[7] = std::numeric_limits<float>::quiet_NaN();
    mix.forward(stream);
    mix.backward(false, false, stream);
    gated.forward(stream);
    gated.backward(false, false, stream);
    return flat(mix.out, mix.dv, mix.dv1, mix.d_own, mix.d_first, gated.out, gated.dv1, gated.dalpha);
  };
  check_same_bits_on_any_threads<float>([&] { return run({2, 1500, 2, 64}, 0, fast); });
  for (const Backend backend : fast_backends()) {
    const Size size{2, backend == Backend::cuda ? 70 : 1500, 2, 64};
    const size_t n = static_cast<size_t>(size.numel()), gated = 3 * n + 6, where = n / 2 + 100;
    // In out, dv, dv1, d_own[2], d_first[1]; in the gated out and dalpha.
    const std::vector<size_t> want{
        where, n + 7, 2 * n + 7, 3 * n + 2, 3 * n + 4, gated + where, gated + 2 * n + where / 64};
    CHECK(nans_of(run(size, where, Stream{backend})) == want);
  }
}

TEST_CASE("value_mix: wrong shapes and indices are errors") {
  const std::vector<float> x(12);
  const Tensor a = view(x, {1, 2, 2, 3}), b = view(x, {11}), w = view(x, {3});
  CHECK_THROWS_AS(value_mix_forward(a, a, b, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 3}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(a, a, a, {w, 0}, {w, -1}, fast), Error);
  const Grad d{a, false};
  CHECK_THROWS_AS(value_mix_backward(d, d, {w, 0}, {}, a, {}, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_backward(d, d, {w, 3}, {}, a, a, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(a, a, a, w, fast), Error);
  CHECK_THROWS_AS(gated_mix_backward(d, {w, false}, a, a, view(x, {1, 2, 2}), fast), Error);
  CHECK_THROWS_AS(scale_forward(a, a, w, fast), Error);
  const std::vector<bf16> half(12);
  const Tensor n = view(half, a.shape), few = view(half, {3});
  CHECK_THROWS_AS(value_mix_forward(n, n, a, {w, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(value_mix_forward(n, n, n, {few, 0}, {w, 0}, fast), Error);
  CHECK_THROWS_AS(gated_mix_forward(n, n, n, view(half, {1, 2, 2}), fast), Error);
  CHECK_THROWS_AS(scale_backward(d, w, a, a, view(x, {1}), fast), Error);
}
