#include "kernels/depth/multiway_mix.h"

#include "tests/depth_cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

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

// A mixture, or its gradients, as vectors that own their numbers: activations in T, the rest in Wide<T>.
template <class T>
using Mix = MultiwayMix<std::vector<T>, std::vector<Wide<T>>>;

// All members in one list.
template <class T>
std::vector<std::vector<T>*> members(MultiwayMix<std::vector<T>>& m) {
  std::vector<std::vector<T>*> list;
  for (Rows<T>* rows : {&m.sources, &m.gains, &m.post})
    for (auto& row : *rows) list.push_back(&row);
  list.insert(list.end(), {&m.weight, &m.base, &m.skip});
  return list;
}

template <class To, class From>
MultiwayMix<std::vector<To>> convert_mix(const From& from) {
  MultiwayMix<std::vector<To>> to;
  const auto f = [](const auto& x) { return convert<To>(x); };
  map_members(to, from, f, f);
  return to;
}

template <class T>
std::vector<T*> pointers(Rows<T>& rows) {
  std::vector<T*> list;
  for (auto& row : rows) list.push_back(row.data());
  return list;
}

// What the reference's forward takes; m must live on.
template <class T>
MultiwayMix<T*> data_of(MultiwayMix<std::vector<T>>& m) {
  return {pointers(m.sources), pointers(m.gains), pointers(m.post), m.weight.data(), m.base.data(), m.skip.data()};
}

template <class M>
MultiwayMix<Tensor> mix_tensors(const M& m, const Size& size) {
  const Shape rows{1, size.N, size.C}, column{size.C};
  return {tensors_of(m.sources, rows),         tensors_of(m.gains, column),
          tensors_of(m.post, column),          tensor_of(m.weight, {1, size.N, size.W * size.S}),
          tensor_of(m.base, {size.W, size.S}), tensor_of(m.skip, rows)};
}

template <class T>
Rows<T> random_rows(int64_t rows, int64_t n, uint64_t seed) {
  Rows<T> out;
  for (int64_t i = 0; i < rows; ++i) out.push_back(random_vector<T>(n, seed + static_cast<uint64_t>(i)));
  return out;
}

// weight and base are `scale` times a random number.
template <class T>
Mix<T> random_mix(const Size& size, uint64_t seed, double scale = 1.0) {
  using P = Wide<T>;
  const int64_t N = size.N, C = size.C, S = size.S, W = size.W;
  return {random_rows<T>(S, N * C, seed),
          random_rows<P>(size.prepost ? S : 0, C, seed + 200),
          random_rows<P>(size.prepost ? W : 0, C, seed + 400),
          random_vector<T>(N * W * S, seed + 500, scale),
          random_vector<P>(W * S, seed + 501, scale),
          random_vector<T>(size.prepost ? N * C : 0, seed + 502)};
}

template <class T>
Rows<T> poisoned_rows(int64_t rows, int64_t n) {
  return Rows<T>(static_cast<size_t>(rows), poisoned<T>(n));
}

// Every other source is added to, and the skip if the first one is.
bool added(size_t source, bool first) { return (source % 2 == 0) == first; }

// What a gradient may find in memory: random numbers where it adds, NaN where it sets.
template <class T>
Mix<T> gradients_before(const Size& size, bool first) {
  Mix<T> d = random_mix<T>(size, 900);
  for (size_t s = 0; s < d.sources.size(); ++s)
    if (!added(s, first)) d.sources[s] = poisoned<T>(size.N * size.C);
  if (size.prepost && !first) d.skip = poisoned<T>(size.N * size.C);
  d.weight = poisoned<T>(size.N * size.W * size.S);
  return d;
}

MultiwayMix<Grad, Tensor> gradients_of(const MultiwayMix<Tensor>& d, bool first) {
  MultiwayMix<Grad, Tensor> grads{{}, d.gains, d.post, {d.weight, false}, d.base, {d.skip, first}};
  for (size_t s = 0; s < d.sources.size(); ++s) grads.sources.push_back({d.sources[s], added(s, first)});
  return grads;
}

