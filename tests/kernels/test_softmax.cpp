#include "kernels/block/softmax.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, S;
};

// One lane a row to several columns a lane; several blocks.
const std::vector<Size> sizes{{1, 1}, {3, 2}, {5, 7}, {2000, 4}, {300, 33}, {17, 128}, {2, 1300}};
const std::vector<Size> gpu_sizes{{1, 1}, {3, 2}, {5, 7}, {130, 4}, {9, 33}, {3, 128}, {1, 400}};

Op softmax(const Size& s, const Pruning& pruning, double scale = 1) {
  const Shape shape{1, s.rows, s.S};
  return {{input("inp", shape, scale), in_f32(output("out", shape))},
          [=](auto& t, Stream stream) { softmax_forward(t["out"], t["inp"], pruning, stream); },
          [=](auto& t, Stream stream) { softmax_backward(t.grad("inp"), t["dout"], t["inp"], pruning, stream); },
          [=](auto& z) { softmax_forward_ref(z["out"], z["inp"], s.rows, s.S, pruning); }};
}

std::vector<double> forward(const std::vector<double>& inp, const Size& size, const Pruning& pruning, Backend backend) {
  const Op op = softmax(size, pruning);
  Trial trial(op, Dtype::f32);
  trial.x["inp"] = inp;
  return trial.forward(backend)["out"];
}

// Each top_p with and without renormalising.
std::vector<Pruning> prunings(const std::vector<double>& top_ps) {
  std::vector<Pruning> list;
  for (const double top_p : top_ps)
    for (const bool renormalize : {true, false}) list.push_back({top_p, renormalize});
  return list;
}

int64_t kept(const std::vector<double>& out) {
  return std::count_if(out.begin(), out.end(), [](double x) { return x > 0; });
}

}  // namespace

TEST_CASE("softmax: reference backward is the derivative of the reference forward, pruned or not") {
  for (double scale : {1e-3, 1.0, 10.0})
    for (const Pruning& pruning : prunings({0.0, 0.37, 0.8, 1.0}))
      for (const Size& size : std::vector<Size>{{1, 1}, {3, 2}, {4, 7}, {2, 31}}) {
        CAPTURES(scale, pruning.top_p, pruning.renormalize);
        // An infinitesimal step leaves the mask, which goes by the real parts, as it is. The gradient is 0 where one
        // entry is kept: then it is judged by dout, of size 0.58.
        check_derivative(softmax(size, pruning, scale), {1e-11, pruning.renormalize ? 0.4e-11 : 0});
      }
}

// In bf16 out, which is f32 and computed from the same numbers, is as close. Equal weights are frequent then, and the
// larger index comes first in both.
TEST_CASE_TEMPLATE("softmax: the fast backends equal the reference, set and added", T, float, bf16) {
  constexpr bool in_bf16 = std::is_same_v<T, bf16>;
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (double scale : in_bf16 ? std::vector<double>{3.0} : std::vector<double>{1.0, 30.0})
      for (const Pruning& pruning : prunings({0.0, 0.371, 0.9, 1.0})) {
        CAPTURES(scale, pruning.top_p, pruning.renormalize);
        // dinp is all cancellation where one entry has all the weight: then it is judged by dout.
        const bool constant = size.S == 1 || (pruning.top_p == 0 && pruning.renormalize);
        const bool cancels = constant || (!in_bf16 && (scale > 1 || pruning.top_p == 0));
        // Sums of up to 1300 terms in vector order, and an exp of 1.5 ulp: some ulps (6e-8) of the result.
        check_backend(softmax(size, pruning, scale), DtypeOf<T>::value, backend,
                      {{"out", 1e-6}, {"dinp", {2e-6, cancels ? 0.8e-6 : 0}}});
      }
  });
}

