#include "kernels/depth/depth_mix.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, N, C;
};

constexpr double eps = 1e-12;
constexpr Dtype dtypes[] = {Dtype::f32, Dtype::bf16};

// A whole depth: S sources and S mixes, mix m over the sources 0 to m. scores: the trained scalars of either kind.
Op depth_mix(const Size& s, bool vertical, double scale = 1, double eps_used = eps, Kernels kernels = Kernels::fast) {
  const auto named = [](const char* name, int64_t i) { return str(name, i); };
  const Shape rows{1, s.N, s.C};
  std::vector<Operand> operands;
  for (int64_t m = 0; m < s.S; ++m) {
    for (const Operand& one : {input(str("source", m), rows, scale * static_cast<double>(m + 1)),
                               parameter(str("scores", m), {m + 1}, 2), output(str("out", m), rows)})
      operands.push_back(one);
    if (!vertical) continue;
    for (const Operand& one :
         {saved(str("squares", m), {s.N}), saved(str("weights", m), {s.N, m + 1}), saved(str("pbar", m), {s.N})})
      operands.push_back(one);
  }
  const auto take_dots = [=](const Tensor& dots, const Tensor& a, const Tensor& b, Stream stream) {
    if (is_plain(kernels, stream)) vertical_dot_plain(dots, a, b, s.N, s.C);
    else vertical_dot(dots, a, b, stream);
  };
  return {operands,
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            const bool plain = is_plain(kernels, stream);
            for (int64_t m = 0; m < s.S; ++m) {
              const Tensor out = t[named("out", m)], source = t[named("source", m)], scores = t[named("scores", m)];
              const Tensor weights = t[named("weights", m)];
              if (vertical) take_dots(t[named("squares", m)], source, source, stream);
              const auto read = several(m + 1, "source", get), norms = several(m + 1, "squares", get);
              if (vertical && plain) vertical_forward_plain(out, weights, read, norms, scores, s.N, s.C, eps_used);
              else if (vertical) vertical_forward(out, weights, read, norms, scores, eps_used, stream);
              else if (plain) depth_mix_forward_plain(out, read, scores);
              else depth_mix_forward(out, read, scores, stream);
            }
          },
          [=](auto& t, Stream stream) {
            const bool plain = is_plain(kernels, stream);
            for (int64_t i = s.S - 1; i >= 0; --i) {
              if (vertical) take_dots(t[named("pbar", i)], t[named("dout", i)], t[named("out", i)], stream);
              std::vector<DepthReader> readers;
              for (int64_t m = i; m < s.S; ++m)
                readers.push_back({t[named("dout", m)], t[named(vertical ? "weights" : "scores", m)],
                                   t[named("dscores", m)], i, t[named("pbar", m)]});
              const Grad to = t.grad(named("source", i));
              const Tensor source = t[named("source", i)], squares = t[named("squares", i)];
              if (vertical && plain) vertical_backward_plain(to, source, squares, readers, s.N, s.C, eps_used);
              else if (vertical) vertical_backward(to, source, squares, readers, eps_used, stream);
              else if (plain) depth_mix_backward_plain(to, source, readers);
              else depth_mix_backward(to, source, readers, stream);
            }
          },
          [=](auto& z) {
            const auto get = [&](const std::string& name) -> const Complex* { return z[name]; };
            for (int64_t m = 0; m < s.S; ++m) {
              Complex *const out = z[named("out", m)], *const scores = z[named("scores", m)];
              const auto read = several(m + 1, "source", get);
              if (!vertical) {
                depth_mix_forward_ref(out, read, scores, s.N * s.C);
                continue;
              }
              vertical_dot_ref(z[named("squares", m)], read.back(), read.back(), s.N, s.C);
              vertical_forward_ref(out, z[named("weights", m)], read, several(m + 1, "squares", get), scores, s.N, s.C,
                                   eps_used);
            }
          },
          vertical};  // pbar is that of the rounded mixtures
}

const std::vector<Size> sizes{{1, 1, 1},   {2, 5, 3},     {3, 300, 16}, {4, 37, 33},  {12, 130, 64},
                              {9, 17, 96}, {16, 10, 100}, {7, 9, 257},  {3, 3, 2100}, {129, 3, 20}};
// Rows for one warp, several blocks and several rounds, more blocks than lanes, both widths, ragged ends.
const std::vector<Size> gpu_sizes{{1, 1, 1},    {2, 5, 3},  {4, 19, 33},  {1, 40, 520}, {6, 3, 257},
                                  {3, 3, 2100}, {5, 2, 96}, {2, 50, 264}, {1, 67, 257}};

}  // namespace

