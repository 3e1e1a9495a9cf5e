#include "kernels/block/rope.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {
struct Size {
  int64_t B, T, H, D, pos;
  int64_t numel() const { return B * T * H * D; }
  Shape shape() const { return {B, T, H, D}; }
};
// Every head size with code of its own, and others; positions that begin at 0 and later; work for more than one thread.
const std::vector<Size> sizes{{1, 1, 1, 2, 0},   {2, 3, 5, 6, 4},   {3, 5, 4, 8, 0},    {2, 9, 3, 16, 7},
                              {2, 33, 4, 32, 1}, {1, 65, 3, 64, 0}, {2, 70, 2, 128, 9}, {2, 501, 3, 34, 3}};

std::vector<double> powers(int64_t D, double theta) {
  std::vector<double> frequencies;
  for (int64_t j = 0; j < D / 2; ++j)
    frequencies.push_back(std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(D)));
  return frequencies;
}

// In place where out is inp.
void forward(Backend backend, const Tensor& out, const Tensor& inp, const Tensor& table, int64_t pos) {
  run_on(backend, {out, inp, table}, [=](auto& t, Stream stream) { rope_forward(t[0], t[1], t[2], pos, stream); });
}
void backward(Backend backend, const Grad& dinp, const Tensor& dout, const Tensor& table, int64_t pos) {
  run_on(backend, {dinp, dout, table}, [=](auto& t, Stream stream) {
    rope_backward({t[0], dinp.add}, t[1], t[2], pos, stream);
  });
}
}  // namespace

TEST_CASE("rope: the table holds cosines, then sines") {
  const std::vector<double> table = rope_table(301, powers(6, 10000.0));
  REQUIRE(table.size() == 301 * 6);
  for (int64_t t : {0, 1, 17, 300}) {
    for (int64_t j = 0; j < 3; ++j) {
      const double angle = static_cast<double>(t) / std::pow(std::cbrt(10000.0), static_cast<double>(j));
      CHECK(std::abs(table[static_cast<size_t>(t * 6 + j)] - std::cos(angle)) < 1e-12);
      CHECK(std::abs(table[static_cast<size_t>(t * 6 + 3 + j)] - std::sin(angle)) < 1e-12);
    }
  }
}

TEST_CASE("rope: the reference is a product of complex numbers, and its scores depend on distance alone") {
  const int64_t B = 2, T = 5, H = 3, D = 10, h = D / 2, pos = 4;
  const auto inp = random_vector<double>(B * T * H * D, 1), table = rope_table(pos + T, powers(D, 500.0));
  auto out = poisoned<double>(B * T * H * D);
  rope_forward_ref(out.data(), inp.data(), table.data(), B, T, H, D, pos);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < T; ++t)
      for (int64_t head = 0; head < H; ++head)
        for (int64_t j = 0; j < h; ++j) {
          const size_t i = static_cast<size_t>(((b * T + t) * H + head) * D + j), k = i + static_cast<size_t>(h);
          const double angle = static_cast<double>(pos + t) * std::pow(500.0, -2.0 * static_cast<double>(j) / D);
          const Complex want = Complex(inp[i], inp[k]) * std::polar(1.0, angle);
          CHECK(std::abs(Complex(out[i], out[k]) - want) < 1e-13);
        }

  // The same two vectors, five positions apart, at three places.
  const auto q = random_vector<double>(D, 2), k = random_vector<double>(D, 3), far = rope_table(40, powers(D, 500.0));
  std::vector<double> scores;
  for (int64_t at : {0, 11, 34}) {
    auto rq = poisoned<double>(D), rk = poisoned<double>(D);
    rope_forward_ref(rq.data(), q.data(), far.data(), 1, 1, 1, D, at + 5);
    rope_forward_ref(rk.data(), k.data(), far.data(), 1, 1, 1, D, at);
    double score = 0;
    for (size_t c = 0; c < rq.size(); ++c) score += rq[c] * rk[c];
    scores.push_back(score);
  }
  CHECK(std::abs(scores[1] - scores[0]) < 1e-13);
  CHECK(std::abs(scores[2] - scores[0]) < 1e-13);
}

