#include "kernels/optim/adamw.h"

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Three ranges with their own learning rate and decay, and three gaps: before, between, behind.
constexpr int64_t n = 40009;
const std::vector<AdamwRow> rows{{3, 20, 0.5, 0.1}, {20, 301, 0.02, 0.0}, {333, 40000, 0.1, 0.3, 0.25}};
constexpr double usual = 0.7;

bool in_gap(int64_t i) { return i < 3 || (i >= 301 && i < 333) || i >= 40000; }

// How all weights decay in a step.
struct Decay {
  bool cautious = false;
  double factor = 1;
};

// At a base learning rate of 1.
std::vector<double> numbers_of(const AdamwConstants& constants, int64_t step, double factor, double decay = 1) {
  const AdamwNumbers of = adamw_numbers(constants, step, 1, factor, decay);
  return {of.factor, of.lr, of.unbias_m, of.unbias_v, of.decay};
}

template <class T>
struct State {
  std::vector<T> params = random_vector<T>(n, 1), m = std::vector<T>(n, T(0)), v = m;

  void update(const std::vector<T>& grads, int64_t step, double eps, Backend backend, Tensor bf16_copy = {},
              double factor = usual, const Decay& decay = {}) {
    const AdamwConstants constants{0.9, 0.95, eps, decay.cautious};
    const auto numbers = numbers_of(constants, step, factor, decay.factor);
    run_on(backend, {view(params), view(m), view(v), bf16_copy, view(grads), view(numbers)},
           [=](auto& t, Stream stream) { adamw_update(t[0], t[1], t[2], t[3], t[4], t[5], rows, constants, stream); });
  }
};

// The textbook's form, one parameter at a time: the decay, then a step against the unbiased moments, whose bias is
// found as the sum of the weights that the moving average has given out. Cautious decay asks the step first.
struct Textbook {
  double p, m = 0, v = 0, weight_m = 0, weight_v = 0;

  void update(double grad, double lr, double weight_decay, double eps, bool cautious) {
    const double g = grad * usual;
    m = 0.9 * m + 0.1 * g, weight_m = 0.9 * weight_m + 0.1;
    v = 0.95 * v + 0.05 * g * g, weight_v = 0.95 * weight_v + 0.05;
    const double step = lr * (m / weight_m) / (std::sqrt(v / weight_v) + eps);
    if (!cautious || step * p >= 0) p = p * (1 - lr * weight_decay);
    p = p - step;
  }
};

// params, m and v after five updates, one behind the other.
std::vector<double> textbook(double grad_size, double eps, const Decay& decay = {}) {
  std::vector<double> all(3 * n, 0.0);
  const auto params = convert<double>(random_vector<float>(n, 1));
  std::vector<Textbook> states;
  for (double p : params) states.push_back(Textbook{p});
  for (uint64_t step = 1; step <= 5; ++step) {
    const auto grads = random_vector<float>(n, 10 + step, grad_size);
    for (const AdamwRow& row : rows)
      for (int64_t i = row.begin; i < row.end; ++i)
        states[static_cast<size_t>(i)].update(static_cast<double>(grads[static_cast<size_t>(i)]), row.lr_mul,
                                              decay.factor * row.weight_decay, eps * row.eps_mul, decay.cautious);
  }
  for (size_t i = 0; i < n; ++i) all[i] = states[i].p, all[n + i] = states[i].m, all[2 * n + i] = states[i].v;
  return all;
}

template <class T>
std::vector<T> run(double grad_size, double eps, Backend backend, const Decay& decay = {}) {
  State<T> state;
  state.params = convert<T>(random_vector<float>(n, 1));
  for (int64_t step = 1; step <= 5; ++step)
    state.update(convert<T>(random_vector<float>(n, 10 + static_cast<uint64_t>(step), grad_size)), step, eps, backend,
                 {}, usual, decay);
  return joined(state.params, state.m, state.v);
}

// params, m and v have different sizes; each is judged by its own.
template <class T>
void check_parts(const std::vector<T>& got, const std::vector<double>& want, double tolerance) {
  for (int part : {0, 1, 2}) {
    CAPTURE(part);
    const auto begin = part * n, end = begin + n;
    check_close("part", std::vector<T>(got.begin() + begin, got.begin() + end),
                std::vector<double>(want.begin() + begin, want.begin() + end), tolerance);
  }
}

}  // namespace

