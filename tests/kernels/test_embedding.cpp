#include "kernels/block/embedding.h"

#include <algorithm>
#include <numeric>

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, V, C;
  int64_t rows() const { return B * T; }
};
// Widths below, at and beside a vector; few words, so that most rows meet again, and once so many that every thread has
// a first and a last one; work for more than one thread.
const std::vector<Size> sizes{{1, 1, 1, 1},    {2, 7, 5, 3},     {3, 5, 300, 16},
                              {2, 600, 9, 32}, {5, 401, 64, 47}, {7, 1001, 2000, 16}};

std::vector<int32_t> some_tokens(const Size& s) {
  std::vector<int32_t> tokens;
  for (double u : random_vector<double>(s.rows(), 9)) {
    const double square = u * u;  // small tokens are more frequent
    tokens.push_back(static_cast<int32_t>(square * static_cast<double>(s.V)));
  }
  return tokens;
}

template <class T>
std::vector<T> forward(const Size& s, const std::vector<float>& weight, const std::vector<int32_t>& tokens,
                       Backend backend) {
  auto out = poisoned<T>(s.rows() * s.C);
  run_on(backend, {view(out, {s.B, s.T, s.C}), view(weight, {s.V, s.C}), view(tokens, {s.B, s.T})},
         [](auto& t, Stream stream) { embedding_forward(t[0], t[1], t[2], stream); });
  return out;
}

template <class T>
std::vector<float> backward(const Size& s, const std::vector<T>& dout, const std::vector<int32_t>& tokens,
                            Backend backend) {
  auto dweight = random_vector<float>(s.V * s.C, 4);
  run_on(backend, {view(dweight, {s.V, s.C}), view(dout, {s.B, s.T, s.C}), view(tokens, {s.B, s.T})},
         [](auto& t, Stream stream) { embedding_backward(t[0], t[1], t[2], stream); });
  return dweight;
}

}  // namespace

TEST_CASE("embedding: forward copies the rows of the tokens") {
  for (const Size& s : sizes) {
    CAPTURE(s.C);
    const auto tokens = some_tokens(s);
    const auto weight = random_vector<float>(s.V * s.C, 1);
    std::vector<float> want;
    for (int32_t token : tokens) {
      const auto row = weight.begin() + token * s.C;
      want.insert(want.end(), row, row + s.C);
    }
    CHECK(forward<float>(s, weight, tokens, Backend::reference) == want);
    for (const Backend backend : fast_backends()) CHECK(forward<float>(s, weight, tokens, backend) == want);
  }
}

TEST_CASE("embedding: reference backward is the derivative of the reference forward") {
  const Size s{2, 7, 5, 3};
  const auto tokens = some_tokens(s);
  const auto weight = random_vector<double>(s.V * s.C, 1), dout = random_vector<double>(s.rows() * s.C, 2);
  const auto before = random_vector<double>(s.V * s.C, 3);
  auto want = complex_step(weight, [&](const std::vector<Complex>& w) {
    std::vector<Complex> out(dout.size());
    embedding_forward_ref(out.data(), w.data(), tokens.data(), s.rows(), s.C);
    return dot(dout, out);
  });
  for (size_t i = 0; i < want.size(); ++i) want[i] += before[i];
  auto dweight = before;
  embedding_backward_ref(dweight.data(), dout.data(), tokens.data(), s.rows(), s.C);
  check_close("dweight", dweight, want, 1e-13);
}

// Every column is summed in the order of the tokens on both backends: the float results must be equal.
TEST_CASE("embedding: fast CPU backward equals the reference to the bit, on any number of threads") {
  for (const Size& s : sizes) {
    CAPTURE(s.C);
    const auto tokens = some_tokens(s);
    const auto dout = random_vector<float>(s.rows() * s.C, 2);
    CHECK(backward(s, dout, tokens, Backend::cpu) == backward(s, dout, tokens, Backend::reference));
    check_same_bits_on_any_threads<float>([&] { return backward(s, dout, tokens, Backend::cpu); });
  }
}

// The order in which the GPU adds: of the positions sorted by word, those up to the next multiple of 32; then the sum
// of the other parts, each such a sum. From the bits it shows whether every position is where it should be in the list:
// a word in two places of it would have two writers at a time.
std::vector<float> backward_in_parts(const Size& s, const std::vector<float>& dout,
                                     const std::vector<int32_t>& tokens) {
  std::vector<size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens[a] < tokens[b]; });
  auto dweight = random_vector<float>(s.V * s.C, 4);
  const auto C = static_cast<size_t>(s.C);
  for (size_t begin = 0, end; begin < order.size(); begin = end) {
    const int32_t word = tokens[order[begin]];
    for (end = begin; end < order.size() && tokens[order[end]] == word;) ++end;
    for (size_t c = 0; c < C; ++c) {
      float first = 0, others = 0;
      for (size_t i = begin; i < end;) {
        float part = 0;
        do part += dout[order[i] * C + c];
        while (++i < end && i % 32 != 0);
        (i - 1) / 32 == begin / 32 ? first = part : others += part;
      }
      float& to = dweight[static_cast<size_t>(word) * C + c];
      to = to + first + others;
    }
  }
  return dweight;
}

