#include "kernels/attention/attention.h"

#include <omp.h>

#include <array>
#include <type_traits>

#include "kernels/attention/ops.h"
#include "kernels/cpu/amx.h"
#include "kernels/devices.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const double nan_value = std::numeric_limits<double>::quiet_NaN();

struct Size {
  int64_t B, T, H, K, D;
  int64_t queries() const { return B * T * H * D; }
  int64_t keys() const { return B * T * K * D; }
  std::string str() const { return crossply::str(B, " ", T, " ", H, " ", K, " ", D); }
};

// Everything an attention reads and writes, in one type (lse in float where that is bf16); the outputs begin as NaN.
template <class Real>
struct Case {
  using Stat = std::conditional_t<std::is_same_v<Real, bf16>, float, Real>;
  Size z;
  Kernels kernels = Kernels::fast;
  std::vector<Real> q, k, v, dout, out;
  std::vector<Stat> lse;
  std::vector<Real> dq, dk, dv;

  explicit Case(const Size& size, double logits = 1)
      : z(size),
        q(random_vector<Real>(z.queries(), 1, logits)),
        k(random_vector<Real>(z.keys(), 2)),
        v(random_vector<Real>(z.keys(), 3)),
        dout(random_vector<Real>(z.queries(), 4)),
        out(poisoned<Real>(z.queries())),
        lse(poisoned<Stat>(z.B * z.H * z.T)),
        dq(poisoned<Real>(z.queries())),
        dk(poisoned<Real>(z.keys())),
        dv(poisoned<Real>(z.keys())) {}

  // The same numbers in double, as the reference reads them.
  template <class From>
  explicit Case(const Case<From>& from)
      : z(from.z),
        q(convert<Real>(from.q)),
        k(convert<Real>(from.k)),
        v(convert<Real>(from.v)),
        dout(convert<Real>(from.dout)),
        out(convert<Real>(from.out)),
        lse(convert<Stat>(from.lse)),
        dq(convert<Real>(from.dq)),
        dk(convert<Real>(from.dk)),
        dv(convert<Real>(from.dv)) {}

  Tensor of_queries(const std::vector<Real>& x) const { return view(x, {z.B, z.T, z.H, z.D}); }
  Tensor of_keys(const std::vector<Real>& x) const { return view(x, {z.B, z.T, z.K, z.D}); }
  AttentionSizes sizes() const { return {z.B, z.T, z.H, z.K, z.D, z.T, 0}; }
  void forward(double scale, Backend backend) {
    run_on(backend, {of_queries(out), view(lse, {z.B, z.H, z.T}), of_queries(q), of_keys(k), of_keys(v)},
           [&](auto& t, Stream stream) {
             if (is_plain(kernels, stream))
               attention_forward_plain(t[0], t[1], t[2], t[3], t[4], sizes(), static_cast<float>(scale));
             else attention_forward(t[0], t[1], t[2], t[3], t[4], scale, stream);
           });
  }
  void backward(double scale, Backend backend, bool accumulate_q = false, bool accumulate_k = false,
                bool accumulate_v = false) {
    run_on(backend,
           {of_queries(dq), of_keys(dk), of_keys(dv), of_queries(dout), of_queries(out), of_queries(q), of_keys(k),
            of_keys(v), view(lse, {z.B, z.H, z.T})},
           [&](auto& t, Stream stream) {
             const Grad to_q{t[0], accumulate_q}, to_k{t[1], accumulate_k}, to_v{t[2], accumulate_v};
             if (is_plain(kernels, stream))
               attention_backward_plain(to_q, to_k, to_v, t[3], t[4], t[5], t[6], t[7], t[8], sizes(),
                                        static_cast<float>(scale));
             else attention_backward(to_q, to_k, to_v, t[3], t[4], t[5], t[6], t[7], t[8], scale, stream);
           });
  }
};

double usual_scale(const Size& z) { return 1 / std::sqrt(static_cast<double>(z.D)); }

