#include "kernels/block/distill.h"

#include "kernels/block/cross_entropy.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, V, C, width;  // width: the teacher's C
};

struct Case {
  Backend backend;
  Size size;
};

const std::vector<Distillation> ways = {{0.6, 1, false}, {0.6, 1, true}, {0, 1, false}, {1, 1, false},
                                        {0.3, 2, false}, {0, 0.5, true}, {1, 3, false}};

// Pseudo-random targets; where `some`, scattered rows are not scored.
std::vector<int32_t> make_targets(const Size& size, bool some) {
  const auto draw = random_vector<double>(size.rows, 77), keep = random_vector<double>(size.rows, 78);
  std::vector<int32_t> targets(static_cast<size_t>(size.rows));
  for (size_t n = 0; n < targets.size(); ++n)
    targets[n] = some && keep[n] < 0 ? -1 : static_cast<int32_t>((draw[n] * 0.5 + 0.5) * static_cast<double>(size.V));
  return targets;
}

// One problem, and the reference's answer; the outputs start as NaN, dweight as random numbers.
template <class S>
struct ProblemOf {
  Size size;
  Distillation how;
  Backend backend = Backend::cpu;
  std::vector<int32_t> targets;
  std::vector<S> inp, weight, teacher_inp, teacher_weight, dinp;
  std::vector<float> losses, ce, dweight;
  std::vector<double> losses64, ce64, dinp64, dweight64;

  ProblemOf(const Size& s, const Distillation& d, bool some, double magnitude = 1.0)
      : size(s),
        how(d),
        targets(make_targets(s, some)),
        inp(random_vector<S>(s.rows * s.C, 1, magnitude)),
        weight(random_vector<S>(s.V * s.C, 2)),
        teacher_inp(random_vector<S>(s.rows * s.width, 4, magnitude)),
        teacher_weight(random_vector<S>(s.V * s.width, 5)),
        dinp(poisoned<S>(s.rows * s.C)),
        losses(poisoned<float>(s.rows)),
        ce(losses),
        dweight(random_vector<float>(s.V * s.C, 3)),
        losses64(poisoned<double>(s.rows)),
        ce64(losses64),
        dinp64(poisoned<double>(s.rows * s.C)),
        dweight64(convert<double>(dweight)) {}

  void run(double scale) {
    const auto [rows, V, C, width] = size;
    run_on(backend,
           {view(losses), view(ce), view(dinp, {rows, C}), view(dweight, {V, C}), view(inp, {rows, C}),
            view(weight, {V, C}), view(targets), view(teacher_inp, {rows, width}), view(teacher_weight, {V, width})},
           [&](auto& t, Stream stream) {
             distill_forward(t[0], t[1], t[2], {t[3], true}, t[4], t[5], t[6], {t[7], t[8]}, how, scale, stream);
           });
  }
  void reference(double scale) {
    const auto x = convert<double>(inp), w = convert<double>(weight), y = convert<double>(teacher_inp),
               v = convert<double>(teacher_weight);
    distill_ref(losses64.data(), ce64.data(), dinp64.data(), dweight64.data(), x.data(), w.data(), targets.data(),
                y.data(), v.data(), how, scale, size.rows, size.V, size.C, size.width);
  }
  // The teacher has the student's logits.
  void teach_itself() { size.width = size.C, teacher_inp = inp, teacher_weight = weight; }
};
using Problem = ProblemOf<float>;

double round_to_bf16(double x) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(x)))); }

// exp(z) / sum exp(z) and the logarithm of it.
void log_softmax(std::vector<double>& z, double tau) {
  double largest = -INFINITY, sum = 0;
  for (double& x : z) x /= tau, largest = std::max(largest, x);
  for (const double x : z) sum += std::exp(x - largest);
  for (double& x : z) x -= largest + std::log(sum);
}

// And a third answer: the plain bf16 computation's, which rounds both logits, dz and dinp once each.
struct Bf16Problem : ProblemOf<bf16> {
  std::vector<double> plain_losses, plain_dinp, plain_dweight;

  Bf16Problem(const Size& s, const Distillation& d, bool some)
      : ProblemOf(s, d, some, 2.0),
        plain_losses(s.rows, 0.0),
        plain_dinp(s.rows * s.C, 0.0),
        plain_dweight(dweight64) {}

