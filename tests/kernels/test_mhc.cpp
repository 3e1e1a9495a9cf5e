#include "kernels/depth/streams/mhc.h"

#include "kernels/depth/depth_mix.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
};

struct MhcVariant {
  const char* name;
  Mixing mixing;
  bool reads = true;     // or the next sublayer does, by these coefficients
  bool squared = false;  // the squares are given
  int64_t iterations = 20;
};
const std::vector<MhcVariant> kinds = {{"merge", Mixing::merge},
                                       {"merge, squared", Mixing::merge, true, true},
                                       {"identity", Mixing::identity},
                                       {"permutations", Mixing::permutations},
                                       {"sinkhorn", Mixing::sinkhorn},
                                       {"sinkhorn of one step", Mixing::sinkhorn, true, true, 1},
                                       {"identity, no read", Mixing::identity, false},
                                       {"permutations, no read", Mixing::permutations, false, true},
                                       {"sinkhorn, no read", Mixing::sinkhorn, false, true, 3}};
bool fits(const MhcVariant& kind, int64_t E) {
  return kind.mixing != Mixing::permutations || E <= max_permuted_streams;
}

// A read of the streams. What the kind has none of is not there.
Op mhc(const Size& s, const MhcVariant& kind, double spread = 1, double eps = 1e-3) {
  const int64_t B = s.B, T = s.T, E = s.E, C = s.C;
  const MhcForm form{kind.mixing, kind.iterations, eps, 1e-4};
  const int64_t M = mhc_rows(form.mixing, E), G = mhc_groups(form.mixing);
  Operand scale = parameter("scale", {G});
  for (const double x : random_vector<double>(G, 8)) scale.given.push_back(spread * (x + 1.5));
  // Logits of this spread: z is of the size of fn's rows.
  std::vector<Operand> operands{input("streams", {B, T, E, C}),
                                parameter("fn", {M, E * C}, 1.7 / std::sqrt(static_cast<double>(E * C))),
                                parameter("base", {M}, spread),
                                scale,
                                saved("pre", {B, T, E}),
                                saved("z", {B, T, M}),
                                saved("rho", {B, T})};
  if (kind.squared) operands.push_back(saved("squares", {B, T}));
  if (kind.reads) operands.push_back(output("out", {B, T, C}));
  if (G > 1) operands.push_back(in_f32(output("coef", {B, T, E, E + 2})));
  const auto read = [](const auto& t) {
    return MhcRead<Tensor>{t["streams"], t["squares"], t["out"], t["coef"], t["pre"], t["z"], t["rho"]};
  };
  const auto weights = [](const auto& t) { return MhcWeights<Tensor>{t["fn"], t["base"], t["scale"]}; };
  return {operands,
          [=](auto& t, Stream stream) {
            if (kind.squared) vertical_dot(t["squares"], t["streams"], t["streams"], stream);
            mhc_read_forward(read(t), weights(t), form, stream);
          },
          [=](auto& t, Stream stream) {
            mhc_read_backward({t.grad("streams"), t["dout"], t["dcoef"]}, {t["dfn"], t["dbase"], t["dscale"]}, read(t),
                              weights(t), form, stream);
          },
          [=](auto& z) {
            if (kind.squared) vertical_dot_ref(z["squares"], z["streams"], z["streams"], s.rows(), E * C);
            mhc_read_forward_ref<Complex>({z["streams"], z["squares"], z["out"], z["coef"], z["pre"], z["z"], z["rho"]},
                                          {z["fn"], z["base"], z["scale"]}, form, s.rows(), E, C);
          }};
}

// comb[k,i] of a token, of E streams.
double comb(const Trial& a, int64_t E, int64_t n, int64_t k, int64_t i) {
  return a["coef"][static_cast<size_t>((n * E + k) * (E + 2) + 1 + i)];
}
double sum_of(const Trial& a, int64_t E, int64_t n, int64_t line, bool column) {
  double sum = 0;
  for (int64_t i = 0; i < E; ++i) sum += column ? comb(a, E, n, i, line) : comb(a, E, n, line, i);
  return sum;
}

}  // namespace