// What rounding to bf16 must cost: exact, but that the weights of a tile, the gradients of its scores and the results
// are rounded. The weights sum to one before they are rounded.
void plain_bf16(Case<double>& c, double scale, bool accumulate) {
  const auto rounded = [](double x) { return static_cast<double>(bf16(static_cast<float>(x))); };
  const auto [B, T, H, K, D] = c.z;
  std::vector<double> p(T), dq(D), dk(c.dk.size()), dv(c.dv.size());
  if (accumulate) dk = c.dk, dv = c.dv;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = ((b * T + t) * H + h) * D, key = (b * T * K + h / (H / K)) * D, stride = K * D;
        double max = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j <= t; ++j) {
          p[j] = 0;
          for (int64_t d = 0; d < D; ++d) p[j] += scale * c.q[row + d] * c.k[key + j * stride + d];
          max = std::max(max, p[j]);
        }
        for (int64_t j = 0; j <= t; ++j) sum += p[j] = std::exp(p[j] - max);
        c.lse[(b * H + h) * T + t] = max + std::log(sum);
        for (int64_t d = 0; d < D; ++d) {
          double out = 0;
          for (int64_t j = 0; j <= t; ++j) out += rounded(p[j]) * c.v[key + j * stride + d];
          c.out[row + d] = rounded(out / sum);
          delta += c.dout[row + d] * c.out[row + d];
        }
        for (int64_t d = 0; d < D; ++d) dq[d] = accumulate ? c.dq[row + d] : 0;
        for (int64_t j = 0; j <= t; ++j) {
          const int64_t at = key + j * stride;
          double dp = 0;
          for (int64_t d = 0; d < D; ++d) dp += c.dout[row + d] * c.v[at + d];
          const double ds_rounded = rounded(p[j] / sum * (dp - delta)), p_rounded = rounded(p[j] / sum);
          for (int64_t d = 0; d < D; ++d) {
            dq[d] += scale * ds_rounded * c.k[at + d];
            dk[at + d] += scale * ds_rounded * c.q[row + d];
            dv[at + d] += p_rounded * c.dout[row + d];
          }
        }
        for (int64_t d = 0; d < D; ++d) c.dq[row + d] = rounded(dq[d]);
      }
  for (size_t i = 0; i < dk.size(); ++i) c.dk[i] = rounded(dk[i]), c.dv[i] = rounded(dv[i]);
}

// The largest and the root mean square difference; NaN where there is one.
std::array<double, 2> errors(const std::vector<double>& got, const std::vector<double>& want) {
  double largest = 0, square = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    largest = error <= largest ? largest : error;
    square += error * error;
  }
  return {largest, std::sqrt(square / static_cast<double>(want.size()))};
}

// No worse than twice the errors of the plain computation, and float's own where that one has none.
void check_rounding(const std::string& what, const std::vector<bf16>& got, const std::vector<double>& plain,
                    const std::vector<double>& want) {
  CAPTURE(what);
  const auto mine = errors(convert<double>(got), want), allowed = errors(plain, want);
  for (int i = 0; i < 2; ++i) CHECK(mine[i] <= 2 * allowed[i] + 1e-6);
}

void check_against_reference(Case<float>& fast, Backend backend, double scale, double tolerance,
                             bool accumulate_q = false, bool accumulate_k = false, bool accumulate_v = false) {
  CAPTURE(static_cast<int>(backend));
  Case<double> want(fast);
  fast.forward(scale, backend);
  want.forward(scale, Backend::reference);
  check_close("out", fast.out, want.out, tolerance);
  check_close("lse", fast.lse, want.lse, tolerance);
  fast.backward(scale, backend, accumulate_q, accumulate_k, accumulate_v);
  want.backward(scale, Backend::reference, accumulate_q, accumulate_k, accumulate_v);
  check_close("dq", fast.dq, want.dq, tolerance);
  check_close("dk", fast.dk, want.dk, tolerance);
  check_close("dv", fast.dv, want.dv, tolerance);
}

// Without a matrix unit, and with those that this machine may have.
template <class F>
void on_every_unit(F&& body) {
  for (MatrixUnit unit : {MatrixUnit::none, MatrixUnit::avx512_bf16, MatrixUnit::amx}) {
    use_matrix_unit(unit);
    CAPTURE(static_cast<int>(matrix_unit()));
    body();
  }
}