// Forward and backward.
template <class T>
struct Run {
  Rows<T> outs;
  std::vector<Wide<T>> rstd;
  Mix<T> d;
};

// The tensors of m in one list, and a mixture of the same ones from such a list.
std::vector<Tensor> list_of(const MultiwayMix<Tensor>& m) {
  return joined(m.sources, m.gains, m.post, std::vector<Tensor>{m.weight, m.base, m.skip});
}
MultiwayMix<Tensor> taken(const Tensor*& from, const MultiwayMix<Tensor>& like) {
  MultiwayMix<Tensor> m = like;
  for (auto* tensors : {&m.sources, &m.gains, &m.post})
    for (Tensor& tensor : *tensors) tensor = *from++;
  m.weight = *from++, m.base = *from++, m.skip = *from++;
  return m;
}

// d: what the gradients find in memory, the sources added to as `first` says.
template <class T, class M>
Run<T> run(Backend backend, const M& m, const Rows<T>& douts, const M& d, bool first, const Size& size,
           double eps = 1e-6) {
  Run<T> r{poisoned_rows<T>(size.W, size.N * size.C), poisoned<Wide<T>>(size.prepost ? size.N * size.W : 0), d};
  const Shape rows{1, size.N, size.C};
  const MultiwayMix<Tensor> tensors = mix_tensors(m, size), gradients = mix_tensors(r.d, size);
  std::vector<Tensor> all = joined(tensors_of(r.outs, rows), tensors_of(douts, rows));
  all.push_back(tensor_of(r.rstd, {1, size.N, size.W}));
  run_on(backend, joined(all, list_of(tensors), list_of(gradients)), [&](const std::vector<Tensor>& t, Stream stream) {
    const auto first_dy = t.begin() + size.W;
    const Tensor* rest = t.data() + 2 * size.W;
    const Tensor saved = *rest++;
    const MultiwayMix<Tensor> mix = taken(rest, tensors), grads = taken(rest, gradients);
    multiway_mix_forward({t.begin(), first_dy}, saved, mix, eps, stream);
    multiway_mix_backward(gradients_of(grads, first), {first_dy, first_dy + size.W}, saved, mix, stream);
  });
  return r;
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
  for (bool first : {false, true}) {
    CAPTURE(first);
    auto before = gradients_before<double>(size, first);
    auto d = run(Backend::reference, m, douts, before, first, size, eps).d;
    const auto got = members(d), old = members(before), values = members(m);
    const auto steps = members(complex);
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

template <class T>
void check_fast(Backend backend, const Size& size, double scale) {
  const double rounding = std::is_same_v<T, bf16> ? 0x1p-8 : 0;  // of activations, once
  const auto m = random_mix<T>(size, 1, scale);
  const auto douts = random_rows<T>(size.W, size.N * size.C, 700);
  Rows<double> douts64;
  convert_into(douts64, douts);
  for (bool first : {false, true}) {
    CAPTURE(first);
    const auto before = gradients_before<T>(size, first);
    const Run<T> r = run(backend, m, douts, before, first, size);
    auto want = run(Backend::reference, convert_mix<double>(m), douts64, convert_mix<double>(before), first, size);
    for (size_t w = 0; w < want.outs.size(); ++w)
      check_close(str("out ", w), r.outs[w], want.outs[w], std::max(5e-6, rounding));
    check_close("rstd", r.rstd, want.rstd, 5e-6);
    auto got64 = convert_mix<double>(r.d);
    const auto got = members(got64), wanted = members(want.d);
    for (size_t k = 0; k < got.size(); ++k) {
      const bool activation = k < r.d.sources.size() || got[k] == &got64.weight || got[k] == &got64.skip;
      check_close(str("gradient ", k), *got[k], *wanted[k], activation ? std::max(2e-5, rounding) : 2e-5);
    }
  }
}

}  // namespace

TEST_CASE("multiway_mix: reference forward, by hand") {
  MultiwayMix<std::vector<double>> m;
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
      CAPTURES(size.S, size.W);
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
    for_sizes(joined(sizes, of_cpu), joined(sizes, of_gpu), [](Backend backend, const Size& size) {
      CAPTURES(size.N, size.C, size.S, size.W);
      check_fast<S>(backend, size, 1.0);
      if (backend == Backend::cpu || size.N * size.C < 200) check_fast<S>(backend, size, 1e-4);
    });
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
    const auto before = gradients_before<float>(size, false);
    const Run<float> r = run(backend, m, douts, before, false, size);
    for (const auto& out : r.outs) CHECK(out == (prepost ? m.skip : m.sources.back()));
    // With a = 0 the norm's slope is eps^(-1/2), and the gains and posts get nothing.
    for (float rstd : r.rstd) CHECK(rstd == doctest::Approx(1000).epsilon(1e-6));
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
    check_same_bits_on_any_threads<float>([&] {
      auto r = run(Backend::cpu, m, douts, gradients_before<float>(size, false), false, size);
      std::vector<float> all = flat(r.outs, r.rstd);
      for (const auto* member : members(r.d)) all = joined(all, *member);
      return all;
    });
  }
  for (const FastKind& kind : fast_kinds) {
    const Backend backend = kind.backend;
    const bool prepost = kind.prepost;
    if (!available(backend)) continue;
    CAPTURES(backend, prepost);
    const size_t N = backend == Backend::cpu ? 700 : 203, C = 48;
    const Size size{static_cast<int64_t>(N), 48, 5, 4, prepost};
    auto m = random_mix<float>(size, 1);
    auto douts = random_rows<float>(size.W, size.N * size.C, 700);
    m.sources[2][100 * C + 7] = nan;
    douts[1][200 * C + 9] = nan;
    const Run<float> r = run(backend, m, douts, gradients_before<float>(size, false), false, size);
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

TEST_CASE("multiway_mix: shapes that do not fit") {
  const Size size{6, 9, 3, 2, true};
  const auto m = random_mix<double>(size, 1);
  auto outs = poisoned_rows<double>(2, 54);
  auto rstd = poisoned<double>(12);
  const auto d = gradients_before<double>(size, false);
  const Tensor saved = view(rstd, {2, 3, 2});
  const auto out = tensors_of(outs, {2, 3, 9});
  const MultiwayMix<Tensor> mix = mix_tensors(m, size);
  const auto gradients = gradients_of(mix_tensors(d, size), false);
  multiway_mix_forward(out, saved, mix, 1e-6, reference);
  multiway_mix_backward(gradients, out, saved, mix, reference);

  auto refuses = [&](const auto& spoil) {
    MultiwayMix<Tensor> wrong = mix;
    MultiwayMix<Grad, Tensor> wrong_gradients = gradients;
    spoil(wrong), spoil(wrong_gradients);
    CHECK_THROWS_AS(multiway_mix_forward(out, saved, wrong, 1e-6, reference), Error);
    CHECK_THROWS_AS(multiway_mix_backward(gradients, out, saved, wrong, reference), Error);
    CHECK_THROWS_AS(multiway_mix_backward(wrong_gradients, out, saved, mix, reference), Error);
  };
  refuses([](auto& wrong) { wrong.gains.pop_back(); });
  refuses([](auto& wrong) { wrong.sources.clear(); });
  refuses([](auto& wrong) { wrong.post.clear(); });
  refuses([](auto& wrong) { wrong.skip = {}; });
  refuses([](auto& wrong) { wrong.base.shape = Shape{3, 3}; });
  refuses([](auto& wrong) { wrong.weight.shape = Shape{2, 3, 5}; });
  CHECK_THROWS_AS(multiway_mix_forward(out, Tensor{}, mix, 1e-6, fast), Error);
  CHECK_THROWS_AS(multiway_mix_forward(std::vector<Tensor>(9, out[0]), saved, mix, 1e-6, fast), Error);
  MultiwayMix<Grad, Tensor> adds = gradients;
  adds.weight.add = true;  // which is always set
  CHECK_THROWS_AS(multiway_mix_backward(adds, out, saved, mix, reference), Error);
}