  static std::vector<double> logits(const bf16* x, const std::vector<bf16>& weight, int64_t V, int64_t C) {
    std::vector<double> z(static_cast<size_t>(V), 0.0);
    for (int64_t v = 0; v < V; ++v) {
      for (int64_t c = 0; c < C; ++c)
        z[static_cast<size_t>(v)] +=
            static_cast<double>(float(x[c])) * static_cast<double>(float(weight[static_cast<size_t>(v * C + c)]));
      z[static_cast<size_t>(v)] = round_to_bf16(z[static_cast<size_t>(v)]);
    }
    return z;
  }

  void plain(double scale) {
    const auto [rows, V, C, width] = size;
    for (int64_t n = 0; n < rows; ++n) {
      const int32_t target = targets[static_cast<size_t>(n)];
      if (target < 0) continue;
      auto p = logits(&inp[static_cast<size_t>(n * C)], weight, V, C), s = p,
           t = logits(&teacher_inp[static_cast<size_t>(n * width)], teacher_weight, V, width), dz = p;
      log_softmax(p, 1), log_softmax(s, how.tau), log_softmax(t, how.tau);
      double ignored;
      plain_losses[static_cast<size_t>(n)] =
          distill_row_ref(dz.data(), &ignored, p.data(), s.data(), t.data(), target, how, V);
      for (int64_t v = 0; v < V; ++v)
        for (int64_t c = 0; c < C; ++c) {
          const double d = round_to_bf16(scale * dz[static_cast<size_t>(v)]);
          const size_t x = static_cast<size_t>(n * C + c), w = static_cast<size_t>(v * C + c);
          plain_dinp[x] += d * static_cast<double>(float(weight[w]));
          plain_dweight[w] += d * static_cast<double>(float(inp[x]));
        }
    }
    for (double& x : plain_dinp) x = round_to_bf16(x);
  }
};

}  // namespace

TEST_CASE("distill: reference backward is the derivative of the reference forward") {
  const double scale = 0.37;
  for (const double magnitude : {1e-3, 1.0, 30.0})
    for (const Size& size : std::vector<Size>{{1, 2, 1, 1}, {5, 7, 3, 2}, {4, 31, 5, 8}})
      for (const Distillation& how : ways) {
        CAPTURES(magnitude, size.V, how.alpha, how.tau, how.per_element);
        const auto x = random_vector<double>(size.rows * size.C, 1, magnitude),
                   w = random_vector<double>(size.V * size.C, 2);
        const auto y = random_vector<double>(size.rows * size.width, 4, magnitude),
                   v = random_vector<double>(size.V * size.width, 5);
        const auto targets = make_targets(size, size.rows > 1);
        auto loss = [&](const std::vector<Complex>& inp, const std::vector<Complex>& weight) {
          std::vector<Complex> losses(static_cast<size_t>(size.rows)), ce(losses);
          const auto ty = convert<Complex>(y), tv = convert<Complex>(v);
          distill_ref<Complex>(losses.data(), ce.data(), nullptr, nullptr, inp.data(), weight.data(), targets.data(),
                               ty.data(), tv.data(), how, 1, size.rows, size.V, size.C, size.width);
          return dot(std::vector<double>(losses.size(), scale), losses);
        };
        const auto want_dinp = complex_step(x, [&](auto& inp) { return loss(inp, convert<Complex>(w)); });
        const auto want_dweight = complex_step(w, [&](auto& weight) { return loss(convert<Complex>(x), weight); });

        auto losses = poisoned<double>(size.rows), ce = losses, dinp = poisoned<double>(size.rows * size.C);
        std::vector<double> dweight(w.size(), 0.0);
        distill_ref(losses.data(), ce.data(), dinp.data(), dweight.data(), x.data(), w.data(), targets.data(), y.data(),
                    v.data(), how, scale, size.rows, size.V, size.C, size.width);
        // As for cross_entropy; with tau = 1/2 logits of 30 are 60.
        check_close("dinp", dinp, want_dinp, 1e-11, 1e-13);
        check_close("dweight", dweight, want_dweight, 1e-11, 1e-13);
      }
}

