#include "kernels/block/cross_entropy.h"

#include <omp.h>

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, V, C;
};

struct Case {
  Backend backend;
  Size size;
};

// A GPU gets the CPU's sizes, too.
std::vector<Case> for_backends(std::vector<Case> cases) {
  for (size_t i = 0, n = cases.size(); i < n && !emulated; ++i)
    if (cases[i].backend == Backend::cpu) cases.push_back({Backend::cuda, cases[i].size});
  return cases;
}

enum class Scored { all, none, some, tail };

// Pseudo-random targets; `some` leaves out scattered rows, `tail` a prompt at the start.
std::vector<int32_t> make_targets(const Size& size, Scored scored) {
  const auto draw = random_vector<double>(size.rows, 77), keep = random_vector<double>(size.rows, 78);
  std::vector<int32_t> targets(static_cast<size_t>(size.rows));
  for (size_t n = 0; n < targets.size(); ++n) {
    const bool out = scored == Scored::none || (scored == Scored::some && keep[n] < 0) ||
                     (scored == Scored::tail && n < targets.size() / 3);
    targets[n] = out ? -1 : static_cast<int32_t>((draw[n] * 0.5 + 0.5) * static_cast<double>(size.V));
  }
  return targets;
}

// One problem, and the reference's answer; the outputs start as NaN, dweight as random numbers.
template <class S>
struct ProblemOf {
  Size size;
  Backend backend = Backend::cpu;
  Kernels kernels = Kernels::fast;
  std::vector<int32_t> targets;
  std::vector<S> inp, weight, dinp;
  std::vector<float> losses, dweight;
  std::vector<double> losses64, dinp64, dweight64;

  ProblemOf(const Size& s, Scored scored, double magnitude = 1.0)
      : size(s),
        targets(make_targets(s, scored)),
        inp(random_vector<S>(s.rows * s.C, 1, magnitude)),
        weight(random_vector<S>(s.V * s.C, 2)),
        dinp(poisoned<S>(s.rows * s.C)),
        losses(poisoned<float>(s.rows)),
        dweight(random_vector<float>(s.V * s.C, 3)),
        losses64(poisoned<double>(s.rows)),
        dinp64(poisoned<double>(s.rows * s.C)),
        dweight64(convert<double>(dweight)) {}

  // In the order of the arguments.
  template <class W, class X>
  std::vector<Tensor> tensors(const std::vector<W>& l, const std::vector<X>& dx, const std::vector<W>& dw,
                              const std::vector<X>& x, const std::vector<X>& w) const {
    return {view(l),
            view(dx, {size.rows, size.C}),
            view(dw, {size.V, size.C}),
            view(x, {size.rows, size.C}),
            view(w, {size.V, size.C}),
            view(targets)};
  }
  void forward() { call(false, false, 1); }
  void forward_backward(double scale) { call(true, true, scale); }
  // Over what the weight's gradient held.
  void set_gradients(double scale) {
    dweight = poisoned<float>(size.V * size.C);
    call(true, false, scale);
  }
  void call(bool gradients, bool accumulate, double scale) {
    run_on(backend, tensors(losses, dinp, dweight, inp, weight), [&](auto& t, Stream stream) {
      const Tensor dx = gradients ? t[1] : Tensor{};
      const Grad dw = gradients ? Grad{t[2], accumulate} : Grad{};
      if (is_plain(kernels, stream)) cross_entropy_forward_plain(t[0], dx, dw, t[3], t[4], t[5], scale);
      else cross_entropy_forward(t[0], dx, dw, t[3], t[4], t[5], scale, stream);
    });
  }
  void reference(double scale) {
    const auto inp64 = convert<double>(inp), weight64 = convert<double>(weight);
    const auto t = tensors(losses64, dinp64, dweight64, inp64, weight64);
    cross_entropy_forward(t[0], t[1], {t[2], true}, t[3], t[4], t[5], scale, Stream{Backend::reference});
  }
};
using Problem = ProblemOf<float>;

