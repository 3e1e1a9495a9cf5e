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
const std::vector<Size> few_sizes{{1, 7}, {5, 2}, {33, 33}, {24, 65}, {72, 17}};  // of the emulator

template <class T>
Tensor matrix(std::vector<T>& x, const Size& s) {
  return view(x, {s.m, s.n});
}

template <class T>
std::vector<T> iterated(const std::vector<T>& x, const Size& s, const NewtonSchulz& iteration, Stream stream) {
  std::vector<T> result = x;
  run_on(stream, {matrix(result, s)},
         [&](const std::vector<Tensor>& there) { newton_schulz(there, iteration, stream); });
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
TEST_CASE("newton_schulz: the CPU and the GPU equal the reference in double; a zero matrix stays zero") {
  for (const Backend backend : fast_backends())
    for (const std::string& name : muon_polynomials)
      for (const Size& s : sizes_of(backend, sizes, few_sizes)) {
        CAPTURES(backend, name, s.m, s.n);
        const NewtonSchulz iteration = newton_schulz_of(name, 0);
        const auto x = random_vector<float>(s.m * s.n, 3);
        const auto want = iterated(convert<double>(x), s, iteration, Stream{Backend::reference});
        check_close("f32", iterated(x, s, iteration, Stream{backend}), want, 1e-4);
        const std::vector<float> zero(x.size(), 0.f);
        CHECK(iterated(zero, s, iteration, Stream{backend}) == zero);
        if (backend == Backend::cpu)
          check_same_bits_on_any_threads<float>([&] { return iterated(x, s, iteration, Stream{backend}); });
      }
}

// In bf16 X and its squares are stored with 8 bits; singular values move within the range that the polynomial maps to
// about 1, so only the whole can be compared: 5 % of the Frobenius norm.
TEST_CASE("newton_schulz: in bf16 the result is near that of the rounded matrix") {
  for (const Backend backend : fast_backends())
    for (const Size& s : sizes_of(backend, sizes, few_sizes)) {
      CAPTURES(backend, s.m, s.n);
      const NewtonSchulz iteration = newton_schulz_of("jordan", 0);
      const auto x = random_vector<bf16>(s.m * s.n, 3);
      const auto want = iterated(convert<double>(x), s, iteration, Stream{Backend::reference});
      const auto result = iterated(x, s, iteration, Stream{backend});
      double difference = 0, size = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double got = static_cast<float>(result[i]);
        difference += (got - want[i]) * (got - want[i]), size += want[i] * want[i];
      }
      CHECK(std::sqrt(difference / size) < 0.05);
    }
}

// Three of each shape, which a GPU multiplies at once.
template <class T>
void check_beside_others(Backend backend) {
  const NewtonSchulz iteration = newton_schulz_of("jordan", 0);
  const std::vector<Size> shapes = sizes_of(backend, sizes, few_sizes);
  std::vector<std::vector<T>> all, alone;
  std::vector<Tensor> list;
  for (uint64_t copy = 0; copy < 3; ++copy)
    for (const Size& s : shapes) all.push_back(random_vector<T>(s.m * s.n, static_cast<uint64_t>(s.m) + 1000 * copy));
  alone = all;
  for (size_t i = 0; i < all.size(); ++i) list.push_back(matrix(all[i], shapes[i % shapes.size()]));
  run_on(backend, list,
         [&](const std::vector<Tensor>& there, Stream stream) { newton_schulz(there, iteration, stream); });
  for (size_t i = 0; i < all.size(); ++i)
    CHECK(all[i] == iterated(alone[i], shapes[i % shapes.size()], iteration, Stream{backend}));
}
TEST_CASE("newton_schulz: a matrix does not depend on those beside it in the list") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    check_beside_others<float>(backend);
    check_beside_others<bf16>(backend);
  }
}