TEST_CASE("rope: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& s : std::vector<Size>{{1, 1, 1, 2, 3}, {2, 3, 3, 6, 2}, {1, 5, 2, 14, 0}}) {
      CAPTURES(scale, s.D);
      const auto inp = random_vector<double>(s.numel(), 1, scale), dout = random_vector<double>(s.numel(), 2);
      const auto table = rope_table(s.pos + s.T, powers(s.D, 100.0)), before = random_vector<double>(s.numel(), 3);
      const auto table_c = convert<Complex>(table);
      auto want = complex_step(inp, [&](const std::vector<Complex>& x) {
        std::vector<Complex> out(x.size());
        rope_forward_ref(out.data(), x.data(), table_c.data(), s.B, s.T, s.H, s.D, s.pos);
        return dot(dout, out);
      });
      auto dinp = poisoned<double>(s.numel());
      rope_backward_ref(dinp.data(), dout.data(), table.data(), s.B, s.T, s.H, s.D, s.pos, false);
      check_close("dinp", dinp, want, 1e-14);
      dinp = before;
      for (size_t i = 0; i < want.size(); ++i) want[i] += before[i];
      rope_backward_ref(dinp.data(), dout.data(), table.data(), s.B, s.T, s.H, s.D, s.pos, true);
      check_close("dinp added", dinp, want, 1e-14);
    }
  }
}

// Two products and a sum, each rounded once: at most 1.5 * 2^-24 * (|x c| + |y s|), against a scale of about 0.58. In
// bf16 the result is rounded once.
TEST_CASE_TEMPLATE("rope: the fast backends equal the reference, set, added and in place", T, float, bf16) {
  const double tolerance = tolerance_or_rounding<T>(4e-7);
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    for (const Size& s : sizes) {
      CAPTURES(s.T, s.D);
      const auto inp = random_vector<T>(s.numel(), 1), before = random_vector<T>(s.numel(), 2);
      const auto table = convert<float>(rope_table(s.pos + s.T + 2, powers(s.D, 10000.0)));
      const auto inp64 = convert<double>(inp), table64 = convert<double>(table);
      const Tensor x = view(inp, s.shape()), angles = view(table, {s.pos + s.T + 2, s.D});
      auto out = poisoned<T>(s.numel()), in_place = inp;
      const Tensor both = view(in_place, s.shape());
      auto want = poisoned<double>(s.numel());
      rope_forward_ref(want.data(), inp64.data(), table64.data(), s.B, s.T, s.H, s.D, s.pos);
      forward(backend, view(out, s.shape()), x, angles, s.pos);
      check_close("out", out, want, tolerance);
      forward(backend, both, both, angles, s.pos);
      CHECK(convert<float>(in_place) == convert<float>(out));
      for (bool add : {false, true}) {
        auto dinp = add ? before : poisoned<T>(s.numel());
        auto dinp64 = convert<double>(dinp);
        rope_backward_ref(dinp64.data(), inp64.data(), table64.data(), s.B, s.T, s.H, s.D, s.pos, add);
        backward(backend, {view(dinp, s.shape()), add}, x, angles, s.pos);
        check_close("dinp", dinp, dinp64, tolerance);
        if (add) continue;
        std::copy(inp.begin(), inp.end(), in_place.begin());
        backward(backend, {both, false}, both, angles, s.pos);
        CHECK(convert<float>(in_place) == convert<float>(dinp));
      }
    }
  }
}

TEST_CASE("rope: NaN stays in its pair, threads do not matter, positions beyond the table are refused") {
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    const Size s{2, 501, 3, 34, 3};
    const auto table = convert<float>(rope_table(504, powers(s.D, 10000.0)));
    const Tensor angles = view(table, {504, s.D});
    auto inp = random_vector<float>(s.numel(), 1);
    inp[34 * 7 + 20] = NAN;
    auto run = [&] {
      auto out = std::vector<float>(inp.size());
      forward(backend, view(out, s.shape()), view(inp, s.shape()), angles, s.pos);
      return out;
    };
    const auto out = run();
    for (size_t i = 0; i < out.size(); ++i) REQUIRE(std::isnan(out[i]) == (i == 34 * 7 + 20 || i == 34 * 7 + 3));
    if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
    const Tensor x = view(inp, s.shape());
    CHECK_THROWS_AS(rope_forward(x, x, angles, 4, Stream{backend}), Error);
  }
}