// And a third answer: the plain bf16 computation's, which rounds logits, dz and dinp once each.
struct Bf16Problem : ProblemOf<bf16> {
  std::vector<double> plain_losses, plain_dinp, plain_dweight;

  Bf16Problem(const Size& s, Scored scored)
      : ProblemOf(s, scored, 2.0), plain_losses(losses64), plain_dinp(s.rows * s.C, 0.0), plain_dweight(dweight64) {}

  static double round_to_bf16(double x) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(x)))); }

  void plain(double scale) {
    const auto x = convert<double>(inp), w = convert<double>(weight);
    const size_t V = static_cast<size_t>(size.V), C = static_cast<size_t>(size.C);
    for (size_t n = 0; n < targets.size(); ++n) {
      plain_losses[n] = 0;
      if (targets[n] < 0) continue;
      std::vector<double> z(V);
      double sum = 0;
      for (size_t v = 0; v < V; ++v) {
        double dot = 0;
        for (size_t c = 0; c < C; ++c) dot += x[n * C + c] * w[v * C + c];
        z[v] = round_to_bf16(dot);
        sum += std::exp(z[v]);
      }
      plain_losses[n] = std::log(sum) - z[static_cast<size_t>(targets[n])];
      for (size_t v = 0; v < V; ++v) {
        const double dz =
            round_to_bf16(scale * (std::exp(z[v]) / sum - (static_cast<int32_t>(v) == targets[n] ? 1.0 : 0.0)));
        for (size_t c = 0; c < C; ++c)
          plain_dinp[n * C + c] += dz * w[v * C + c], plain_dweight[v * C + c] += dz * x[n * C + c];
      }
      for (size_t c = 0; c < C; ++c) plain_dinp[n * C + c] = round_to_bf16(plain_dinp[n * C + c]);
    }
  }
};

}  // namespace

TEST_CASE("cross_entropy: bf16 is at most twice as far from the exact answer as the plain bf16 computation") {
  for (const Case& c : for_backends({{Backend::cpu, {64, 31, 3}},
                                     {Backend::cpu, {200, 21, 32}},
                                     {Backend::cpu, {70, 5003, 17}},
                                     {Backend::cpu, {5000, 21, 7}},
                                     {Backend::cpu, {300, 70001, 3}},
                                     {Backend::cuda, {64, 31, 3}},
                                     {Backend::cuda, {5, 5008, 17}}})) {
    if (!available(c.backend)) continue;
    for (const Kernels kernels : kernels_of(c.backend))
      for (Scored scored : {Scored::all, Scored::some, Scored::none}) {
        const Size size = c.size;
        if (size.V > 10000 && scored != Scored::all) continue;
        CAPTURES(c.backend, kernels, size.rows, size.V, scored);
        Bf16Problem p(size, scored);
        p.backend = c.backend, p.kernels = kernels;
        p.forward_backward(0.5), p.reference(0.5), p.plain(0.5);
        // 1e-6: where nothing is scored nothing is rounded either.
        CHECK(distance(p.losses, p.losses64) <= 2 * distance(p.plain_losses, p.losses64) + 1e-6);
        CHECK(distance(p.dinp, p.dinp64) <= 2 * distance(p.plain_dinp, p.dinp64) + 1e-6);
        CHECK(distance(p.dweight, p.dweight64) <= 2 * distance(p.plain_dweight, p.dweight64) + 1e-6);
        const auto losses = p.losses;
        p.losses = poisoned<float>(size.rows);
        p.forward();
        CHECK(p.losses == losses);
      }
  }
}

