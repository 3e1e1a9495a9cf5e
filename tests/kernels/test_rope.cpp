#include "kernels/block/rope.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {
struct Size {
  int64_t B, T, H, D, pos;
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

// With a table that ends `more` rows behind the last position.
Op rope(const Size& s, double theta, double scale = 1, int64_t more = 2) {
  const Shape shape{s.B, s.T, s.H, s.D};
  const int64_t rows = s.pos + s.T + more;
  return {{input("inp", shape, scale), output("out", shape),
           constant("table", {rows, s.D}, rope_table(rows, powers(s.D, theta)))},
          [=](auto& t, Stream stream) { rope_forward(t["out"], t["inp"], t["table"], s.pos, stream); },
          [=](auto& t, Stream stream) { rope_backward(t.grad("inp"), t["dout"], t["table"], s.pos, stream); },
          [=](auto& z) { rope_forward_ref(z["out"], z["inp"], z["table"], s.B, s.T, s.H, s.D, s.pos); }};
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
  for (double scale : {1e-3, 1.0, 1e3})
    for (const Size& s : std::vector<Size>{{1, 1, 1, 2, 3}, {2, 3, 3, 6, 2}, {1, 5, 2, 14, 0}})
      check_derivative(rope(s, 100, scale, 0), 1e-14);
}

// Two products and a sum, each rounded once: at most 1.5 * 2^-24 * (|x c| + |y s|), against a scale of about 0.58.
TEST_CASE_TEMPLATE("rope: the fast backends equal the reference, set, added and in place", T, float, bf16) {
  for_sizes(sizes, sizes, [](Backend backend, const Size& s) {
    const Op op = rope(s, 10000);
    check_backend(op, DtypeOf<T>::value, backend, {{"out", 4e-7}, {"dinp", 4e-7}});
    check_in_place(op, DtypeOf<T>::value, backend, {{"out", "inp"}}, {{"dinp", "dout"}});
  });
}

TEST_CASE("rope: NaN stays in its pair, threads do not matter, positions beyond the table are refused") {
  const Op op = rope({2, 501, 3, 34, 3}, 10000, 1, 0);
  const std::set<size_t> pair{34 * 7 + 20, 34 * 7 + 3};
  for (const Backend backend : fast_backends())
    check_nans(op, Dtype::f32, backend, {{"inp", {34 * 7 + 20}}, {"dout", {34 * 7 + 3}}},
               {{"out", at(pair)}, {"dinp", at(pair)}});
  check_threads(op);
  for (const Backend backend : fast_backends()) {
    const std::vector<float> x(2 * 4 * 6), table(6 * 6);
    CHECK_NOTHROW(rope_forward(view(x, {2, 4, 1, 6}), view(x, {2, 4, 1, 6}), view(table, {6, 6}), 2, Stream{}));
    CHECK_THROWS_AS(rope_forward(view(x, {2, 4, 1, 6}), view(x, {2, 4, 1, 6}), view(table, {6, 6}), 3, Stream{backend}),
                    Error);
  }
}