// Sums of up to 700 rows of size 1, against sums in double.
TEST_CASE("embedding: CUDA backward equals the reference, and the bits do not depend on who runs first") {
  if (!available(Backend::cuda)) return;
  for (const Size& s : sizes) {
    CAPTURE(s.C);
    const auto tokens = some_tokens(s);
    const auto dout = random_vector<float>(s.rows() * s.C, 2);
    const auto got = backward(s, dout, tokens, Backend::cuda);
    auto want = convert<double>(random_vector<float>(s.V * s.C, 4));
    embedding_backward_ref(want.data(), convert<double>(dout).data(), tokens.data(), s.rows(), s.C);
    check_close("dweight", got, want, 1e-6);
    CHECK(got == backward_in_parts(s, dout, tokens));
  }
}

TEST_CASE("embedding: NaN stays in its column, and tokens outside the vocabulary are refused") {
  const Size s{1, 40, 6, 32};
  auto tokens = some_tokens(s);
  tokens[17] = 4;
  auto dout = random_vector<float>(s.rows() * s.C, 2);
  dout[17 * 32 + 30] = NAN;
  for (const Backend backend : fast_backends()) {
    const auto dweight = backward(s, dout, tokens, backend);
    for (size_t i = 0; i < dweight.size(); ++i) CHECK(std::isnan(dweight[i]) == (i == 4 * 32 + 30));
  }
  const auto weight = random_vector<float>(s.V * s.C, 1);
  for (int32_t bad : {-1, 6}) {
    tokens[39] = bad;
    for (Backend backend : {Backend::reference, Backend::cpu}) {
      CHECK_THROWS_AS(forward<float>(s, weight, tokens, backend), Error);
      CHECK_THROWS_AS(backward(s, dout, tokens, backend), Error);
    }
  }
}

TEST_CASE("embedding: CUDA makes the rows of tokens outside the vocabulary NaN, and leaves them out of the gradient") {
  if (!available(Backend::cuda)) return;
  const Size s{1, 70, 6, 8};
  const auto tokens = some_tokens(s);
  const auto weight = random_vector<float>(s.V * s.C, 1);
  const auto dout = random_vector<float>(s.rows() * s.C, 2);
  auto bad = tokens;
  bad[3] = -1, bad[40] = 6;
  bad[41] = std::numeric_limits<int32_t>::max(), bad[69] = std::numeric_limits<int32_t>::min();
  const auto is_bad = [&](size_t n) { return bad[n] != tokens[n]; };
  const auto out = forward<float>(s, weight, bad, Backend::cuda),
             want = forward<float>(s, weight, tokens, Backend::reference);
  for (size_t i = 0; i < out.size(); ++i) CHECK((is_bad(i / 8) ? std::isnan(out[i]) : out[i] == want[i]));
  auto good_dout = dout;
  for (size_t i = 0; i < good_dout.size(); ++i)
    if (is_bad(i / 8)) good_dout[i] = 0;
  const auto dweight = backward(s, good_dout, tokens, Backend::reference);
  check_close("dweight", backward(s, dout, bad, Backend::cuda), dweight, 1e-6);
}

TEST_CASE("embedding: in bf16 forward rounds the master's rows, backward sums in f32") {
  for (const Size& s : sizes) {
    CAPTURE(s.C);
    const auto tokens = some_tokens(s);
    const auto weight = random_vector<float>(s.V * s.C, 1);
    const auto dout = random_vector<bf16>(s.rows() * s.C, 2);
    const auto want = convert<bf16>(forward<float>(s, weight, tokens, Backend::reference));
    for (const Backend backend : fast_backends()) {
      CHECK(convert<float>(forward<bf16>(s, weight, tokens, backend)) == convert<float>(want));
      if (is_slow(backend) && &s == &sizes.back()) continue;  // slow in the emulator
      // The same sums as of the same numbers in f32, although the GPU reads more of them at a time.
      CHECK(backward(s, dout, tokens, backend) ==
            backward(s, convert<float>(dout), tokens, backend == Backend::cpu ? Backend::reference : backend));
    }
  }
}
