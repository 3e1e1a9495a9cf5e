#include "kernels/depth/head_mix.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

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
  std::vector<const T*> u() {
    std::vector<const T*> list;
    for (int64_t s = 0; s < z.S; ++s) list.push_back(part(0) + s * z.N * z.C);
    return list;
  }
  HeadMix views() {
    HeadMix m;
    for (const T* source : u()) m.sources.push_back(view(source, {1, z.N, z.C}));
    m.weight = z.shared ? view(part(1), {z.K, z.S}) : view(part(1), {1, z.N, z.K, z.S});
    m.gain = view(part(2), {z.C});
    m.wk = view(part(3), {z.K * z.D, z.C});
    m.wv = view(part(4), {z.K * z.D, z.C});
    return m;
  }
};

template <class T>
Case<T> make(const HeadMixSize& z, uint64_t seed, double scale = 1) {
  Case<T> c{z, {}};
  c.all = random_vector<T>(c.total(), seed, scale);
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

void forward(const Tensor& k, const Tensor& v, const HeadMix& m, Backend backend) {
  std::vector<Tensor> tensors{k, v, m.weight, m.gain, m.wk, m.wv};
  tensors.insert(tensors.end(), m.sources.begin(), m.sources.end());
  run_on(backend, tensors, [&](auto& t, Stream stream) {
    head_mix_forward(t[0], t[1], {{t.begin() + 6, t.end()}, t[2], t[3], t[4], t[5]}, stream);
  });
}
void backward(const HeadMix& d, const Tensor& dk, const Tensor& dv, const HeadMix& m, const std::vector<bool>& acc,
              Backend backend) {
  std::vector<Tensor> tensors{dk, dv, m.weight, m.gain, m.wk, m.wv, d.weight, d.gain, d.wk, d.wv};
  tensors.insert(tensors.end(), m.sources.begin(), m.sources.end());
  tensors.insert(tensors.end(), d.sources.begin(), d.sources.end());
  run_on(backend, tensors, [&](auto& t, Stream stream) {
    const auto u = t.begin() + 10, du = u + static_cast<int64_t>(m.sources.size());
    head_mix_backward({{du, t.end()}, t[6], t[7], t[8], t[9]}, t[0], t[1], {{u, du}, t[2], t[3], t[4], t[5]}, acc,
                      stream);
  });
}

}  // namespace