// Heads narrower than a vector, odd, wider than the widest tile; one tile and several, full and ragged; cut pairs.
const std::vector<Size> sizes{{1, 2, 1, 1, 1},    {2, 5, 4, 4, 8},    {3, 43, 4, 4, 8},   {2, 64, 4, 2, 16},
                              {1, 67, 6, 2, 13},  {1, 130, 2, 1, 64}, {9, 130, 1, 1, 24}, {2, 192, 4, 4, 8},
                              {1, 200, 3, 3, 48}, {1, 67, 2, 1, 129}, {1, 33, 2, 2, 256}, {1, 300, 1, 1, 31},
                              {4, 17, 6, 3, 80},  {2, 85, 4, 2, 8},   {1, 340, 2, 1, 7},  {1, 530, 1, 1, 8}};
// For the emulator, which is slow: one block and several of 16 rows, tiles of 32 and stages of 64 columns likewise.
const std::vector<Size> small_sizes{
    {1, 1, 1, 1, 1}, {2, 5, 4, 2, 8}, {1, 43, 3, 1, 13}, {2, 33, 2, 2, 66}, {1, 67, 2, 1, 129}};
std::vector<Size> sizes_for(Backend backend) { return sizes_of(backend, sizes, small_sizes); }

}  // namespace

TEST_CASE("attention: reference backward is the derivative of the reference forward") {
  for (double logits : {1e-2, 1.0, 30.0})
    for (const Size& z : std::vector<Size>{{1, 1, 1, 1, 3}, {2, 5, 2, 2, 3}, {1, 6, 4, 2, 5}, {1, 7, 3, 1, 2}}) {
      CAPTURES(logits, z.str());
      const double scale = usual_scale(z);
      Case<double> c(z, logits);
      auto loss = [&](const std::vector<Complex>& q, const std::vector<Complex>& k, const std::vector<Complex>& v) {
        std::vector<Complex> out(q.size()), lse(c.lse.size());
        attention_forward_ref(out.data(), lse.data(), q.data(), k.data(), v.data(), z.B, z.T, z.H, z.K, z.D, scale);
        return dot(c.dout, out);
      };
      const auto q = convert<Complex>(c.q), k = convert<Complex>(c.k), v = convert<Complex>(c.v);
      c.forward(scale, Backend::reference);
      c.backward(scale, Backend::reference);
      check_close("dq", c.dq, complex_step(c.q, [&](auto& x) { return loss(x, k, v); }), 1e-11);
      check_close("dk", c.dk, complex_step(c.k, [&](auto& x) { return loss(q, x, v); }), 1e-11);
      check_close("dv", c.dv, complex_step(c.v, [&](auto& x) { return loss(q, k, x); }), 1e-11);
    }
}

TEST_CASE("attention: the reference forward on a case worked by hand") {
  // Two positions, D = 1: position 1 weighs v = 2 and v = 10 by exp(0) and exp(log 3).
  Case<double> c({1, 2, 1, 1, 1});
  c.q = {5, 1}, c.k = {0, std::log(3.0)}, c.v = {2, 10};
  c.forward(1, Backend::reference);
  check_close("out", c.out, std::vector<double>{2, 8}, 1e-14);
  CHECK(std::abs(c.lse[0]) < 1e-14);
  CHECK(c.lse[1] == doctest::Approx(std::log(4.0)).epsilon(1e-14));
}

TEST_CASE("attention: the fast backends equal the reference") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Size& z : sizes_for(backend)) {
        CAPTURES(z.str(), kernels);
        Case<float> c(z);
        c.kernels = kernels;
        check_against_reference(c, backend, usual_scale(z), 1e-5);
      }
}

TEST_CASE("attention: narrow heads of every width, at the ends of vectors and blocks") {
  for (int64_t D = 1; D <= 17; ++D)
    for (int64_t T : {1, 2, 15, 16, 17, 31, 32, 33, 40, 48, 53, 64, 65, 85, 97, 200}) {
      const Size z{T < 20 ? 3 : 1, T, 6, (D + T) % 2 == 0 ? 6 : 2 + D % 2, D};
      CAPTURE(z.str());
      // One position has gradients of nothing but rounding: seen from what they are added to, it is that small.
      const bool accumulate_q = T == 1 || (D + T) % 3 == 0, accumulate_k = T == 1 || D % 2 == 0,
                 accumulate_v = T % 2 == 0;
      Case<float> c(z);
      if (accumulate_q) c.dq = random_vector<float>(z.queries(), 5);
      if (accumulate_k) c.dk = random_vector<float>(z.keys(), 6);
      if (accumulate_v) c.dv = random_vector<float>(z.keys(), 7);
      check_against_reference(c, Backend::cpu, usual_scale(z), 1e-5, accumulate_q, accumulate_k, accumulate_v);
    }
}

