#include "kernels/depth/multiway_mix.h"

#include "tests/backends.h"
#include "tests/check.h"
#include "tests/threads.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const Stream cpu{Backend::cpu};

struct FastKind {
  Backend backend;
  bool prepost;
};
constexpr FastKind fast_kinds[] = {
    {Backend::cpu, false}, {Backend::cpu, true}, {Backend::cuda, false}, {Backend::cuda, true}};

struct Size {
  int64_t N, C, S, W;
  bool prepost;
};

template <class T>
using Rows = std::vector<std::vector<T>>;

// The members of a MultiwayMix, or their gradients, as vectors that own their numbers: activations in T, the rest in P.
template <class T, class P = T>
struct Mix {
  Rows<T> sources;
  Rows<P> gains, post;
  std::vector<T> weight;
  std::vector<P> base;
  std::vector<T> skip;

  // All of them in one list.
  std::vector<std::vector<T>*> members() {
    std::vector<std::vector<T>*> list;
    for (Rows<T>* rows : {&sources, &gains, &post})
      for (auto& row : *rows) list.push_back(&row);
    list.insert(list.end(), {&weight, &base, &skip});
    return list;
  }
};

template <class T>
std::vector<T*> pointers(Rows<T>& rows) {
  std::vector<T*> list;
  for (auto& row : rows) list.push_back(row.data());
  return list;
}

template <class T>
MultiwayMixData<T> data_of(Mix<T>& m) {
  return {pointers(m.sources), pointers(m.gains), pointers(m.post), m.weight.data(), m.base.data(), m.skip.data()};
}

template <class T>
std::vector<Tensor> views(const Rows<T>& rows, const Shape& shape) {
  std::vector<Tensor> list;
  for (const auto& row : rows) list.push_back(view(row.data(), shape));
  return list;
}

template <class T, class P>
MultiwayMix tensors_of(const Mix<T, P>& m, const Size& size) {
  MultiwayMix out;
  out.sources = views(m.sources, {1, size.N, size.C});
  out.gains = views(m.gains, {size.C});
  out.post = views(m.post, {size.C});
  out.weight = view(m.weight.data(), {1, size.N, size.W * size.S});
  out.base = view(m.base.data(), {size.W, size.S});
  if (size.prepost) out.skip = view(m.skip.data(), {1, size.N, size.C});
  return out;
}

template <class T>
Rows<T> random_rows(int64_t rows, int64_t n, uint64_t seed) {
  Rows<T> out;
  for (int64_t i = 0; i < rows; ++i) out.push_back(random_vector<T>(n, seed + static_cast<uint64_t>(i)));
  return out;
}

// weight and base are `scale` times a random number.
template <class T, class P = T>
Mix<T, P> random_mix(const Size& size, uint64_t seed, double scale = 1.0) {
  const int64_t N = size.N, C = size.C, S = size.S, W = size.W;
  Mix<T, P> m;
  m.sources = random_rows<T>(S, N * C, seed);
  m.gains = random_rows<P>(size.prepost ? S : 0, C, seed + 200);
  m.post = random_rows<P>(size.prepost ? W : 0, C, seed + 400);
  m.weight = random_vector<T>(N * W * S, seed + 500, scale);
  m.base = random_vector<P>(W * S, seed + 501, scale);
  m.skip = random_vector<T>(size.prepost ? N * C : 0, seed + 502);
  return m;
}

template <class To, class T, class P>
Mix<To> convert_mix(const Mix<T, P>& from) {
  Mix<To> to;
  for (const auto& row : from.sources) to.sources.push_back(convert<To>(row));
  for (const auto& row : from.gains) to.gains.push_back(convert<To>(row));
  for (const auto& row : from.post) to.post.push_back(convert<To>(row));
  to.weight = convert<To>(from.weight), to.base = convert<To>(from.base), to.skip = convert<To>(from.skip);
  return to;
}

template <class T>
Rows<T> poisoned_rows(int64_t rows, int64_t n) {
  return Rows<T>(static_cast<size_t>(rows), poisoned<T>(n));
}