TEST_CASE("depth_mix: reference backward over a whole depth is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 2, 3}, {4, 3, 5}, {3, 1, 7}})
    for (const double scale : {1e-3, 1.0, 1e3}) {
      CAPTURE(scale);
      Tolerances trained;  // beside what they are added to, of size 1; of a single source vertical's are 0
      for (int64_t m = 0; m < size.S; ++m) trained.insert({str("dscores", m), {1e-12, 5e-13}});
      check_derivative(depth_mix(size, false, scale), 1e-12, trained);
      check_derivative(depth_mix(size, true, scale), 1e-12, trained);
      check_derivative(depth_mix(size, true, scale, 0.3 * scale * scale), 1e-12, trained);
    }
}

TEST_CASE("depth_mix: both kinds on the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (const bool vertical : {false, true}) {
        CAPTURES(kernels, vertical);
        // f32 in vector order: some ulps (6e-8) of the result. Where very many sources add up one after another, they
        // cancel, and it is some ulps of the largest partial sum. With vertical attention the terms q cancel in
        // p - pbar and in the sum over tokens.
        Tolerances tolerances;
        for (int64_t m = 0; m < size.S; ++m)
          tolerances.insert({{str("out", m), size.S > 16 ? 4e-6 : 1e-6},
                             {str("squares", m), 1e-6},
                             {str("weights", m), 1e-6},
                             {str("pbar", m), 2e-6},
                             {str("dsource", m), size.S > 16 ? 6e-6 : 2e-6},
                             {str("dscores", m), {vertical ? 1e-5 : 2e-6, 2e-6}}});
        for (const Dtype dtype : dtypes)  // an eps that is not lost beside the squares
          check_backend(depth_mix(size, vertical, 1, 0.25, kernels), dtype, backend, tolerances);
      }
  });
}

TEST_CASE_TEMPLATE("depth_mix: more inputs than lanes, and as many as a GPU takes", T, float, bf16) {
  // One mix of 256 sources, and the gather of the first of them, from 256 readers that are all alike but for dout.
  const int64_t S = 256, N = 5, C = 24;
  const auto sources = random_vector<T>(S * N * C, 1);
  const auto squares = random_vector<float>(S * N, 2), scores = random_vector<float>(S, 3);
  std::vector<std::vector<float>> first;  // results
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<T>(N * C), plain = out, dinp = out, plain_dinp = out;
    auto weights = poisoned<float>(N * S), norms = squares, dscores = random_vector<float>(S * S, 4), dplain = dscores;
    auto pbar = random_vector<float>(N, 5);
    for (float& x : norms) x = x * x + 1;
    run_on(backend,
           {view(sources, {S, N, C}), view(norms, {S, N}), view(scores, {S}), view(out, {N, C}), view(plain, {N, C}),
            view(weights, {N, S}), view(pbar, {N}), view(dinp, {N, C}), view(plain_dinp, {N, C}), view(dscores, {S, S}),
            view(dplain, {S, S})},
           [&](auto& t, Stream stream) {
             std::vector<Tensor> rows, square;
             for (int64_t s = 0; s < S; ++s) {
               rows.push_back(view(t[0].template as<T>() + s * N * C, {N, C}));
               square.push_back(view(t[1].template as<float>() + s * N, {N}));
             }
             vertical_forward(t[3], t[5], rows, square, t[2], eps, stream);
             depth_mix_forward(t[4], rows, t[2], stream);
             std::vector<DepthReader> readers, vertical_readers;
             for (int64_t r = 0; r < S; ++r) {
               const auto own = [&](const Tensor& all) { return view(all.as<float>() + r * S, {S}); };
               const Tensor& dout = rows[static_cast<size_t>(r)];
               vertical_readers.push_back({dout, t[5], own(t[9]), r, t[6]});
               readers.push_back({dout, t[2], own(t[10]), r, {}});
             }
             vertical_backward({t[7], false}, rows[0], square[0], vertical_readers, eps, stream);
             depth_mix_backward({t[8], false}, rows[0], readers, stream);
           });
    const std::vector<std::vector<float>> results{convert<float>(out),
                                                  convert<float>(plain),
                                                  convert<float>(dinp),
                                                  convert<float>(plain_dinp),
                                                  weights,
                                                  dscores,
                                                  dplain};
    if (first.empty()) first = results;
    for (size_t i = 0; i < results.size(); ++i) {
      CAPTURE(i);
      // Sums of 256 in f32, whose order is different; what is stored as bf16 may be rounded to either side.
      check_close("result", results[i], convert<double>(first[i]), i < 4 ? tolerance_or_rounding<T>(4e-6) : 4e-6);
    }
  }
}

