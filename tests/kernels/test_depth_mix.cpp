#include "kernels/depth/depth_mix.h"

#include <cstring>

#include "tests/support/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, N, C;
  int64_t block() const { return N * C; }
};

constexpr double eps = 1e-12;

template <class T>
std::vector<const T*> pointers(const std::vector<std::vector<T>>& vectors) {
  std::vector<const T*> out;
  for (const auto& v : vectors) out.push_back(v.data());
  return out;
}

// Cuts x into `count` equal parts.
template <class T>
std::vector<std::vector<T>> parts(const std::vector<T>& x, int64_t count) {
  const int64_t size = static_cast<int64_t>(x.size()) / count;
  std::vector<std::vector<T>> out;
  for (int64_t i = 0; i < count; ++i) out.emplace_back(x.begin() + i * size, x.begin() + (i + 1) * size);
  return out;
}

// A whole depth: S sources and S mixes, mix m over the sources 0 to m, with everything that both kinds of mix need.
template <class T>
struct Depth {
  Size size;
  bool vertical;
  Kernels kernels = Kernels::fast;
  double eps_used = eps;
  std::vector<std::vector<T>> sources, out, dout, dinp;                  // [S] (N,C)
  std::vector<std::vector<T>> before;                                    // dinp before an accumulate
  std::vector<std::vector<AccumulationType<T>>> squares, weights, pbar;  // [S] (N), (N,m+1), (N)
  std::vector<std::vector<AccumulationType<T>>> scores, dscores;  // [S] (m+1): the trained scalars of either kind

  Depth(const Size& s, bool is_vertical, double scale = 1.0) : size(s), vertical(is_vertical) {
    for (int64_t m = 0; m < s.S; ++m) {
      const uint64_t seed = 10 * static_cast<uint64_t>(m + 1);
      sources.push_back(random_vector<T>(s.block(), seed, scale * static_cast<double>(m + 1)));
      squares.push_back(poisoned<AccumulationType<T>>(s.N));
      scores.push_back(random_vector<AccumulationType<T>>(m + 1, seed + 1, 2.0));
      weights.push_back(poisoned<AccumulationType<T>>(s.N * (m + 1)));
      pbar.push_back(poisoned<AccumulationType<T>>(s.N));
      out.push_back(poisoned<T>(s.block()));
      dout.push_back(random_vector<T>(s.block(), seed + 2));
      dscores.push_back(random_vector<AccumulationType<T>>(m + 1, seed + 3));
      dinp.push_back(poisoned<T>(s.block()));
      before.push_back(random_vector<T>(s.block(), seed + 4));
    }
  }
  auto members() { return std::tie(sources, out, dout, dinp, before, squares, weights, pbar, scores, dscores); }
  template <class From>
  explicit Depth(Depth<From>& from) : size(from.size), vertical(from.vertical), eps_used(from.eps_used) {
    convert_members(*this, from);
  }

  Tensor rows(const std::vector<T>& v) const { return view(v, {size.N, size.C}); }
  Tensor table(int64_t m) const { return view(weights[static_cast<size_t>(m)].data(), {size.N, m + 1}); }