// A step moves a parameter by up to the learning rate, 0.5; five steps have about eight roundings each; 1e-6 is 17
// units of 2^-24. The large eps is of the size of the gradients, so that a misplaced eps would show.
TEST_CASE("adamw: all backends equal the textbook over five steps") {
  for (double grad_size : {1e-6, 1e-2, 1e3}) {
    for (double eps : {1e-8, 1e-2}) {
      CAPTURES(grad_size, eps);
      const auto want = textbook(grad_size, eps);
      check_parts(run<double>(grad_size, eps, Backend::reference), want, 1e-12);
      check_parts(run<float>(grad_size, eps, Backend::reference), want, 1e-6);
      for (const Backend backend : fast_backends()) check_parts(run<float>(grad_size, eps, backend), want, 1e-6);
    }
  }
}

// No sign of a step here depends on a rounding.
TEST_CASE("adamw: cautious decay, and a decay that is a part of the usual one, equal the textbook over five steps") {
  for (const Decay& decay : {Decay{true, 1}, Decay{false, 0.4}, Decay{true, 0.4}, Decay{false, 0}}) {
    CAPTURES(decay.cautious, decay.factor);
    const auto want = textbook(1e-2, 1e-8, decay);
    CHECK(want != textbook(1e-2, 1e-8));
    check_parts(run<double>(1e-2, 1e-8, Backend::reference, decay), want, 1e-12);
    for (const Backend backend : fast_backends()) check_parts(run<float>(1e-2, 1e-8, backend, decay), want, 1e-6);
  }
}

TEST_CASE("adamw: what lies outside the rows is untouched, and threads do not matter") {
  const auto params = random_vector<float>(n, 1);
  for (const Backend backend : fast_backends()) {
    const auto all = run<float>(1.0, 1e-8, backend);
    for (int64_t i = 0; i < n; ++i) {
      const size_t k = static_cast<size_t>(i);
      REQUIRE((all[k] == params[k]) == in_gap(i));
      REQUIRE((all[n + k] == 0.f) == in_gap(i));
      REQUIRE((all[2 * n + k] == 0.f) == in_gap(i));
    }
  }
  check_same_bits_on_any_threads<float>([] { return run<float>(1.0, 1e-8, Backend::cpu); });
}

TEST_CASE("adamw: a learning rate of zero moves the moments and not the parameter") {
  for (const Backend backend : all_backends()) {
    std::vector<float> p{1.f, 2.f}, m(2, 0.f), v(2, 0.f), g{0.5f, -4.f};
    const AdamwConstants constants{0.9, 0.95, 1e-8};
    const auto numbers = numbers_of(constants, 1, 1);
    run_on(backend, {view(p), view(m), view(v), view(g), view(numbers)}, [=](auto& t, Stream stream) {
      adamw_update(t[0], t[1], t[2], {}, t[3], t[4], {{0, 2, 0.0, 0.1}}, constants, stream);
    });
    CHECK(p == std::vector<float>{1.f, 2.f});
    CHECK(m[1] < 0.f);
    CHECK(v[1] > 0.f);
  }
}

TEST_CASE("adamw: a NaN or infinite gradient makes its parameter NaN, and no other") {
  for (const Backend backend : all_backends()) {
    State<float> state;
    auto grads = random_vector<float>(n, 2);
    grads[10] = NAN;
    grads[500] = INFINITY;
    grads[1] = grads[10];  // in a gap
    state.update(grads, 1, 1e-8, backend);
    for (size_t i = 0; i < n; ++i) REQUIRE(std::isnan(state.params[i]) == (i == 10 || i == 500));
  }
}

TEST_CASE("adamw: a factor that is not finite leaves everything as it is") {
  for (const Backend backend : all_backends()) {
    for (const double factor : {double{NAN}, double{INFINITY}}) {
      CAPTURES(backend, factor);
      State<float> state;
      const State<float> before = state;
      auto bf16_copy = std::vector<bf16>(n, 7.f);
      state.update(random_vector<float>(n, 2), 1, 1e-8, backend,
                   backend == Backend::reference ? Tensor{} : view(bf16_copy, {n}), factor);
      CHECK(state.params == before.params);
      CHECK(state.m == before.m);
      CHECK(state.v == before.v);
      CHECK(std::all_of(bf16_copy.begin(), bf16_copy.end(), [](bf16 x) { return static_cast<float>(x) == 7.f; }));
    }
  }
}

