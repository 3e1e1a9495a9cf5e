#include "kernels/depth/query_mix.h"

#include <cstring>

#include "kernels/depth/depth_mix.h"
#include "tests/support/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, N, C;
  int64_t block() const { return N * C; }
};

// A whole depth: S sources and S mixtures, mixture m over the sources 0 to m, with all that they save and train.
template <class T>
struct Depth {
  Size size;
  double eps = 0.25;                                             // not lost beside the mean squares
  std::vector<std::vector<T>> sources, out, dout, dinp, before;  // [S] (N,C); before: dinp before an accumulate
  std::vector<std::vector<AccumulationType<T>>> squares, logits, weights, pbar;   // [S] (N), (N,m+1), (N,m+1), (N)
  std::vector<std::vector<AccumulationType<T>>> proj, gain, query, dproj, dgain;  // [S] (C)

  explicit Depth(const Size& s, double scale = 1.0) : size(s) {
    for (int64_t m = 0; m < s.S; ++m) {
      const uint64_t seed = 10 * static_cast<uint64_t>(m + 1);
      sources.push_back(random_vector<T>(s.block(), seed, scale * static_cast<double>(m + 1)));
      dout.push_back(random_vector<T>(s.block(), seed + 1));
      before.push_back(random_vector<T>(s.block(), seed + 2));
      proj.push_back(random_vector<AccumulationType<T>>(s.C, seed + 3, 2 / std::sqrt(static_cast<double>(s.C))));
      gain.push_back(random_vector<AccumulationType<T>>(s.C, seed + 4));
      dproj.push_back(random_vector<AccumulationType<T>>(s.C, seed + 5));
      dgain.push_back(random_vector<AccumulationType<T>>(s.C, seed + 6));
      out.push_back(poisoned<T>(s.block())), dinp.push_back(poisoned<T>(s.block()));
      for (auto* list : {&squares, &pbar}) list->push_back(poisoned<AccumulationType<T>>(s.N));
      for (auto* list : {&logits, &weights}) list->push_back(poisoned<AccumulationType<T>>(s.N * (m + 1)));
      query.push_back(poisoned<AccumulationType<T>>(s.C));
    }
  }
  auto members() {
    return std::tie(sources, out, dout, dinp, before, squares, logits, weights, pbar, proj, gain, query, dproj, dgain);
  }
  template <class From>
  explicit Depth(Depth<From>& from) : size(from.size), eps(from.eps) {
    convert_members(*this, from);
  }

  Tensor rows(const std::vector<T>& v) const { return view(v, {size.N, size.C}); }
  // Of mixture m, as its backward and its forward see it.
  std::vector<Tensor> mix(size_t m) const {
    const Shape table{size.N, static_cast<int64_t>(m) + 1};
    return {tensor_of(proj[m]), tensor_of(gain[m]), tensor_of(query[m]), view(logits[m], table),
            view(weights[m], table)};
  }
  static QueryMix as_mix(const Tensor* t) { return {t[0], t[1], t[2], t[3], t[4]}; }

  void forward(Stream stream) {
    for (size_t m = 0; m < sources.size(); ++m) {
      run_on(stream.backend, {tensor_of(squares[m]), rows(sources[m])},
             [](auto& t, Stream there) { vertical_dot(t[0], t[1], t[1], there); });
      std::vector<Tensor> tensors = mix(m);
      tensors.push_back(rows(out[m]));
      for (size_t s = 0; s <= m; ++s) tensors.push_back(rows(sources[s]));
      for (size_t s = 0; s <= m; ++s) tensors.push_back(tensor_of(squares[s]));
      run_on(stream.backend, tensors, [&](auto& t, Stream there) {
        const auto read = t.begin() + 6, norms = read + static_cast<int64_t>(m) + 1;
        query_mix_forward(t[5], as_mix(t.data()), {read, norms}, {norms, t.end()}, eps, there);
      });
    }
  }
  void backward(bool accumulate, Stream stream) {
    for (size_t s = sources.size(); s-- > 0;) {
      if (accumulate) dinp[s] = before[s];
      run_on(stream.backend, {tensor_of(pbar[s]), rows(dout[s]), rows(out[s])},
             [](auto& t, Stream there) { vertical_dot(t[0], t[1], t[2], there); });
      std::vector<Tensor> tensors{rows(dinp[s]), rows(sources[s]), tensor_of(squares[s])};
      for (size_t m = s; m < sources.size(); ++m) {
        for (const Tensor& t : mix(m)) tensors.push_back(t);
        for (const Tensor& t : {rows(dout[m]), tensor_of(dproj[m]), tensor_of(dgain[m]), tensor_of(pbar[m])})
          tensors.push_back(t);
      }
      run_on(stream.backend, tensors, [&](auto& t, Stream there) {
        std::vector<QueryReader> readers;
        for (size_t i = 3; i < t.size(); i += 9)
          readers.push_back({t[i + 5], as_mix(&t[i]), t[i + 6], t[i + 7], t[i + 8], static_cast<int64_t>(s)});
        query_mix_backward({t[0], accumulate}, t[1], t[2], readers, eps, there);
      });
    }
  }
};

