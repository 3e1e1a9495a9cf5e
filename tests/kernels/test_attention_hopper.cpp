// Attention for sm_90, in the emulator: its forward at sizes around its tiles, and with rows that nobody may read; who
// calls it; what the lots may not change. Its backward, and what both lose by rounding, is in test_attention.cpp.
#if !CROSSPLY_CUDA

#include "kernels/attention/attention_hopper.cuh"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, H, K, D, pos = 0, beyond = 0;  // rows in the caches behind the last position
  int64_t window = pos + T + beyond;
  AttentionSizes sizes() const { return {B, T, H, K, D, pos + T + beyond, pos, window}; }
};

struct Attention {
  std::vector<float> out, lse;
  std::vector<double> want, want_lse;
};
// What is beyond the last position is NaN.
Attention attended(const Size& s, uint64_t seed) {
  const AttentionSizes z = s.sizes();
  const auto q = random_vector<bf16>(s.B * s.T * s.H * s.D, 1, 1.3);
  auto k = random_vector<bf16>(s.B * z.S * s.K * s.D, 2, 1.3), v = random_vector<bf16>(s.B * z.S * s.K * s.D, 3);
  const double scale = 1 / std::sqrt(static_cast<double>(s.D));
  Attention a;
  a.want.resize(q.size()), a.want_lse.resize(static_cast<size_t>(s.B * s.H * s.T));
  auto qd = convert<double>(q), kd = convert<double>(k), vd = convert<double>(v);
  for (int64_t b = 0; b < s.B; ++b)
    for (int64_t h = 0; h < s.H; ++h)
      for (int64_t t = 0; t < s.T; ++t) {
        const int64_t row = z.query_head(b, h) + t * z.query_stride, lower = z.lower(b, s.pos + t);
        const int64_t keys = z.key_head(b, h / z.group) + lower * z.key_stride;
        a.want_lse[static_cast<size_t>((b * s.H + h) * s.T + t)] =
            attend_ref(&a.want[static_cast<size_t>(row)], &qd[static_cast<size_t>(row)], &kd[static_cast<size_t>(keys)],
                       &vd[static_cast<size_t>(keys)], z.key_stride, s.pos + t + 1 - lower, s.D, scale);
      }
  for (auto* x : {&k, &v})
    for (int64_t b = 0; b < s.B; ++b)
      std::fill_n(x->begin() + (b * z.S + s.pos + s.T) * z.key_stride, s.beyond * z.key_stride, bf16(NAN));
  const OnDevice on_q(q), on_k(k), on_v(v);
  const OnDevice out(std::vector<bf16>(q.size(), bf16(NAN)));
  const OnDevice lse(std::vector<float>(a.want_lse.size(), NAN));
  emulator::seed(seed);
  attention_forward_hopper(out.data, lse.data, on_q.data, on_k.data, on_v.data, z, static_cast<float>(scale));
  a.out = convert<float>(out.host()), a.lse = lse.host();
  return a;
}

}  // namespace

TEST_CASE("attention_hopper: the forward equals the reference around its tiles") {
  const std::vector<Size> sizes{{1, 64, 1, 1, 64},
                                {1, 65, 1, 1, 64},
                                {1, 127, 1, 1, 128},
                                {2, 128, 2, 1, 64},
                                {1, 129, 1, 1, 128},
                                {1, 191, 2, 2, 64},
                                {1, 193, 1, 1, 64},
                                {1, 193, 4, 1, 128},
                                {1, 320, 1, 1, 64},
                                {1, 320, 1, 1, 128},
                                {1, 70, 2, 1, 64, 100},
                                {2, 64, 1, 1, 128, 130, 9},
                                {1, 450, 1, 1, 64},
                                {1, 100, 2, 1, 128, 28, 50},
                                {1, 200, 1, 1, 64, 300, 7, 70},
                                {1, 150, 2, 1, 128, 350, 0, 130},
                                {1, 128, 1, 1, 64, 582, 0, 330}};
  uint64_t seed = 0;
  for (const Size& s : sizes) {
    CAPTURES(s.B, s.T, s.H, s.K, s.D, s.pos, s.window);
    const Attention a = attended(s, ++seed);
    // The weights, which sum to 1, of values below 1, and then the result are rounded to bf16.
    check_close("out", a.out, a.want, 0x1p-8, 0x1p-8);
    check_close("lse", a.lse, a.want_lse, 2e-6);
  }
}

