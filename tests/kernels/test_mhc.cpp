#include "kernels/depth/streams/mhc.h"

#include "tests/support/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
};

struct MhcVariant {
  const char* name;
  Mixing mixing;
  bool reads = true;     // or the next sublayer does, by these coefficients
  bool squared = false;  // the squares are given
  int64_t iterations = 20;
};
const std::vector<MhcVariant> kinds = {{"merge", Mixing::merge},
                                       {"merge, squared", Mixing::merge, true, true},
                                       {"identity", Mixing::identity},
                                       {"permutations", Mixing::permutations},
                                       {"sinkhorn", Mixing::sinkhorn},
                                       {"sinkhorn of one step", Mixing::sinkhorn, true, true, 1},
                                       {"identity, no read", Mixing::identity, false},
                                       {"permutations, no read", Mixing::permutations, false, true},
                                       {"sinkhorn, no read", Mixing::sinkhorn, false, true, 3}};
bool fits(const MhcVariant& kind, int64_t E) {
  return kind.mixing != Mixing::permutations || E <= max_permuted_streams;
}

// What a read takes and leaves, forward and backward. What the kind has none of is empty.
template <class T>
struct Around {
  using P = AccumulationType<T>;
  Size s;
  MhcVariant kind;
  MhcForm form;
  std::vector<T> streams, dout, out, dstreams;
  std::vector<P> squares, dcoef, fn, base, scale;        // given
  std::vector<P> coef, pre, z, rho, dfn, dbase, dscale;  // computed; the last three are added to
  auto members() {
    return std::tie(streams, dout, out, dstreams, squares, dcoef, fn, base, scale, coef, pre, z, rho, dfn, dbase,
                    dscale);
  }

  Around(const Size& size, const MhcVariant& of_kind, double spread = 1)
      : s(size), kind(of_kind), form{kind.mixing, kind.iterations, 1e-3, 1e-4} {
    const int64_t N = s.rows(), E = s.E, M = mhc_rows(form.mixing, E), G = mhc_groups(form.mixing);
    const int64_t coefs = G > 1 ? N * E * (E + 2) : 0, outs = kind.reads ? N * s.C : 0;
    streams = random_vector<T>(N * E * s.C, 1), dout = random_vector<T>(outs, 2);
    out = poisoned<T>(outs), dstreams = poisoned<T>(N * E * s.C);
    dcoef = random_vector<P>(coefs, 4);
    if (kind.squared) take_squares();
    // Logits of this spread: z is of the size of fn's rows.
    fn = random_vector<P>(M * E * s.C, 6, 1.7 / std::sqrt(static_cast<double>(E * s.C)));
    base = random_vector<P>(M, 7, spread), scale = random_vector<P>(G, 8);
    for (auto& x : scale) x = P(spread) * (x + P(1.5));
    coef = poisoned<P>(coefs), pre = poisoned<P>(N * E), z = poisoned<P>(N * M), rho = poisoned<P>(N);
    dfn = random_vector<P>(M * E * s.C, 9), dbase = random_vector<P>(M, 10), dscale = random_vector<P>(G, 11);
  }
  template <class From>
  explicit Around(Around<From>& from) : s(from.s), kind(from.kind), form(from.form) {
    convert_members(*this, from);
  }
  void take_squares() {
    squares.assign(static_cast<size_t>(s.rows()), P(0));
    const size_t width = static_cast<size_t>(s.E * s.C);
    for (size_t i = 0; i < streams.size(); ++i) squares[i / width] += P(streams[i]) * P(streams[i]);
  }