TEST_CASE("depth_mix: memory that begins between two multiples of 16 bytes") {
  for (const Dtype dtype : dtypes)
    for (const bool vertical : {false, true}) {
      const Op op = depth_mix({1, 5, 48}, vertical);
      Tolerances sums;
      if (!vertical) sums.insert({"dscores0", {1e-6, 1e-5}});
      check_any_address(op, dtype, sums);
      check_any_address(op, dtype, sums, {"dout0", "scores0", "dscores0"});
      check_any_address(op, dtype, sums, {"out0", "dout0", "squares0", "weights0", "pbar0", "scores0", "dscores0"});
    }
}

TEST_CASE("depth_mix: a worked example of vertical attention") {
  const Op op = depth_mix({3, 1, 4}, true, 1, 0);
  const std::vector<std::vector<double>> want_dinp{{0.08938204, 0.02159717, 0.01769456, 0.15716691},
                                                   {0.00667533, 0.00181363, 0.06551882, 0.02670130},
                                                   {0.06930992, -0.07773733, 0.07601765, 0.15547466}};
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    Trial a(op, Dtype::f32);
    a.x["source0"] = {1, 2, -2, 0}, a.x["source1"] = {.5, -1.5, 0, 2}, a.x["source2"] = {-3, 0, 4, 0};
    a.x["scores2"] = {.5, -.25, 1}, a.x["dscores2"] = {0, 0, 0};
    a.x["dout0"] = a.x["dout1"] = {0, 0, 0, 0}, a.x["dout2"] = {.1f, -.2f, .3f, .4f};  // of the last mix alone
    a.run(backend);
    for (int s = 0; s < 3; ++s)
      CHECK(a[str("squares", s)] == std::vector<double>{std::vector<double>{9, 6.5, 25}[static_cast<size_t>(s)]});
    check_close("weights", a["weights2"], std::vector<double>{0.39291728, 0.21839608, 0.38868664}, 2e-7);
    check_close("out", a["out2"], std::vector<double>{-0.66394461, 0.45824043, 0.76891202, 0.43679216}, 2e-7);
    check_close("pbar", a["pbar2"], std::vector<double>{0.24734792}, 2e-7);
    for (size_t s = 0; s < 3; ++s) check_close("dinp", a[str("dsource", s)], want_dinp[s], 5e-7);
    check_close("dscores", a["dscores2"], std::vector<double>{-0.45081282, 0.19713568, 0.25367715}, 5e-7);
  }
}

TEST_CASE("depth_mix: what must hold for vertical attention over every token") {
  const Op op = depth_mix({5, 11, 19}, true, 1, 0);
  Trial a(op, Dtype::f64);
  for (size_t m = 0; m < 5; ++m) a.x[str("dscores", m)].assign(m + 1, 0);
  a.run(Backend::reference);
  for (int m = 0; m < 5; ++m) {  // a constant added to the scores changes nothing
    double sum = 0;
    for (const double x : a[str("dscores", m)]) sum += x;
    CHECK(std::abs(sum) < 1e-12);
  }
  for (size_t n = 0; n < 11; ++n) {  // out is of degree 1 in all sources together
    double got = 0, want = 0;
    for (int s = 0; s < 5; ++s)
      for (size_t i = n * 19; i < (n + 1) * 19; ++i) {
        got += a[str("source", s)][i] * a[str("dsource", s)][i];
        want += a[str("dout", s)][i] * a[str("out", s)][i];
      }
    CHECK(std::abs(got - want) < 1e-12);
  }
}

TEST_CASE("depth_mix: one source is copied bit for bit, and its gather is exactly dout") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Dtype dtype : dtypes)
        for (const int64_t C : {1, 15, 16, 67, 256})
          for (const double scale : {1e-15, 1e-3, 1.0, 1e15})
            for (const bool vertical : {false, true}) {
              if (is_slow(backend) && (scale == 1e-3 || scale == 1e15)) continue;  // slow there
              CAPTURES(backend, kernels, name_of(dtype), C, scale, vertical);
              const Op op = depth_mix({1, 50, C}, vertical, scale, eps, kernels);
              Trial a(op, dtype);
              a.x["source0"][3] = -0.0, a.x["scores0"][0] = 1;
              const auto before = a["dscores0"];
              a.run(backend);
              CHECK(a["out0"] == a["source0"]);
              CHECK(std::signbit(a["out0"][3]));
              CHECK(a["dsource0"] == a["dout0"]);
              if (vertical) CHECK(a["weights0"] == std::vector<double>(50, 1));
              if (vertical) CHECK(a["dscores0"] == before);
            }
}