// Every width of tiles, whole and ragged, and one that is none; blocks of 128 or 64 queries and keys, parts of them.
const std::vector<Size> small_sizes_bf16{{1, 1, 1, 1, 8},     {2, 17, 4, 2, 16},  {1, 140, 2, 1, 40},
                                         {1, 150, 1, 1, 64},  {1, 43, 2, 1, 13},  {1, 65, 1, 1, 88},
                                         {1, 131, 1, 1, 128}, {1, 70, 1, 1, 200}, {1, 33, 2, 1, 104}};

void check_bf16(const Size& z, Backend backend, bool accumulate, Kernels kernels = Kernels::fast) {
  CAPTURES(z.str(), backend, accumulate, kernels);
  const double scale = usual_scale(z);
  Case<bf16> c(z, 3);
  c.kernels = kernels;
  if (accumulate) c.dq = random_vector<bf16>(z.queries(), 5), c.dk = c.k, c.dv = c.v;
  Case<double> want(c), plain(c);
  c.forward(scale, backend);
  want.forward(scale, Backend::reference);
  plain_bf16(plain, scale, accumulate);
  check_close("lse", c.lse, want.lse, 1e-5);
  check_rounding("out", c.out, plain.out, want.out);
  c.backward(scale, backend, accumulate, accumulate, accumulate);
  want.backward(scale, Backend::reference, accumulate, accumulate, accumulate);
  check_rounding("dq", c.dq, plain.dq, want.dq);
  check_rounding("dk", c.dk, plain.dk, want.dk);
  check_rounding("dv", c.dv, plain.dv, want.dv);
}

TEST_CASE("attention: fast CPU in bf16 loses no more than bf16 must") {
  on_every_unit([] {
    for (const Size& z : sizes)
      for (bool accumulate : {false, true}) check_bf16(z, Backend::cpu, accumulate);
  });
}

TEST_CASE("attention: the GPU in bf16 loses no more than bf16 must") {
  if (!available(Backend::cuda)) return;
  for (const Kernels kernels : kernels_of(Backend::cuda))
    for (const Size& z : sizes_of(Backend::cuda, sizes, small_sizes_bf16))
      check_bf16(z, Backend::cuda, z.T % 2 == 0, kernels);
}

TEST_CASE("attention: the warpgroup products of sm_90 in bf16 lose no more than bf16 must") {
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  const std::vector<Size> around_tiles{{1, 64, 1, 1, 64},  {1, 65, 1, 1, 128}, {1, 127, 2, 1, 64},  {2, 128, 1, 1, 128},
                                       {1, 129, 1, 1, 64}, {1, 191, 2, 2, 64}, {1, 193, 4, 1, 128}, {1, 193, 4, 2, 64},
                                       {1, 320, 1, 1, 64}, {1, 320, 2, 1, 128}};
  for (const Size& z : around_tiles)
    for (const bool accumulate : {false, true}) check_bf16(z, Backend::cuda, accumulate);
}

TEST_CASE("attention: large logits") {
  // Scores reach 30 * 30 / 3, whose float spacing is 3e-5: that is the relative error a weight may have.
  for (const Backend backend : fast_backends())
    for (const Size& z : std::vector<Size>{{1, 67, 2, 1, 8}, {2, 67, 4, 2, 8}, {1, 130, 2, 2, 33}}) {
      if (is_slow(backend) && z.H != 2) break;
      CAPTURE(z.str());
      Case<float> c(z, 30);
      check_against_reference(c, backend, 30 * usual_scale(z), 1e-3);
    }
}

TEST_CASE("attention: scores that are all far below zero, or far above") {
  for (const Backend backend : fast_backends())
    for (double sign : {-1.0, 1.0})
      for (const Size& z : std::vector<Size>{{1, 40, 1, 1, 33}, {1, 53, 2, 1, 8}, {1, 40, 2, 2, 16}}) {
        if (is_slow(backend) && z.D < 33) break;
        CAPTURES(z.str(), sign);
        Case<float> c(z);
        for (size_t i = 0; i < c.q.size(); i += static_cast<size_t>(z.D)) c.q[i] = static_cast<float>(sign * 1000);
        for (size_t i = 0; i < c.k.size(); i += static_cast<size_t>(z.D)) c.k[i] = 1;
        check_against_reference(c, backend, usual_scale(z), 1e-3);  // scores of some 350, whose spacing is 3e-5
      }
}