TEST_CASE("distill: alpha 1 is the cross entropy, whatever the teacher") {
  for (const Backend backend : all_backends()) {
    CAPTURE(backend);
    const Size size{23, 37, 5, 3};
    Problem p(size, {1, 1, false}, true);
    p.backend = backend;
    if (backend == Backend::reference) {
      p.reference(0.5);
      auto dweight = convert<double>(random_vector<float>(size.V * size.C, 3)),
           dinp = poisoned<double>(size.rows * size.C), losses = poisoned<double>(size.rows);
      const auto x = convert<double>(p.inp), w = convert<double>(p.weight);
      cross_entropy_forward_backward_ref(losses.data(), dinp.data(), dweight.data(), x.data(), w.data(),
                                         p.targets.data(), 0.5, size.rows, size.V, size.C);
      check_close("losses", p.losses64, losses, 1e-12);
      check_close("dinp", p.dinp64, dinp, 1e-12);
      check_close("dweight", p.dweight64, dweight, 1e-12);
      continue;
    }
    Problem alone = p;
    p.run(0.5);
    run_on(backend,
           {view(alone.losses), view(alone.dinp, {size.rows, size.C}), view(alone.dweight, {size.V, size.C}),
            view(alone.inp, {size.rows, size.C}), view(alone.weight, {size.V, size.C}), view(alone.targets)},
           [](auto& t, Stream stream) {
             cross_entropy_forward(t[0], t[1], {t[2], true}, t[3], t[4], t[5], 0.5, stream);
           });
    CHECK(p.losses == alone.losses);
    CHECK(p.ce == alone.losses);
    check_close("dinp", p.dinp, alone.dinp, 1e-6);
    check_close("dweight", p.dweight, alone.dweight, 1e-6);
  }
}

TEST_CASE("distill: of a teacher with its own logits a student learns nothing, exactly") {
  for (const Backend backend : fast_backends())
    for (const double tau : {1.0, 2.5}) {
      CAPTURES(backend, tau);
      Problem p({19, 45, 6, 6}, {0, tau, false}, true, 3.0);
      p.backend = backend;
      p.teach_itself();
      const auto before = p.dweight;
      p.run(1.0);
      for (const float loss : p.losses) CHECK(loss == 0);
      for (const float d : p.dinp) CHECK(d == 0);
      CHECK(p.dweight == before);
      p.reference(1.0);
      for (const double loss : p.losses64) CHECK(loss == 0);
      for (const double d : p.dinp64) CHECK(d == 0);
      for (size_t n = 0; n < p.ce.size(); ++n) CHECK((p.ce[n] > 0) == (p.targets[n] >= 0));
    }
}

TEST_CASE("distill: the fast backends equal the reference, whatever the number of chunks and of rows not scored") {
  // The CPU's last two need several chunks: of 4096 rows at most, and of 64 MB.
  for (const Case& c : std::vector<Case>{{Backend::cpu, {1, 2, 1, 1}},
                                         {Backend::cpu, {5, 31, 3, 7}},
                                         {Backend::cpu, {200, 21, 32, 16}},
                                         {Backend::cpu, {33, 5003, 17, 9}},
                                         {Backend::cpu, {5000, 21, 7, 5}},
                                         {Backend::cpu, {140, 130001, 3, 2}},
                                         {Backend::cuda, {1, 2, 1, 1}},
                                         {Backend::cuda, {5, 31, 3, 7}},
                                         {Backend::cuda, {20, 24, 8, 16}},
                                         {Backend::cuda, {3, 5003, 7, 2}}}) {
    if (!available(c.backend)) continue;
    const bool large = c.size.V > 10000 || c.size.rows > 1000;
    for (const Distillation& how : ways)
      for (const bool some : {false, true}) {
        if (large && (some != how.per_element || how.alpha == 1)) continue;
        CAPTURES(c.backend, c.size.rows, c.size.V, some, how.alpha, how.tau, how.per_element);
        Problem p(c.size, how, some);
        p.backend = c.backend;
        p.reference(0.5), p.run(0.5);
        // A float sum of V logits' differences, beside a cross entropy of about log V: an error of some 1e-6 of that.
        check_close("losses", p.losses, p.losses64, 1e-5, 1e-6);
        check_close("ce", p.ce, p.ce64, 1e-6);
        check_close("dinp", p.dinp, p.dinp64, c.size.V > 10000 ? 5e-5 : 1e-5, 1e-8);
        check_close("dweight", p.dweight, p.dweight64, 1e-5);
      }
  }
}