  void take_dots(const Tensor& dots, const Tensor& a, const Tensor& b, Stream stream) const {
    run_on(stream.backend, {dots, a, b}, [&](auto& t, Stream there) {
      if (is_plain(kernels, there)) vertical_dot_plain(t[0], t[1], t[2], size.N, size.C);
      else vertical_dot(t[0], t[1], t[2], there);
    });
  }
  void forward(Stream stream) {
    for (size_t m = 0; m < sources.size(); ++m) {
      if (vertical) take_dots(tensor_of(squares[m]), rows(sources[m]), rows(sources[m]), stream);
      std::vector<Tensor> tensors{rows(out[m]), table(static_cast<int64_t>(m)), tensor_of(scores[m])};
      for (size_t s = 0; s <= m; ++s) tensors.push_back(rows(sources[s]));
      for (size_t s = 0; s <= m; ++s) tensors.push_back(tensor_of(squares[s]));
      run_on(stream.backend, tensors, [&](auto& t, Stream there) {
        const auto middle = t.begin() + 4 + static_cast<int64_t>(m);
        const std::vector<Tensor> read(t.begin() + 3, middle), norms(middle, t.end());
        const bool plain = is_plain(kernels, there);
        if (vertical && plain) vertical_forward_plain(t[0], t[1], read, norms, t[2], size.N, size.C, eps_used);
        else if (vertical) vertical_forward(t[0], t[1], read, norms, t[2], eps_used, there);
        else if (plain) depth_mix_forward_plain(t[0], read, t[2]);
        else depth_mix_forward(t[0], read, t[2], there);
      });
    }
  }
  void backward(bool accumulate, Stream stream) {
    for (size_t s = sources.size(); s-- > 0;) {
      if (accumulate) dinp[s] = before[s];
      if (vertical) take_dots(tensor_of(pbar[s]), rows(dout[s]), rows(out[s]), stream);
      std::vector<Tensor> tensors{rows(dinp[s]), rows(sources[s]), tensor_of(squares[s])};
      for (size_t m = s; m < sources.size(); ++m)
        for (const Tensor& t : {rows(dout[m]), table(static_cast<int64_t>(m)), tensor_of(pbar[m]), tensor_of(scores[m]),
                                tensor_of(dscores[m])})
          tensors.push_back(t);
      run_on(stream.backend, tensors, [&](auto& t, Stream there) {
        std::vector<DepthReader> readers;
        for (size_t i = 3; i < t.size(); i += 5)
          readers.push_back({t[i], t[vertical ? i + 1 : i + 3], t[i + 4], static_cast<int64_t>(s), t[i + 2]});
        const Grad to{t[0], accumulate};
        const bool plain = is_plain(kernels, there);
        if (vertical && plain) vertical_backward_plain(to, t[1], t[2], readers, size.N, size.C, eps_used);
        else if (vertical) vertical_backward(to, t[1], t[2], readers, eps_used, there);
        else if (plain) depth_mix_backward_plain(to, t[1], readers);
        else depth_mix_backward(to, t[1], readers, there);
      });
    }
  }
};

// The sum over all mixes of <dout, out>, by the reference forward.
Complex loss(const Depth<double>& depth, const std::vector<std::vector<Complex>>& sources,
             const std::vector<std::vector<Complex>>& scores) {
  const Size size = depth.size;
  Complex sum = 0;
  std::vector<std::vector<Complex>> squares;
  for (size_t m = 0; m < sources.size(); ++m) {
    const std::vector<std::vector<Complex>> read(sources.begin(), sources.begin() + static_cast<int64_t>(m) + 1);
    std::vector<Complex> out(static_cast<size_t>(size.block()));
    if (depth.vertical) {
      squares.emplace_back(static_cast<size_t>(size.N));
      std::vector<Complex> weights(static_cast<size_t>(size.N) * (m + 1));
      vertical_dot_ref(squares[m].data(), sources[m].data(), sources[m].data(), size.N, size.C);
      vertical_forward_ref(out.data(), weights.data(), pointers(read), pointers(squares), scores[m].data(), size.N,
                           size.C, depth.eps_used);
    } else {
      depth_mix_forward_ref(out.data(), pointers(read), scores[m].data(), size.block());
    }
    sum += dot(depth.dout[m], out);
  }
  return sum;
}

void check_against_complex_step(Depth<double>& depth) {
  std::vector<std::vector<Complex>> sources, scores;
  for (const auto& s : depth.sources) sources.push_back(convert<Complex>(s));
  for (const auto& s : depth.scores) scores.push_back(convert<Complex>(s));
  const auto want_dinp =
      complex_step(joined(depth.sources), [&](auto& x) { return loss(depth, parts(x, depth.size.S), scores); });
  std::vector<std::vector<double>> want_dscores;
  for (size_t m = 0; m < scores.size(); ++m) {
    want_dscores.push_back(complex_step(depth.scores[m], [&](auto& w) {
      auto changed = scores;
      changed[m] = w;
      return loss(depth, sources, changed);
    }));
    for (size_t s = 0; s <= m; ++s) want_dscores[m][s] += depth.dscores[m][s];  // it is added
  }
  depth.forward(reference);
  depth.backward(false, reference);
  for (size_t s = 0; s < sources.size(); ++s) {  // source by source: their magnitudes differ
    CAPTURE(s);
    check_close("dinp", depth.dinp[s], parts(want_dinp, depth.size.S)[s], 1e-12);
    check_close("dscores", depth.dscores[s], want_dscores[s], 1e-12);
  }
}