TEST_CASE_TEMPLATE("attention: later keys do not change a bit, and numbers below the normal ones stay", S, float,
                   bf16) {
  for (const Backend backend : fast_backends()) {
    const Size z{1, 100, 2, 1, 8};
    Case<S> c(z, 10), changed(z, 10);
    constexpr int64_t from = 43;
    for (auto i = static_cast<size_t>(from * z.D); i < c.k.size(); ++i)
      changed.k[i] = 100 * static_cast<float>(c.k[i]), changed.v[i] = 7.f;
    c.forward(1, backend);
    changed.forward(1, backend);
    const auto rows = [](const std::vector<S>& x) { return std::vector<float>(x.begin(), x.begin() + from * 16); };
    CHECK(rows(c.out) == rows(changed.out));
    CHECK(rows(c.out) != std::vector<float>(c.out.end() - from * 16, c.out.end()));
  }
  volatile float smallest = std::numeric_limits<float>::min();
  CHECK(smallest / 2 > 0);
}

TEST_CASE("attention: gradients are set, or added where asked") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Size& z : std::vector<Size>{{1, 10, 4, 2, 9}, {1, 67, 4, 2, 8}, {5, 20, 4, 2, 17}})
        for (int flags = 0; flags < 8; ++flags) {
          const bool accumulate_q = flags & 1, accumulate_k = flags & 2, accumulate_v = flags & 4;
          if (is_slow(backend) && z.T > 10) continue;
          CAPTURES(z.str(), flags, kernels);
          Case<float> c(z);
          c.kernels = kernels;
          if (accumulate_q) c.dq = random_vector<float>(z.queries(), 5);
          if (accumulate_k) c.dk = random_vector<float>(z.keys(), 6);
          if (accumulate_v) c.dv = random_vector<float>(z.keys(), 7);
          check_against_reference(c, backend, 0.3, 1e-5, accumulate_q, accumulate_k, accumulate_v);
        }
}

TEST_CASE_TEMPLATE("attention: the gradients do not depend on the number of threads", S, float, bf16) {
  const auto floats = [](const std::vector<S>& x) { return convert<float>(x); };
  const int threads = omp_get_max_threads();
  for (const Size& z : std::vector<Size>{{1, 200, 4, 1, 16}, {1, 200, 3, 3, 8}, {4, 70, 4, 2, 8}, {1, 600, 2, 1, 8}}) {
    CAPTURE(z.str());
    omp_set_num_threads(1);
    Case<S> one(z);
    one.forward(0.3, Backend::cpu);
    one.backward(0.3, Backend::cpu);
    for (int n : {2, 3}) {
      omp_set_num_threads(n);
      Case<S> c(z);
      c.forward(0.3, Backend::cpu);
      c.backward(0.3, Backend::cpu);
      CHECK((floats(c.out) == floats(one.out) && c.lse == one.lse && floats(c.dq) == floats(one.dq)));
      CHECK((floats(c.dk) == floats(one.dk) && floats(c.dv) == floats(one.dv)));
    }
  }
  omp_set_num_threads(threads);
}

TEST_CASE_TEMPLATE("attention: a NaN in one key reaches the rows that see it, and only those", S, float, bf16) {
  for (const Backend backend : fast_backends())
    for (int64_t key : {int64_t{37}, int64_t{149}, int64_t{0}, int64_t{64}}) {
      const Size z{1, 150, backend == Backend::cuda ? 1 : 2, 1, 8};
      if (backend == Backend::cuda && key % 64 == 0) continue;
      CAPTURES(backend, key);
      Case<S> c(z);
      c.k[static_cast<size_t>(key * z.D + 3)] = static_cast<float>(nan_value);
      c.forward(0.3, backend);
      c.backward(0.3, backend);
      int64_t wrong = 0;
      for (int64_t t = 0; t < z.T; ++t)
        for (int64_t i = 0; i < z.H * z.D; ++i) {
          const auto at = static_cast<size_t>(t * z.H * z.D + i);
          wrong += std::isnan(static_cast<float>(c.out[at])) != (t >= key);
          wrong += t >= key && !std::isnan(static_cast<float>(c.dq[at]));
        }
      for (int64_t t = 0; t < z.T; ++t)
        for (int64_t h = 0; h < z.H; ++h) wrong += std::isnan(c.lse[static_cast<size_t>(h * z.T + t)]) != (t >= key);
      // A row with a NaN sends it back to every key it saw, so to all up to the last row.
      for (const auto* x : {&c.dk, &c.dv})
        for (S g : *x) wrong += !std::isnan(static_cast<float>(g));
      CHECK(wrong == 0);
    }
}