// What a gradient may find in memory: random numbers where it adds, NaN where it sets. Every other source is added to.
template <class T, class P = T>
Mix<T, P> gradients_before(const Size& size, const MultiwayAcc& acc) {
  Mix<T, P> d = random_mix<T, P>(size, 900);
  for (size_t s = 0; s < d.sources.size(); ++s)
    if (!acc.sources[s]) d.sources[s] = poisoned<T>(size.N * size.C);
  if (size.prepost && !acc.skip) d.skip = poisoned<T>(size.N * size.C);
  d.weight = poisoned<T>(size.N * size.W * size.S);
  return d;
}

MultiwayAcc alternating(const Size& size, bool first) {
  MultiwayAcc acc;
  for (int64_t s = 0; s < size.S; ++s) acc.sources.push_back((s % 2 == 0) == first);
  acc.skip = first;
  return acc;
}

// Forward and backward.
template <class S>
struct Run {
  Rows<S> outs;
  std::vector<float> rstd;
  Mix<S, float> d;
};

// The tensors of m in one list, and a MultiwayMix of the same ones from such a list.
void append(std::vector<Tensor>& list, const MultiwayMix& m) {
  for (const auto* tensors : {&m.sources, &m.gains, &m.post}) list.insert(list.end(), tensors->begin(), tensors->end());
  list.insert(list.end(), {m.weight, m.base, m.skip});
}
MultiwayMix taken(const Tensor*& from, const MultiwayMix& like) {
  MultiwayMix m = like;
  for (auto* tensors : {&m.sources, &m.gains, &m.post})
    for (Tensor& tensor : *tensors) tensor = *from++;
  m.weight = *from++, m.base = *from++, m.skip = *from++;
  return m;
}

template <class S>
Run<S> run(Backend backend, const Mix<S, float>& m, const Rows<S>& douts, const MultiwayAcc& acc, const Size& size) {
  Run<S> r{poisoned_rows<S>(size.W, size.N * size.C), poisoned<float>(size.prepost ? size.N * size.W : 0),
           gradients_before<S, float>(size, acc)};
  const Shape rows{1, size.N, size.C};
  const Tensor rstd = size.prepost ? view(r.rstd.data(), {1, size.N, size.W}) : Tensor{};
  const MultiwayMix tensors = tensors_of(m, size), gradients = tensors_of(r.d, size);
  std::vector<Tensor> all = views(r.outs, rows), dy = views(douts, rows);
  all.insert(all.end(), dy.begin(), dy.end());
  all.push_back(rstd), append(all, tensors), append(all, gradients);
  run_on(backend, all, [&](const std::vector<Tensor>& t, Stream stream) {
    const auto first_dy = t.begin() + size.W;
    const Tensor* rest = t.data() + 2 * size.W;
    const Tensor saved = *rest++;
    const MultiwayMix mix = taken(rest, tensors), d = taken(rest, gradients);
    multiway_mix_forward({t.begin(), first_dy}, saved, mix, stream);
    multiway_mix_backward(d, {first_dy, first_dy + size.W}, saved, mix, acc, stream);
  });
  return r;
}

std::vector<float> flatten(Run<float> r) {
  std::vector<float> all = r.rstd;
  for (const auto& row : r.outs) all.insert(all.end(), row.begin(), row.end());
  for (const auto* member : r.d.members()) all.insert(all.end(), member->begin(), member->end());
  return all;
}

void check_reference(const Size& size, double scale, double eps) {
  const int64_t N = size.N, C = size.C;
  auto m = random_mix<double>(size, 1, scale);
  auto douts = random_rows<double>(size.W, N * C, 700);
  auto complex = convert_mix<Complex>(m);
  auto loss = [&] {
    Rows<Complex> outs(static_cast<size_t>(size.W), std::vector<Complex>(static_cast<size_t>(N * C)));
    std::vector<Complex> rstd(static_cast<size_t>(N * size.W));
    multiway_mix_forward_ref(pointers(outs), rstd.data(), data_of(complex), N, C, eps);
    Complex sum = 0;
    for (size_t w = 0; w < outs.size(); ++w) sum += dot(douts[w], outs[w]);
    return sum;
  };
  auto outs = poisoned_rows<double>(size.W, N * C);
  auto rstd = poisoned<double>(N * size.W);
  multiway_mix_forward_ref(pointers(outs), rstd.data(), data_of(m), N, C, eps);
  for (bool first : {false, true}) {
    CAPTURE(first);
    const MultiwayAcc acc = alternating(size, first);
    auto d = gradients_before<double>(size, acc), before = d;
    multiway_mix_backward_ref(data_of(d), pointers(douts), rstd.data(), data_of(m), acc, N, C);
    const auto got = d.members(), old = before.members(), values = m.members();
    const auto steps = complex.members();
    for (size_t k = 0; k < got.size(); ++k) {
      const auto want = complex_step(*values[k], [&](const std::vector<Complex>& x) {
        *steps[k] = x;
        return loss();
      });
      *steps[k] = convert<Complex>(*values[k]);
      double largest = 0;
      for (double g : want) largest = std::max(largest, std::abs(g));
      for (size_t i = 0; i < want.size(); ++i)
        if (!std::isnan((*old[k])[i])) (*got[k])[i] -= (*old[k])[i];
      // What was there before is of size 1: taking it off again leaves 1e-16 of that.
      check_close(str("gradient ", k), *got[k], want, 1e-10 + (largest > 0 ? 1e-15 / largest : 0));
    }
  }
}

