#include "kernels/block/embedding.h"

#include <algorithm>
#include <numeric>

#include "tests/support/op.h"

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

Op embedding(const Size& s, const std::vector<int32_t>& tokens) {
  const auto with_tokens = [=](Stream stream, auto&& body) {
    run_on(stream, {view(tokens, {s.B, s.T})}, [&](const std::vector<Tensor>& list) { body(list[0]); });
  };
  return {{parameter("weight", {s.V, s.C}), output("out", {s.B, s.T, s.C})},
          [=](auto& t, Stream stream) {
            with_tokens(stream, [&](const Tensor& ids) { embedding_forward(t["out"], t["weight"], ids, stream); });
          },
          [=](auto& t, Stream stream) {
            with_tokens(stream, [&](const Tensor& ids) { embedding_backward(t["dweight"], t["dout"], ids, stream); });
          },
          [=](auto& z) { embedding_forward_ref(z["out"], z["weight"], tokens.data(), s.rows(), s.C); }};
}
Op embedding(const Size& s) { return embedding(s, some_tokens(s)); }

}  // namespace

TEST_CASE("embedding: forward copies the rows of the tokens") {
  for (const Size& s : sizes) {
    const Op op = embedding(s);
    INFO(op.str());
    const Trial before(op, Dtype::f32);
    std::vector<double> want;
    for (int32_t token : some_tokens(s)) {
      const auto row = before["weight"].begin() + token * s.C;
      want.insert(want.end(), row, row + s.C);
    }
    for (const Backend backend : all_backends()) CHECK(Trial(before).forward(backend)["out"] == want);
  }
}

TEST_CASE("embedding: reference backward is the derivative of the reference forward") {
  check_derivative(embedding({2, 7, 5, 3}), 1e-13);
}

// Every column is summed in the order of the tokens on both backends: the float results must be equal.
TEST_CASE("embedding: fast CPU backward equals the reference to the bit, on any number of threads") {
  for (const Size& s : sizes) {
    const Op op = embedding(s);
    INFO(op.str());
    const Trial before(op, Dtype::f32);
    CHECK(Trial(before).backward(Backend::cpu)["dweight"] == Trial(before).backward(Backend::reference)["dweight"]);
    check_threads(op);
  }
}

// The order in which the GPU adds: of the positions sorted by word, those up to the next multiple of 32; then the sum
// of the other parts, each such a sum. From the bits it shows whether every position is where it should be in the list:
// a word in two places of it would have two writers at a time.
std::vector<double> backward_in_parts(const Size& s, const Trial& before, const std::vector<int32_t>& tokens) {
  const auto dout = convert<float>(before["dout"]);
  auto dweight = convert<float>(before["dweight"]);
  std::vector<size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens[a] < tokens[b]; });
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
  return convert<double>(dweight);
}

// Sums of up to 700 rows of size 1, against sums in double.
TEST_CASE("embedding: CUDA backward equals the reference, and the bits do not depend on who runs first") {
  if (!available(Backend::cuda)) return;
  for (const Size& s : sizes) {
    const Op op = embedding(s);
    INFO(op.str());
    const Trial before(op, Dtype::f32), got = Trial(before).backward(Backend::cuda);
    check_close("dweight", got["dweight"], before.exact().backward(Backend::reference)["dweight"], 1e-6);
    CHECK(got["dweight"] == backward_in_parts(s, before, some_tokens(s)));
  }
}

TEST_CASE("embedding: NaN stays in its column, and tokens outside the vocabulary are refused") {
  const Size s{1, 40, 6, 32};
  auto tokens = some_tokens(s);
  tokens[17] = 4;
  for (const Backend backend : fast_backends())
    check_nans(embedding(s, tokens), Dtype::f32, backend, {{"dout", {17 * 32 + 30}}}, {{"dweight", at({4 * 32 + 30})}});
  for (int32_t bad : {-1, 6}) {
    tokens[39] = bad;
    const Op op = embedding(s, tokens);
    for (Backend backend : {Backend::reference, Backend::cpu}) {
      CHECK_THROWS_AS(Trial(op, Dtype::f32).forward(backend), Error);
      CHECK_THROWS_AS(Trial(op, Dtype::f32).backward(backend), Error);
    }
  }
}

TEST_CASE("embedding: CUDA makes the rows of tokens outside the vocabulary NaN, and leaves them out of the gradient") {
  if (!available(Backend::cuda)) return;
  const Size s{1, 70, 6, 8};
  const auto tokens = some_tokens(s);
  auto bad = tokens;
  bad[3] = -1, bad[40] = 6;
  bad[41] = std::numeric_limits<int32_t>::max(), bad[69] = std::numeric_limits<int32_t>::min();
  const auto is_bad = [&](size_t n) { return bad[n] != tokens[n]; };
  const Op op = embedding(s, bad), good_op = embedding(s, tokens);
  Trial got(op, Dtype::f32), want(good_op, Dtype::f32);
  for (size_t i = 0; i < want["dout"].size(); ++i)
    if (is_bad(i / 8)) want.x["dout"][i] = 0;
  got.run(Backend::cuda), want.run(Backend::reference);
  const auto& out = got["out"];
  for (size_t i = 0; i < out.size(); ++i) CHECK((is_bad(i / 8) ? std::isnan(out[i]) : out[i] == want["out"][i]));
  check_close("dweight", got["dweight"], want["dweight"], 1e-6);
}

TEST_CASE("embedding: in bf16 forward rounds the master's rows, backward sums in f32") {
  for (const Size& s : sizes) {
    const Op op = embedding(s);
    INFO(op.str());
    const Trial before(op, Dtype::bf16);
    Trial in_f32 = before;
    in_f32.dtype = Dtype::f32;
    const auto want = convert<double>(convert<bf16>(Trial(in_f32).forward(Backend::reference)["out"]));
    for (const Backend backend : fast_backends()) {
      CHECK(Trial(before).forward(backend)["out"] == want);
      if (is_slow(backend) && &s == &sizes.back()) continue;  // slow in the emulator
      // The same sums as of the same numbers in f32, although the GPU reads more of them at a time.
      const Backend same = backend == Backend::cpu ? Backend::reference : backend;
      CHECK(Trial(before).backward(backend)["dweight"] == Trial(in_f32).backward(same)["dweight"]);
    }
  }
}
