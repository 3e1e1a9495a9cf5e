#include "kernels/depth/head_mix.h"

#include "tests/support/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Random inputs in one flat vector: sources, weight, gain, wk, wv; and views into any such vector.
template <class T>
struct Case {
  HeadMixSize z;
  std::vector<T> all;

  int64_t sizes(int part) const {
    const int64_t of[] = {z.S * z.N * z.C, (z.shared ? 1 : z.N) * z.K * z.S, z.C, z.K * z.D * z.C, z.K * z.D * z.C};
    return of[part];
  }
  int64_t total() const { return sizes(0) + sizes(1) + sizes(2) + sizes(3) + sizes(4); }
  T* part(int index) {
    int64_t at = 0;
    for (int i = 0; i < index; ++i) at += sizes(i);
    return all.data() + at;
  }
  std::vector<T> values(int index) { return {part(index), part(index) + sizes(index)}; }
  HeadMix<const T*> pointers() {
    HeadMix<const T*> m{{}, part(1), part(2), part(3), part(4)};
    for (int64_t s = 0; s < z.S; ++s) m.sources.push_back(part(0) + s * z.N * z.C);
    return m;
  }
  HeadMix<Tensor> views() {
    HeadMix<Tensor> m{{},
                      z.shared ? view(part(1), {z.K, z.S}) : view(part(1), {1, z.N, z.K, z.S}),
                      view(part(2), {z.C}),
                      view(part(3), {z.K * z.D, z.C}),
                      view(part(4), {z.K * z.D, z.C})};
    for (const T* source : pointers().sources) m.sources.push_back(view(source, {1, z.N, z.C}));
    return m;
  }
  Tensor heads(const std::vector<T>& x) const { return view(x, {1, z.N, z.K, z.D}); }
  int64_t out() const { return z.N * z.K * z.D; }
};

template <class T>
Case<T> make(const HeadMixSize& z, uint64_t seed, double scale = 1) {
  Case<T> c{z, {}};
  c.all = random_vector<T>(c.total(), seed, scale);
  return c;
}
template <class T>
Case<T> filled(const HeadMixSize& z, T value) {
  Case<T> c{z, {}};
  c.all.assign(static_cast<size_t>(c.total()), value);
  return c;
}

const std::vector<HeadMixSize> sizes = {
    {1, 1, 1, 2, 3, true},     {5, 3, 2, 4, 7, true},      {5, 3, 2, 4, 7, false},   {130, 5, 3, 6, 65, true},
    {67, 12, 5, 8, 80, false}, {200, 4, 4, 32, 128, true}, {70, 2, 6, 2, 17, false}, {1100, 2, 2, 4, 200, true},
};

// For the GPU: several tiles and chunks of tokens, both widths, more than eight heads, several tokens to a block and
// several steps through the columns.
const std::vector<HeadMixSize> gpu_sizes = {
    {1, 1, 1, 2, 3, true},   {5, 3, 2, 4, 7, false},   {70, 2, 2, 6, 65, true},  {9, 12, 2, 36, 80, false},
    {3, 2, 9, 2, 264, true}, {4100, 1, 1, 2, 8, true}, {300, 3, 2, 2, 8, false}, {3, 3, 9, 2, 301, false},
};

HeadMix<Grad, Tensor> gradients_of(const HeadMix<Tensor>& d, const std::vector<bool>& accumulate) {
  HeadMix<Grad, Tensor> gradients{{}, d.weight, d.gain, d.wk, d.wv};
  for (size_t s = 0; s < d.sources.size(); ++s) gradients.sources.emplace_back(d.sources[s], accumulate[s]);
  return gradients;
}

void forward(const Tensor& k, const Tensor& v, const HeadMix<Tensor>& m, Backend backend) {
  run_on(backend, joined<Tensor>({k, v, m.weight, m.gain, m.wk, m.wv}, m.sources), [&](auto& t, Stream stream) {
    head_mix_forward(t[0], t[1], {{t.begin() + 6, t.end()}, t[2], t[3], t[4], t[5]}, stream);
  });
}
void backward(const HeadMix<Tensor>& d, const Tensor& dk, const Tensor& dv, const HeadMix<Tensor>& m,
              const std::vector<bool>& accumulate, Backend backend) {
  const std::vector<Tensor> others{dk, dv, m.weight, m.gain, m.wk, m.wv, d.weight, d.gain, d.wk, d.wv};
  run_on(backend, joined(others, m.sources, d.sources), [&](auto& t, Stream stream) {
    const auto u = t.begin() + 10, du = u + static_cast<int64_t>(m.sources.size());
    head_mix_backward(gradients_of({{du, t.end()}, t[6], t[7], t[8], t[9]}, accumulate), t[0], t[1],
                      {{u, du}, t[2], t[3], t[4], t[5]}, stream);
  });
}

}  // namespace

