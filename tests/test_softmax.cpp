#include "kernels/block/softmax.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, S;
};
constexpr Backend reference = Backend::reference;

// One lane a row to several columns a lane; several blocks.
std::vector<Size> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {{1, 1}, {3, 2}, {5, 7}, {2000, 4}, {300, 33}, {17, 128}, {2, 1300}};
  return {{1, 1}, {3, 2}, {5, 7}, {130, 4}, {9, 33}, {3, 128}, {1, 400}};
}

template <class T>
std::vector<Wide<T>> forward(const std::vector<T>& inp, const Size& size, const Pruning& pruning, Backend backend) {
  auto out = poisoned<Wide<T>>(size.rows * size.S);
  const Shape shape{1, size.rows, size.S};
  run_on(backend, {view(out, shape), view(inp, shape)},
         [=](auto& t, Stream stream) { softmax_forward(t[0], t[1], pruning, stream); });
  return out;
}

template <class T>
std::vector<T> backward(std::vector<T> dinp, const std::vector<Wide<T>>& dout, const std::vector<T>& inp,
                        const Size& size, const Pruning& pruning, bool add, Backend backend) {
  const Shape shape{1, size.rows, size.S};
  run_on(backend, {view(dinp, shape), view(dout, shape), view(inp, shape)}, [=](auto& t, Stream stream) {
    softmax_backward({t[0], add}, t[1], t[2], pruning, stream);
  });
  return dinp;
}

// Each top_p with and without renormalising.
std::vector<Pruning> prunings(const std::vector<double>& top_ps) {
  std::vector<Pruning> list;
  for (const double top_p : top_ps)
    for (const bool renormalize : {true, false}) list.push_back({top_p, renormalize});
  return list;
}

int64_t kept(const std::vector<float>& out) {
  return std::count_if(out.begin(), out.end(), [](float x) { return x > 0; });
}

}  // namespace

TEST_CASE("softmax: reference backward is the derivative of the reference forward, pruned or not") {
  for (double scale : {1e-3, 1.0, 10.0}) {
    for (const Pruning& pruning : prunings({0.0, 0.37, 0.8, 1.0})) {
      for (const Size& size : std::vector<Size>{{1, 1}, {3, 2}, {4, 7}, {2, 31}}) {
        CAPTURES(scale, pruning.top_p, pruning.renormalize, size.S);
        const int64_t n = size.rows * size.S;
        const auto inp = random_vector<double>(n, 1, scale), dout = random_vector<double>(n, 2);
        // An infinitesimal step leaves the mask, which goes by the real parts, as it is.
        auto want = complex_step(inp, [&](auto& x) {
          std::vector<Complex> out(x.size());
          softmax_forward_ref(out.data(), x.data(), size.rows, size.S, pruning);
          return dot(dout, out);
        });
        auto got = backward(poisoned<double>(n), dout, inp, size, pruning, false, reference);
        if (pruning.renormalize) {  // 0 where one entry is kept: judge it beside dout
          got = joined(got, dout), want = joined(want, dout);
        }
        check_close("dinp", got, want, 1e-11);
      }
    }
  }
}

// In bf16 out, which is f32 and computed from the same numbers, is as close, and dinp is rounded once. Equal weights
// are frequent then, and the larger index comes first in both.
TEST_CASE_TEMPLATE("softmax: the fast backends equal the reference, set and added", T, float, bf16) {
  const bool narrow = std::is_same_v<T, bf16>;
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend);
    for (double scale : narrow ? std::vector<double>{3.0} : std::vector<double>{1.0, 30.0}) {
      for (const Pruning& pruning : prunings({0.0, 0.371, 0.9, 1.0})) {
        for (const Size& size : sizes_for(backend)) {
          CAPTURES(scale, pruning.top_p, pruning.renormalize, size.S);
          const int64_t n = size.rows * size.S;
          const auto inp = random_vector<T>(n, 1, scale);
          const auto dout = random_vector<float>(n, 2);
          const auto inp64 = convert<double>(inp), dout64 = convert<double>(dout);
          // Sums of up to 1300 terms in vector order, and an exp of 1.5 ulp: some ulps (6e-8) of the result.
          check_close("out", forward(inp, size, pruning, backend), forward(inp64, size, pruning, reference), 1e-6);
          for (bool add : {false, true}) {
            const auto dinp = add ? random_vector<T>(n, 3) : poisoned<T>(n);
            auto got = convert<float>(backward(dinp, dout, inp, size, pruning, add, backend));
            auto want = backward(convert<double>(dinp), dout64, inp64, size, pruning, add, reference);
            // dinp is all cancellation where one entry has all the weight: judge it beside dout.
            const bool constant = !add && (size.S == 1 || (pruning.top_p == 0 && pruning.renormalize));
            if (narrow && constant)
              for (float d : got) CHECK(std::abs(d) < 1e-6f);
            else if (!narrow && (scale > 1 || pruning.top_p == 0))
              check_close("dinp", joined(got, dout), joined(want, dout), 2e-6);
            else check_close("dinp", got, want, tolerance_or_rounding<T>(2e-6));
          }
        }
      }
    }
  }
}

