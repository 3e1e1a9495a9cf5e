#include "kernels/depth/query_mix.h"

#include "kernels/depth/depth_mix.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, N, C;
  int64_t block() const { return N * C; }
};

// A whole depth: S sources and S mixtures, mixture m over the sources 0 to m. eps: not lost beside the mean squares.
Op query_mix(const Size& s, double scale = 1, double eps = 0.25) {
  const auto named = [](const char* name, int64_t i) { return str(name, i); };
  const Shape rows{s.N, s.C};
  std::vector<Operand> operands;
  for (int64_t m = 0; m < s.S; ++m)
    for (const Operand& one :
         {input(str("source", m), rows, scale * static_cast<double>(m + 1)),
          parameter(str("proj", m), {s.C}, 2 / std::sqrt(static_cast<double>(s.C))), parameter(str("gain", m), {s.C}),
          output(str("out", m), rows), saved(str("squares", m), {s.N}), saved(str("query", m), {s.C}),
          saved(str("logits", m), {s.N, m + 1}), saved(str("weights", m), {s.N, m + 1}), saved(str("pbar", m), {s.N})})
      operands.push_back(one);
  const auto mix = [=](auto& t, int64_t m) {
    return QueryMix{t[named("proj", m)], t[named("gain", m)], t[named("query", m)], t[named("logits", m)],
                    t[named("weights", m)]};
  };
  return {operands,
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            for (int64_t m = 0; m < s.S; ++m) {
              const Tensor source = t[named("source", m)];
              vertical_dot(t[named("squares", m)], source, source, stream);
              query_mix_forward(t[named("out", m)], mix(t, m), several(m + 1, "source", get),
                                several(m + 1, "squares", get), eps, stream);
            }
          },
          [=](auto& t, Stream stream) {
            for (int64_t i = s.S - 1; i >= 0; --i) {
              vertical_dot(t[named("pbar", i)], t[named("dout", i)], t[named("out", i)], stream);
              std::vector<QueryReader> readers;
              for (int64_t m = i; m < s.S; ++m)
                readers.push_back({t[named("dout", m)], mix(t, m), t[named("dproj", m)], t[named("dgain", m)],
                                   t[named("pbar", m)], i});
              query_mix_backward(t.grad(named("source", i)), t[named("source", i)], t[named("squares", i)], readers,
                                 eps, stream);
            }
          },
          [=](auto& z) {
            const auto get = [&](const std::string& name) -> const Complex* { return z[name]; };
            for (int64_t m = 0; m < s.S; ++m) {
              const Complex* source = z[named("source", m)];
              vertical_dot_ref(z[named("squares", m)], source, source, s.N, s.C);
              query_mix_forward_ref<Complex>(z[named("out", m)],
                                             {z[named("proj", m)], z[named("gain", m)], z[named("query", m)],
                                              z[named("logits", m)], z[named("weights", m)]},
                                             several(m + 1, "source", get), several(m + 1, "squares", get), s.N, s.C,
                                             eps);
            }
          },
          true};  // pbar is that of the rounded mixtures
}

constexpr Dtype dtypes[] = {Dtype::f32, Dtype::bf16};

// Ragged rows, several groups of readers, several blocks and tiles of rows, more columns than one round of threads.
const std::vector<Size> sizes{{1, 1, 1},   {2, 5, 3},     {3, 300, 16}, {4, 37, 33},  {12, 130, 64},
                              {9, 17, 96}, {16, 10, 100}, {7, 9, 257},  {3, 3, 2100}, {33, 70, 20}};
const std::vector<Size> gpu_sizes{{1, 1, 1},    {2, 5, 3},    {4, 19, 33},  {1, 40, 520},
                                  {10, 3, 257}, {3, 3, 2100}, {2, 130, 264}};

}  // namespace