TEST_CASE("mhc: reference backward is the derivative of the reference forward") {
  for (const MhcVariant& kind : kinds)
    for (const int64_t E : {1, 2, 3, 4})
      for (const double spread : {0.1, 1.0, 4.0}) {
        if (!fits(kind, E)) continue;
        CAPTURES(kind.name, E, spread);
        check_derivative(mhc({1, 3, E, 5}, kind, spread), 1e-10, {{"dstreams", 1e-11}});
      }
}

TEST_CASE("mhc: the fast backends equal the reference, set and added") {
  // Ragged chunks, tokens and columns.
  const std::vector<Size> of_cpu{{1, 1, 1, 1},    {1, 3, 2, 33}, {2, 70, 4, 20}, {1, 17, 3, 40},
                                 {3, 100, 4, 64}, {1, 9, 5, 21}, {1, 5, 8, 67},  {1, 300, 2, 16}};
  const std::vector<Size> of_gpu{{1, 3, 3, 40}, {1, 37, 4, 24}, {1, 2, 2, 33},
                                 {1, 70, 1, 8}, {1, 5, 8, 20},  {1, 2, 6, 16}};
  for (const MhcVariant& kind : kinds)
    for_sizes(of_cpu, of_gpu, [&](Backend backend, const Size& s) {
      if (!fits(kind, s.E)) return;
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        CAPTURE(kind.name);
        // Sums of E C products, which may cancel, some ulps (6e-8) each. In bf16 a GPU multiplies with two parts of
        // fn, and of its gradient's factor, which together keep 16 bits.
        const bool split = backend == Backend::cuda && dtype == Dtype::bf16;
        const double exact = split ? 3e-5 : 4e-6;
        // Of one number in all the norm leaves only what norm_eps does: the rest, of size 1, cancels.
        const Tolerance streams(3e-5, s.E * s.C == 1 ? 1e-7 : 0);
        check_backend(mhc(s, kind), dtype, backend,
                      {{"squares", 1e-6},
                       {"rho", 1e-6},
                       {"z", exact},
                       {"pre", exact},
                       {"coef", 3 * exact},
                       {"out", exact},
                       {"dstreams", streams},
                       {"dfn", 10 * exact},
                       {"dbase", 10 * exact},
                       {"dscale", {10 * exact, exact}}});  // single sums, which may cancel
      }
    });
}

TEST_CASE("mhc: what comb promises, and what it does not") {
  for (const Backend backend : all_backends())
    for (const double spread : {1.0, 30.0}) {
      CAPTURES(backend, spread);
      const Size s{1, 40, 4, 8};
      const auto forward = [&](const Op& op) { return Trial(op, Dtype::f32).forward(backend); };
      const Trial sinkhorn = forward(mhc(s, {"sinkhorn", Mixing::sinkhorn}, spread, 1e-6));
      const Trial permutations = forward(mhc(s, {"permutations", Mixing::permutations}, spread));
      const Trial identity = forward(mhc(s, {"identity", Mixing::identity}, spread));
      double worst_row = 0;
      for (int64_t n = 0; n < 40; ++n)
        for (int64_t i = 0; i < 4; ++i) {
          CHECK(sum_of(sinkhorn, 4, n, i, true) == doctest::Approx(1).epsilon(3e-6));  // columns come last
          worst_row = std::max(worst_row, std::abs(sum_of(sinkhorn, 4, n, i, false) - 1));
          for (const bool column : {false, true})
            CHECK(sum_of(permutations, 4, n, i, column) == doctest::Approx(1).epsilon(1e-6));
          for (int64_t k = 0; k < 4; ++k) CHECK(comb(identity, 4, n, k, i) == (k == i ? 1 : 0));
        }
      // Twenty iterations do not converge where logits are peaked: nobody may count on the rows.
      if (spread > 1) CHECK(worst_row > 1e-3);
      else CHECK(worst_row < 0.1);
    }
}

