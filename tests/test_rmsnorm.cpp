#include "kernels/block/rmsnorm.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {
struct Size {
  int64_t rows, C;
};
}  // namespace

TEST_CASE("rmsnorm: reference backward is the derivative of the reference forward") {
  const double eps = 1e-6;
  for (double scale : {1e-3, 1.0, 1e3}) {
    for (const Size& size : std::vector<Size>{{1, 3}, {3, 7}, {2, 31}}) {
      const int64_t rows = size.rows, C = size.C;
      CAPTURE(scale);
      CAPTURE(rows);
      CAPTURE(C);
      const auto inp = random_vector<double>(rows * C, 1, scale), weight = random_vector<double>(C, 2);
      const auto dout = random_vector<double>(rows * C, 3);
      auto loss = [&](const std::vector<Complex>& x, const std::vector<Complex>& w) {
        std::vector<Complex> out(x.size()), rstd(static_cast<size_t>(rows));
        rmsnorm_forward_ref(out.data(), rstd.data(), x.data(), w.data(), rows, C, eps);
        return dot(dout, out);
      };
      const auto want_dinp = complex_step(inp, [&](auto& x) { return loss(x, convert<Complex>(weight)); });
      const auto want_dweight = complex_step(weight, [&](auto& w) { return loss(convert<Complex>(inp), w); });

      auto out = poisoned<double>(rows * C), rstd = poisoned<double>(rows), dinp = poisoned<double>(rows * C);
      std::vector<double> dweight(static_cast<size_t>(C), 0.0);
      rmsnorm_forward_ref(out.data(), rstd.data(), inp.data(), weight.data(), rows, C, eps);
      rmsnorm_backward_ref(dinp.data(), dweight.data(), dout.data(), inp.data(), weight.data(), rstd.data(), rows, C,
                           false);
      check_close("dinp", dinp, want_dinp, 1e-10);
      check_close("dweight", dweight, want_dweight, 1e-10);
    }
  }
}