TEST_CASE("head_mix: the reference's backward is the derivative of its forward") {
  for (const HeadMixSize& z : {sizes[1], sizes[2]}) {
    for (const double scale : {0.1, 1.0, 3.0}) {
      Case<double> x = make<double>(z, 1, scale), d = filled(z, 0.5);
      const auto dk = random_vector<double>(x.out(), 2), dv = random_vector<double>(x.out(), 3);
      backward(d.views(), x.heads(dk), x.heads(dv), x.views(), {true, false, true}, Backend::reference);
      auto loss = [&](const std::vector<Complex>& all) {
        Case<Complex> c{z, all};
        std::vector<Complex> k(static_cast<size_t>(c.out())), v(k.size());
        head_mix_forward_ref(k.data(), v.data(), c.pointers(), z);
        return dot(dk, k) + dot(dv, v);
      };
      std::vector<double> want = complex_step(x.all, loss);
      for (int64_t i = 0; i < d.total(); ++i) {  // what was added to
        const bool set = (i < d.sizes(0) && i / (z.N * z.C) == 1) || (i >= d.sizes(0) && i < d.sizes(0) + d.sizes(1));
        if (!set) want[static_cast<size_t>(i)] += 0.5;
      }
      check_close("gradients", d.all, want, 1e-11);
    }
  }
}