TEST_CASE("mhc: comb[k,i] goes from stream k to stream i, also through the write") {
  // The permutation 0 -> 1 -> 2 -> 0 of three streams is number 3 of six, [1 2 0].
  CHECK(permuted(3, 3, 0) == 1);
  CHECK(permuted(3, 3, 1) == 2);
  CHECK(permuted(3, 3, 2) == 0);
  for (const Backend backend : all_backends()) {
    const Op op = mhc({1, 2, 3, 4}, {"permutations", Mixing::permutations});
    Trial a(op, Dtype::f32);
    a.x["scale"].assign(3, 0);
    a.x["base"].assign(12, -60);  // post is 0
    a.x["base"][6 + 3] = 60;
    a.forward(backend);
    const auto streams = convert<float>(a["streams"]), coef = convert<float>(a["coef"]);
    auto next = poisoned<float>(24);
    const std::vector<float> y(8, 5.f);
    run_on(backend,
           {view(next, {1, 2, 3, 4}), view(streams, {1, 2, 3, 4}), view(coef, {1, 2, 3, 5}), view(y, {1, 2, 4})},
           [](auto& t, Stream there) {
             hyper_write_forward({t[0], {}, {}}, t[1], t[2], t[3], there);
           });
    for (size_t n = 0; n < 2; ++n)
      for (size_t k = 0; k < 3; ++k)
        for (size_t c = 0; c < 4; ++c)
          CHECK(next[(n * 3 + (k + 1) % 3) * 4 + c] == doctest::Approx(streams[(n * 3 + k) * 4 + c]));
  }
}

TEST_CASE("mhc: permutations are in lexicographic order") {
  for (int64_t E = 1; E <= max_permuted_streams; ++E) {
    std::vector<int64_t> want(static_cast<size_t>(E));
    for (int64_t i = 0; i < E; ++i) want[static_cast<size_t>(i)] = i;
    for (int64_t p = 0; p < permutations_of(E); ++p) {
      for (int64_t k = 0; k < E; ++k) CHECK(permuted(p, E, k) == want[static_cast<size_t>(k)]);
      std::next_permutation(want.begin(), want.end());
    }
  }
}

TEST_CASE("mhc: equal streams stay equal, and nothing tells them apart, where all their coefficients are") {
  // The fixed point of a symmetric start: fn 0, equal biases. The gradients of comb's logits are then 0.
  for (const Backend backend : all_backends()) {
    const Op op = mhc({1, 3, 4, 8}, {"sinkhorn", Mixing::sinkhorn});
    Trial a(op, Dtype::f32);
    auto &streams = a.x["streams"], &dcoef = a.x["dcoef"], &dbase = a.x["dbase"];
    a.x["fn"].assign(a["fn"].size(), 0), a.x["base"].assign(a["base"].size(), 0.3);
    dbase.assign(dbase.size(), 0);
    for (size_t at = 0; at < streams.size(); ++at) streams[at] = streams[at / 32 * 32 + at % 8];
    // Each target's gradient is that of the others: dcomb[k,i] = <streams_k, dnext_i>.
    for (size_t at = 0; at < dcoef.size(); ++at)
      dcoef[at] = at % 6 == 5 ? dcoef[at / 24 * 24 + 5] : dcoef[at / 24 * 24 + 1];
    a.run(backend);
    for (size_t m = 8; m < 24; ++m) CHECK(std::abs(dbase[m]) < 1e-6);
    for (size_t m = 5; m < 8; ++m) CHECK(dbase[m] == doctest::Approx(dbase[4]));
  }
}

TEST_CASE("mhc: logits far beyond what exp can hold, and a NaN that stays in its token") {
  const Size s{1, 20, 4, 16};
  for (const Backend backend : fast_backends())
    for (const MhcVariant& kind : kinds)
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        CAPTURE(kind.name);
        const Op op = mhc(s, kind, 1e6);
        for (const double x : Trial(op, dtype).run(backend).all_results()) CHECK(std::isfinite(x));
        const Where coef = [&](size_t i) {
          const bool computed = kind.mixing != Mixing::identity || i % 6 == 0 || i % 6 == 5;
          return i / 24 == 5 && computed;
        };
        check_nans(mhc(s, kind), dtype, backend, {{"streams", {5 * 64 + 17}}},
                   {{"squares", at({5})},
                    {"rho", at({5})},
                    {"z", in_row(5, mhc_rows(kind.mixing, 4))},
                    {"pre", in_row(5, 4)},
                    {"coef", coef},
                    {"out", in_row(5, 16)},
                    {"dstreams", in_row(5, 64)},
                    {"dfn", everywhere},
                    {"dbase", everywhere},
                    {"dscale", everywhere}});
      }
}

TEST_CASE("mhc: the same bits on any number of threads") {
  for (const MhcVariant& kind : kinds)
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) check_threads(mhc({2, 90, 4, 33}, kind), dtype);
}