// The sum over all mixtures of <dout, out>, by the reference forward.
using Lists = std::vector<std::vector<Complex>>;
Complex loss(const Depth<double>& depth, const Lists& sources, const Lists& proj, const Lists& gain) {
  const auto [S, N, C] = depth.size;
  Complex sum = 0;
  Lists squares;
  std::vector<const Complex*> read, norms;
  for (size_t m = 0; m < sources.size(); ++m) {
    squares.emplace_back(static_cast<size_t>(N));
    vertical_dot_ref(squares[m].data(), sources[m].data(), sources[m].data(), N, C);
    read.push_back(sources[m].data()), norms.push_back(squares[m].data());
    std::vector<Complex> out(static_cast<size_t>(N * C)), query(static_cast<size_t>(C));
    std::vector<Complex> logits(static_cast<size_t>(N) * (m + 1)), weights = logits;
    query_mix_forward_ref<Complex>(out.data(),
                                   {proj[m].data(), gain[m].data(), query.data(), logits.data(), weights.data()}, read,
                                   norms, N, C, depth.eps);
    sum += dot(depth.dout[m], out);
  }
  return sum;
}

void check_against_complex_step(Depth<double>& depth) {
  Lists sources, proj, gain;
  for (const auto& x : depth.sources) sources.push_back(convert<Complex>(x));
  for (const auto& x : depth.proj) proj.push_back(convert<Complex>(x));
  for (const auto& x : depth.gain) gain.push_back(convert<Complex>(x));
  const auto with = [](Lists lists, size_t i, const std::vector<Complex>& x) { return lists[i] = x, lists; };
  std::vector<std::vector<double>> want_dinp, want_dproj, want_dgain;
  for (size_t s = 0; s < sources.size(); ++s) {
    want_dinp.push_back(
        complex_step(depth.sources[s], [&](auto& x) { return loss(depth, with(sources, s, x), proj, gain); }));
    want_dproj.push_back(
        complex_step(depth.proj[s], [&](auto& x) { return loss(depth, sources, with(proj, s, x), gain); }));
    want_dgain.push_back(
        complex_step(depth.gain[s], [&](auto& x) { return loss(depth, sources, proj, with(gain, s, x)); }));
    for (size_t c = 0; c < want_dproj[s].size(); ++c) {  // they are added
      want_dproj[s][c] += depth.dproj[s][c];
      want_dgain[s][c] += depth.dgain[s][c];
    }
  }
  depth.forward(reference);
  depth.backward(false, reference);
  for (size_t s = 0; s < sources.size(); ++s) {
    CAPTURE(s);
    check_close("dinp", depth.dinp[s], want_dinp[s], 1e-12);
    check_close("dproj", depth.dproj[s], want_dproj[s], 1e-12);
    check_close("dgain", depth.dgain[s], want_dgain[s], 1e-12);
  }
}

// Ragged rows, several groups of readers, several blocks and tiles of rows, more columns than one round of threads.
const std::vector<Size> sizes{{1, 1, 1},   {2, 5, 3},     {3, 300, 16}, {4, 37, 33},  {12, 130, 64},
                              {9, 17, 96}, {16, 10, 100}, {7, 9, 257},  {3, 3, 2100}, {33, 70, 20}};
const std::vector<Size> gpu_sizes{{1, 1, 1},    {2, 5, 3},    {4, 19, 33},  {1, 40, 520},
                                  {10, 3, 257}, {3, 3, 2100}, {2, 130, 264}};

