#include "kernels/cpu/gemm_bf16.h"

#include "kernels/cpu/amx.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t M, N, K;
};
struct Form {
  bool a_k_inner, b_k_inner;
};
const std::vector<Form> forms{{true, true}, {true, false}, {false, false}, {false, true}};

// Runs `body` on every unit this machine has, and ends on the best.
template <class F>
void on_every_unit(F&& body) {
  for (MatrixUnit unit : {MatrixUnit::none, MatrixUnit::avx512_bf16, MatrixUnit::amx}) {
    use_matrix_unit(unit);
    if (matrix_unit() != unit) continue;
    CAPTURE(static_cast<int>(unit));
    body();
  }
}

// Operands with `gap` elements between one line and the next.
template <class T>
struct Case {
  Size size;
  Form form;
  int64_t gap;
  std::vector<T> a, b;
  Case(const Size& s, const Form& f, int64_t g = 0) : size(s), form(f), gap(g) {
    const int64_t a_lines = f.a_k_inner ? s.M : s.K, b_lines = f.b_k_inner ? s.N : s.K;
    a = random_vector<T>(a_lines * a_line(), 1);
    b = random_vector<T>(b_lines * b_line(), 2);
    // What lies between must not be used.
    for (int64_t i = 0; i < a_lines * gap; ++i)
      a[static_cast<size_t>((i / gap + 1) * a_line() - 1 - i % gap)] = T(std::nanf(""));
    for (int64_t i = 0; i < b_lines * gap; ++i)
      b[static_cast<size_t>((i / gap + 1) * b_line() - 1 - i % gap)] = T(std::nanf(""));
  }
  int64_t a_line() const { return (form.a_k_inner ? size.K : size.M) + gap; }
  int64_t b_line() const { return (form.b_k_inner ? size.K : size.N) + gap; }
  int64_t a_row() const { return form.a_k_inner ? a_line() : 1; }
  int64_t a_col() const { return form.a_k_inner ? 1 : a_line(); }
  int64_t b_row() const { return form.b_k_inner ? 1 : b_line(); }
  int64_t b_col() const { return form.b_k_inner ? b_line() : 1; }

  template <class C>
  std::vector<C> run(const std::vector<C>& before, bool accumulate) const {
    std::vector<C> c = accumulate ? before : poisoned<C>(size.M * size.N);
    const std::vector<GemmProduct<C, T>> product{
        {c.data(), {a.data(), a_row(), a_col()}, {b.data(), b_row(), b_col()}, size.N, size.K, accumulate}};
    if constexpr (std::is_same_v<T, bf16>) gemm_rows_bf16(product, size.M);
    else gemm_rows_bf16x3(product, size.M);
    return c;
  }
  std::vector<double> exact() const {
    std::vector<double> c(static_cast<size_t>(size.M * size.N));
    for (int64_t i = 0; i < size.M; ++i) {
      for (int64_t j = 0; j < size.N; ++j) {
        const T *x = a.data() + i * a_row(), *y = b.data() + j * b_col();
        double sum = 0;
        for (int64_t k = 0; k < size.K; ++k)
          sum += static_cast<double>(x[k * a_col()]) * static_cast<double>(y[k * b_row()]);
        c[static_cast<size_t>(i * size.N + j)] = sum;
      }
    }
    return c;
  }
};

// Float sums of products that are exact in float, as in test_matmul.cpp; with bf16 results, rounding them dominates.
template <class C>
double tolerance(int64_t K) {
  return 5 * 0x1p-24 * std::sqrt(static_cast<double>(K + 1)) + (std::is_same_v<C, bf16> ? 0x1p-8 : 0);
}
// Splitting drops low * low and rounds low: each at most 2^-16 of a product, of either sign.
constexpr double split_tolerance = 4e-5;