template <class S>
void check_fast(Backend backend, const Size& size, double scale) {
  const double rounding = std::is_same_v<S, bf16> ? 0x1p-8 : 0;  // of activations, once
  const int64_t N = size.N, C = size.C;
  auto m = random_mix<S, float>(size, 1, scale);
  auto douts = random_rows<S>(size.W, N * C, 700);
  auto m64 = convert_mix<double>(m);
  Rows<double> douts64, outs64 = poisoned_rows<double>(size.W, N * C);
  for (const auto& row : douts) douts64.push_back(convert<double>(row));
  auto rstd64 = poisoned<double>(size.prepost ? N * size.W : 0);
  multiway_mix_forward_ref(pointers(outs64), rstd64.data(), data_of(m64), N, C, 1e-6);
  for (bool first : {false, true}) {
    CAPTURE(first);
    const MultiwayAcc acc = alternating(size, first);
    const Run<S> r = run(backend, m, douts, acc, size);
    for (size_t w = 0; w < outs64.size(); ++w)
      check_close(str("out ", w), r.outs[w], outs64[w], std::max(5e-6, rounding));
    check_close("rstd", r.rstd, rstd64, 5e-6);
    auto d64 = convert_mix<double>(gradients_before<S, float>(size, acc)), got64 = convert_mix<double>(r.d);
    multiway_mix_backward_ref(data_of(d64), pointers(douts64), rstd64.data(), data_of(m64), acc, N, C);
    const auto got = got64.members(), want = d64.members();
    for (size_t k = 0; k < got.size(); ++k) {
      const bool activation = k < r.d.sources.size() || got[k] == &got64.weight || got[k] == &got64.skip;
      check_close(str("gradient ", k), *got[k], *want[k], activation ? std::max(2e-5, rounding) : 2e-5);
    }
  }
}

}  // namespace

TEST_CASE("multiway_mix: reference forward, by hand") {
  Mix<double> m;
  m.sources = {{1, 2}, {3, 5}}, m.gains = {{1, -1}, {2, 1}}, m.post = {{10, 100}};
  m.weight = {0.5, 1}, m.base = {1.5, -2}, m.skip = {7, 8};
  // c = (2, -1): a = 2 (1, -2) - (6, 5) = (-4, -9), whose mean square is 48.5.
  Rows<double> outs{{0, 0}};
  std::vector<double> rstd{0};
  multiway_mix_forward_ref(pointers(outs), rstd.data(), data_of(m), 1, 2, 0.5);
  check_close("rstd", rstd, std::vector<double>{1.0 / 7}, 1e-15);
  check_close("out", outs[0], std::vector<double>{7 - 40.0 / 7, 8 - 900.0 / 7}, 1e-15);
  m.gains.clear(), m.post.clear();  // a = 2 (1, 2) - (3, 5)
  multiway_mix_forward_ref(pointers(outs), rstd.data(), data_of(m), 1, 2, 0.5);
  CHECK(outs[0] == std::vector<double>{-1, -1});
}

TEST_CASE("multiway_mix: reference backward is the derivative of the reference forward") {
  for (bool prepost : {false, true}) {
    CAPTURE(prepost);
    for (const Size& size : std::vector<Size>{
             {1, 3, 1, 1, prepost}, {2, 7, 3, 4, prepost}, {3, 5, 4, 2, prepost}, {2, 4, 5, 8, prepost}}) {
      CAPTURE(size.S);
      CAPTURE(size.W);
      for (double scale : {0.0, 1e-3, 1.0, 30.0}) {
        CAPTURE(scale);
        for (double eps : {1e-6, 0.1}) check_reference(size, scale, eps);
      }
    }
  }
}