TEST_CASE("query_mix: reference backward over a whole depth is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 2, 3}, {4, 3, 5}, {3, 1, 7}})
    for (const double scale : {1e-3, 1.0, 1e3})
      for (const double eps : {0.3, 1e-6}) {
        CAPTURES(scale, eps);
        Tolerances trained;  // beside what they are added to, of size 1; those of a single source are 0
        for (int64_t m = 0; m < size.S; ++m)
          for (const char* name : {"dproj", "dgain"}) trained.insert({str(name, m), {1e-12, 5e-13}});
        check_derivative(query_mix(size, scale, eps * scale * scale), 1e-12, trained);
      }
}

TEST_CASE("query_mix: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    // Sums of C products that cancel: some ulps (6e-8) of the largest partial sum, and so are all that follow.
    Tolerances tolerances;
    for (int64_t m = 0; m < size.S; ++m)
      tolerances.insert({{str("squares", m), 1e-6},
                         {str("query", m), 1e-7},
                         {str("logits", m), {2e-6, 2e-6}},
                         {str("weights", m), 4e-6},
                         {str("out", m), 4e-6},
                         {str("pbar", m), 4e-6},
                         {str("dsource", m), 6e-6},
                         {str("dproj", m), 2e-5},
                         {str("dgain", m), 2e-5}});
    for (const Dtype dtype : dtypes) check_backend(query_mix(size), dtype, backend, tolerances);
  });
}

TEST_CASE("query_mix: one source is copied bit for bit, and its gather is exactly dout") {
  for (const Dtype dtype : dtypes) {
    check_any_address(query_mix({1, 5, 48}), dtype);
    check_any_address(query_mix({1, 5, 48}), dtype, {},
                      {"out0", "dout0", "squares0", "logits0", "weights0", "pbar0", "dproj0", "dgain0"});
    for (const Backend backend : fast_backends())
      for (const int64_t C : {1, 15, 16, 67, 256})
        for (const double scale : {1e-15, 1.0, 1e15}) {
          CAPTURES(backend, name_of(dtype), C, scale);
          const Op op = query_mix({1, 50, C}, scale);
          Trial a(op, dtype);
          a.x["source0"][3] = -0.0;
          const Trial before = a;
          a.run(backend);
          CHECK(a["out0"] == a["source0"]);
          CHECK(std::signbit(a["out0"][3]));
          CHECK(a["dsource0"] == a["dout0"]);
          CHECK(a["weights0"] == std::vector<double>(50, 1));
          for (const char* name : {"dproj0", "dgain0"}) CHECK(a[name] == before[name]);
        }
  }
}

TEST_CASE_TEMPLATE("query_mix: without readers dinp is 0, or unchanged if added", T, float, bf16) {
  const auto inp = random_vector<T>(60, 1), before = random_vector<T>(60, 3);
  const std::vector<float> squares(3, 1.f);
  for (const Backend backend : backends_of<T>())
    for (const bool accumulate : {false, true}) {
      auto dinp = accumulate ? before : poisoned<T>(60);
      run_on(backend, {view(dinp, {3, 20}), view(inp, {3, 20}), view(squares, {3})}, [&](auto& t, Stream there) {
        query_mix_backward({t[0], accumulate}, t[1], t[2], {}, 1e-6, there);
      });
      CHECK(dinp == (accumulate ? before : std::vector<T>(60, T(0.f))));
    }
}

TEST_CASE("query_mix: equal weights where all queries are 0, also for rows of zeros") {
  for (const Backend backend : all_backends()) {
    const Op op = query_mix({4, 6, 35});
    Trial a(op, Dtype::f32);
    for (int m = 0; m < 4; ++m) a.x[str("proj", m)].assign(35, 0);
    std::fill_n(a.x["source2"].begin(), 70, 0);  // two rows
    a.run(backend);
    for (size_t m = 0; m < 4; ++m)
      CHECK(a[str("weights", m)] == std::vector<double>(6 * (m + 1), 1.f / static_cast<float>(m + 1)));
    for (const double x : a.all_results()) CHECK(std::isfinite(x));
  }
}

