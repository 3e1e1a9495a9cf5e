// The write of hyper-connections that also reads for the next sublayer and takes the streams' squares, as mHC has it.
// The plain one is in test_hyper.cpp.
#include "kernels/depth/streams/hyper.h"
#include "tests/support/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
};

template <class T>
struct Write {
  using P = AccumulationType<T>;
  Size s;
  bool behind;                           // whether next has a gradient, too
  std::vector<T> streams, y, dnext, dx;  // given, as is coef
  std::vector<T> next, x, dstreams, dy;  // computed
  std::vector<P> coef, squares, dcoef;
  auto members() { return std::tie(streams, y, dnext, dx, next, x, dstreams, dy, coef, squares, dcoef); }

  explicit Write(const Size& size, bool next_has_gradient = true) : s(size), behind(next_has_gradient) {
    const int64_t N = s.rows(), all = N * s.E * s.C, coefs = N * s.E * (s.E + 2);
    streams = random_vector<T>(all, 1), y = random_vector<T>(N * s.C, 2), coef = random_vector<P>(coefs, 3);
    dnext = random_vector<T>(behind ? all : 0, 4), dx = random_vector<T>(N * s.C, 5);
    next = poisoned<T>(all), x = poisoned<T>(N * s.C), squares = poisoned<P>(N);
    dstreams = poisoned<T>(all), dy = poisoned<T>(N * s.C), dcoef = poisoned<P>(coefs);
  }
  template <class From>
  explicit Write(Write<From>& from) : s(from.s), behind(from.behind) {
    convert_members(*this, from);
  }

  std::vector<Tensor> tensors() const {
    const auto [B, T_, E, C] = s;
    const Shape all{B, T_, E, C}, one{B, T_, C}, of_coef{B, T_, E, E + 2};
    return {tensor_of(next, all),     tensor_of(x, one),         tensor_of(squares, Shape{B, T_}),
            tensor_of(streams, all),  tensor_of(coef, of_coef),  tensor_of(y, one),
            tensor_of(dstreams, all), tensor_of(dcoef, of_coef), tensor_of(dy, one),
            tensor_of(dnext, all),    tensor_of(dx, one)};
  }
  void forward(Stream stream) {
    run_on(stream.backend, tensors(), [](auto& t, Stream there) {
      hyper_write_forward({t[0], t[1], t[2]}, t[3], t[4], t[5], there);
    });
  }
  void backward(bool accumulate, bool accumulate_y, Stream stream) {
    run_on(stream.backend, tensors(), [=](auto& t, Stream there) {
      hyper_write_backward({t[6], accumulate}, t[7], {t[8], accumulate_y}, {t[0], t[9], t[10]}, t[3], t[4], t[5],
                           there);
    });
  }
};

// x and squares of next as it is.
std::pair<std::vector<double>, std::vector<double>> read_of(const Write<double>& a) {
  const auto [N, E, C] = std::tuple{a.s.rows(), a.s.E, a.s.C};
  std::vector<double> x(a.x.size()), squares(a.squares.size());
  for (int64_t row = 0; row < N * E; ++row)
    for (int64_t c = 0; c < C; ++c) {
      const double next = a.next[static_cast<size_t>(row * C + c)];
      x[static_cast<size_t>(row / E * C + c)] += a.coef[static_cast<size_t>(row * (E + 2))] * next;
      squares[static_cast<size_t>(row / E)] += next * next;
    }
  return {x, squares};
}

// <dnext, next> + <dx, x>, by the reference forward.
Complex loss(const Write<double>& a, const std::vector<std::vector<Complex>>& given) {
  Write<Complex> c(a.s);
  hyper_write_forward_ref<Complex>({c.next.data(), c.x.data(), nullptr}, given[0].data(), given[1].data(),
                                   given[2].data(), a.s.rows(), a.s.E, a.s.C);
  return (a.behind ? dot(a.dnext, c.next) : Complex(0)) + dot(a.dx, c.x);
}

}  // namespace