TEST_CASE("cross_entropy: reference backward is the derivative of the reference forward") {
  const double scale = 0.37;
  for (double magnitude : {1e-3, 1.0, 30.0}) {
    for (const Size& size : std::vector<Size>{{1, 2, 1}, {5, 7, 3}, {4, 31, 5}}) {
      CAPTURES(magnitude, size.V);
      const auto inp = random_vector<double>(size.rows * size.C, 1, magnitude);
      const auto weight = random_vector<double>(size.V * size.C, 2);
      const auto targets = make_targets(size, size.rows == 1 ? Scored::all : Scored::some);
      auto loss = [&](const std::vector<Complex>& x, const std::vector<Complex>& w) {
        std::vector<Complex> losses(static_cast<size_t>(size.rows));
        cross_entropy_forward_ref(losses.data(), x.data(), w.data(), targets.data(), size.rows, size.V, size.C);
        return dot(std::vector<double>(losses.size(), scale), losses);
      };
      const auto want_dinp = complex_step(inp, [&](auto& x) { return loss(x, convert<Complex>(weight)); });
      const auto want_dweight = complex_step(weight, [&](auto& w) { return loss(convert<Complex>(inp), w); });

      auto losses = poisoned<double>(size.rows), alone = losses, dinp = poisoned<double>(size.rows * size.C);
      std::vector<double> dweight(weight.size(), 0.0);
      cross_entropy_forward_backward_ref(losses.data(), dinp.data(), dweight.data(), inp.data(), weight.data(),
                                         targets.data(), scale, size.rows, size.V, size.C);
      cross_entropy_forward_ref(alone.data(), inp.data(), weight.data(), targets.data(), size.rows, size.V, size.C);
      // At magnitude 30 a softmax entry can round to exactly one, hence an absolute error of one ulp in dz.
      check_close("dinp", dinp, want_dinp, 1e-12);
      check_close("dweight", dweight, want_dweight, 1e-12);
      CHECK(losses == alone);
    }
  }
}

TEST_CASE("cross_entropy: the loss of equal logits is log V") {
  const Size size{3, 11, 2};
  Problem p(size, Scored::all, 0.0);
  p.forward();
  for (float loss : p.losses) CHECK(std::abs(loss - std::log(11.0)) < 1e-6);
}

TEST_CASE("cross_entropy: the fast backends equal the reference, whatever the number of chunks and of ignored rows") {
  // The CPU's last two need several chunks: of 4096 rows at most, and of 64 MB.
  for (const Case& c : for_backends({{Backend::cpu, {1, 2, 1}},
                                     {Backend::cpu, {5, 31, 3}},
                                     {Backend::cpu, {200, 21, 32}},
                                     {Backend::cpu, {33, 5003, 17}},
                                     {Backend::cpu, {10000, 21, 7}},
                                     {Backend::cpu, {260, 70001, 3}},
                                     {Backend::cuda, {1, 2, 1}},
                                     {Backend::cuda, {5, 31, 3}},
                                     {Backend::cuda, {20, 24, 8}},
                                     {Backend::cuda, {3, 5003, 7}},
                                     {Backend::cuda, {2, 30011, 3}}})) {  // more than stays in shared memory
    if (!available(c.backend)) continue;
    for (const Kernels kernels : kernels_of(c.backend))
      for (Scored scored : {Scored::all, Scored::none, Scored::some, Scored::tail}) {
        const Size size = c.size;
        CAPTURES(c.backend, kernels, size.rows, size.V, scored);
        Problem p(size, scored);
        p.backend = c.backend, p.kernels = kernels;
        p.reference(0.5);
        p.forward();
        check_close("losses", p.losses, p.losses64, 1e-6);
        const auto losses = p.losses;
        p.losses = poisoned<float>(size.rows);
        p.forward_backward(0.5);
        CHECK(p.losses == losses);
        // dinp is a float sum over V and dweight one over rows: their rounding grows with the number of terms.
        check_close("dinp", p.dinp, p.dinp64, size.V > 10000 ? 5e-5 : 1e-5);
        check_close("dweight", p.dweight, p.dweight64, 1e-5);
      }
  }
}

TEST_CASE("cross_entropy: a weight's gradient that is set may hold anything before, also where no row is scored") {
  for (const Case& c : for_backends({{Backend::cpu, {9, 31, 3}},
                                     {Backend::cpu, {300, 70001, 3}},  // two chunks
                                     {Backend::cuda, {9, 31, 3}}})) {
    if (!available(c.backend)) continue;
    for (const Kernels kernels : kernels_of(c.backend))
      for (Scored scored : {Scored::all, Scored::some, Scored::none}) {
        CAPTURES(c.backend, kernels, c.size.rows, scored);
        Problem p(c.size, scored);
        p.backend = c.backend, p.kernels = kernels;
        p.dweight64.assign(p.dweight64.size(), 0);
        p.set_gradients(0.5), p.reference(0.5);
        check_close("dweight", p.dweight, p.dweight64, 1e-5);
      }
  }
}

