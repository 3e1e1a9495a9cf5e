#include "kernels/block/rmsnorm.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t rows, C;
  int64_t numel() const { return rows * C; }
};

template <class T>
struct Result {
  std::vector<T> out, dinp;
  std::vector<Wide<T>> rstd, dweight;
};

// Of what is in dinp, to which is added, or NaN, and in dweight; an empty weight is none.
template <class T>
Result<T> run(const std::vector<T>& dinp, const std::vector<Wide<T>>& dweight, const std::vector<T>& dout,
              const std::vector<T>& inp, const std::vector<Wide<T>>& weight, const Size& size, bool add,
              Backend backend) {
  Result<T> r{poisoned<T>(size.numel()), dinp, poisoned<Wide<T>>(size.rows), dweight};
  const Shape shape{1, size.rows, size.C};
  const bool gain = !weight.empty();
  run_on(backend,
         {view(r.out, shape), view(r.rstd), view(inp, shape), gain ? view(weight) : Tensor{}, view(r.dinp, shape),
          gain ? view(r.dweight) : Tensor{}, view(dout, shape)},
         [=](auto& t, Stream stream) {
           rmsnorm_forward(t[0], t[1], t[2], t[3], 1e-6, stream);
           rmsnorm_backward({t[4], add}, t[5], t[6], t[2], t[3], t[1], stream);
         });
  return r;
}

}  // namespace

TEST_CASE("rmsnorm: reference backward is the derivative of the reference forward") {
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 3}, {3, 7}, {2, 31}}) {
      CAPTURES(scale, size.rows, size.C);
      const auto inp = random_vector<double>(size.numel(), 1, scale), weight = random_vector<double>(size.C, 2);
      const auto dout = random_vector<double>(size.numel(), 3);
      auto loss = [&](const std::vector<Complex>& x, const std::vector<Complex>& w) {
        std::vector<Complex> out(x.size()), rstd(x.size());
        rmsnorm_forward_ref(out.data(), rstd.data(), x.data(), w.data(), size.rows, size.C, 1e-6);
        return dot(dout, out);
      };
      const auto want_dinp = complex_step(inp, [&](auto& x) { return loss(x, convert<Complex>(weight)); });
      const auto want_dweight = complex_step(weight, [&](auto& w) { return loss(convert<Complex>(inp), w); });
      const std::vector<double> zero(weight.size(), 0.0);
      const auto got = run(poisoned<double>(size.numel()), zero, dout, inp, weight, size, false, Backend::reference);
      check_close("dinp", got.dinp, want_dinp, 1e-10);
      check_close("dweight", got.dweight, want_dweight, 1e-10);
    }
  }
}

TEST_CASE_TEMPLATE("rmsnorm: NaN stays in its row, dinp may alias dout, and the threads do not matter", T, float,
                   bf16) {
  const Size size{700, 203};  // enough for both directions to go parallel
  auto inp = random_vector<T>(size.numel(), 1);
  const auto weight = random_vector<float>(size.C, 2), zero = std::vector<float>(203, 0.f);
  const auto dout = random_vector<T>(size.numel(), 3);
  for (const bool gain : {true, false}) {
    CAPTURE(gain);
    auto all = [&] {
      const auto r = run(poisoned<T>(size.numel()), zero, dout, inp, gain ? weight : std::vector<float>{}, size, false,
                         Backend::cpu);
      return joined(convert<float>(r.out), r.dinp, r.dweight);
    };
    auto dinp = dout;
    auto out = dout;
    auto rstd = poisoned<float>(size.rows), dweight = zero;
    const Tensor x = view(inp, {size.rows, size.C}), dx = view(dinp, x.shape), r = view(rstd);
    const Tensor w = gain ? view(weight) : Tensor{};
    rmsnorm_forward(view(out, x.shape), r, x, w, 1e-6, Stream{});
    rmsnorm_backward({dx, false}, gain ? view(dweight) : Tensor{}, dx, x, w, r, Stream{});
    CHECK(all() == joined(convert<float>(out), dinp, dweight));
    check_same_bits_on_any_threads<float>(all);
  }
  inp[7 * 203 + 202] = NAN;
  for (const bool gain : {true, false}) {
    CAPTURE(gain);
    const auto r = run(poisoned<T>(size.numel()), zero, dout, inp, gain ? weight : std::vector<float>{}, size, false,
                       Backend::cpu);
    const auto spoilt = joined(convert<float>(r.out), r.dinp, r.dweight);
    int64_t wrong = 0;
    for (int64_t i = 0; i < (2 * size.rows + 1) * size.C; ++i) {
      const bool depends = i < 2 * size.numel() ? i / size.C % size.rows == 7 : gain;
      wrong += std::isnan(spoilt[static_cast<size_t>(i)]) != depends;
    }
    CHECK(wrong == 0);
  }
}