  std::vector<Tensor> tensors() const {
    const auto [B, T_, E, C] = s;
    const int64_t M = mhc_rows(form.mixing, E), G = mhc_groups(form.mixing);
    const Shape all{B, T_, E, C}, x{B, T_, C}, of_pre{B, T_, E}, of_coef{B, T_, E, E + 2};
    return {tensor_of(streams, all),      tensor_of(squares, Shape{B, T_}), tensor_of(out, x),
            tensor_of(coef, of_coef),     tensor_of(pre, of_pre),           tensor_of(z, Shape{B, T_, M}),
            tensor_of(rho, Shape{B, T_}), tensor_of(fn, Shape{M, E * C}),   tensor_of(base, Shape{M}),
            tensor_of(scale, Shape{G}),   tensor_of(dfn, Shape{M, E * C}),  tensor_of(dbase, Shape{M}),
            tensor_of(dscale, Shape{G}),  tensor_of(dstreams, all),         tensor_of(dout, x),
            tensor_of(dcoef, of_coef)};
  }
  static MhcRead<Tensor> read(const std::vector<Tensor>& t) { return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}; }
  void forward(Stream stream) {
    run_on(stream.backend, tensors(), [&](auto& t, Stream there) {
      mhc_read_forward(read(t), {t[7], t[8], t[9]}, form, there);
    });
  }
  void backward(bool accumulate, Stream stream) {
    run_on(stream.backend, tensors(), [&](auto& t, Stream there) {
      mhc_read_backward({{t[13], accumulate}, t[14], t[15]}, {t[10], t[11], t[12]}, read(t), {t[7], t[8], t[9]}, form,
                        there);
    });
  }
};

// <dout, out> + <dcoef, coef>, by the reference forward.
Complex loss(const Around<double>& a, const std::vector<std::vector<Complex>>& given) {
  Around<Complex> c(a.s, a.kind);
  c.form = a.form;
  c.streams = given[0], c.fn = given[1], c.base = given[2], c.scale = given[3];
  if (a.kind.squared) c.take_squares();
  const auto data = [](auto& v) { return v.empty() ? nullptr : v.data(); };
  mhc_read_forward_ref<Complex>(
      {data(c.streams), data(c.squares), data(c.out), data(c.coef), data(c.pre), data(c.z), data(c.rho)},
      {data(c.fn), data(c.base), data(c.scale)}, c.form, a.s.rows(), a.s.E, a.s.C);
  return dot(a.dout, c.out) + dot(a.dcoef, c.coef);
}

template <class T>
std::vector<float> all_results(Around<T>& a) {
  return joined(flat(a.out), flat(a.coef), flat(a.pre), flat(a.z), flat(a.dstreams), flat(a.dfn), flat(a.dbase),
                flat(a.dscale));
}

// comb[k,i] of a token.
template <class T>
double comb(const Around<T>& a, int64_t n, int64_t k, int64_t i) {
  return static_cast<double>(a.coef[static_cast<size_t>((n * a.s.E + k) * (a.s.E + 2) + 1 + i)]);
}
template <class T>
double sum_of(const Around<T>& a, int64_t n, int64_t line, bool column) {
  double sum = 0;
  for (int64_t i = 0; i < a.s.E; ++i) sum += column ? comb(a, n, i, line) : comb(a, n, line, i);
  return sum;
}

}  // namespace

TEST_CASE("mhc: reference backward is the derivative of the reference forward") {
  for (const MhcVariant& kind : kinds)
    for (const int64_t E : {1, 2, 3, 4})
      for (const double spread : {0.1, 1.0, 4.0}) {
        if (!fits(kind, E)) continue;
        CAPTURES(kind.name, E, spread);
        Around<double> a({1, 3, E, 5}, kind, spread);
        std::vector<std::vector<Complex>> given;
        for (const auto* x : {&a.streams, &a.fn, &a.base, &a.scale}) given.push_back(convert<Complex>(*x));
        const auto want = [&](size_t i, const std::vector<double>& x) {
          return complex_step(x, [&](auto& changed) {
            auto all = given;
            all[i] = changed;
            return loss(a, all);
          });
        };
        const auto before = std::tuple{a.dfn, a.dbase, a.dscale};
        a.forward(reference);
        a.backward(false, reference);
        const auto added = [](std::vector<double> after, const std::vector<double>& from) {
          for (size_t i = 0; i < after.size(); ++i) after[i] -= from[i];
          return after;
        };
        check_close("dstreams", a.dstreams, want(0, a.streams), 1e-11);
        check_close("dfn", added(a.dfn, std::get<0>(before)), want(1, a.fn), 1e-10);
        check_close("dbase", added(a.dbase, std::get<1>(before)), want(2, a.base), 1e-10);
        check_close("dscale", added(a.dscale, std::get<2>(before)), want(3, a.scale), 1e-10);
      }
}