namespace {

// What is stored in S may be rounded. On a GPU that is also the mixtures and the weights times the gain, whose errors
// add up in everything: up to three roundings of 2^-9 at most, so the whole is judged, not its smallest elements.
template <class S, class A>
void check_part(const std::string& what, const std::vector<A>& got, const std::vector<double>& want, bool stored,
                Backend backend) {
  constexpr bool in_bf16 = std::is_same_v<S, bf16>;
  if (!in_bf16 || backend != Backend::cuda) return check_close(what, got, want, in_bf16 && stored ? 0x1p-8 : 2e-5);
  const double wrong = distance(got, want) / size_of(want);
  CHECK_MESSAGE(wrong <= 0x1p-7, what << ": " << wrong);
}

template <class S>
void check_against_reference(const HeadMixSize& z, Backend backend) {
  Case<S> x = make<S>(z, 4);
  Case<float> factors{z, convert<float>(x.all)};
  Case<double> exact{z, convert<double>(x.all)};
  HeadMix<Tensor> m = x.views();
  m.weight = factors.views().weight, m.gain = factors.views().gain;
  auto k = poisoned<S>(x.out()), v = k;
  auto want_k = poisoned<double>(x.out()), want_v = want_k;
  forward(x.heads(k), x.heads(v), m, backend);
  forward(exact.heads(want_k), exact.heads(want_v), exact.views(), Backend::reference);
  check_part<S>("k", k, want_k, true, backend);
  check_part<S>("v", v, want_v, true, backend);

  const auto dk = random_vector<S>(x.out(), 5), dv = random_vector<S>(x.out(), 6);
  const auto exact_dk = convert<double>(dk), exact_dv = convert<double>(dv);
  for (const int added : {0, 1, 2, 3}) {  // to no source, every second, every other second, all
    CAPTURE(added);
    if (is_slow(backend) && added % 3 == 0) continue;  // slow there
    std::vector<bool> accumulate;
    for (int64_t s = 0; s < z.S; ++s) accumulate.push_back((added >> s % 2 & 1) != 0);
    Case<float> d{z, poisoned<float>(x.total())};  // sources and weight are set where they are not added to
    for (int64_t s = 0; s < z.S; ++s)
      if (accumulate[static_cast<size_t>(s)]) std::fill_n(d.part(0) + s * z.N * z.C, z.N * z.C, 0.25f);
    std::fill(d.all.begin() + d.sizes(0) + d.sizes(1), d.all.end(), 0.25f);
    Case<double> want{z, convert<double>(d.all)};
    Case<S> stored{z, convert<S>(d.all)};
    HeadMix<Tensor> gradients = d.views();
    gradients.sources = stored.views().sources;
    backward(gradients, x.heads(dk), x.heads(dv), m, accumulate, backend);
    std::copy_n(stored.part(0), d.sizes(0), d.part(0));
    backward(want.views(), want.heads(exact_dk), want.heads(exact_dv), exact.views(), accumulate, Backend::reference);
    for (int part = 0; part < 5; ++part) {
      CAPTURE(part);
      check_part<S>("gradient", d.values(part), want.values(part), part == 0, backend);
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("head_mix: fast against reference", S, float, bf16) {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const HeadMixSize& z) {
    CAPTURES(z.N, z.C);
    check_against_reference<S>(z, backend);
  });
}

TEST_CASE("head_mix: the same bits for any number of threads") {
  // Several tiles of tokens; the second also has rows enough for the gain to be folded in parallel.
  for (const HeadMixSize& z : std::vector<HeadMixSize>{{333, 5, 4, 8, 96, true}, {333, 5, 4, 40, 96, false}}) {
    CAPTURE(z.shared);
    Case<float> x = make<float>(z, 7);
    const auto dk = random_vector<float>(x.out(), 8), dv = random_vector<float>(x.out(), 9);
    check_same_bits_on_any_threads<float>([&] {
      Case<float> d = filled(z, 0.f);
      backward(d.views(), x.heads(dk), x.heads(dv), x.views(), std::vector<bool>(5, false), Backend::cpu);
      auto k = poisoned<float>(x.out()), v = k;
      forward(x.heads(k), x.heads(v), x.views(), Backend::cpu);
      return joined(d.all, k, v);
    });
  }
}

TEST_CASE("head_mix: NaN reaches what depends on it, and nothing else") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t n = 131, h = 1, d = 2;  // where
  for (const Backend backend : fast_backends()) {
    for (const bool shared : {true, false}) {
      CAPTURES(backend, shared);
      const HeadMixSize z{150, 3, 2, 4, 65, shared};
      Case<float> spoilt = make<float>(z, 1), x = spoilt, dx = filled(z, 0.f);
      auto k = poisoned<float>(x.out()), v = k;
      spoilt.part(0)[(z.N + n) * z.C + 7] = nan;  // the second source's token n
      forward(x.heads(k), x.heads(v), spoilt.views(), backend);
      int64_t wrong = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        const bool depends = static_cast<int64_t>(i) / (z.K * z.D) == n;
        wrong += (std::isnan(k[i]) != depends) + (std::isnan(v[i]) != depends);
      }
      CHECK(wrong == 0);

      auto dk = random_vector<float>(x.out(), 2), dv = random_vector<float>(x.out(), 3);
      dk[static_cast<size_t>((n * z.K + h) * z.D + d)] = nan;
      backward(dx.views(), x.heads(dk), x.heads(dv), x.views(), std::vector<bool>(3, false), backend);
      const std::vector<std::function<bool(int64_t)>> depends = {
          [&](int64_t i) { return i / z.C % z.N == n; },  // of every source
          [&](int64_t i) { return i / z.S % z.K == h && (shared || i / (z.S * z.K) == n); },
          [&](int64_t) { return true; },
          [&](int64_t i) { return i / z.C == h * z.D + d; },
          [&](int64_t) { return false; },
      };
      for (int part = 0; part < 5; ++part) {
        CAPTURE(part);
        wrong = 0;
        for (int64_t i = 0; i < dx.sizes(part); ++i)
          wrong += std::isnan(dx.part(part)[i]) != depends[static_cast<size_t>(part)](i);
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("head_mix: refuses shapes that do not fit") {
  const HeadMixSize z{6, 3, 2, 4, 5, true};
  Case<float> x = make<float>(z, 1), dx = make<float>(z, 2);
  const auto k = random_vector<float>(x.out(), 3), v = k;
  const Tensor heads = x.heads(k), others = x.heads(v);
  auto refused = [&](const std::function<void(HeadMix<Tensor>&)>& spoil) {
    HeadMix<Tensor> m = x.views(), d = dx.views();
    spoil(m), spoil(d);
    const std::vector<bool> accumulate(3, false);
    CHECK_THROWS_AS(head_mix_forward(heads, others, m, fast), Error);
    CHECK_THROWS_AS(head_mix_backward(gradients_of(dx.views(), accumulate), heads, others, m, fast), Error);
    CHECK_THROWS_AS(head_mix_backward(gradients_of(d, accumulate), heads, others, x.views(), fast), Error);
  };
  refused([](HeadMix<Tensor>& m) { m.sources.pop_back(); });
  refused([](HeadMix<Tensor>& m) { m.sources[1] = view(m.sources[1].as<float>(), {1, 5, 5}); });
  refused([](HeadMix<Tensor>& m) { m.weight = view(m.weight.as<float>(), {2, 2}); });
  refused([](HeadMix<Tensor>& m) { m.gain = view(m.gain.as<float>(), {4}); });
  refused([](HeadMix<Tensor>& m) { m.wk = view(m.wk.as<float>(), {7, 5}); });
  refused([](HeadMix<Tensor>& m) { m.wv = view(m.wv.as<float>(), {8, 4}); });
  CHECK_THROWS_AS(head_mix_forward(heads, view(v, {1, z.N, z.K, 2}), x.views(), fast), Error);
}