template <class C, class T>
void check(const Case<T>& x, std::vector<double> want, double allowed) {
  check_close("c", x.template run<C>({}, false), want, allowed);
  const auto before = random_vector<C>(x.size.M * x.size.N, 3);
  for (size_t i = 0; i < want.size(); ++i) want[i] += static_cast<double>(before[i]);
  check_close("c added to", x.template run<C>(before, true), want, allowed);
}
void check_all(const Size& size, const Form& form, int64_t gap) {
  CAPTURE(size.M);
  CAPTURE(size.N);
  CAPTURE(size.K);
  CAPTURE(form.a_k_inner);
  CAPTURE(form.b_k_inner);
  const Case<bf16> x(size, form, gap);
  const Case<float> y(size, form, gap);
  const auto want = x.exact(), want_split = y.exact();
  on_every_unit([&] {
    check<float>(x, want, tolerance<float>(size.K));
    check<bf16>(x, want, tolerance<bf16>(size.K));
    check<float>(y, want_split, split_tolerance + tolerance<float>(size.K));
  });
}

const std::vector<Size> sizes{
    {1, 1, 1},       {17, 1, 33},      {1, 33, 17},      {33, 17, 1},  {2, 3, 5},    {16, 16, 32},  {32, 32, 64},
    {31, 65, 63},    {96, 64, 96},     {70, 40, 129},    {64, 1, 320}, {5, 400, 31}, {33, 47, 700},  // several depths
    {40, 36, 4200},  {513, 3, 4097},                      // sums kept while K passes
    {35, 1060, 40},  {20, 400, 2050},                     // several blocks of columns
    {300, 330, 700}, {260, 254, 1500}, {140, 1100, 300},  // larger than a cache, packed aside
};

}  // namespace

TEST_CASE("gemm_bf16: every unit, form and odd size equals the exact product, set and added") {
  for (const Size& size : sizes) {
    for (const Form& form : forms) check_all(size, form, size.K % 3);
  }
}

TEST_CASE("gemm_bf16: every height and width of an edge tile, every length of a last step") {
  for (int64_t n = 1; n <= 66; ++n) {
    check_all({n, 67 - n, 35}, forms[static_cast<size_t>(n % 4)], 0);
    check_all({34, 18, n}, forms[static_cast<size_t>(n % 4)], n % 2);
  }
}

TEST_CASE("gemm_bf16: a sum is rounded once, after c's old value was added") {
  on_every_unit([] {
    // Products of 2^-8: alone each would vanish beside 256.
    const std::vector<bf16> a(static_cast<size_t>(40 * 5000), bf16(0x1p-4f)), b(a);
    for (bool accumulate : {false, true}) {
      std::vector<bf16> c(1600, bf16(256.f));
      gemm_rows_bf16<bf16>({{c.data(), {a.data(), 5000, 1}, {b.data(), 1, 5000}, 40, 5000, accumulate}}, 40);
      const float want = bf16((accumulate ? 256.f : 0.f) + 5000 * 0x1p-8f);
      CHECK(std::all_of(c.begin(), c.end(), [&](bf16 x) { return static_cast<float>(x) == want; }));
    }
  });
}

TEST_CASE("gemm_bf16: the result does not depend on the thread count, nor on who calls") {
  on_every_unit([] {
    for (const Size& size :
         std::vector<Size>{{300, 400, 200}, {32, 33, 9000}, {1100, 70, 513}, {70, 1500, 70}, {200, 400, 1400}}) {
      for (const Form& form : forms) {
        const Case<bf16> x(size, form);
        const Case<float> y(size, form);
        auto compute = [&] {
          return joined(x.run<float>(random_vector<float>(size.M * size.N, 3), true), x.run<bf16>({}, false),
                        y.run<float>({}, false));
        };
        check_same_bits_on_any_threads<float>(compute);
        const auto want = compute();
        std::vector<float> inside[2];
#pragma omp parallel for num_threads(2)
        for (int i = 0; i < 2; ++i) inside[i] = compute();
        CHECK(inside[0] == want);
        CHECK(inside[1] == want);
      }
    }
  });
}