// f32 sums over S sources, C columns and N tokens, where the mean of the norm's backward cancels: some tens of 6e-8.
// Not with one source and one way: there da is orthogonal to the source, and all of dweight cancels.
TEST_CASE_TEMPLATE("multiway_mix: the fast backends equal the reference, set and added", S, float, bf16) {
  for (bool prepost : {false, true}) {
    CAPTURE(prepost);
    std::vector<Size> sizes{{1, 5, 2, 1, prepost},  {5, 31, 3, 2, prepost}, {70, 16, 4, 3, prepost},
                            {9, 64, 2, 4, prepost}, {6, 67, 3, 5, prepost}, {6, 67, 3, 8, prepost}};
    const std::vector<Size> of_cpu{{300, 80, 7, 4, prepost}, {33, 127, 5, 4, prepost}, {3, 1027, 129, 4, prepost},
                                   {40, 112, 6, 1, prepost}, {6, 67, 3, 6, prepost},   {6, 67, 3, 7, prepost},
                                   {130, 67, 3, 8, prepost}};
    // Several tokens a block, with sums in shared memory and, for 30 sources, outside; several warps; a row of two
    // passes; more sources than sums at once; ways that not every thread has.
    const std::vector<Size> of_gpu{{17, 80, 30, 2, prepost}, {1, 1048, 3, 3, prepost}, {1, 531, 2, 2, prepost},
                                   {3, 136, 9, 6, prepost},  {9, 112, 11, 1, prepost}, {1, 16, 129, 4, prepost}};
    for (const Backend backend : fast_backends()) {
      auto all = sizes;
      const auto& more = backend == Backend::cpu ? of_cpu : of_gpu;
      all.insert(all.end(), more.begin(), more.end());
      for (const Size& size : all) {
        CAPTURE(static_cast<int>(backend));
        CAPTURE(size.N);
        CAPTURE(size.C);
        CAPTURE(size.S);
        CAPTURE(size.W);
        check_fast<S>(backend, size, 1.0);
        if (backend == Backend::cpu || size.N * size.C < 200) check_fast<S>(backend, size, 1e-4);
      }
    }
  }
}

TEST_CASE("multiway_mix: at the start the ways are the last source or the skip, exactly") {
  for (const auto& [backend, prepost] : fast_kinds) {
    if (!available(backend)) continue;
    const Size size{backend == Backend::cpu ? 37 : 9, 83, 6, 4, prepost};
    const auto douts = random_rows<float>(size.W, size.N * size.C, 700);
    auto m = random_mix<float>(size, 1, 0.0);
    if (!prepost)
      for (size_t w = 0; w < 4; ++w) m.base[w * 6 + 5] = 1.f;
    const Run<float> r = run(backend, m, douts, alternating(size, false), size);
    for (const auto& out : r.outs) CHECK(out == (prepost ? m.skip : m.sources.back()));
    // With a = 0 the norm's slope is eps^(-1/2), and the gains and posts get nothing.
    for (float rstd : r.rstd) CHECK(rstd == doctest::Approx(1000).epsilon(1e-6));
    const Mix<float> before = gradients_before<float>(size, alternating(size, false));
    CHECK(r.d.gains == before.gains);
    CHECK(r.d.post == before.post);
    if (prepost) check_fast<float>(backend, size, 0.0);
  }
}

