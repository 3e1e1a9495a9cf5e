#include "kernels/optim/muon.h"

#include "kernels/optim/newton_schulz.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t m, n;
};
const std::vector<Size> sizes{{1, 1}, {1, 7}, {5, 2}, {2, 5}, {33, 33}, {64, 192}, {200, 130}, {131, 257}, {300, 40}};

template <class T>
Tensor matrix(std::vector<T>& x, const Size& s) {
  return view(x, {s.m, s.n});
}

template <class T>
std::vector<T> iterated(const std::vector<T>& x, const Size& s, const NewtonSchulz& iteration, Stream stream) {
  std::vector<T> result = x;
  newton_schulz({matrix(result, s)}, iteration, stream);
  return result;
}

// p(x) of all steps, for a singular value of the matrix that the first step gets.
double polynomial_at(const NewtonSchulz& iteration, double x) {
  for (const auto& [a, b, c] : iteration.steps) x = a * x + b * x * x * x + c * x * x * x * x * x;
  return x;
}

}  // namespace

// A polynomial's terms are up to 20 times their sum, and each rounds by some units of 1.1e-16, in five steps: 1e-13.
TEST_CASE("newton_schulz: of a diagonal matrix it makes the polynomial of each entry, in either orientation") {
  for (const std::string& name : muon_polynomials) {
    const NewtonSchulz iteration = newton_schulz_of(name, 0);
    for (const Size& s : {Size{2, 3}, Size{3, 2}, Size{2, 2}}) {
      CAPTURES(name, s.m, s.n);
      std::vector<double> x(static_cast<size_t>(s.m * s.n), 0.0);
      x[0] = 3, x[static_cast<size_t>(s.n + 1)] = -4;
      std::vector<double> want(x.size(), 0.0);
      const double norm = 5 * iteration.safety;
      want[0] = polynomial_at(iteration, 3 / norm);
      want[static_cast<size_t>(s.n + 1)] = polynomial_at(iteration, -4 / norm);
      check_close("x", iterated(x, s, iteration, Stream{Backend::reference}), want, 1e-13);
    }
  }
}

TEST_CASE("newton_schulz: rotations of either side go through it, and singular values come near 1") {
  // X = R diag(1, .5) R'^T, with rotations by 0.3 and 1.1.
  const double c = std::cos(0.3), s = std::sin(0.3), d = std::cos(1.1), e = std::sin(1.1);
  const auto rotated = [=](double a, double b) {
    return std::vector<double>{a * c * d + b * s * e, a * c * e - b * s * d, a * s * d - b * c * e,
                               a * s * e + b * c * d};
  };
  for (const std::string& name : muon_polynomials) {
    const NewtonSchulz iteration = newton_schulz_of(name, 0);
    const double norm = std::sqrt(1.25) * iteration.safety;
    const double a = polynomial_at(iteration, 1 / norm), b = polynomial_at(iteration, 0.5 / norm);
    check_close("x", iterated(rotated(1, 0.5), {2, 2}, iteration, Stream{Backend::reference}), rotated(a, b), 1e-13);
    CHECK((a > 0.6 && a < 1.25 && b > 0.6 && b < 1.25));
  }
  CHECK(newton_schulz_of("jordan", 2).steps.size() == 2);
  CHECK(newton_schulz_of("polar_express", 7).steps[6] == newton_schulz_of("polar_express", 0).steps[4]);
}

// Each step's sums round by some units of 2^-24 of their largest terms, and small singular values grow by 485 or 970 on
// the way: 1e-4 is what random matrices of these sizes need. A wrong coefficient or a missing term of the triangle is
// off by 1e-2.
TEST_CASE("newton_schulz: the CPU equals the reference in double, in f32 and bf16x3; a zero matrix stays zero") {
  for (const std::string& name : muon_polynomials)
    for (const Size& s : sizes) {
      CAPTURES(name, s.m, s.n);
      const NewtonSchulz iteration = newton_schulz_of(name, 0);
      const auto x = random_vector<float>(s.m * s.n, 3);
      const auto want = iterated(convert<double>(x), s, iteration, Stream{Backend::reference});
      check_close("f32", iterated(x, s, iteration, Stream{Backend::cpu}), want, 1e-4);
      const std::vector<float> zero(x.size(), 0.f);
      CHECK(iterated(zero, s, iteration, Stream{Backend::cpu}) == zero);
      check_same_bits_on_any_threads<float>([&] { return iterated(x, s, iteration, Stream{Backend::cpu}); });
    }
}