TEST_CASE_TEMPLATE("mhc: the fast backends equal the reference, set and added", S, float, bf16) {
  // Ragged chunks, tokens and columns.
  const std::vector<Size> of_cpu{{1, 1, 1, 1},    {1, 3, 2, 33}, {2, 70, 4, 20}, {1, 17, 3, 40},
                                 {3, 100, 4, 64}, {1, 9, 5, 21}, {1, 5, 8, 67},  {1, 300, 2, 16}};
  const std::vector<Size> of_gpu{{1, 3, 3, 40}, {1, 37, 4, 24}, {1, 2, 2, 33},
                                 {1, 70, 1, 8}, {1, 5, 8, 20},  {1, 2, 6, 16}};
  for (const MhcVariant& kind : kinds)
    for_sizes(of_cpu, of_gpu, [&](Backend backend, const Size& s) {
      if (!fits(kind, s.E)) return;
      for (const bool accumulate : {false, true}) {
        CAPTURES(kind.name, s.E, s.C, s.T, accumulate);
        Around<S> a(s, kind);
        if (accumulate) a.dstreams = random_vector<S>(s.rows() * s.E * s.C, 12);
        Around<double> b(a);
        a.forward(Stream{backend}), b.forward(reference);
        a.backward(accumulate, Stream{backend}), b.backward(accumulate, reference);
        // Sums of E C products, which may cancel, some ulps (6e-8) each. In bf16 a GPU multiplies with two parts of
        // fn, and of its gradient's factor, which together keep 16 bits.
        const bool split = backend == Backend::cuda && std::is_same_v<S, bf16>;
        const double exact = split ? 3e-5 : 4e-6;
        check_close("rho", a.rho, b.rho, 1e-6);
        check_close("z", a.z, b.z, exact);
        check_close("pre", a.pre, b.pre, exact);
        check_close("coef", a.coef, b.coef, 3 * exact);
        check_close("out", a.out, b.out, tolerance_or_rounding<S>(exact));
        // Of one number in all the norm leaves only what norm_eps does: the rest, of size 1, cancels.
        check_close("dstreams", a.dstreams, b.dstreams, tolerance_or_rounding<S>(3e-5), s.E * s.C == 1 ? 1e-7 : 0);
        check_close("dfn", a.dfn, b.dfn, 10 * exact);
        check_close("dbase", a.dbase, b.dbase, 10 * exact);
        check_close("dscale", a.dscale, b.dscale, 10 * exact);
      }
    });
}

TEST_CASE("mhc: what comb promises, and what it does not") {
  for (const Backend backend : all_backends())
    for (const double spread : {1.0, 30.0}) {
      CAPTURES(backend, spread);
      Around<float> sinkhorn({1, 40, 4, 8}, {"sinkhorn", Mixing::sinkhorn}, spread);
      Around<float> permutations({1, 40, 4, 8}, {"permutations", Mixing::permutations}, spread);
      Around<float> identity({1, 40, 4, 8}, {"identity", Mixing::identity}, spread);
      sinkhorn.form.eps = 1e-6;
      double worst_row = 0;
      for (Around<float>* a : {&sinkhorn, &permutations, &identity}) a->forward(Stream{backend});
      for (int64_t n = 0; n < 40; ++n)
        for (int64_t i = 0; i < 4; ++i) {
          CHECK(sum_of(sinkhorn, n, i, true) == doctest::Approx(1).epsilon(3e-6));  // columns come last
          worst_row = std::max(worst_row, std::abs(sum_of(sinkhorn, n, i, false) - 1));
          for (const bool column : {false, true})
            CHECK(sum_of(permutations, n, i, column) == doctest::Approx(1).epsilon(1e-6));
          for (int64_t k = 0; k < 4; ++k) CHECK(comb(identity, n, k, i) == (k == i ? 1 : 0));
        }
      // Twenty iterations do not converge where logits are peaked: nobody may count on the rows.
      if (spread > 1) CHECK(worst_row > 1e-3);
      else CHECK(worst_row < 0.1);
    }
}