template <class T>
void check_fast_against_reference(const Size& size, Stream stream) {
  CAPTURES(size.S, size.N, size.C);
  for (const bool accumulate : {false, true}) {
    Depth<T> depth(size);
    Depth<double> want(depth);
    depth.forward(stream);
    want.forward(reference);
    const auto want_out = want.out;
    for (size_t m = 0; m < want.out.size() && std::is_same_v<T, bf16>; ++m)
      want.out[m] = convert<double>(depth.out[m]);  // pbar is that of the rounded mixtures
    depth.backward(accumulate, stream);
    want.backward(accumulate, reference);
    for (size_t m = 0; m < depth.sources.size(); ++m) {
      CAPTURE(m);
      check_close("squares", depth.squares[m], want.squares[m], 1e-6);
      check_close("query", depth.query[m], want.query[m], 1e-7);
      // Sums of C products that cancel: some ulps (6e-8) of the largest partial sum, and so are all that follow.
      check_close("logits", depth.logits[m], want.logits[m], 2e-6, 2e-6);
      check_close("weights", depth.weights[m], want.weights[m], 4e-6);
      check_close("out", depth.out[m], want_out[m], tolerance_or_rounding<T>(4e-6));
      check_close("pbar", depth.pbar[m], want.pbar[m], 4e-6);
      check_close("dinp", depth.dinp[m], want.dinp[m], tolerance_or_rounding<T>(6e-6));
      check_close("dproj", depth.dproj[m], want.dproj[m], 2e-5);
      check_close("dgain", depth.dgain[m], want.dgain[m], 2e-5);
    }
  }
}

template <class T>
std::vector<float> all_results(Depth<T>& d) {
  return flat(d.out, d.dinp, d.squares, d.logits, d.weights, d.pbar, d.dproj, d.dgain);
}

}  // namespace

TEST_CASE("query_mix: reference backward over a whole depth is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 2, 3}, {4, 3, 5}, {3, 1, 7}})
    for (const double scale : {1e-3, 1.0, 1e3}) {
      CAPTURES(size.S, scale);
      Depth<double> depth(size, scale), tiny_eps(size, scale);
      depth.eps = 0.3 * scale * scale;
      tiny_eps.eps = 1e-6 * scale * scale;
      check_against_complex_step(depth);
      check_against_complex_step(tiny_eps);
    }
}

TEST_CASE_TEMPLATE("query_mix: the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes,
            [](Backend backend, const Size& size) { check_fast_against_reference<T>(size, Stream{backend}); });
}

TEST_CASE_TEMPLATE("query_mix: one source is copied bit for bit, and its gather is exactly dout", T, float, bf16) {
  for (const Backend backend : fast_backends())
    for (const int64_t C : {1, 15, 16, 67, 256})
      for (const double scale : {1e-15, 1.0, 1e15}) {
        CAPTURES(backend, C, scale);
        Depth<T> depth({1, 50, C}, scale);
        depth.sources[0][3] = -0.f;
        const auto dproj = depth.dproj, dgain = depth.dgain;
        depth.forward(Stream{backend});
        depth.backward(false, Stream{backend});
        CHECK(std::memcmp(depth.out[0].data(), depth.sources[0].data(), depth.out[0].size() * sizeof(T)) == 0);
        CHECK(depth.dinp == depth.dout);
        CHECK(depth.weights[0] == std::vector<float>(50, 1.f));
        CHECK(depth.dproj == dproj);
        CHECK(depth.dgain == dgain);
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
    Depth<float> depth({4, 6, 35});
    for (auto& proj : depth.proj) std::fill(proj.begin(), proj.end(), 0.f);
    std::fill_n(depth.sources[2].begin(), 70, 0.f);  // two rows
    depth.forward(Stream{backend});
    depth.backward(false, Stream{backend});
    for (size_t m = 0; m < 4; ++m)
      CHECK(depth.weights[m] == std::vector<float>(6 * (m + 1), 1.f / static_cast<float>(m + 1)));
    for (const float x : all_results(depth)) CHECK(std::isfinite(x));
  }
}