TEST_CASE("attention_hopper: is what attention does, cached or not, where there are the instructions") {
  for (const int64_t pos : {0, 40}) {
    const Size s{1, 70, 2, 1, 64, pos};
    const AttentionSizes z = s.sizes();
    const auto q = random_vector<bf16>(s.T * s.H * s.D, 1), k = random_vector<bf16>(z.S * s.D, 2);
    const Shape queries{1, s.T, s.H, s.D}, keys{1, z.S, s.K, s.D};
    auto once = poisoned<bf16>(s.T * s.H * s.D), twice = once;
    auto lse = poisoned<float>(s.H * s.T);
    const auto attend = [&](std::vector<bf16>& out) {
      run_on(Backend::cuda, {view(out, queries), view(lse, {1, s.H, s.T}), view(q, queries), view(k, keys)},
             [&](auto& t, Stream stream) {
               if (pos > 0) attention_cached(t[0], {}, t[3], t[3], t[2], {}, {}, pos, 0.125, 0, stream);
               else attention_forward(t[0], t[1], t[2], t[3], t[3], 0.125, {}, stream);
             });
    };
    attend(once);
    {
      const WithHopper use;
      CHECK(hopper_serves(z));
      attend(twice);
      auto without = poisoned<bf16>(s.T * s.H * s.D);
      ::setenv("CROSSPLY_NO_HOPPER", "1", 1);
      CHECK(!hopper_serves(z));
      attend(without);
      ::unsetenv("CROSSPLY_NO_HOPPER");
      CHECK(without == once);
    }
    CHECK(once != twice);  // tiles of other sizes are summed in another order
    check_close("out", twice, convert<double>(once), 0x1p-7, 0x1p-7);
  }
}

namespace {

// What a backward reads and writes; lse and delta may be anything.
struct Backward {
  Size s;
  std::vector<bf16> dq, dk, dv, dout, q, k, v;
  std::vector<float> lse, delta;

  explicit Backward(const Size& size) : s(size) {
    const int64_t queries = s.B * s.T * s.H * s.D, keys = s.B * s.T * s.K * s.D, rows = s.B * s.H * s.T;
    q = random_vector<bf16>(queries, 1), k = random_vector<bf16>(keys, 2), v = random_vector<bf16>(keys, 3);
    dout = random_vector<bf16>(queries, 4), lse = random_vector<float>(rows, 5), delta = random_vector<float>(rows, 6);
    dq = poisoned<bf16>(queries), dk = poisoned<bf16>(keys), dv = poisoned<bf16>(keys);
  }
  void run(uint64_t seed) {
    const OnDevice on_dq(dq), on_dk(dk), on_dv(dv);
    const OnDevice on_dout(dout), on_q(q), on_k(k), on_v(v);
    const OnDevice on_lse(lse), on_delta(delta);
    emulator::seed(seed);
    attention_backward_hopper({.dq = on_dq.data,
                               .dk = on_dk.data,
                               .dv = on_dv.data,
                               .dout = on_dout.data,
                               .q = on_q.data,
                               .k = on_k.data,
                               .v = on_v.data,
                               .lse = on_lse.data,
                               .delta = on_delta.data,
                               .scale = 0.125f,
                               .accumulate_q = false,
                               .accumulate_k = false,
                               .accumulate_v = false},
                              s.sizes());
    dq = on_dq.host(), dk = on_dk.host(), dv = on_dv.host();
  }
};

}  // namespace

TEST_CASE("attention_hopper: the same bits whatever the lots") {
  for (const int64_t window : {260, 75}) {
    const Size s{1, 260, 2, 1, 64, 0, 0, window};
    const Attention first = attended(s, 1);
    Backward gradients(s);
    gradients.run(1);
    for (uint64_t seed = 2; seed <= 4; ++seed) {
      const Attention again = attended(s, seed);
      CHECK(again.out == first.out);
      CHECK(again.lse == first.lse);
      Backward others(s);
      others.run(seed);
      CHECK(convert<float>(others.dq) == convert<float>(gradients.dq));
      CHECK(convert<float>(others.dk) == convert<float>(gradients.dk));
      CHECK(convert<float>(others.dv) == convert<float>(gradients.dv));
    }
  }
}

#endif