// The rows of out when the positions of c come in chunks of `step`; what the caches hold beyond them must stay NaN.
template <class S>
std::vector<S> in_chunks(const Case<S>& c, int64_t step, Backend backend) {
  const Size& z = c.z;
  const int64_t rows = z.T + 3, row = z.K * z.D, wide = z.H * z.D;
  auto k_cache = poisoned<S>(z.B * rows * row), v_cache = k_cache, out = poisoned<S>(z.queries());
  for (int64_t pos = 0; pos < z.T; pos += step) {
    const int64_t n = std::min(step, z.T - pos);
    std::vector<S> q, k, v;
    for (int64_t b = 0; b < z.B; ++b) {
      const int64_t at = b * z.T + pos;
      q.insert(q.end(), c.q.begin() + at * wide, c.q.begin() + (at + n) * wide);
      k.insert(k.end(), c.k.begin() + at * row, c.k.begin() + (at + n) * row);
      v.insert(v.end(), c.v.begin() + at * row, c.v.begin() + (at + n) * row);
    }
    auto part = poisoned<S>(z.B * n * wide);
    run_on(backend,
           {view(part, {z.B, n, z.H, z.D}), view(k_cache, {z.B, rows, z.K, z.D}), view(v_cache, {z.B, rows, z.K, z.D}),
            view(q, {z.B, n, z.H, z.D}), view(k, {z.B, n, z.K, z.D}), view(v, {z.B, n, z.K, z.D})},
           [&](auto& t, Stream stream) { attention_cached(t[0], t[1], t[2], t[3], t[4], t[5], pos, 0.3, stream); });
    for (int64_t b = 0; b < z.B; ++b)
      std::copy_n(part.begin() + b * n * wide, n * wide, out.begin() + (b * z.T + pos) * wide);
  }
  for (int64_t b = 0; b < z.B; ++b)
    for (auto i = static_cast<size_t>((b * rows + z.T) * row); i < static_cast<size_t>((b + 1) * rows * row); ++i)
      CHECK((is_nan(k_cache[i]) && is_nan(v_cache[i])));
  return out;
}

TEST_CASE("attention: cached steps and chunks equal the whole sequence") {
  for (const Size& z : std::vector<Size>{{2, 7, 4, 2, 5}, {1, 150, 2, 1, 8}, {2, 130, 3, 3, 33}})
    for (const Backend backend : all_backends())
      for (int64_t step : {int64_t{1}, int64_t{3}, int64_t{29}, int64_t{70}, z.T}) {
        if (is_slow(backend) && z.T > 7 && (step != 70 || z.D > 8)) continue;
        CAPTURES(z.str(), step, backend);
        Case<float> c(z);
        Case<double> want(c);
        want.forward(0.3, Backend::reference);
        check_close("out", in_chunks(c, step, backend), want.out, 1e-5);
      }
}

TEST_CASE("attention: cached steps and chunks in bf16 lose no more than bf16 must") {
  for (const Backend backend : fast_backends())
    for (const auto& step_and_T : std::vector<std::array<int64_t, 2>>{{1, 5}, {17, 60}, {60, 135}}) {
      const int64_t step = step_and_T[0];
      const Size z{2, step_and_T[1], 2, 1, 24};  // few queries, and blocks that begin anywhere
      CAPTURES(step, backend);
      Case<bf16> c(z, 3);
      Case<double> want(c), plain(c);
      want.forward(0.3, Backend::reference);
      plain_bf16(plain, 0.3, false);
      check_rounding("out", in_chunks(c, step, backend), plain.out, want.out);
    }
}

