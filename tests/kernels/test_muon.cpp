#include "kernels/optim/muon.h"

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t n = 40009;
const std::vector<MuonRow> rows{{3, 20, 0.5, 0.1, 0.2}, {20, 301, 0.02, 0, 3}, {333, 40000, 0.1, 0.3, 1.5}};

template <class T>
struct State {
  std::vector<T> params = random_vector<T>(n, 1), m = random_vector<T>(n, 2), u = random_vector<T>(n, 3);
  std::vector<double> factor{0.7}, numbers{0.4, 0.95, 0.5};

  void momentum(const std::vector<T>& grads, bool nesterov, Backend backend) {
    momentum_into(view(u), grads, nesterov, backend);
  }
  void momentum_into(const Tensor& to, const std::vector<T>& grads, bool nesterov, Backend backend) {
    run_on(backend, {to, view(m), view(grads), view(factor), view(numbers)},
           [&](const std::vector<Tensor>& t, Stream stream) {
             muon_momentum(t[0], t[1], t[2], t[3], t[4], nesterov, stream);
           });
  }
  void update(bool cautious, Backend backend, const Tensor& copy = {}) { update_by(view(u), cautious, backend, copy); }
  void update_by(const Tensor& o, bool cautious, Backend backend, const Tensor& copy = {}) {
    run_on(backend, {view(params), copy, o, view(factor), view(numbers)},
           [&](const std::vector<Tensor>& t, Stream stream) {
             muon_update(t[0], t[1], t[2], t[3], t[4], rows, cautious, stream);
           });
  }
};

}  // namespace

// Both passes are a few roundings of numbers of size 1 each.
TEST_CASE("muon: momentum and update equal what is written out here, by every backend") {
  for (const bool nesterov : {false, true})
    for (const bool cautious : {false, true}) {
      CAPTURES(nesterov, cautious);
      State<double> exact;
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
      check_close("m", exact.m, m, 1e-14), check_close("u", exact.u, u, 1e-14);
      check_close("params", exact.params, params, 1e-14);
      for (const Backend backend : fast_backends()) {
        State<float> fast;
        fast.momentum(convert<float>(grads), nesterov, backend), fast.update(cautious, backend);
        check_close("f32 m", fast.m, m, 1e-6), check_close("f32 u", fast.u, u, 1e-6);
        check_close("f32 params", fast.params, params, 1e-6);
      }
    }
}

TEST_CASE("muon: the bf16 copy is the updated parameter rounded; the direction may be bf16, or the gradient itself") {
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    State<float> a, b, c, d;
    const auto grads = random_vector<float>(n, 4);
    std::vector<bf16> u(n), copy(n), rounded(n);
    a.momentum(grads, true, backend);
    b.u = grads;
    b.momentum(b.u, true, backend);
    CHECK(a.u == b.u);
    c.momentum_into(view(u), grads, true, backend);
    CHECK(c.m == a.m);
    for (size_t i = 0; i < n; ++i) CHECK(u[i].bits == bf16(a.u[i]).bits);
    a.update(false, backend, view(copy));
    for (const MuonRow& row : rows)
      for (int64_t i = row.begin; i < row.end; ++i) REQUIRE(copy[i].bits == bf16(a.params[i]).bits);
    d.u = convert<float>(u);
    d.update(true, backend, view(copy)), c.update_by(view(u), true, backend, view(rounded));
    CHECK((c.params == d.params && std::memcmp(copy.data(), rounded.data(), n * sizeof(bf16)) == 0));
  }
  const auto grads = random_vector<float>(n, 4);
  check_same_bits_on_any_threads<float>([&] {
    State<float> state;
    state.momentum(grads, true, Backend::cpu), state.update(true, Backend::cpu);
    return joined(state.params, state.m, state.u);
  });
}

void normalize_rows_on(Backend backend, const Tensor& o, const Tensor& v, const std::vector<double>& factor) {
  run_on(backend, {o, v, view(factor)},
         [](const std::vector<Tensor>& t, Stream stream) { normalize_rows(t[0], t[1], 0.95, t[2], stream); });
}

TEST_CASE("muon: where the factor is not finite nothing is written; a zero direction only decays") {
  for (const Backend backend : all_backends()) {
    State<float> state, before;
    state.factor = {NAN};
    state.momentum(random_vector<float>(n, 4), true, backend), state.update(false, backend);
    std::vector<float> o(6, 1.f), v(2, 0.f);
    normalize_rows_on(backend, view(o, {2, 3}), view(v), state.factor);
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
  const auto start = convert<float>(o), start_v = convert<float>(v);
  normalize_rows_on(Backend::reference, view(o, {2, 2}), view(v), factor);
  check_close("o", o, want, 1e-9), check_close("v", v, std::vector<double>{0.05 * 12.5, 0.05 * 0.005}, 1e-12);
  for (const Backend backend : fast_backends()) {
    auto fast = start, fast_v = start_v;
    normalize_rows_on(backend, view(fast, {2, 2}), view(fast_v), factor);
    check_close("f32 o", fast, want, 1e-6), check_close("f32 v", fast_v, v, 1e-6);
  }
  // A matrix that is larger than a block, in f32 and bf16.
  constexpr int64_t height = 70, width = 300;
  std::vector<double> big = convert<double>(random_vector<bf16>(height * width, 5)), big_v(70, 0.5);
  const auto begin = big;
  normalize_rows_on(Backend::reference, view(big, {height, width}), view(big_v), factor);
  for (const Backend backend : fast_backends()) {
    auto fast = convert<float>(begin);
    auto rounded = convert<bf16>(begin);
    std::vector<float> fast_v(70, 0.5f), rounded_v = fast_v;
    normalize_rows_on(backend, view(fast, {height, width}), view(fast_v), factor);
    normalize_rows_on(backend, view(rounded, {height, width}), view(rounded_v), factor);
    check_close("f32 o", fast, big, 1e-5), check_close("f32 v", fast_v, big_v, 1e-6);
    check_close("bf16 o", convert<float>(rounded), big, 4e-3);
    CHECK(rounded_v == fast_v);
  }
}

TEST_CASE("muon: the scales of a wide and a tall matrix") {
  CHECK(muon_scale_of("rms", 4, 100) == doctest::Approx(2));
  CHECK(muon_scale_of("original", 4, 100) == 1);
  CHECK(muon_scale_of("original", 100, 4) == 5);
  CHECK(muon_scale_of("spectral", 4, 100) == doctest::Approx(0.2));
}