TEST_CASE("softmax: top-p by hand") {
  // alpha = 0.1, 0.4, 0.2, 0.3; in descending order the sums before are 0, 0.4, 0.7, 0.9.
  const std::vector<double> alpha{0.1, 0.4, 0.2, 0.3};
  std::vector<double> inp;
  for (double a : alpha) inp.push_back(std::log(a));
  struct Case {
    double top_p;
    std::vector<double> mask;
  };
  const std::vector<Case> cases{{0.0, {0, 1, 0, 0}}, {0.39, {0, 1, 0, 0}}, {0.4, {0, 1, 0, 1}}, {0.69, {0, 1, 0, 1}},
                                {0.7, {0, 1, 1, 1}}, {0.89, {0, 1, 1, 1}}, {0.9, {1, 1, 1, 1}}, {1.0, {1, 1, 1, 1}}};
  for (const Backend backend : all_backends()) {
    for (const Case& c : cases) {
      for (const bool renormalize : {true, false}) {
        CAPTURES(c.top_p, renormalize);
        double sum = 0;
        for (size_t m = 0; m < 4; ++m) sum += c.mask[m] * alpha[m];
        std::vector<double> want;
        for (size_t m = 0; m < 4; ++m) want.push_back(c.mask[m] * alpha[m] / (renormalize ? sum : 1));
        const auto out = forward(inp, {1, 4}, {c.top_p, renormalize}, backend);
        check_close("out", out, want, 1e-6);
        CHECK(kept(out) == std::count(c.mask.begin(), c.mask.end(), 1.0));
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
        const auto out = forward(std::vector<double>(static_cast<size_t>(8 * S), 0.25), {8, S}, Pruning{0.9}, backend);
        pruned += 8 * S - kept(out);
        for (size_t i = 1; i < out.size(); ++i)
          CHECK_MESSAGE((i % static_cast<size_t>(S) == 0 || out[i - 1] <= out[i]), "entry " << i << " of " << S);
      }
      CHECK(pruned == want);
    }
    for (int64_t S : {1, 2, 9, 200}) {
      CHECK(kept(forward(random_vector<double>(3 * S, 1), {3, S}, Pruning{0.0}, backend)) == 3);
      CHECK(kept(forward(random_vector<double>(3 * S, 1), {3, S}, Pruning{}, backend)) == 3 * S);
    }
  }
}

TEST_CASE("softmax: pruned entries receive gradient, unless the others are renormalised") {
  const auto dinp = [](const Pruning& pruning, Backend backend) {
    const Op op = softmax({1, 3}, pruning);
    Trial trial(op, Dtype::f32);
    trial.x["inp"] = {0, 3, 2.5}, trial.x["dout"] = {5, 1, 7};  // weights 0.03, 0.60, 0.37
    return trial.run(backend)["dinp"];
  };
  for (const Backend backend : all_backends()) {
    for (double d : dinp({0.5, false}, backend)) CHECK(std::abs(d) > 1e-3);
    const auto renormalised = dinp({0.7, true}, backend);
    CHECK(renormalised[0] == 0);
    CHECK(renormalised[2] > 1);  // 0.62 * 0.38 * (7 - 1)
    CHECK(renormalised[1] == doctest::Approx(-renormalised[2]));
  }
}

TEST_CASE("softmax: NaN and overflow make their row NaN, a large logit does not, and the threads do not matter") {
  for (const Pruning& pruning : prunings({0.5, 1.0})) {
    CAPTURES(pruning.top_p, pruning.renormalize);
    for (const Backend backend : fast_backends())
      check_nans(softmax({backend == Backend::cpu ? 2000 : 60, 9}, pruning), Dtype::f32, backend,
                 {{"inp", {7 * 9 + 5}}, {"dout", {40 * 9 + 2}}},
                 {{"out", [](size_t i) { return i / 9 == 7 || i / 9 == 30; }},
                  {"dinp", [](size_t i) { return i / 9 == 7 || i / 9 == 30 || i / 9 == 40; }}},
                 [](Trial& trial) {
                   auto& inp = trial.x["inp"];
                   inp[30 * 9] = INFINITY, inp[50 * 9 + 8] = 3e38, inp[51 * 9 + 8] = -3e38;
                 });
    check_threads(softmax({2000, 9}, pruning));
  }
}

TEST_CASE("softmax: wrong shapes are errors") {
  const std::vector<float> x(6), five(5);
  CHECK_THROWS_AS(softmax_forward(view(x, {2, 3}), view(five), Pruning{}, Stream{}), Error);
  CHECK_THROWS_AS(softmax_backward({view(x), false}, view(five), view(x, {2, 3}), Pruning{}, Stream{}), Error);
}