TEST_CASE("attention: recorded with a divisor, the logits are q k / (sqrt(D) divisor), cached or not") {
  const Size z{1, 5, 4, 2, 9};
  Case<double> want(Case<float>(z, 5));
  want.forward(1 / (3 * 2.5), Backend::reference);
  const Case<float> c(z, 5);
  for (const std::string& name : joined(fast_devices(), std::vector<std::string>{"reference"}))
    for (const int64_t cache : {int64_t{0}, z.T}) {
      CAPTURES(name, cache);
      const auto device = make_device(name);
      Tape tape(Dtype::f32, cache);
      Value* q = tape.input("q", c.of_queries(c.q).shape, Dtype::f32);
      Value* k = tape.input("k", c.of_keys(c.k).shape, Dtype::f32);
      Value* v = tape.input("v", k->shape, Dtype::f32);
      const Value* out = ops::attention(tape, "a", q, k, v, 2.5);
      tape.plan(PlanMode::reuse);
      tape.allocate(*device);
      device->copy_in(q->tensor.data, c.q.data(), q->bytes());
      device->copy_in(k->tensor.data, c.k.data(), k->bytes());
      device->copy_in(v->tensor.data, c.v.data(), v->bytes());
      tape.forward(Step{});
      std::vector<float> got(c.q.size());
      device->copy_out(got.data(), out->tensor.data, out->bytes());
      check_close("out", got, want.out, 1e-5);
    }
}

// 2 bytes before a boundary of 16, where tensor cores cannot read.
TEST_CASE("attention: bf16 at any address") {
  if (!available(Backend::cuda)) return;
  const Size z{1, 20, 2, 1, 16};
  const Case<bf16> c(z, 3);
  Case<double> want(c), plain(c);
  want.forward(0.3, Backend::reference);
  plain_bf16(plain, 0.3, false);
  const auto there = [](int64_t n) { return static_cast<bf16*>(allocate_device_memory((n + 8) * 2)) + 1; };
  const int64_t queries = z.queries(), keys = z.keys();
  bf16 *out = there(queries), *q = there(queries), *k = there(keys), *v = there(keys);
  auto* lse = static_cast<float*>(allocate_device_memory(c.lse.size() * sizeof(float)));
  copy_to_device(q, c.q.data(), c.q.size() * 2);
  copy_to_device(k, c.k.data(), c.k.size() * 2);
  copy_to_device(v, c.v.data(), c.v.size() * 2);
  const Shape of_q{z.B, z.T, z.H, z.D}, of_k{z.B, z.T, z.K, z.D};
  attention_forward(view(out, of_q), view(lse, {z.B, z.H, z.T}), view(q, of_q), view(k, of_k), view(v, of_k), 0.3,
                    Stream{Backend::cuda});
  std::vector<bf16> got(c.out.size());
  copy_from_device(got.data(), out, got.size() * 2);
  check_rounding("out", got, plain.out, want.out);
  for (bf16* x : {out, q, k, v}) release_device_memory(x - 1);
  release_device_memory(lse);
}

TEST_CASE("attention: on the GPU, who comes first does not matter") {
  if (!available(Backend::cuda)) return;
  const auto run = [] {  // the emulator draws another order each time
    Case<bf16> c({1, 40, 2, 1, 40}, 3);
    c.forward(0.3, Backend::cuda);
    c.backward(0.3, Backend::cuda);
    auto all = convert<float>(c.out);
    for (const auto* x : {&c.dq, &c.dk, &c.dv}) all.insert(all.end(), x->begin(), x->end());
    return all;
  };
  CHECK(run() == run());
}

TEST_CASE("attention: shapes that do not fit are refused") {
  Case<float> c({1, 4, 3, 3, 2});
  const Tensor lse = view(c.lse.data(), {1, 3, 4}), q = c.of_queries(c.q), out = c.of_queries(c.out);
  const Tensor two = view(c.k.data(), {1, 4, 2, 2});  // 3 query heads cannot share 2 key heads
  CHECK_THROWS_AS(attention_forward(out, lse, q, two, two, 1, Stream{}), Error);
  const Tensor k = c.of_keys(c.k);
  CHECK_THROWS_AS(attention_cached(out, k, k, q, k, k, 1, 1, Stream{}), Error);  // 4 rows do not fit behind one
}