TEST_CASE("softmax: top-p by hand") {
  // alpha = 0.1, 0.4, 0.2, 0.3; in descending order the sums before are 0, 0.4, 0.7, 0.9.
  const std::vector<float> alpha{0.1f, 0.4f, 0.2f, 0.3f};
  std::vector<float> inp;
  for (float a : alpha) inp.push_back(std::log(a));
  struct Case {
    double top_p;
    std::vector<float> mask;
  };
  const std::vector<Case> cases{{0.0, {0, 1, 0, 0}}, {0.39, {0, 1, 0, 0}}, {0.4, {0, 1, 0, 1}}, {0.69, {0, 1, 0, 1}},
                                {0.7, {0, 1, 1, 1}}, {0.89, {0, 1, 1, 1}}, {0.9, {1, 1, 1, 1}}, {1.0, {1, 1, 1, 1}}};
  for (const Backend backend : all_backends()) {
    for (const Case& c : cases) {
      for (const bool renormalize : {true, false}) {
        CAPTURES(c.top_p, renormalize);
        float sum = 0;
        for (size_t m = 0; m < 4; ++m) sum += c.mask[m] * alpha[m];
        std::vector<float> want;
        for (size_t m = 0; m < 4; ++m) want.push_back(c.mask[m] * alpha[m] / (renormalize ? sum : 1));
        const auto out = forward(inp, {1, 4}, {c.top_p, renormalize}, backend);
        check_close("out", out, want, 1e-6);
        CHECK(kept(out) == std::count(c.mask.begin(), c.mask.end(), 1.f));
      }
    }
  }
}

TEST_CASE("softmax: among equal entries the last ones stay, and rounding does not decide how many") {
  for (const Backend backend : all_backends()) {
    // Eight heads of L layers read 1 to L streams: the entries that top-p 0.9 prunes at equal weights.
    for (const auto& [L, want] : std::vector<std::pair<int64_t, int64_t>>{{32, 288}, {64, 1392}, {128, 6048}}) {
      int64_t pruned = 0;
      for (int64_t S = 1; S <= L; ++S) {
        const auto out = forward(std::vector<float>(static_cast<size_t>(8 * S), 0.25f), {8, S}, Pruning{0.9}, backend);
        pruned += 8 * S - kept(out);
        for (size_t i = 1; i < out.size(); ++i)
          CHECK_MESSAGE((i % static_cast<size_t>(S) == 0 || out[i - 1] <= out[i]), "entry " << i << " of " << S);
      }
      CHECK(pruned == want);
    }
    for (int64_t S : {1, 2, 9, 200}) {
      CHECK(kept(forward(random_vector<float>(3 * S, 1), {3, S}, Pruning{0.0}, backend)) == 3);
      CHECK(kept(forward(random_vector<float>(3 * S, 1), {3, S}, Pruning{}, backend)) == 3 * S);
    }
  }
}

TEST_CASE("softmax: pruned entries receive gradient, unless the others are renormalised") {
  const Size size{1, 3};
  const std::vector<float> inp{0.f, 3.f, 2.5f}, dout{5.f, 1.f, 7.f};  // weights 0.03, 0.60, 0.37
  for (const Backend backend : all_backends()) {
    for (float d : backward(poisoned<float>(3), dout, inp, size, {0.5, false}, false, backend))
      CHECK(std::abs(d) > 1e-3f);
    const auto renormalised = backward(poisoned<float>(3), dout, inp, size, {0.7, true}, false, backend);
    CHECK(renormalised[0] == 0);
    CHECK(renormalised[2] > 1);  // 0.62 * 0.38 * (7 - 1)
    CHECK(renormalised[1] == doctest::Approx(-renormalised[2]));
  }
}

TEST_CASE("softmax: NaN and overflow make their row NaN, a large logit does not, and the threads do not matter") {
  for (const Backend backend : fast_backends()) {
    for (const Pruning& pruning : prunings({0.5, 1.0})) {
      CAPTURES(backend, pruning.top_p, pruning.renormalize);
      const Size size{backend == Backend::cpu ? 2000 : 60, 9};
      const size_t rows = static_cast<size_t>(size.rows);
      auto inp = random_vector<float>(size.rows * size.S, 1);
      auto dout = random_vector<float>(size.rows * size.S, 2);
      auto run = [&] {
        return joined(forward(inp, size, pruning, backend),
                      backward(poisoned<float>(size.rows * size.S), dout, inp, size, pruning, false, backend));
      };
      if (backend == Backend::cpu) check_same_bits_on_any_threads<float>(run);
      inp[7 * 9 + 5] = NAN;
      inp[30 * 9] = INFINITY;
      inp[50 * 9 + 8] = 3e38f;
      inp[51 * 9 + 8] = -3e38f;
      dout[40 * 9 + 2] = NAN;
      const auto both = run();
      for (size_t i = 0; i < both.size(); ++i) {
        const size_t row = i / 9 % rows;
        const bool in_dout = row == 40 && i / 9 >= rows;
        CHECK_MESSAGE(std::isnan(both[i]) == (row == 7 || row == 30 || in_dout), "element " << i);
      }
    }
  }
}

TEST_CASE("softmax: wrong shapes are errors") {
  const std::vector<float> x(6), five(5);
  CHECK_THROWS_AS(softmax_forward(view(x, {2, 3}), view(five), Pruning{}, Stream{}), Error);
  CHECK_THROWS_AS(softmax_backward({view(x), false}, view(five), view(x, {2, 3}), Pruning{}, Stream{}), Error);
}