TEST_CASE("head_mix: the reference's backward is the derivative of its forward") {
  for (const HeadMixSize& z : {sizes[1], sizes[2]}) {
    for (const double scale : {0.1, 1.0, 3.0}) {
      Case<double> x = make<double>(z, 1, scale), d{z, std::vector<double>(static_cast<size_t>(x.total()), 0.5)};
      const int64_t out = z.N * z.K * z.D;
      const auto dk = random_vector<double>(out, 2), dv = random_vector<double>(out, 3);
      std::vector<double*> du;
      for (int64_t s = 0; s < z.S; ++s) du.push_back(d.part(0) + s * z.N * z.C);
      const std::vector<bool> acc{true, false, true};
      head_mix_backward_ref(du, d.part(1), d.part(2), d.part(3), d.part(4), dk.data(), dv.data(), x.u(), x.part(1),
                            x.part(2), x.part(3), x.part(4), z, acc);
      auto forward = [&](const std::vector<Complex>& all) {
        Case<Complex> c{z, all};
        std::vector<Complex> k(static_cast<size_t>(out)), v(k.size());
        head_mix_forward_ref(k.data(), v.data(), c.u(), c.part(1), c.part(2), c.part(3), c.part(4), z);
        return dot(dk, k) + dot(dv, v);
      };
      std::vector<double> want = complex_step(x.all, forward);
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
  constexpr bool narrow = std::is_same_v<S, bf16>;
  if (!narrow || backend != Backend::cuda) return check_close(what, got, want, narrow && stored ? 0x1p-8 : 2e-5);
  const double wrong = distance(got, want) / size_of(want);
  CHECK_MESSAGE(wrong <= 0x1p-7, what << ": " << wrong);
}

template <class S>
void check_against_reference(const HeadMixSize& z, Backend backend) {
  Case<S> x = make<S>(z, 4);
  Case<float> factors{z, convert<float>(x.all)};
  Case<double> wide{z, convert<double>(x.all)};
  HeadMix m = x.views();
  m.weight = factors.views().weight, m.gain = factors.views().gain;
  const int64_t out = z.N * z.K * z.D;
  auto k = poisoned<S>(out), v = k;
  const Shape shape{1, z.N, z.K, z.D};
  forward(view(k.data(), shape), view(v.data(), shape), m, backend);
  std::vector<double> want_k(static_cast<size_t>(out)), want_v(want_k);
  head_mix_forward_ref(want_k.data(), want_v.data(), wide.u(), wide.part(1), wide.part(2), wide.part(3), wide.part(4),
                       z);
  check_part<S>("k", k, want_k, true, backend);
  check_part<S>("v", v, want_v, true, backend);

  const auto dk = random_vector<S>(out, 5), dv = random_vector<S>(out, 6);
  for (const int added : {0, 1, 2, 3}) {  // to no source, every second, every other second, all
    CAPTURE(added);
    if (backend == Backend::cuda && added % 3 == 0) continue;  // slow there
    std::vector<bool> acc;
    for (int64_t s = 0; s < z.S; ++s) acc.push_back((added >> s % 2 & 1) != 0);
    Case<float> d{z, poisoned<float>(x.total())};  // sources and weight are set where they are not added to
    for (int64_t s = 0; s < z.S; ++s)
      if (acc[static_cast<size_t>(s)]) std::fill_n(d.part(0) + s * z.N * z.C, z.N * z.C, 0.25f);
    std::fill(d.all.begin() + d.sizes(0) + d.sizes(1), d.all.end(), 0.25f);
    Case<double> want{z, convert<double>(d.all)};
    Case<S> stored{z, convert<S>(d.all)};
    HeadMix gradients = d.views();
    gradients.sources = stored.views().sources;
    backward(gradients, view(dk.data(), shape), view(dv.data(), shape), m, acc, backend);
    std::copy_n(stored.part(0), d.sizes(0), d.part(0));
    std::vector<double*> du;
    for (int64_t s = 0; s < z.S; ++s) du.push_back(want.part(0) + s * z.N * z.C);
    const auto wide_k = convert<double>(dk), wide_v = convert<double>(dv);
    head_mix_backward_ref(du, want.part(1), want.part(2), want.part(3), want.part(4), wide_k.data(), wide_v.data(),
                          wide.u(), wide.part(1), wide.part(2), wide.part(3), wide.part(4), z, acc);
    for (int part = 0; part < 5; ++part) {
      CAPTURE(part);
      const std::vector<float> got(d.part(part), d.part(part) + d.sizes(part));
      check_part<S>("gradient", got, std::vector<double>(want.part(part), want.part(part) + d.sizes(part)), part == 0,
                    backend);
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("head_mix: fast against reference", S, float, bf16) {
  for (const Backend backend : fast_backends())
    for (const HeadMixSize& z : backend == Backend::cuda ? gpu_sizes : sizes) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(z.N);
      CAPTURE(z.C);
      check_against_reference<S>(z, backend);
    }
}

TEST_CASE("head_mix: the same bits for any number of threads") {
  // Several tiles of tokens; the second also has rows enough for the gain to be folded in parallel.
  for (const HeadMixSize& z : std::vector<HeadMixSize>{{333, 5, 4, 8, 96, true}, {333, 5, 4, 40, 96, false}}) {
    CAPTURE(z.shared);
    Case<float> x = make<float>(z, 7);
    const auto dk = random_vector<float>(z.N * z.K * z.D, 8), dv = random_vector<float>(z.N * z.K * z.D, 9);
    const Shape shape{1, z.N, z.K, z.D};
    check_same_bits_on_any_threads<float>([&] {
      Case<float> d{z, std::vector<float>(static_cast<size_t>(x.total()), 0.f)};
      head_mix_backward(d.views(), view(dk.data(), shape), view(dv.data(), shape), x.views(),
                        std::vector<bool>(5, false), Stream{});
      auto k = poisoned<float>(z.N * z.K * z.D), v = k;
      head_mix_forward(view(k.data(), shape), view(v.data(), shape), x.views(), Stream{});
      d.all.insert(d.all.end(), k.begin(), k.end());
      d.all.insert(d.all.end(), v.begin(), v.end());
      return d.all;
    });
  }
}

TEST_CASE("head_mix: NaN reaches what depends on it, and nothing else") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t n = 131, h = 1, d = 2;  // where
  for (const Backend backend : fast_backends()) {
    for (const bool shared : {true, false}) {
      CAPTURE(static_cast<int>(backend));
      CAPTURE(shared);
      const HeadMixSize z{150, 3, 2, 4, 65, shared};
      const int64_t out = z.N * z.K * z.D;
      const Shape shape{1, z.N, z.K, z.D};
      auto k = poisoned<float>(out), v = k;
      Case<float> spoilt = make<float>(z, 1);
      spoilt.part(0)[(z.N + n) * z.C + 7] = nan;  // the second source's token n
      forward(view(k.data(), shape), view(v.data(), shape), spoilt.views(), backend);
      int64_t wrong = 0;
      for (size_t i = 0; i < k.size(); ++i) {
        const bool depends = static_cast<int64_t>(i) / (z.K * z.D) == n;
        wrong += (std::isnan(k[i]) != depends) + (std::isnan(v[i]) != depends);
      }
      CHECK(wrong == 0);

      Case<float> x = make<float>(z, 1), dx{z, std::vector<float>(static_cast<size_t>(x.total()), 0.f)};
      auto dk = random_vector<float>(out, 2), dv = random_vector<float>(out, 3);
      dk[static_cast<size_t>((n * z.K + h) * z.D + d)] = nan;
      backward(dx.views(), view(dk.data(), shape), view(dv.data(), shape), x.views(), std::vector<bool>(3, false),
               backend);
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
  auto k = random_vector<float>(z.N * z.K * z.D, 3), v = k;
  const Tensor heads = view(k.data(), {1, z.N, z.K, z.D}), others = view(v.data(), {1, z.N, z.K, z.D});
  const std::vector<bool> acc(3, false);
  auto refused = [&](const std::function<void(HeadMix&)>& spoil) {
    HeadMix m = x.views(), d = dx.views();
    spoil(m);
    CHECK_THROWS_AS(head_mix_forward(heads, others, m, Stream{}), Error);
    CHECK_THROWS_AS(head_mix_backward(dx.views(), heads, others, m, acc, Stream{}), Error);
    spoil(d);
    CHECK_THROWS_AS(head_mix_backward(d, heads, others, x.views(), acc, Stream{}), Error);
  };
  refused([](HeadMix& m) { m.sources.pop_back(); });
  refused([](HeadMix& m) { m.sources[1] = view(m.sources[1].as<float>(), {1, 5, 5}); });
  refused([](HeadMix& m) { m.weight = view(m.weight.as<float>(), {2, 2}); });
  refused([](HeadMix& m) { m.gain = view(m.gain.as<float>(), {4}); });
  refused([](HeadMix& m) { m.wk = view(m.wk.as<float>(), {7, 5}); });
  refused([](HeadMix& m) { m.wv = view(m.wv.as<float>(), {8, 4}); });
  CHECK_THROWS_AS(head_mix_forward(heads, view(v.data(), {1, z.N, z.K, 2}), x.views(), Stream{}), Error);
  CHECK_THROWS_AS(head_mix_backward(dx.views(), heads, others, x.views(), {false, false}, Stream{}), Error);
}