TEST_CASE("query_mix: logits far beyond what exp can hold") {
  for (const Backend backend : fast_backends()) {
    const Op op = query_mix({5, 20, 64});
    Trial a(op, Dtype::f32);
    for (int m = 0; m < 5; ++m)
      for (double& w : a.x[str("proj", m)]) w *= 16384;
    Trial want = a.exact();
    a.forward(backend), want.forward(Backend::reference);
    // Each token has one source, but where two logits are within some units of each other.
    for (size_t i = 0; i < a["weights4"].size(); ++i) {
      CHECK(std::isfinite(a["weights4"][i]));
      if (const double w = want["weights4"][i]; w < 1e-9 || w > 1 - 1e-9) CHECK(std::abs(a["weights4"][i] - w) < 1e-6);
    }
  }
}

TEST_CASE("query_mix: a NaN stays in its row, but for what is trained") {
  for (const Backend backend : fast_backends()) {
    const Op op = query_mix({3, 12, 40});
    Trial a(op, Dtype::f32);
    a.x["source1"][5 * 40 + 7] = NAN;
    a.run(backend);
    for (size_t m = 0; m < 3; ++m) {
      for (size_t i = 0; i < 480; ++i) {
        CHECK(std::isnan(a[str("out", m)][i]) == (m > 0 && i / 40 == 5));
        CHECK(std::isnan(a[str("dsource", m)][i]) == (i / 40 == 5));
      }
      CHECK(std::isnan(a[str("dproj", m)][0]) == (m > 0));
    }
  }
}

TEST_CASE("query_mix: the same bits on any number of threads") {
  for (const Size& size : std::vector<Size>{{5, 300, 65}, {20, 40, 96}})
    for (const Dtype dtype : dtypes) check_threads(query_mix(size), dtype);
}

TEST_CASE("query_mix: more inputs than lanes, and as many as a GPU takes") {
  // One mixture of 256 sources, and the gather of the first of them from 256 readers.
  const int64_t S = 256, N = 5, C = 24;
  const auto sources = random_vector<float>(S * N * C, 1), proj = random_vector<float>(C, 2);
  const std::vector<float> gain(static_cast<size_t>(C), 1.f);
  std::vector<std::vector<float>> first;
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<float>(N * C), dinp = out, query = poisoned<float>(C), logits = poisoned<float>(N * S);
    auto weights = logits, squares = poisoned<float>(S * N), pbar = random_vector<float>(N, 3);
    std::vector<float> trained(static_cast<size_t>(2 * S * C), 0.f);
    run_on(backend,
           {view(sources, {S, N, C}), view(squares, {S, N}), view(proj), view(gain), view(query), view(logits, {N, S}),
            view(weights, {N, S}), view(out, {N, C}), view(dinp, {N, C}), view(pbar), view(trained, {2 * S, C})},
           [&](auto& t, Stream stream) {
             std::vector<Tensor> rows, norms;
             for (int64_t s = 0; s < S; ++s) {
               rows.push_back(view(t[0].template as<float>() + s * N * C, {N, C}));
               norms.push_back(view(t[1].template as<float>() + s * N, {N}));
               vertical_dot(norms.back(), rows.back(), rows.back(), stream);
             }
             const QueryMix mix{t[2], t[3], t[4], t[5], t[6]};
             query_mix_forward(t[7], mix, rows, norms, 1e-6, stream);
             std::vector<QueryReader> readers;
             for (int64_t r = 0; r < S; ++r) {
               const auto own = [&](int64_t i) { return view(t[10].template as<float>() + i * C, {C}); };
               readers.push_back({rows[static_cast<size_t>(r)], mix, own(r), own(S + r), t[9], r});
             }
             query_mix_backward({t[8], false}, rows[0], norms[0], readers, 1e-6, stream);
           });
    const std::vector<std::vector<float>> results{out, dinp, weights, trained};
    if (first.empty()) first = results;
    for (size_t i = 0; i < results.size(); ++i) {
      CAPTURE(i);
      check_close("result", results[i], convert<double>(first[i]), 1e-5);  // sums of 256 in f32, in another order
    }
  }
}