TEST_CASE("mhc: comb[k,i] goes from stream k to stream i, also through the write") {
  // The permutation 0 -> 1 -> 2 -> 0 of three streams is number 3 of six, [1 2 0].
  CHECK(permuted(3, 3, 0) == 1);
  CHECK(permuted(3, 3, 1) == 2);
  CHECK(permuted(3, 3, 2) == 0);
  for (const Backend backend : all_backends()) {
    Around<float> a({1, 2, 3, 4}, {"permutations", Mixing::permutations});
    std::fill(a.scale.begin(), a.scale.end(), 0.f);
    std::fill(a.base.begin(), a.base.end(), -60.f);  // post is 0
    a.base[6 + 3] = 60;
    a.forward(Stream{backend});
    auto next = poisoned<float>(24);
    const std::vector<float> y(8, 5.f);
    run_on(backend,
           {view(next, {1, 2, 3, 4}), view(a.streams, {1, 2, 3, 4}), view(a.coef, {1, 2, 3, 5}), view(y, {1, 2, 4})},
           [](auto& t, Stream there) {
             hyper_write_forward({t[0], {}, {}}, t[1], t[2], t[3], there);
           });
    for (size_t n = 0; n < 2; ++n)
      for (size_t k = 0; k < 3; ++k)
        for (size_t c = 0; c < 4; ++c)
          CHECK(next[(n * 3 + (k + 1) % 3) * 4 + c] == doctest::Approx(a.streams[(n * 3 + k) * 4 + c]));
  }
}

TEST_CASE("mhc: permutations are in lexicographic order") {
  for (int64_t E = 1; E <= max_permuted_streams; ++E) {
    std::vector<int64_t> want(static_cast<size_t>(E));
    for (int64_t i = 0; i < E; ++i) want[static_cast<size_t>(i)] = i;
    for (int64_t p = 0; p < permutations_of(E); ++p) {
      for (int64_t k = 0; k < E; ++k) CHECK(permuted(p, E, k) == want[static_cast<size_t>(k)]);
      std::next_permutation(want.begin(), want.end());
    }
  }
}

TEST_CASE("mhc: equal streams stay equal, and nothing tells them apart, where all their coefficients are") {
  // The fixed point of a symmetric start: fn 0, equal biases. The gradients of comb's logits are then 0.
  for (const Backend backend : all_backends()) {
    Around<float> a({1, 3, 4, 8}, {"sinkhorn", Mixing::sinkhorn});
    std::fill(a.fn.begin(), a.fn.end(), 0.f), std::fill(a.base.begin(), a.base.end(), 0.3f);
    std::fill(a.dbase.begin(), a.dbase.end(), 0.f);
    for (size_t at = 0; at < a.streams.size(); ++at) a.streams[at] = a.streams[at / 32 * 32 + at % 8];
    // Each target's gradient is that of the others: dcomb[k,i] = <streams_k, dnext_i>.
    for (size_t at = 0; at < a.dcoef.size(); ++at)
      a.dcoef[at] = at % 6 == 5 ? a.dcoef[at / 24 * 24 + 5] : a.dcoef[at / 24 * 24 + 1];
    a.forward(Stream{backend});
    a.backward(false, Stream{backend});
    for (size_t m = 8; m < 24; ++m) CHECK(std::abs(a.dbase[m]) < 1e-6f);
    for (size_t m = 5; m < 8; ++m) CHECK(a.dbase[m] == doctest::Approx(a.dbase[4]));
  }
}

TEST_CASE_TEMPLATE("mhc: logits far beyond what exp can hold, and a NaN that stays in its token", T, float, bf16) {
  for (const Backend backend : fast_backends())
    for (const MhcVariant& kind : kinds) {
      CAPTURES(kind.name, backend);
      Around<T> a({1, 20, 4, 16}, kind, 1e6);
      a.forward(Stream{backend});
      a.backward(false, Stream{backend});
      for (const float x : all_results(a)) CHECK(std::isfinite(x));
      Around<T> b({1, 20, 4, 16}, kind);
      b.streams[5 * 64 + 17] = T(NAN);
      if (kind.squared) b.take_squares();
      b.forward(Stream{backend});
      b.backward(false, Stream{backend});
      for (size_t i = 0; i < b.dstreams.size(); ++i) CHECK(is_nan(static_cast<float>(b.dstreams[i])) == (i / 64 == 5));
      for (size_t i = 0; i < b.coef.size(); ++i) {
        const bool computed = kind.mixing != Mixing::identity || i % 6 == 0 || i % 6 == 5;
        CHECK(is_nan(b.coef[i]) == (i / 24 == 5 && computed));
      }
      CHECK(is_nan(b.dbase[0]));
    }
}

TEST_CASE_TEMPLATE("mhc: the same bits on any number of threads", T, float, bf16) {
  for (const MhcVariant& kind : kinds)
    check_same_bits_on_any_threads<float>([&] {
      Around<T> a({2, 90, 4, 33}, kind);
      a.forward(fast);
      a.backward(false, fast);
      return all_results(a);
    });
}