const std::vector<Size> sizes{{1, 1, 1},   {2, 5, 3},     {3, 300, 16}, {4, 37, 33},  {12, 130, 64},
                              {9, 17, 96}, {16, 10, 100}, {7, 9, 257},  {3, 3, 2100}, {129, 3, 20}};
// Rows for one warp, several blocks and several rounds, more blocks than lanes, both widths, ragged ends.
const std::vector<Size> gpu_sizes{{1, 1, 1},    {2, 5, 3},  {4, 19, 33},  {1, 40, 520}, {6, 3, 257},
                                  {3, 3, 2100}, {5, 2, 96}, {2, 50, 264}, {1, 67, 257}};

template <class T>
void check_fast_against_reference(const Size& size, bool vertical, Stream stream, Kernels kernels) {
  CAPTURES(size.S, size.N, size.C, kernels);
  for (bool accumulate : {false, true}) {
    Depth<T> depth(size, vertical);
    depth.kernels = kernels;
    depth.eps_used = 0.25;  // not lost beside the squares
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
      // f32 in vector order: some ulps (6e-8) of the result. Where very many sources add up one after another, they
      // cancel, and it is some ulps of the largest partial sum.
      check_close("out", depth.out[m], want_out[m], tolerance_or_rounding<T>(size.S > 16 ? 4e-6 : 1e-6));
      if (vertical) check_close("squares", depth.squares[m], want.squares[m], 1e-6);
      if (vertical) check_close("weights", depth.weights[m], want.weights[m], 1e-6);
      if (vertical) check_close("pbar", depth.pbar[m], want.pbar[m], 2e-6);
      check_close("dinp", depth.dinp[m], want.dinp[m], tolerance_or_rounding<T>(size.S > 16 ? 6e-6 : 2e-6));
      // With vertical attention the terms q cancel in p - pbar and in the sum over tokens.
      check_close("dscores", depth.dscores[m], want.dscores[m], vertical ? 1e-5 : 2e-6);
    }
  }
}

}  // namespace

TEST_CASE("depth_mix: reference backward over a whole depth is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 2, 3}, {4, 3, 5}, {3, 1, 7}}) {
    for (double scale : {1e-3, 1.0, 1e3}) {
      CAPTURES(size.S, scale);
      Depth<double> plain(size, false, scale), vertical(size, true, scale), large_eps(size, true, scale);
      large_eps.eps_used = 0.3 * scale * scale;
      check_against_complex_step(plain);
      check_against_complex_step(vertical);
      check_against_complex_step(large_eps);
    }
  }
}