// In bf16 X and its squares are stored with 8 bits; singular values move within the range that the polynomial maps to
// about 1, so only the whole can be compared: 5 % of the Frobenius norm.
TEST_CASE("newton_schulz: in bf16 the result is near that of the rounded matrix") {
  for (const Size& s : sizes) {
    CAPTURES(s.m, s.n);
    const NewtonSchulz iteration = newton_schulz_of("jordan", 0);
    auto x = random_vector<bf16>(s.m * s.n, 3);
    const auto want = iterated(convert<double>(x), s, iteration, Stream{Backend::reference});
    newton_schulz({matrix(x, s)}, iteration, Stream{Backend::cpu});
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double got = static_cast<float>(x[i]);
      difference += (got - want[i]) * (got - want[i]), size += want[i] * want[i];
    }
    CHECK(std::sqrt(difference / size) < 0.05);
  }
}

TEST_CASE("newton_schulz: a matrix does not depend on those beside it in the list") {
  const NewtonSchulz iteration = newton_schulz_of("jordan", 0);
  const Stream cpu{Backend::cpu};
  std::vector<std::vector<float>> all, alone;
  std::vector<Tensor> list;
  for (const Size& s : sizes) all.push_back(random_vector<float>(s.m * s.n, static_cast<uint64_t>(s.m)));
  alone = all;
  for (size_t i = 0; i < sizes.size(); ++i) list.push_back(matrix(all[i], sizes[i]));
  newton_schulz(list, iteration, cpu);
  for (size_t i = 0; i < sizes.size(); ++i) CHECK(all[i] == iterated(alone[i], sizes[i], iteration, cpu));
}

namespace {

constexpr int64_t n = 40009;
const std::vector<MuonRow> rows{{3, 20, 0.5, 0.1, 0.2}, {20, 301, 0.02, 0, 3}, {333, 40000, 0.1, 0.3, 1.5}};

template <class T>
struct State {
  std::vector<T> params = random_vector<T>(n, 1), m = random_vector<T>(n, 2), u = random_vector<T>(n, 3);
  std::vector<double> factor{0.7}, numbers{0.4, 0.95, 0.5};

  void momentum(const std::vector<T>& grads, bool nesterov, Backend backend) {
    muon_momentum(view(u), view(m), view(grads), view(factor), view(numbers), nesterov, Stream{backend});
  }
  void update(bool cautious, Backend backend, const Tensor& copy = {}) {
    muon_update(view(params), copy, view(u), view(factor), view(numbers), rows, cautious, Stream{backend});
  }
};

}  // namespace

// Both passes are a few roundings of numbers of size 1 each.
TEST_CASE("muon: momentum and update equal what is written out here, on the CPU and by the reference") {
  for (const bool nesterov : {false, true})
    for (const bool cautious : {false, true}) {
      CAPTURES(nesterov, cautious);
      State<double> exact;
      State<float> fast;
      const auto grads = random_vector<double>(n, 4);
      std::vector<double> u(n), m(n), params = exact.params;
      for (size_t i = 0; i < n; ++i) {
        m[i] = 0.95 * exact.m[i] + 0.05 * 0.7 * grads[i];
        u[i] = nesterov ? 0.05 * 0.7 * grads[i] + 0.95 * m[i] : m[i];
      }
      for (const MuonRow& row : rows)
        for (int64_t i = row.begin; i < row.end; ++i) {
          const double lr = 0.4 * row.lr_mul,
                       decay = cautious && u[i] * params[i] < 0 ? 0 : lr * 0.5 * row.weight_decay;
          params[i] = (1 - decay) * params[i] - lr * row.scale * u[i];
        }
      exact.momentum(grads, nesterov, Backend::reference), exact.update(cautious, Backend::reference);
      fast.momentum(convert<float>(grads), nesterov, Backend::cpu), fast.update(cautious, Backend::cpu);
      check_close("m", exact.m, m, 1e-14), check_close("u", exact.u, u, 1e-14);
      check_close("params", exact.params, params, 1e-14);
      check_close("f32 m", fast.m, m, 1e-6), check_close("f32 u", fast.u, u, 1e-6);
      check_close("f32 params", fast.params, params, 1e-6);
    }
}