TEST_CASE("depth_mix: weights (0, ..., 0, 1) are the last source exactly, and so is the gather") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (const Dtype dtype : dtypes) {
        CAPTURES(size.S, size.C, kernels, name_of(dtype));
        const Op op = depth_mix(size, false, 1, eps, kernels);
        Trial a(op, dtype);
        for (int64_t m = 0; m < size.S; ++m) {
          a.x[str("scores", m)].assign(static_cast<size_t>(m), 0);
          a.x[str("scores", m)].push_back(1);
        }
        a.run(backend);
        for (int64_t m = 0; m < size.S; ++m) {
          CHECK(a[str("out", m)] == a[str("source", m)]);
          CHECK(a[str("dsource", m)] == a[str("dout", m)]);
        }
      }
  });
}

TEST_CASE("depth_mix: scores without data are zeros, and dscores without data are not written") {
  const Op op = depth_mix({3, 20, 40}, true);
  for (const Backend backend : all_backends()) {
    Trial zeros(op, Dtype::f32), none = zeros;
    for (size_t m = 0; m < 3; ++m) {
      zeros.x[str("scores", m)].assign(m + 1, 0);
      for (const char* name : {"scores", "dscores"}) none.x[str(name, m)].clear();
    }
    zeros.run(backend), none.run(backend);
    for (int m = 0; m < 3; ++m)
      for (const char* name : {"out", "weights", "dsource"}) CHECK(none[str(name, m)] == zeros[str(name, m)]);
  }
}

TEST_CASE_TEMPLATE("depth_mix: without readers dinp is 0, or unchanged if added", T, float, bf16) {
  const auto inp = random_vector<T>(60, 1), before = random_vector<T>(60, 3);
  const auto squares = random_vector<float>(3, 2);
  for (const Backend backend : backends_of<T>()) {
    for (bool accumulate : {false, true}) {
      auto plain = accumulate ? before : poisoned<T>(60), vertical = plain;
      run_on(backend, {view(plain, {3, 20}), view(vertical, {3, 20}), view(inp, {3, 20}), view(squares, {3})},
             [&](auto& t, Stream there) {
               depth_mix_backward({t[0], accumulate}, t[2], {}, there);
               vertical_backward({t[1], accumulate}, t[2], t[3], {}, eps, there);
             });
      const auto want = accumulate ? before : std::vector<T>(60, 0.f);
      CHECK(plain == want);
      CHECK(vertical == want);
    }
  }
}

TEST_CASE("depth_mix: norms and scores far apart") {
  const Op op = depth_mix({6, 8, 48}, true, 1, 0);
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    Trial a(op, Dtype::f32);
    const std::vector<float> factors{1e-16f, 1e-8f, 1.f, 1e8f, 1e16f, 1e-4f};
    for (size_t s = 0; s < 6; ++s)
      for (double& x : a.x[str("source", s)]) x = static_cast<float>(x) * factors[s];
    a.x["scores5"] = {-300, -20, -INFINITY, 30, 40, 0};
    for (double& score : a.x["scores4"]) score = static_cast<float>(score) + 200.f;
    Trial want = a.exact();
    a.run(backend), want.run(Backend::reference);
    for (int m = 0; m < 6; ++m) {
      CAPTURE(m);
      check_close("weights", a[str("weights", m)], want[str("weights", m)], 1e-6);
      check_close("out", a[str("out", m)], want[str("out", m)], 2e-6);
      check_close("dinp", a[str("dsource", m)], want[str("dsource", m)], 5e-6);
    }
  }
}

TEST_CASE("depth_mix: NaN shows where it must, and nowhere else") {
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (const Dtype dtype : dtypes)
        for (const bool vertical : {false, true}) {
          CAPTURES(backend, kernels, name_of(dtype), vertical);
          const Op op = depth_mix({3, 40, 24}, vertical, 1, eps, kernels);
          Trial a(op, dtype), bad_score = a;
          a.x["source1"][7 * 24 + 5] = NAN;
          a.run(backend);
          for (size_t i = 0; i < 40 * 24; ++i) {
            const bool spoilt = vertical ? i / 24 == 7 : i == 7 * 24 + 5;  // the norm spreads over the row
            CHECK(!std::isnan(a["out0"][i]));
            CHECK(std::isnan(a["out2"][i]) == spoilt);
            CHECK(std::isnan(a["dsource1"][i]) == (vertical && spoilt));
          }
          CHECK(std::isnan(a["dscores2"][1]));
          CHECK(!std::isnan(a["dscores0"][0]));
          bad_score.x["scores2"][1] = NAN;
          bad_score.forward(backend);
          for (const double y : bad_score["out2"]) CHECK(std::isnan(y));
        }
}