TEST_CASE("hyper_write: the reference backward of a write that reads is the derivative of its forward") {
  for (const int64_t E : {1, 2, 3, 4})
    for (const bool behind : {false, true}) {
      CAPTURES(E, behind);
      Write<double> a({1, 3, E, 5}, behind);
      std::vector<std::vector<Complex>> given;
      for (const auto* x : {&a.streams, &a.coef, &a.y}) given.push_back(convert<Complex>(*x));
      const auto want = [&](size_t i, const std::vector<double>& x) {
        return complex_step(x, [&](auto& changed) {
          auto all = given;
          all[i] = changed;
          return loss(a, all);
        });
      };
      a.forward(reference);
      a.backward(false, false, reference);
      check_close("dstreams", a.dstreams, want(0, a.streams), 1e-11);
      check_close("dcoef", a.dcoef, want(1, a.coef), 1e-11);
      check_close("dy", a.dy, want(2, a.y), 1e-11);
    }
}

TEST_CASE_TEMPLATE("hyper_write: the fast backends equal the reference, set and added", S, float, bf16) {
  // As for the plain write: sums of so many terms, and one rounding of what is stored.
  const double exact = 3e-6, rounding = std::is_same_v<S, bf16> ? 0x1p-8 : 0;
  const std::vector<Size> of_cpu{{1, 1, 1, 1},    {1, 3, 1, 33}, {2, 5, 2, 16}, {1, 7, 3, 40},  {3, 100, 4, 67},
                                 {1, 200, 4, 64}, {1, 5, 5, 21}, {1, 9, 6, 32}, {2, 65, 7, 18}, {1, 4, 8, 259}};
  const std::vector<Size> of_gpu{{1, 3, 3, 40}, {1, 5, 4, 24},  {1, 2, 2, 33}, {1, 33, 4, 24},
                                 {1, 2, 6, 32}, {1, 1, 7, 259}, {1, 9, 8, 32}, {1, 2, 1, 72}};
  for_sizes(of_cpu, of_gpu, [&](Backend backend, const Size& s) {
    for (const bool behind : {false, true})
      for (const bool accumulate : {false, true}) {
        CAPTURES(s.E, s.C, behind, accumulate);
        Write<S> a(s, behind);
        if (accumulate) a.dstreams = random_vector<S>(static_cast<int64_t>(a.dstreams.size()), 6);
        else a.dy = random_vector<S>(static_cast<int64_t>(a.dy.size()), 7);
        Write<double> b(a);
        a.forward(Stream{backend}), b.forward(reference);
        check_close("next", a.next, b.next, std::max(exact, rounding));
        b.next = convert<double>(a.next);
        const auto [x, squares] = read_of(b);
        check_close("x", a.x, x, std::max(exact, rounding));
        check_close("squares", a.squares, squares, exact);
        a.backward(accumulate, !accumulate, Stream{backend}), b.backward(accumulate, !accumulate, reference);
        check_close("dcoef", a.dcoef, b.dcoef, exact);
        check_close("dy", a.dy, b.dy, std::max(exact, rounding));
        check_close("dstreams", a.dstreams, b.dstreams, std::max(exact, rounding));
      }
  });
}

TEST_CASE_TEMPLATE("hyper_write: next has the bits of a plain write", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    Write<T> a({1, 5, 4, 40}), plain({1, 5, 4, 40});
    a.forward(Stream{backend});
    run_on(backend, plain.tensors(), [](auto& t, Stream there) {
      hyper_write_forward({t[0], {}, {}}, t[3], t[4], t[5], there);
    });
    CHECK(flat(a.next) == flat(plain.next));
  }
}

TEST_CASE_TEMPLATE("hyper_write: a NaN stays in its token", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    Write<T> a({1, 6, 4, 24});
    a.streams[2 * 96 + 30] = T(NAN);
    a.forward(Stream{backend});
    a.backward(false, false, Stream{backend});
    for (size_t n = 0; n < 6; ++n) {
      CHECK(is_nan(static_cast<float>(a.x[n * 24 + 6])) == (n == 2));
      CHECK(is_nan(a.squares[n]) == (n == 2));
      CHECK(is_nan(a.dcoef[n * 24]) == (n == 2));
    }
  }
}