TEST_CASE("cross_entropy: logits of size 1e4 neither overflow nor lose the gradient") {
  Problem p({40, 50, 6}, Scored::some, 1e4);
  p.reference(1.0);
  p.forward_backward(1.0);
  // A logit of 1e4 is a float to about 1e-3, and softmax turns absolute errors into relative ones.
  check_close("losses", p.losses, p.losses64, 1e-5);
  check_close("dinp", p.dinp, p.dinp64, 1e-2);
  check_close("dweight", p.dweight, p.dweight64, 1e-2);
}

TEST_CASE("cross_entropy: NaN in a scored row shows in its loss and gradients, in an ignored row nowhere") {
  const Size size{70, 37, 5};
  Problem p(size, Scored::some);
  for (int64_t n = 0; n < size.rows; ++n)
    if (p.targets[static_cast<size_t>(n)] == -1) p.inp[static_cast<size_t>(n * size.C)] = NAN;
  p.reference(1.0);
  p.forward_backward(1.0);
  check_close("losses", p.losses, p.losses64, 1e-6);
  check_close("dinp", p.dinp, p.dinp64, 1e-5);
  check_close("dweight", p.dweight, p.dweight64, 1e-5);

  size_t row = 30;
  while (p.targets[row] == -1) ++row;
  p.inp[row * static_cast<size_t>(size.C) + 2] = NAN;
  p.forward_backward(1.0);
  for (size_t n = 0; n < p.losses.size(); ++n) {
    CHECK(std::isnan(p.losses[n]) == (n == row));
    CHECK(std::isnan(p.dinp[n * static_cast<size_t>(size.C)]) == (n == row));
  }
  for (float g : p.dweight) CHECK(std::isnan(g));
}

TEST_CASE("cross_entropy: on a GPU a NaN, and a target that is no token, stay in their row's loss") {
  if (!available(Backend::cuda)) return;
  for (const Kernels kernels : kernels_of(Backend::cuda)) {
    Problem p({12, 37, 5}, Scored::all);
    p.backend = Backend::cuda, p.kernels = kernels;
    p.inp[3 * 5 + 2] = NAN;
    p.targets[5] = 37, p.targets[7] = -2, p.targets[8] = -1;
    p.forward();
    for (size_t n = 0; n < p.losses.size(); ++n) CHECK(std::isnan(p.losses[n]) == (n == 3 || n == 5 || n == 7));
    CHECK(p.losses[8] == 0);
  }
}

TEST_CASE("cross_entropy: NaN in one row of the weight shows in every loss") {
  Problem p({9, 40, 5}, Scored::all);
  p.weight[39 * 5] = NAN;
  p.forward();
  for (float loss : p.losses) CHECK(std::isnan(loss));
}

TEST_CASE("cross_entropy: a target outside the vocabulary is an error") {
  for (int32_t wrong : {-2, 11, 1 << 30}) {
    Problem p({3, 11, 2}, Scored::all);
    p.targets[1] = wrong;
    CHECK_THROWS_AS(p.forward(), Error);
    CHECK_THROWS_AS(p.forward_backward(1.0), Error);
  }
}

TEST_CASE("cross_entropy: the thread count does not change a bit") {
  const int threads = omp_get_max_threads();
  Problem one({5000, 29, 8}, Scored::some), three = one;
  omp_set_num_threads(1);
  one.forward_backward(0.1);
  omp_set_num_threads(3);
  three.forward_backward(0.1);
  omp_set_num_threads(threads);
  CHECK(one.losses == three.losses);
  CHECK(one.dinp == three.dinp);
  CHECK(one.dweight == three.dweight);
}