TEST_CASE("muon: the bf16 copy is the updated parameter rounded; the direction may be bf16, or the gradient itself") {
  State<float> a, b;
  const auto grads = random_vector<float>(n, 4);
  std::vector<bf16> u(n), copy(n), rounded(n);
  a.momentum(grads, true, Backend::cpu);
  b.u = grads;
  b.momentum(b.u, true, Backend::cpu);
  CHECK(a.u == b.u);
  State<float> c;
  muon_momentum(view(u), view(c.m), view(grads), view(c.factor), view(c.numbers), true, Stream{Backend::cpu});
  for (size_t i = 0; i < n; ++i) CHECK(u[i].bits == bf16(a.u[i]).bits);
  a.update(false, Backend::cpu, view(copy));
  for (const MuonRow& row : rows)
    for (int64_t i = row.begin; i < row.end; ++i) REQUIRE(copy[i].bits == bf16(a.params[i]).bits);
  check_same_bits_on_any_threads<float>([&] {
    State<float> state;
    state.momentum(grads, true, Backend::cpu), state.update(true, Backend::cpu);
    return joined(state.params, state.m, state.u);
  });
}

TEST_CASE("muon: where the factor is not finite nothing is written; a zero direction only decays") {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    State<float> state, before;
    state.factor = {NAN};
    state.momentum(random_vector<float>(n, 4), true, backend), state.update(false, backend);
    std::vector<float> o(6, 1.f), v(2, 0.f);
    normalize_rows(view(o, {2, 3}), view(v), 0.95, view(state.factor), Stream{backend});
    CHECK((state.params == before.params && state.m == before.m && state.u == before.u));
    CHECK((o == std::vector<float>(6, 1.f) && v == std::vector<float>(2, 0.f)));
    state.factor = {1}, state.u.assign(n, 0.f);
    state.update(false, backend);
    CHECK(state.params[400] == doctest::Approx(before.params[400] * (1 - 0.4 * 0.1 * 0.5 * 0.3)).epsilon(1e-6));
  }
}

TEST_CASE("muon: NorMuon's rows get about the same size, and the matrix keeps its norm") {
  // Row 0 is (3, 4), row 1 (0, 0.1): squares 25 and 0.01, means 12.5 and 0.005, v = 0.05 of them.
  const double first = std::sqrt(0.05 * 12.5) + 1e-10, second = std::sqrt(0.05 * 0.005) + 1e-10;
  std::vector<double> want{3 / first, 4 / first, 0, 0.1 / second}, o{3, 4, 0, 0.1}, v{0, 0}, factor{1};
  const double by = std::sqrt(25.01) / std::sqrt(25 / (first * first) + 0.01 / (second * second));
  for (double& x : want) x *= by;
  auto fast = convert<float>(o), fast_v = convert<float>(v);
  normalize_rows(view(o, {2, 2}), view(v), 0.95, view(factor), Stream{Backend::reference});
  normalize_rows(view(fast, {2, 2}), view(fast_v), 0.95, view(factor), Stream{Backend::cpu});
  check_close("o", o, want, 1e-9), check_close("v", v, std::vector<double>{0.05 * 12.5, 0.05 * 0.005}, 1e-12);
  check_close("f32 o", fast, want, 1e-6), check_close("f32 v", fast_v, v, 1e-6);
}

TEST_CASE("muon: the scales of a wide and a tall matrix") {
  CHECK(muon_scale_of("rms", 4, 100) == doctest::Approx(2));
  CHECK(muon_scale_of("original", 4, 100) == 1);
  CHECK(muon_scale_of("original", 100, 4) == 5);
  CHECK(muon_scale_of("spectral", 4, 100) == doctest::Approx(0.2));
}