// Sums are in float: what is stored as f32 is as close in bf16 as in f32, what is stored as bf16 is rounded once.
TEST_CASE_TEMPLATE("rmsnorm: the fast backends equal the reference, set and added, with a gain and without", T, float,
                   bf16) {
  // A GPU has a kernel for each number of 16-byte vectors a lane: one, up to 4, up to 8, and more.
  const int64_t wide = std::is_same_v<T, bf16> ? 2 : 1;
  const std::vector<Size> sizes{{1, 3},           {5, 31},          {301, 32},
                                {7, 8},           {3, 1027},        {2000 / wide, 96},
                                {70, 420 * wide}, {7, 1012 * wide}, {5, 1028 * wide}};
  for (const Backend backend : fast_backends()) {
    for (const Size& size : sizes) {
      CAPTURES(backend, size.rows, size.C);
      const auto inp = random_vector<T>(size.numel(), 1), dout = random_vector<T>(size.numel(), 3);
      const auto dweight = random_vector<float>(size.C, 5);
      for (const bool add : {false, true}) {
        for (const bool gain : {true, false}) {
          CAPTURE(gain);
          const auto weight = random_vector<float>(gain ? size.C : 0, 2);
          const auto dinp = add ? random_vector<T>(size.numel(), 4) : poisoned<T>(size.numel());
          const auto got = run(dinp, dweight, dout, inp, weight, size, add, backend);
          const auto want = run(convert<double>(dinp), convert<double>(dweight), convert<double>(dout),
                                convert<double>(inp), convert<double>(weight), size, add, Backend::reference);
          // f32 sums of up to 1028 terms in vector order: some ulps (6e-8) of the result; the backward sums rows too.
          check_close("out", got.out, want.out, tolerance_or_rounding<T>(1e-6));
          check_close("rstd", got.rstd, want.rstd, 1e-6);
          check_close("dinp", got.dinp, want.dinp, tolerance_or_rounding<T>(1e-5));
          check_close("dweight", got.dweight, want.dweight, 1e-5);
        }
      }
    }
  }
}

TEST_CASE("rmsnorm: without a gain it is the norm with a gain of ones") {
  for (Backend backend : {Backend::cpu, Backend::reference}) {
    for (const Size& size : std::vector<Size>{{1, 3}, {5, 31}, {300, 32}, {2000, 96}}) {
      CAPTURES(backend, size.C);
      const auto inp = random_vector<float>(size.numel(), 1), dout = random_vector<float>(size.numel(), 3);
      const std::vector<float> ones(static_cast<size_t>(size.C), 1.f);
      for (bool add : {false, true}) {
        const auto dinp = add ? random_vector<float>(size.numel(), 4) : poisoned<float>(size.numel());
        const auto want = run(dinp, ones, dout, inp, ones, size, add, backend);
        const auto got = run(dinp, ones, dout, inp, {}, size, add, backend);
        // The same sums, but a compiler may fuse and order them differently: some ulps (6e-8).
        check_close("out", got.out, want.out, 1e-6);
        check_close("dinp", got.dinp, want.dinp, 1e-6);
      }
    }
  }
  const auto row = random_vector<float>(4, 1);
  const Tensor x = view(row, {1, 4}), r = view(row, {1});
  CHECK_THROWS_AS(rmsnorm_backward({x, false}, x, x, x, Tensor{}, r, Stream{}), Error);
}