TEST_CASE("rmsnorm: NaN stays in its row, dinp may alias dout, and the threads do not matter") {
  const int64_t rows = 700, C = 203;  // enough for both directions to go parallel
  auto inp = random_vector<float>(rows * C, 1);
  const auto weight = random_vector<float>(C, 2), dout = random_vector<float>(rows * C, 3);
  auto run = [&](bool alias, bool gain) {  // out, dinp, dweight
    auto out = poisoned<float>(rows * C), rstd = poisoned<float>(rows), dinp = alias ? dout : poisoned<float>(rows * C);
    std::vector<float> dweight(static_cast<size_t>(C), 0.f);
    const Tensor x = view(inp.data(), {rows, C}), r = view(rstd.data(), {rows});
    const Tensor w = gain ? view(weight.data(), {C}) : Tensor{}, dw = gain ? view(dweight.data(), {C}) : Tensor{};
    const Tensor dx = view(dinp.data(), {rows, C}), dy = alias ? dx : view(dout.data(), {rows, C});
    rmsnorm_forward(view(out.data(), {rows, C}), r, x, w, 1e-6, Stream{});
    rmsnorm_backward(dx, dw, dy, x, w, r, false, Stream{});
    out.insert(out.end(), dinp.begin(), dinp.end());
    out.insert(out.end(), dweight.begin(), dweight.end());
    return out;
  };
  for (const bool gain : {true, false}) {
    CAPTURE(gain);
    CHECK(run(false, gain) == run(true, gain));
    check_same_bits_on_any_threads<float>([&] { return run(false, gain); });
  }
  inp[static_cast<size_t>(7 * C + 5)] = std::numeric_limits<float>::quiet_NaN();
  for (const bool gain : {true, false}) {
    CAPTURE(gain);
    const auto spoilt = run(false, gain);
    int64_t wrong = 0;
    for (int64_t i = 0; i < (2 * rows + 1) * C; ++i) {
      const bool depends = i < 2 * rows * C ? i / C % rows == 7 : gain;
      wrong += std::isnan(spoilt[static_cast<size_t>(i)]) != depends;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("rmsnorm: the fast backends equal the reference, set and added") {
  for (const Backend backend : fast_backends()) {
    // A GPU has a kernel for each number of 16-byte vectors a lane: one, up to 4, up to 8, and more.
    for (const Size& size :
         std::vector<Size>{{1, 3}, {5, 31}, {300, 32}, {3, 1027}, {2000, 96}, {70, 420}, {7, 1012}, {5, 1028}}) {
      const int64_t rows = size.rows, C = size.C;
      CAPTURE(static_cast<int>(backend));
      CAPTURE(rows);
      CAPTURE(C);
      const auto inp = random_vector<float>(rows * C, 1), weight = random_vector<float>(C, 2);
      const auto dout = random_vector<float>(rows * C, 3), before = random_vector<float>(rows * C, 4);
      const auto inp64 = convert<double>(inp), weight64 = convert<double>(weight), dout64 = convert<double>(dout);
      for (bool acc : {false, true}) {
        auto out = poisoned<float>(rows * C), rstd = poisoned<float>(rows);
        auto dinp = acc ? before : poisoned<float>(rows * C);
        auto dweight = random_vector<float>(C, 5);
        auto out64 = poisoned<double>(rows * C), rstd64 = poisoned<double>(rows);
        auto dinp64 = convert<double>(dinp), dweight64 = convert<double>(dweight);
        const Tensor r = view(rstd.data(), {rows}), x = view(inp.data(), {rows, C}), w = view(weight.data(), {C});
        run_on(backend, {view(out.data(), {rows, C}), r, x, w},
               [&](auto& t, Stream stream) { rmsnorm_forward(t[0], t[1], t[2], t[3], 1e-6, stream); });
        rmsnorm_forward_ref(out64.data(), rstd64.data(), inp64.data(), weight64.data(), rows, C, 1e-6);
        // f32 sums of up to 1027 terms in vector order: some ulps (6e-8) of the result; the backward sums rows as well.
        check_close("out", out, out64, 1e-6);
        check_close("rstd", rstd, rstd64, 1e-6);
        const Tensor dx = view(dinp.data(), {rows, C}), dw = view(dweight.data(), {C});
        run_on(backend, {dx, dw, view(dout.data(), {rows, C}), x, w, r},
               [&](auto& t, Stream stream) { rmsnorm_backward(t[0], t[1], t[2], t[3], t[4], t[5], acc, stream); });
        rmsnorm_backward_ref(dinp64.data(), dweight64.data(), dout64.data(), inp64.data(), weight64.data(),
                             rstd64.data(), rows, C, acc);
        check_close("dinp", dinp, dinp64, 1e-5);
        check_close("dweight", dweight, dweight64, 1e-5);
      }
    }
  }
}

TEST_CASE("rmsnorm: without a gain it is the norm with a gain of ones") {
  for (Backend backend : {Backend::cpu, Backend::reference}) {
    for (const Size& size : std::vector<Size>{{1, 3}, {5, 31}, {300, 32}, {2000, 96}}) {
      const int64_t rows = size.rows, C = size.C;
      CAPTURE(static_cast<int>(backend));
      CAPTURE(C);
      const auto inp = random_vector<float>(rows * C, 1), dout = random_vector<float>(rows * C, 3);
      const auto ones = std::vector<float>(static_cast<size_t>(C), 1.f);
      for (bool acc : {false, true}) {
        auto run = [&](const Tensor& weight, const Tensor& dweight) {
          auto out = poisoned<float>(rows * C), rstd = poisoned<float>(rows);
          auto dinp = acc ? random_vector<float>(rows * C, 4) : poisoned<float>(rows * C);
          const Tensor x = view(inp.data(), {1, rows, C}), r = view(rstd.data(), {1, rows});
          rmsnorm_forward(view(out.data(), {1, rows, C}), r, x, weight, 1e-6, Stream{backend});
          rmsnorm_backward(view(dinp.data(), {1, rows, C}), dweight, view(dout.data(), {1, rows, C}), x, weight, r, acc,
                           Stream{backend});
          out.insert(out.end(), dinp.begin(), dinp.end());
          return out;
        };
        std::vector<float> dweight(static_cast<size_t>(C), 0.f);
        // The same sums, but a compiler may fuse and order them differently: some ulps (6e-8).
        const auto want = run(view(ones.data(), {C}), view(dweight.data(), {C}));
        check_close("out and dinp", run(Tensor{}, Tensor{}), want, 1e-6);
      }
    }
  }
  const auto row = random_vector<float>(4, 1);
  const Tensor x = view(row.data(), {1, 4}), r = view(row.data(), {1});
  CHECK_THROWS_AS(rmsnorm_backward(x, x, x, x, Tensor{}, r, false, Stream{}), Error);
}

// The same inputs, sums in float: what is stored as f32 is as close as before, what is stored as bf16 is rounded once.
TEST_CASE("rmsnorm: in bf16 the fast backends equal the reference, rounded once") {
  for (const Backend backend : fast_backends()) {
    for (const Size& size : std::vector<Size>{
             {1, 3}, {7, 8}, {5, 31}, {301, 32}, {3, 1027}, {1000, 96}, {70, 840}, {7, 2024}, {5, 2056}}) {
      const int64_t rows = size.rows, C = size.C;
      CAPTURE(rows);
      CAPTURE(C);
      const auto inp = random_vector<bf16>(rows * C, 1), dout = random_vector<bf16>(rows * C, 3);
      const auto weight = random_vector<float>(C, 2);
      const auto inp64 = convert<double>(inp), weight64 = convert<double>(weight), dout64 = convert<double>(dout);
      const Tensor x = view(inp.data(), {rows, C}), dy = view(dout.data(), {rows, C});
      for (const bool acc : {false, true}) {
        for (const bool gain : {false, true}) {
          CAPTURE(gain);
          auto out = poisoned<bf16>(rows * C), dinp = acc ? random_vector<bf16>(rows * C, 4) : poisoned<bf16>(rows * C);
          auto rstd = poisoned<float>(rows), dweight = random_vector<float>(C, 5);
          auto out64 = poisoned<double>(rows * C), rstd64 = poisoned<double>(rows);
          auto dinp64 = convert<double>(dinp), dweight64 = convert<double>(dweight);
          const Tensor w = gain ? view(weight.data(), {C}) : Tensor{}, r = view(rstd.data(), {rows});
          const Tensor dw = gain ? view(dweight.data(), {C}) : Tensor{};
          run_on(backend, {view(out.data(), {rows, C}), r, x, w},
                 [&](auto& t, Stream stream) { rmsnorm_forward(t[0], t[1], t[2], t[3], 1e-6, stream); });
          run_on(backend, {view(dinp.data(), {rows, C}), dw, dy, x, w, r},
                 [&](auto& t, Stream stream) { rmsnorm_backward(t[0], t[1], t[2], t[3], t[4], t[5], acc, stream); });
          const double* w64 = gain ? weight64.data() : nullptr;
          rmsnorm_forward_ref(out64.data(), rstd64.data(), inp64.data(), w64, rows, C, 1e-6);
          rmsnorm_backward_ref(dinp64.data(), gain ? dweight64.data() : nullptr, dout64.data(), inp64.data(), w64,
                               rstd64.data(), rows, C, acc);
          check_close("out", out, out64, 0x1p-8);
          check_close("rstd", rstd, rstd64, 1e-6);
          check_close("dinp", dinp, dinp64, 0x1p-8);
          check_close("dweight", dweight, dweight64, 1e-5);
        }
      }
    }
  }
}

TEST_CASE("rmsnorm: in bf16 a NaN stays in its row, and the threads do not matter") {
  const int64_t rows = 700, C = 203;
  auto inp = random_vector<bf16>(rows * C, 1);
  const auto weight = random_vector<float>(C, 2);
  const auto dout = random_vector<bf16>(rows * C, 3);
  auto run = [&] {  // out, dinp, dweight
    auto out = poisoned<bf16>(rows * C), dinp = poisoned<bf16>(rows * C);
    auto rstd = poisoned<float>(rows), dweight = std::vector<float>(static_cast<size_t>(C), 0.f);
    const Tensor x = view(inp.data(), {rows, C}), r = view(rstd.data(), {rows}), w = view(weight.data(), {C});
    rmsnorm_forward(view(out.data(), {rows, C}), r, x, w, 1e-6, Stream{});
    rmsnorm_backward(view(dinp.data(), {rows, C}), view(dweight.data(), {C}), view(dout.data(), {rows, C}), x, w, r,
                     false, Stream{});
    auto all = convert<float>(out);
    all.insert(all.end(), dinp.begin(), dinp.end());
    all.insert(all.end(), dweight.begin(), dweight.end());
    return all;
  };
  check_same_bits_on_any_threads<float>(run);
  inp[static_cast<size_t>(7 * C + 202)] = std::numeric_limits<float>::quiet_NaN();
  const auto spoilt = run();
  int64_t wrong = 0;
  for (int64_t i = 0; i < (2 * rows + 1) * C; ++i) {
    const bool depends = i >= 2 * rows * C || i / C % rows == 7;
    wrong += std::isnan(spoilt[static_cast<size_t>(i)]) != depends;
  }
  CHECK(wrong == 0);
}