TEST_CASE("query_mix: logits far beyond what exp can hold") {
  for (const Backend backend : fast_backends()) {
    Depth<float> depth({5, 20, 64});
    for (auto& proj : depth.proj)
      for (float& w : proj) w *= 1e4f;
    Depth<double> want(depth);
    depth.forward(Stream{backend});
    want.forward(reference);
    // Each token has one source, but where two logits are within some units of each other.
    for (size_t i = 0; i < depth.weights[4].size(); ++i) {
      CHECK(std::isfinite(depth.weights[4][i]));
      if (const double w = want.weights[4][i]; w < 1e-9 || w > 1 - 1e-9)
        CHECK(std::abs(static_cast<double>(depth.weights[4][i]) - w) < 1e-6);
    }
  }
}

TEST_CASE("query_mix: a NaN stays in its row, but for what is trained") {
  for (const Backend backend : fast_backends()) {
    Depth<float> depth({3, 12, 40});
    depth.sources[1][5 * 40 + 7] = NAN;
    depth.forward(Stream{backend});
    depth.backward(false, Stream{backend});
    for (size_t m = 0; m < 3; ++m)
      for (size_t i = 0; i < 480; ++i) {
        CHECK(is_nan(depth.out[m][i]) == (m > 0 && i / 40 == 5));
        CHECK(is_nan(depth.dinp[m][i]) == (i / 40 == 5));
      }
    for (size_t m = 0; m < 3; ++m) CHECK(is_nan(depth.dproj[m][0]) == (m > 0));
  }
}

TEST_CASE_TEMPLATE("query_mix: the same bits on any number of threads", T, float, bf16) {
  for (const Size& size : std::vector<Size>{{5, 300, 65}, {20, 40, 96}})
    check_same_bits_on_any_threads<float>([&] {
      Depth<T> depth(size);
      depth.forward(fast);
      depth.backward(true, fast);
      return all_results(depth);
    });
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
           {view(sources, {S, N, C}), view(squares, {S, N}), tensor_of(proj), tensor_of(gain), tensor_of(query),
            view(logits, {N, S}), view(weights, {N, S}), view(out, {N, C}), view(dinp, {N, C}), tensor_of(pbar),
            view(trained, {2 * S, C})},
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

TEST_CASE_TEMPLATE("query_mix: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  // One source, whose copy and gather are exact wherever things lie.
  const int64_t N = 5, C = 48, n = N * C;
  const auto inp = random_vector<T>(n + 1, 1), dout = random_vector<T>(n, 2);
  const auto proj = random_vector<float>(C + 1, 3), gain = random_vector<float>(C + 1, 4);
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<T>(n), dinp = poisoned<T>(n + 1);
    auto squares = poisoned<float>(N), logits = squares, weights = squares, pbar = squares;
    auto query = poisoned<float>(C + 1), dproj = std::vector<float>(static_cast<size_t>(C), 0.f), dgain = dproj;
    run_on(backend,
           {tensor_of(inp), tensor_of(dout), tensor_of(out), tensor_of(dinp), tensor_of(squares), tensor_of(logits),
            tensor_of(weights), tensor_of(pbar), tensor_of(proj), tensor_of(gain), tensor_of(query), tensor_of(dproj),
            tensor_of(dgain)},
           [&](auto& t, Stream stream) {
             const auto from = [&](size_t i, int64_t first) { return view(t[i].template as<T>() + first, {N, C}); };
             const auto vector = [&](size_t i) { return view(t[i].template as<float>() + 1, {C}); };
             const auto table = [&](size_t i) { return view(t[i].template as<float>(), {N, 1}); };
             const Tensor x = from(0, 1), dy = from(1, 0);
             const QueryMix mix{vector(8), vector(9), vector(10), table(5), table(6)};
             vertical_dot(t[4], x, x, stream);
             query_mix_forward(from(2, 0), mix, {x}, {t[4]}, 1e-6, stream);
             vertical_dot(t[7], dy, from(2, 0), stream);
             query_mix_backward({from(3, 1), false}, x, t[4], {{dy, mix, t[11], t[12], t[7], 0}}, 1e-6, stream);
           });
    CHECK(one_earlier(inp) == out);
    CHECK(one_earlier(dinp) == dout);
    CHECK(dproj == std::vector<float>(static_cast<size_t>(C), 0.f));
    CHECK(dgain == dproj);
  }
}