TEST_CASE("adamw: rows that overlap, run backwards or leave the arena are refused") {
  std::vector<float> x(10, 1.f);
  const Tensor t = view(x, {10});
  const AdamwConstants constants{0.9, 0.95, 1e-8};
  const auto numbers = numbers_of(constants, 1, 1);
  using Rows = std::vector<AdamwRow>;
  for (const Rows& bad : {Rows{{0, 5, 1, 0}, {4, 8, 1, 0}}, Rows{{5, 8, 1, 0}, {0, 2, 1, 0}}, Rows{{3, 2, 1, 0}},
                          Rows{{5, 11, 1, 0}}, Rows{{-1, 2, 1, 0}}})
    CHECK_THROWS_AS(adamw_update(t, t, t, Tensor{}, t, view(numbers), bad, constants, Stream{}), Error);
}

TEST_CASE("adamw: bf16_copy is the updated parameter rounded, and changes nothing else") {
  const auto grads = random_vector<float>(n, 2);
  for (const Backend backend : fast_backends()) {
    State<float> plain, with;
    auto bf16_copy = std::vector<bf16>(n, 7.f);
    plain.update(grads, 1, 1e-8, backend);
    with.update(grads, 1, 1e-8, backend, view(bf16_copy, {n}));
    CHECK(with.params == plain.params);
    CHECK(with.m == plain.m);
    CHECK(with.v == plain.v);
    for (int64_t i = 0; i < n; ++i) {
      const size_t k = static_cast<size_t>(i);
      REQUIRE(static_cast<float>(bf16_copy[k]) == (in_gap(i) ? 7.f : static_cast<float>(bf16(plain.params[k]))));
    }
    CHECK_THROWS_AS(with.update(grads, 2, 1e-8, backend, view(bf16_copy, {n - 1})), Error);
  }
  auto bf16_copy = std::vector<bf16>(n, 7.f);
  CHECK_THROWS_AS(State<float>().update(grads, 2, 1e-8, Backend::reference, view(bf16_copy, {n})), Error);
}

// Many short rows: more than one launch has room for; some without a gap and alike, some empty, at every alignment, as
// the arrays themselves are.
TEST_CASE("adamw: any number of rows, of any length") {
  const int64_t size = 5003;
  std::vector<AdamwRow> many;
  int64_t at = 1;
  for (int i = 0; at < size - 20; ++i) {
    const int64_t length = i % 7 * (i % 3), gap = i % 5 == 0 ? i % 4 : 0;
    many.push_back({at, at + length, i % 4 < 2 ? 0.1 : 0.03, i % 8 < 4 ? 0.0 : 0.2});
    at += length + gap;
  }
  REQUIRE(many.size() > 600);
  many.push_back({at, size, 0.1, 0.3});
  const auto grads = random_vector<float>(size, 2);
  const auto run = [&](Backend backend, int64_t shift) {
    auto params = random_vector<float>(size, 1), m = random_vector<float>(size, 3);
    std::vector<float> v(static_cast<size_t>(size), 0.5f);
    const AdamwConstants constants{0.9, 0.95, 1e-8};
    const auto numbers = numbers_of(constants, 3, usual);
    const std::vector<Tensor> all{view(params), view(m), view(v), view(grads), view(numbers)};
    run_on(backend, all, [&](std::vector<Tensor> t, Stream stream) {
      for (size_t i = 0; i < 4; ++i) t[i] = view(t[i].as<float>() + shift, {size - shift});
      auto shifted = many;
      for (AdamwRow& row : shifted) row.begin -= shift, row.end -= shift;
      adamw_update(t[0], t[1], t[2], {}, t[3], t[4], shifted, constants, stream);
    });
    return joined(params, m, v);
  };
  const auto want = convert<double>(run(Backend::reference, 0));
  for (const Backend backend : fast_backends())
    for (const int64_t shift : {0, 1}) check_close("params, m and v", run(backend, shift), want, 1e-6);
}