TEST_CASE("depth_mix: the thread count does not change a bit") {
  for (const bool vertical : {false, true})
    for (const Dtype dtype : dtypes) check_threads(depth_mix({5, 700, 51}, vertical), dtype);
}

TEST_CASE("depth_mix: activations of one call have one type, weights and statistics are f32") {
  const std::vector<bf16> half(20), half_out(20);
  const std::vector<float> whole(20);
  const float* const f32 = whole.data();
  const Tensor x = view(half, {4, 5}), out = view(half_out, {4, 5}), in_f32 = view(f32, {4, 5});
  const Tensor square = view(f32, {4}), score = view(f32, {1}), table = view(f32, {4, 1});
  const Tensor bf16_score = view(half.data(), {1}), bf16_column = view(half.data(), {4});
  const Grad d{out, false};
  CHECK_THROWS_AS(depth_mix_forward(out, {in_f32}, score, fast), Error);
  CHECK_THROWS_AS(depth_mix_forward(out, {x}, bf16_score, fast), Error);
  CHECK_THROWS_AS(depth_mix_forward(out, {x}, score, reference), Error);
  CHECK_THROWS_AS(depth_mix_backward(d, in_f32, {{x, score, score, 0, {}}}, fast), Error);
  CHECK_THROWS_AS(depth_mix_backward(d, x, {{x, score, bf16_score, 0, {}}}, fast), Error);
  CHECK_THROWS_AS(vertical_dot(bf16_column, x, x, fast), Error);
  CHECK_THROWS_AS(vertical_forward(out, table, {x}, {bf16_column}, score, eps, fast), Error);
  CHECK_THROWS_AS(vertical_backward(d, x, square, {{in_f32, table, score, 0, square}}, eps, fast), Error);
}

TEST_CASE("depth_mix: wrong shapes are errors") {
  const std::vector<float> memory(20), memory_of_out(20);
  const float* const f32 = memory.data();
  const Tensor x = view(f32, {4, 5}), out = view(memory_of_out, {4, 5}), dy = x, square = view(f32, {4});
  const Tensor three = view(f32, {3}), two = view(f32, {2}), table = view(f32, {4, 2}), short_row = view(f32, {4, 4});
  CHECK_THROWS_AS(depth_mix_forward(out, {}, three, fast), Error);
  CHECK_THROWS_AS(depth_mix_forward(out, {x, x}, three, fast), Error);
  CHECK_THROWS_AS(depth_mix_forward(out, {x, short_row}, two, fast), Error);
  const Grad dx{out, false};
  CHECK_THROWS_AS(depth_mix_backward(dx, short_row, {}, fast), Error);
  CHECK_THROWS_AS(depth_mix_backward(dx, x, {{short_row, two, two, 0, {}}}, fast), Error);
  CHECK_THROWS_AS(depth_mix_backward(dx, x, {{dy, two, three, 0, {}}}, fast), Error);
  for (int64_t column : {-1, 2}) {
    CHECK_THROWS_AS(depth_mix_backward(dx, x, {{dy, two, two, column, {}}}, fast), Error);
    CHECK_THROWS_AS(vertical_backward(dx, x, square, {{dy, table, two, column, square}}, eps, fast), Error);
  }
  CHECK_THROWS_AS(vertical_forward(out, table, {x, x}, {square}, two, eps, fast), Error);
  CHECK_THROWS_AS(vertical_forward(out, table, {x, x}, {square, square}, three, eps, fast), Error);
  CHECK_THROWS_AS(vertical_forward(out, table, {x, x}, {square, two}, two, eps, fast), Error);
  CHECK_THROWS_AS(vertical_backward(dx, x, square, {{dy, table, three, 0, square}}, eps, fast), Error);
  CHECK_THROWS_AS(vertical_backward(dx, x, square, {{dy, table, two, 0, two}}, eps, fast), Error);
  CHECK_THROWS_AS(vertical_dot(three, x, x, fast), Error);
}