TEST_CASE("gemm_bf16: several products give the bits of one after the other") {
  on_every_unit([] {
    for (const int64_t M : {40, 1100}) {
      const int64_t K = 70;
      const auto a = random_vector<bf16>(M * K, 1), b = random_vector<bf16>(K * 200, 2);
      const auto a32 = random_vector<float>(M * K, 1), b32 = random_vector<float>(K * 200, 2);
      auto compute = [&](bool together) {
        auto c = poisoned<float>(2 * M * 200);
        float* d = c.data() + M * 200;
        std::vector<GemmProduct<float, bf16>> list{
            {c.data(), {a.data(), K, 1}, {b.data(), 40, 1}, 40, K, false},
            {c.data() + M * 40, {a.data(), K, 1}, {b.data(), 1, K}, 160, K, false}};
        std::vector<GemmProduct<float, float>> list32{
            {d, {a32.data(), K, 1}, {b32.data(), 40, 1}, 40, K, false},
            {d + M * 40, {a32.data(), K, 1}, {b32.data(), 1, K}, 160, K, false}};
        if (together) gemm_rows_bf16(list, M), gemm_rows_bf16x3(list32, M);
        for (size_t i = 0; i < 2 && !together; ++i) {
          gemm_rows_bf16<float>({list[i]}, M);
          gemm_rows_bf16x3({list32[i]}, M);
        }
        return c;
      };
      const auto one = compute(false);
      CHECK(std::none_of(one.begin(), one.end(), [](float v) { return std::isnan(v); }));
      CHECK(compute(true) == one);
      check_same_bits_on_any_threads<float>([&] { return compute(true); });
    }
  });
}

TEST_CASE("gemm_bf16: NaN and infinity reach exactly the elements they belong to") {
  on_every_unit([] {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const Size& size : std::vector<Size>{{3, 40, 37}, {50, 33, 45}, {70, 70, 700}}) {
        for (const Form& form : forms) {
          Case<bf16> x(size, form);
          Case<float> y(size, form);
          const int64_t i = size.M - 2, k = size.K - 1;
          x.a[static_cast<size_t>(i * x.a_row() + k * x.a_col())] = bad;
          y.a[static_cast<size_t>(i * y.a_row() + k * y.a_col())] = bad;
          const auto reference = x.run<float>({}, false), split = y.run<float>({}, false);
          const auto rounded = x.run<bf16>({}, false);
          int64_t wrong = 0;
          for (int64_t n = 0; n < size.M * size.N; ++n) {
            const size_t at = static_cast<size_t>(n);
            const bool finite = n / size.N != i;
            wrong += std::isfinite(reference[at]) != finite ||
                     std::isfinite(static_cast<float>(rounded[at])) != finite || std::isfinite(split[at]) != finite;
            if (std::isnan(bad) && !finite) wrong += !std::isnan(reference[at]) || !std::isnan(split[at]);
          }
          CHECK(wrong == 0);
        }
      }
    }
  });
}

TEST_CASE("gemm_bf16: nothing to sum") {
  on_every_unit([] {
    const bf16 x(1.f);
    float c[2] = {5, 6};
    gemm_rows_bf16<float>({{c, {&x, 0, 1}, {&x, 2, 1}, 2, 0, true}}, 1);
    CHECK(c[0] == 5.f);
    gemm_rows_bf16<float>({{c, {&x, 0, 1}, {&x, 2, 1}, 2, 0, false}}, 1);
    CHECK(c[1] == 0.f);
    gemm_rows_bf16<float>({{c, {&x, 1, 1}, {&x, 1, 1}, 1, 1, false}}, 0);
  });
}

// The errors' root mean square over that of the results: bf16 would lose 2.4e-3.
TEST_CASE("gemm_bf16: splitting floats costs a few millionths") {
  on_every_unit([] {
    for (const Form& form : forms) {
      const Case<float> x({96, 80, 700}, form);
      const auto want = x.exact();
      auto error = [&](const std::vector<float>& got) {
        double squares = 0, all = 0;
        for (size_t i = 0; i < want.size(); ++i) squares += std::pow(got[i] - want[i], 2), all += std::pow(want[i], 2);
        return std::sqrt(squares / all);
      };
      std::vector<float> plain(want.size());
      gemm(plain.data(), {x.a.data(), x.a_row(), x.a_col()}, {x.b.data(), x.b_row(), x.b_col()}, 96, 80, 700, false);
      const double split = error(x.run<float>({}, false)), whole = error(plain);
      CAPTURE(split);
      CHECK(whole < 5e-7);
      if (matrix_unit() == MatrixUnit::amx) CHECK((split > whole && split < 5e-6));
      else CHECK(split == whole);
    }
  });
}
