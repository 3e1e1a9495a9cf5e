#include "kernels/depth/head_scale.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t tokens, K, D;
};
const Stream reference{Backend::reference};

// A lane or several for each row, both widths of access; one block of partial sums or many.
std::vector<Size> sizes_for(Backend backend) {
  if (backend == Backend::cpu) return {{1, 1, 1}, {3, 2, 5}, {70, 3, 16}, {900, 4, 24}, {5000, 1, 7}};
  return {{1, 1, 1}, {3, 2, 5}, {70, 3, 16}, {40, 4, 24}, {5, 2, 300}};
}

template <class T>
struct Case {
  Size z;
  std::vector<T> inp, dout, dinp;
  std::vector<Wide<T>> factor, dfactor;

  Case(const Size& size, double scale) : z(size) {
    const int64_t n = z.tokens * z.K * z.D;
    inp = random_vector<T>(n, 1, scale), dout = random_vector<T>(n, 2), dinp = random_vector<T>(n, 3, scale);
    factor = random_vector<Wide<T>>(z.K, 4, scale), dfactor = random_vector<Wide<T>>(z.K, 5);
  }
  Case<double> exact() const {
    Case<double> c(z, 1);
    c.inp = convert<double>(inp), c.dout = convert<double>(dout), c.dinp = convert<double>(dinp);
    c.factor = convert<double>(factor), c.dfactor = convert<double>(dfactor);
    return c;
  }
  std::vector<T> forward(Backend backend) const {
    auto out = poisoned<T>(static_cast<int64_t>(inp.size()));
    const Shape shape{z.tokens, z.K, z.D};
    run_on(backend, {view(out, shape), view(inp, shape), view(factor, {z.K})},
           [](auto& t, Stream stream) { head_scale_forward(t[0], t[1], t[2], stream); });
    return out;
  }
  // Writes dinp, and dfactor if trained; else inp is not there either.
  void backward(Backend backend, bool add, bool trained = true) {
    if (!add) dinp = poisoned<T>(static_cast<int64_t>(dinp.size()));
    const Shape shape{z.tokens, z.K, z.D};
    run_on(backend,
           {view(dinp, shape), trained ? view(dfactor, {z.K}) : Tensor{}, view(dout, shape),
            trained ? view(inp, shape) : Tensor{}, view(factor, {z.K})},
           [=](auto& t, Stream stream) {
             head_scale_backward({t[0], add}, t[1], t[2], t[3], t[4], stream);
           });
  }
};

template <class T>
void check_fast(Backend backend, double tolerance) {
  for (const Size& size : sizes_for(backend))
    for (const double scale : {1e-3, 1.0, 50.0}) {
      CAPTURES(backend, size.K, size.D, scale);
      const Case<T> start(size, scale);
      check_close("out", start.forward(backend), start.exact().forward(Backend::reference),
                  tolerance_or_rounding<T>(tolerance));
      for (const bool add : {false, true})
        for (const bool trained : {false, true}) {
          Case<T> got = start;
          Case<double> want = start.exact();
          got.backward(backend, add, trained);
          want.backward(Backend::reference, add, trained);
          check_close("dinp", got.dinp, want.dinp, tolerance_or_rounding<T>(tolerance));
          check_close("dfactor", got.dfactor, want.dfactor, 20 * tolerance);  // sums of up to 35,000 terms
        }
    }
}

}  // namespace

TEST_CASE("head_scale: reference backward is the derivative of the reference forward") {
  for (const Size& z : std::vector<Size>{{1, 1, 1}, {3, 4, 2}, {2, 3, 5}})
    for (const double scale : {1e-3, 1.0, 50.0}) {
      CAPTURE(scale);
      Case<double> c(z, scale);
      const auto loss = [&](const std::vector<Complex>& inp, const std::vector<Complex>& factor) {
        std::vector<Complex> out(inp.size());
        head_scale_forward_ref(out.data(), inp.data(), factor.data(), z.tokens * z.K, z.K, z.D);
        return dot(c.dout, out);
      };
      const auto dinp = complex_step(c.inp, [&](auto& x) { return loss(x, convert<Complex>(c.factor)); });
      auto dfactor = complex_step(c.factor, [&](auto& f) { return loss(convert<Complex>(c.inp), f); });
      for (size_t k = 0; k < dfactor.size(); ++k) dfactor[k] += c.dfactor[k];
      c.backward(Backend::reference, false);
      check_close("dinp", c.dinp, dinp, 1e-13);
      check_close("dfactor", c.dfactor, dfactor, 1e-12);
    }
}

TEST_CASE("head_scale: the fast backends equal the reference, set and added, with and without a trained factor") {
  for (const Backend backend : fast_backends()) {
    check_fast<float>(backend, 4e-7);
    check_fast<bf16>(backend, 4e-7);
  }
}

TEST_CASE("head_scale: the threads do not matter") {
  for (const Size& size : std::vector<Size>{{5000, 3, 8}, {70, 2, 600}})
    check_same_bits_on_any_threads<float>([&] {
      Case<float> c(size, 1);
      const auto out = c.forward(Backend::cpu);
      c.backward(Backend::cpu, true);
      return joined(c.dinp, out, c.dfactor);
    });
}

TEST_CASE("head_scale: NaN stays, and wrong shapes are errors") {
  for (const Backend backend : all_backends()) {
    Case<float> c({4, 3, 5}, 1);
    c.factor[1] = std::numeric_limits<float>::quiet_NaN();
    const auto out = c.forward(backend);
    for (size_t i = 0; i < out.size(); ++i) CHECK(std::isnan(out[i]) == (i / 5 % 3 == 1));
  }
  const std::vector<float> x(12);
  const Tensor heads = view(x, {2, 3, 2}), two = view(x, {2}), three = view(x, {3});
  CHECK_THROWS_AS(head_scale_forward(heads, heads, view(x, {4}), Stream{}), Error);
  CHECK_THROWS_AS(head_scale_forward(three, heads, three, Stream{}), Error);
  CHECK_THROWS_AS(head_scale_backward({heads, false}, two, heads, heads, three, Stream{}), Error);
  CHECK_THROWS_AS(head_scale_backward({heads, false}, three, heads, Tensor{}, three, Stream{}), Error);
}