TEST_CASE("distill: bf16 is at most twice as far from the exact answer as the plain bf16 computation") {
  for (const Case& c : std::vector<Case>{{Backend::cpu, {64, 31, 3, 4}},
                                         {Backend::cpu, {200, 21, 32, 8}},
                                         {Backend::cpu, {40, 5003, 17, 3}},
                                         {Backend::cuda, {64, 31, 3, 8}},
                                         {Backend::cuda, {5, 5008, 16, 8}}}) {
    if (!available(c.backend)) continue;
    for (const Distillation& how : {Distillation{0.6, 1, false}, Distillation{0.3, 2, false}})
      for (const bool some : {false, true}) {
        CAPTURES(c.backend, c.size.rows, c.size.V, some, how.tau);
        Bf16Problem p(c.size, how, some);
        p.backend = c.backend;
        p.run(0.5), p.reference(0.5), p.plain(0.5);
        CHECK(distance(p.losses, p.losses64) <= 2 * distance(p.plain_losses, p.losses64) + 1e-6);
        CHECK(distance(p.dinp, p.dinp64) <= 2 * distance(p.plain_dinp, p.dinp64) + 1e-6);
        CHECK(distance(p.dweight, p.dweight64) <= 2 * distance(p.plain_dweight, p.dweight64) + 1e-6);
      }
  }
}

TEST_CASE("distill: by element of a real vocabulary the objective of a new student is alpha times its cross entropy") {
  // A student that knows nothing, and a teacher that is sure.
  const Size size{8, 50304, 4, 4};
  Problem p(size, {0.6, 1, true}, false);
  for (float& x : p.inp) x *= 0.02f;
  for (float& x : p.teacher_inp) x *= 5;
  p.run(1.0);
  double by_token = 0;
  Problem token = p;
  token.how.per_element = false;
  token.run(1.0);
  for (size_t n = 0; n < p.losses.size(); ++n) {
    CHECK(std::abs(p.losses[n] - 0.6f * p.ce[n]) < 1e-3f);
    by_token += static_cast<double>(token.losses[n] - 0.6f * token.ce[n]) / static_cast<double>(p.losses.size());
  }
  CHECK(by_token > 0.5);
}

TEST_CASE("distill: logits of size 1e4 neither overflow nor lose the gradient") {
  for (const Backend backend : fast_backends()) {
    Problem p({40, 50, 6, 4}, {0.6, 1, false}, true, 1e4);
    p.backend = backend;
    p.reference(1.0), p.run(1.0);
    // A logit of 1e4 is a float to about 1e-3, and softmax turns absolute errors into relative ones.
    check_close("losses", p.losses, p.losses64, 1e-5);
    check_close("dinp", p.dinp, p.dinp64, 1e-2);
    check_close("dweight", p.dweight, p.dweight64, 1e-2);
  }
}

TEST_CASE("distill: NaN in a scored row of student or teacher shows in its loss and gradients, elsewhere nowhere") {
  for (const Backend backend : fast_backends())
    for (const bool of_teacher : {false, true}) {
      CAPTURES(backend, of_teacher);
      const Size size{30, 37, 5, 5};
      Problem p(size, {0.6, 1, false}, true);
      p.backend = backend;
      auto& x = of_teacher ? p.teacher_inp : p.inp;
      // A GPU's products of NaN and 0 are NaN: there only the losses are clean.
      if (backend == Backend::cpu)
        for (size_t n = 0; n < p.targets.size(); ++n)
          if (p.targets[n] == -1) x[n * 5] = NAN;
      size_t row = 20;
      while (p.targets[row] == -1) ++row;
      x[row * 5 + 2] = NAN;
      p.run(1.0);
      for (size_t n = 0; n < p.losses.size(); ++n) {
        CHECK(std::isnan(p.losses[n]) == (n == row));
        CHECK(std::isnan(p.ce[n]) == (n == row && !of_teacher));
        CHECK(std::isnan(p.dinp[n * 5]) == (n == row));
        if (p.targets[n] == -1) CHECK(p.losses[n] + p.ce[n] + std::abs(p.dinp[n * 5]) == 0);
      }
      for (const float g : p.dweight) CHECK(std::isnan(g));
    }
}

TEST_CASE("distill: a target outside the vocabulary is an error, on a GPU NaN") {
  for (const int32_t wrong : {-2, 11, 1 << 30}) {
    Problem p({3, 11, 2, 2}, {}, false);
    p.targets[1] = wrong;
    CHECK_THROWS_AS(p.run(1.0), Error);
    if (!available(Backend::cuda)) continue;
    p.backend = Backend::cuda;
    p.run(1.0);
    for (size_t n = 0; n < 3; ++n) CHECK((std::isnan(p.losses[n]) && std::isnan(p.ce[n])) == (n == 1));
  }
}

TEST_CASE("distill: the thread count does not change a bit") {
  check_same_bits_on_any_threads<float>([] {
    Problem p({5000, 29, 8, 3}, {0.6, 2, false}, true);
    p.run(0.1);
    return joined(p.losses, p.ce, p.dinp, p.dweight);
  });
}