TEST_CASE_TEMPLATE("depth_mix: both kinds on the fast backends equal the reference, set and added", T, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend))
      for (bool vertical : {false, true}) {
        CAPTURE(vertical);
        check_fast_against_reference<T>(size, vertical, Stream{backend}, kernels);
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

TEST_CASE_TEMPLATE("depth_mix: memory that begins between two multiples of 16 bytes", T, float, bf16) {
  // Vertical attention of one source, and a plain mix of it: exact all the same, pbar with dout and out elsewhere.
  const int64_t N = 5, C = 48, n = N * C;
  const auto inp = random_vector<T>(n + 1, 1), dout = random_vector<T>(n, 2);
  const std::vector<float> one{1.f};
  for (const Backend backend : fast_backends()) {
    auto out = poisoned<T>(n), plain = poisoned<T>(n + 1), dinp = plain, plain_dinp = plain;
    auto squares = poisoned<float>(N), weights = squares, pbar = squares;
    std::vector<float> dscores(1, 0.f), dweights(1, 0.f);
    run_on(backend,
           {tensor_of(inp), tensor_of(dout), tensor_of(out), tensor_of(plain), tensor_of(dinp), tensor_of(plain_dinp),
            tensor_of(squares), tensor_of(weights), tensor_of(pbar), tensor_of(dscores), tensor_of(dweights),
            tensor_of(one)},
           [&](auto& t, Stream stream) {
             const auto from = [&](size_t i, int64_t first) { return view(t[i].template as<T>() + first, {N, C}); };
             const Tensor x = from(0, 1), dy = from(1, 0), table = view(t[7].template as<float>(), {N, 1});
             vertical_dot(t[6], x, x, stream);
             vertical_forward(from(2, 0), table, {x}, {t[6]}, t[11], eps, stream);
             vertical_dot(t[8], dy, from(2, 0), stream);
             vertical_backward({from(4, 1), false}, x, t[6], {{dy, table, t[9], 0, t[8]}}, eps, stream);
             depth_mix_forward(from(3, 1), {x}, t[11], stream);
             depth_mix_backward({from(5, 1), false}, x, {{dy, t[11], t[10], 0, {}}}, stream);
           });
    for (const auto& x : {inp, plain}) CHECK(one_earlier(x) == out);
    for (const auto& x : {dinp, plain_dinp}) CHECK(one_earlier(x) == dout);
    CHECK(dscores[0] == 0.f);
    double dot = 0;
    for (size_t i = 0; i < dout.size(); ++i) dot += static_cast<double>(dout[i]) * static_cast<double>(inp[i + 1]);
    CHECK(std::abs(static_cast<double>(dweights[0]) - dot) < 1e-5);
  }
}

TEST_CASE("depth_mix: a worked example of vertical attention") {
  const std::vector<std::vector<float>> h{{1, 2, -2, 0}, {.5f, -1.5f, 0, 2}, {-3, 0, 4, 0}};
  const std::vector<float> scores{.5f, -.25f, 1}, dout{.1f, -.2f, .3f, .4f};
  const std::vector<double> want_out{-0.66394461, 0.45824043, 0.76891202, 0.43679216};
  const std::vector<double> want_dscores{-0.45081282, 0.19713568, 0.25367715};
  const std::vector<std::vector<double>> want_dinp{{0.08938204, 0.02159717, 0.01769456, 0.15716691},
                                                   {0.00667533, 0.00181363, 0.06551882, 0.02670130},
                                                   {0.06930992, -0.07773733, 0.07601765, 0.15547466}};
  for (Stream stream : {fast, reference}) {
    std::vector<float> squares = poisoned<float>(3), weights = poisoned<float>(3), out = poisoned<float>(4);
    std::vector<float> pbar = poisoned<float>(1), dscores(3, 0.f), dinp = poisoned<float>(4);
    std::vector<Tensor> sources, norms;
    for (size_t s = 0; s < 3; ++s) {
      sources.push_back(view(h[s], {1, 4})), norms.push_back(view(&squares[s], {1}));
      vertical_dot(norms[s], sources[s], sources[s], stream);
    }
    const Tensor w = view(weights, {1, 3}), y = view(out, {1, 4}), dy = view(dout, {1, 4});
    vertical_forward(y, w, sources, norms, view(scores, {3}), 0.0, stream);
    vertical_dot(view(pbar, {1}), dy, y, stream);
    check_close("squares", squares, std::vector<double>{9, 6.5, 25}, 0.0);
    check_close("weights", weights, std::vector<double>{0.39291728, 0.21839608, 0.38868664}, 2e-7);
    check_close("out", out, want_out, 2e-7);
    check_close("pbar", pbar, std::vector<double>{0.24734792}, 2e-7);
    for (int64_t s = 0; s < 3; ++s) {
      const size_t i = static_cast<size_t>(s);
      vertical_backward({view(dinp, {1, 4}), false}, sources[i], norms[i],
                        {{dy, w, tensor_of(dscores), s, tensor_of(pbar)}}, 0.0, stream);
      check_close("dinp", dinp, want_dinp[i], 5e-7);
    }
    check_close("dscores", dscores, want_dscores, 5e-7);
  }
}

TEST_CASE("depth_mix: what must hold for vertical attention over every token") {
  Depth<double> depth({5, 11, 19}, true);
  depth.eps_used = 0;
  for (auto& d : depth.dscores) std::fill(d.begin(), d.end(), 0.0);
  depth.forward(reference);
  depth.backward(false, reference);
  for (const auto& d : depth.dscores) {  // a constant added to the scores changes nothing
    double sum = 0;
    for (double x : d) sum += x;
    CHECK(std::abs(sum) < 1e-12);
  }
  for (size_t n = 0; n < 11; ++n) {  // out is of degree 1 in all sources together
    double got = 0, want = 0;
    for (size_t s = 0; s < 5; ++s)
      for (size_t c = 0; c < 19; ++c) {
        got += depth.sources[s][n * 19 + c] * depth.dinp[s][n * 19 + c];
        want += depth.dout[s][n * 19 + c] * depth.out[s][n * 19 + c];
      }
    CHECK(std::abs(got - want) < 1e-12);
  }
}

TEST_CASE_TEMPLATE("depth_mix: one source is copied bit for bit, and its gather is exactly dout", T, float, bf16) {
  for (const Backend backend : fast_backends()) {
    for (const Kernels kernels : kernels_of(backend)) {
      for (int64_t C : {1, 15, 16, 67, 256}) {
        for (double scale : {1e-15, 1e-3, 1.0, 1e15}) {
          CAPTURES(backend, kernels, C, scale);
          if (is_slow(backend) && (scale == 1e-3 || scale == 1e15)) continue;  // slow there
          Depth<T> plain({1, 50, C}, false, scale), vertical({1, 50, C}, true, scale);
          plain.kernels = vertical.kernels = kernels;
          plain.sources[0][3] = vertical.sources[0][3] = -0.f;
          plain.scores[0][0] = 1;
          for (Depth<T>* depth : {&plain, &vertical}) {
            const auto before = depth->dscores[0];
            depth->forward(Stream{backend});
            depth->backward(false, Stream{backend});
            const size_t bytes = 50 * static_cast<size_t>(C) * sizeof(T);
            CHECK(std::memcmp(depth->out[0].data(), depth->sources[0].data(), bytes) == 0);
            CHECK(depth->dinp[0] == depth->dout[0]);
            if (depth->vertical) CHECK(depth->weights[0] == std::vector<float>(50, 1.f));
            if (depth->vertical) CHECK(depth->dscores[0] == before);
          }
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("depth_mix: weights (0, ..., 0, 1) are the last source exactly, and so is the gather", T, float,
                   bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    for (const Kernels kernels : kernels_of(backend)) {
      CAPTURES(size.S, size.C, kernels);
      Depth<T> depth(size, false);
      depth.kernels = kernels;
      for (auto& w : depth.scores) std::fill(w.begin(), w.end() - 1, 0.f), w.back() = 1;
      depth.forward(Stream{backend});
      depth.backward(false, Stream{backend});
      CHECK(depth.out == depth.sources);
      CHECK(depth.dinp == depth.dout);
    }
  });
}

TEST_CASE("depth_mix: scores without data are zeros, and dscores without data are not written") {
  for (const Backend backend : all_backends()) {
    const Stream stream{backend};
    Depth<float> depth({3, 20, 40}, true);
    for (auto& s : depth.scores) std::fill(s.begin(), s.end(), 0.f);
    depth.forward(stream);
    depth.backward(false, stream);
    auto out = poisoned<float>(800), weights = poisoned<float>(60), dinp = poisoned<float>(800);
    const Shape shape{2, 10, 40};
    std::vector<Tensor> tensors{view(out, shape), view(weights, {20, 3}), view(dinp, shape), depth.rows(depth.dout[2]),
                                tensor_of(depth.pbar[2])};
    for (size_t s = 0; s < 3; ++s) tensors.push_back(depth.rows(depth.sources[s]));
    for (size_t s = 0; s < 3; ++s) tensors.push_back(tensor_of(depth.squares[s]));
    run_on(stream.backend, tensors, [](auto& t, Stream there) {
      vertical_forward(t[0], t[1], {t[5], t[6], t[7]}, {t[8], t[9], t[10]}, Tensor{}, eps, there);
      vertical_backward({t[2], false}, t[7], t[10], {{t[3], t[1], Tensor{}, 2, t[4]}}, eps, there);
    });
    CHECK(out == depth.out[2]);
    CHECK(weights == depth.weights[2]);
    CHECK(dinp == depth.dinp[2]);
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
  const Size size{6, 8, 48};
  for (const Backend backend : fast_backends()) {
    CAPTURE(static_cast<int>(backend));
    Depth<float> depth(size, true);
    const std::vector<float> factors{1e-16f, 1e-8f, 1.f, 1e8f, 1e16f, 1e-4f};
    for (size_t s = 0; s < 6; ++s)
      for (float& x : depth.sources[s]) x *= factors[s];
    depth.scores[5] = {-300.f, -20.f, -std::numeric_limits<float>::infinity(), 30.f, 40.f, 0.f};
    for (float& score : depth.scores[4]) score += 200.f;
    depth.eps_used = 0;
    Depth<double> want(depth);
    depth.forward(Stream{backend}), want.forward(reference);
    depth.backward(false, Stream{backend}), want.backward(false, reference);
    for (size_t m = 0; m < 6; ++m) {
      CAPTURE(m);
      check_close("weights", depth.weights[m], want.weights[m], 1e-6);
      check_close("out", depth.out[m], want.out[m], 2e-6);
      check_close("dinp", depth.dinp[m], want.dinp[m], 5e-6);
    }
  }
}

TEST_CASE_TEMPLATE("depth_mix: NaN shows where it must, and nowhere else", T, float, bf16) {
  const Size size{3, 40, 24};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Backend backend : fast_backends())
    for (const Kernels kernels : kernels_of(backend))
      for (bool vertical : {false, true}) {
        CAPTURES(backend, kernels, vertical);
        Depth<T> depth(size, vertical);
        depth.kernels = kernels;
        depth.sources[1][7 * 24 + 5] = nan;
        depth.forward(Stream{backend});
        depth.backward(false, Stream{backend});
        for (size_t i = 0; i < 40 * 24; ++i) {
          const bool spoilt = vertical ? i / 24 == 7 : i == 7 * 24 + 5;  // the norm spreads over the row
          CHECK(!is_nan(depth.out[0][i]));
          CHECK(is_nan(depth.out[2][i]) == spoilt);
          CHECK(is_nan(depth.dinp[1][i]) == (vertical && spoilt));
        }
        CHECK(is_nan(depth.dscores[2][1]));
        CHECK(!is_nan(depth.dscores[0][0]));
        Depth<T> bad_score(size, vertical);
        bad_score.kernels = kernels;
        bad_score.scores[2][1] = nan;
        bad_score.forward(Stream{backend});
        for (float y : bad_score.out[2]) CHECK(is_nan(y));
      }
}

TEST_CASE_TEMPLATE("depth_mix: the thread count does not change a bit", T, float, bf16) {
  for (bool vertical : {false, true})
    check_same_bits_on_any_threads<float>([&] {
      Depth<T> depth({5, 700, 51}, vertical);
      depth.forward(fast);
      depth.backward(true, fast);
      return flat(depth.out, depth.dinp, depth.dscores);
    });
}

TEST_CASE("depth_mix: activations of one call have one type, weights and statistics are f32") {
  Depth<bf16> half({1, 4, 5}, true);
  Depth<float> whole({1, 4, 5}, true);
  const Tensor x = half.rows(half.sources[0]), out = half.rows(half.out[0]), in_f32 = whole.rows(whole.sources[0]);
  const Tensor square = tensor_of(half.squares[0]), score = tensor_of(half.scores[0]), table = half.table(0);
  const Tensor bf16_score = view(half.sources[0].data(), {1}), bf16_column = view(half.sources[0].data(), {4});
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
  Depth<float> d({3, 4, 5}, true);
  d.forward(fast);
  const Tensor x = d.rows(d.sources[0]), out = d.rows(d.out[0]), dy = d.rows(d.dout[1]),
               square = tensor_of(d.squares[0]);
  const Tensor three = tensor_of(d.scores[2]), two = tensor_of(d.scores[1]), table = d.table(1);
  const Tensor short_row = view(d.sources[0].data(), {4, 4});
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
  CHECK_THROWS_AS(vertical_dot(view(d.squares[0].data(), {3}), x, x, fast), Error);
}