TEST_CASE("multiway_mix: NaN shows where it should, and threads do not matter") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (bool prepost : {false, true}) {
    CAPTURE(prepost);
    const Size size{700, 48, 5, 4, prepost};
    const auto m = random_mix<float>(size, 1);
    const auto douts = random_rows<float>(size.W, size.N * size.C, 700);
    check_same_bits_on_any_threads<float>(
        [&] { return flatten(run(Backend::cpu, m, douts, alternating(size, false), size)); });
  }
  for (const FastKind& kind : fast_kinds) {
    const Backend backend = kind.backend;
    const bool prepost = kind.prepost;
    if (!available(backend)) continue;
    CAPTURE(static_cast<int>(backend));
    CAPTURE(prepost);
    const size_t N = backend == Backend::cpu ? 700 : 203, C = 48;
    const Size size{static_cast<int64_t>(N), 48, 5, 4, prepost};
    auto m = random_mix<float>(size, 1);
    auto douts = random_rows<float>(size.W, size.N * size.C, 700);
    const MultiwayAcc acc = alternating(size, false);
    m.sources[2][100 * C + 7] = nan;
    douts[1][200 * C + 9] = nan;
    const Run<float> r = run(backend, m, douts, acc, size);
    for (size_t i = 0; i < N * C; ++i) {
      const bool row = i / C == 100, element = i == 100 * C + 7, spoilt = i / C == 200;
      for (const auto& out : r.outs) REQUIRE(std::isnan(out[i]) == (prepost ? row : element));
      for (const auto& dx : r.d.sources) REQUIRE(std::isnan(dx[i]) == (prepost ? row || spoilt : i == 200 * C + 9));
      if (prepost) REQUIRE(std::isnan(r.d.skip[i]) == (i == 200 * C + 9));
    }
    for (size_t w = 0; w < 4; ++w)
      for (size_t s = 0; s < 5; ++s) {
        CHECK(std::isnan(r.d.weight[(100 * 4 + w) * 5 + s]) == (prepost || s == 2));
        CHECK(std::isnan(r.d.weight[(200 * 4 + w) * 5 + s]) == (w == 1));
        CHECK(std::isnan(r.d.base[w * 5 + s]) == (prepost || s == 2 || w == 1));
      }
  }
}

TEST_CASE("multiway_mix: the reference backend in f32 and f64, and shapes that do not fit") {
  const Size size{6, 9, 3, 2, true};
  const auto m = random_mix<double>(size, 1);
  auto m64 = m;
  auto outs = poisoned_rows<double>(2, 54), want = outs;
  auto rstd = poisoned<double>(12), want_rstd = rstd;
  const Tensor saved = view(rstd.data(), {2, 3, 2});
  const auto out = views(outs, {2, 3, 9});
  const MultiwayMix mix = tensors_of(m, size);
  multiway_mix_forward(out, saved, mix, Stream{Backend::reference});
  multiway_mix_forward_ref(pointers(want), want_rstd.data(), data_of(m64), 6, 9, 1e-6);
  CHECK(outs == want);
  CHECK(rstd == want_rstd);
  const MultiwayAcc acc = alternating(size, false);
  auto d = gradients_before<double>(size, acc);
  const MultiwayMix gradients = tensors_of(d, size);
  multiway_mix_backward(gradients, out, saved, mix, acc, Stream{Backend::reference});
  for (const auto* member : d.members())
    for (double g : *member) CHECK(std::isfinite(g));

  auto refuses = [&](const std::vector<Tensor>& o, const Tensor& r, const MultiwayMix& wrong) {
    CHECK_THROWS_AS(multiway_mix_forward(o, r, wrong, Stream{Backend::reference}), Error);
    CHECK_THROWS_AS(multiway_mix_backward(gradients, o, r, wrong, acc, Stream{Backend::reference}), Error);
    CHECK_THROWS_AS(multiway_mix_backward(wrong, out, saved, wrong, acc, Stream{Backend::reference}), Error);
  };
  MultiwayMix wrong = mix;
  wrong.gains.pop_back();
  refuses(out, saved, wrong);
  wrong = mix, wrong.sources.clear();
  refuses(out, saved, wrong);
  wrong = mix, wrong.post.clear();
  refuses(out, saved, wrong);
  wrong = mix, wrong.skip = Tensor{};
  refuses(out, saved, wrong);
  wrong = mix, wrong.base.shape = Shape{3, 3};
  refuses(out, saved, wrong);
  wrong = mix, wrong.weight.shape = Shape{2, 3, 5};
  refuses(out, saved, wrong);
  CHECK_THROWS_AS(multiway_mix_forward(out, Tensor{}, mix, cpu), Error);
  CHECK_THROWS_AS(multiway_mix_forward(std::vector<Tensor>(9, out[0]), saved, mix, cpu), Error);
  CHECK_THROWS_AS(multiway_mix_backward(gradients, out, saved, mix, MultiwayAcc{{true}, false}, cpu), Error);
}
