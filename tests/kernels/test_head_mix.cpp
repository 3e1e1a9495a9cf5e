#include "kernels/depth/head_mix.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The mixture of what `source` and `other` make of the names.
template <class Source, class Other>
auto mix_of(const HeadMixSize& z, const Source& source, const Other& other) {
  return HeadMix<decltype(source("")), decltype(other(""))>{several(z.S, "source", source), other("weight"),
                                                            other("gain"), other("wk"), other("wv")};
}

Op head_mix(const HeadMixSize& z, double scale = 1) {
  const Shape heads{1, z.N, z.K, z.D}, routes = z.shared ? Shape{z.K, z.S} : Shape{1, z.N, z.K, z.S};
  std::vector<Operand> operands{output("k", heads), output("v", heads)};
  for (int64_t s = 0; s < z.S; ++s) operands.push_back(input(str("source", s), {1, z.N, z.C}, scale));
  for (const Operand& one : {never_added(in_f32(input("weight", routes, scale))), parameter("gain", {z.C}, scale),
                             weight("wk", {z.K * z.D, z.C}, scale), weight("wv", {z.K * z.D, z.C}, scale)})
    operands.push_back(one);
  return {operands,
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            head_mix_forward(t["k"], t["v"], mix_of(z, get, get), stream);
          },
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            const auto d = [&](const std::string& name) { return t["d" + name]; };
            const auto grad = [&](const std::string& name) { return t.grad(name); };
            head_mix_backward(mix_of(z, grad, d), t["dk"], t["dv"], mix_of(z, get, get), stream);
          },
          [=](auto& p) {
            const auto get = [&](const std::string& name) -> const Complex* { return p[name]; };
            head_mix_forward_ref(p["k"], p["v"], mix_of(z, get, get), z);
          }};
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

void check_against_reference(const HeadMixSize& z, Dtype dtype, Backend backend) {
  const Op op = head_mix(z);
  for (const unsigned adds : {0u, 0x55555555u, 0xAAAAAAAAu, ~0u}) {
    if (is_slow(backend) && (adds == 0 || adds == ~0u)) continue;  // slow there
    CAPTURES(backend, name_of(dtype), adds, z.N, z.C);
    Trial got(op, dtype, adds), want = got.exact();
    got.run(backend), want.run(Backend::reference);
    for (const auto& [name, type] : got.results()) {
      // What is stored in bf16 may be rounded. On a GPU that is also the mixtures and the weights times the gain, whose
      // errors add up in everything: up to three roundings of 2^-9 at most, so the whole is judged, not its smallest
      // elements.
      if (dtype == Dtype::bf16 && backend == Backend::cuda) {
        const double wrong = distance(got[name], want[name]) / size_of(want[name]);
        CHECK_MESSAGE(wrong <= 0x1p-7, name << ": " << wrong);
      } else {
        check_close(name, got[name], want[name], type == Dtype::bf16 ? 0x1p-8 : 2e-5);
      }
    }
  }
}

}  // namespace

TEST_CASE("head_mix: the reference's backward is the derivative of its forward") {
  for (const HeadMixSize& z : {sizes[1], sizes[2]})
    for (const double scale : {0.1, 1.0, 3.0}) {
      CAPTURE(scale);
      check_derivative(head_mix(z, scale), 1e-11);
    }
}

TEST_CASE("head_mix: fast against reference") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const HeadMixSize& z) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) check_against_reference(z, dtype, backend);
  });
}

TEST_CASE("head_mix: the same bits for any number of threads") {
  // Several tiles of tokens; the second also has rows enough for the gain to be folded in parallel.
  for (const HeadMixSize& z : std::vector<HeadMixSize>{{333, 5, 4, 8, 96, true}, {333, 5, 4, 40, 96, false}})
    check_threads(head_mix(z));
}

TEST_CASE("head_mix: NaN reaches what depends on it, and nothing else") {
  const int64_t n = 131, h = 1, d = 2;  // where
  for (const Backend backend : fast_backends())
    for (const bool shared : {true, false}) {
      CAPTURES(backend, shared);
      const HeadMixSize z{150, 3, 2, 4, 65, shared};
      const Op op = head_mix(z);
      Trial spoilt(op, Dtype::f32);
      spoilt.x["source1"][static_cast<size_t>(n * z.C + 7)] = NAN;
      spoilt.forward(backend);
      for (const char* name : {"k", "v"})
        for (size_t i = 0; i < spoilt[name].size(); ++i)
          CHECK(std::isnan(spoilt[name][i]) == in_row(static_cast<size_t>(n), z.K * z.D)(i));
      std::map<std::string, Where> want{{"dgain", everywhere}, {"dwk", in_row(static_cast<size_t>(h * z.D + d), z.C)}};
      for (int s = 0; s < 3; ++s) want[str("dsource", s)] = in_row(static_cast<size_t>(n), z.C);
      want["dweight"] = [=](size_t i) {
        const auto at = static_cast<int64_t>(i);
        return at / z.S % z.K == h && (shared || at / (z.S * z.K) == n);
      };
      check_nans(op, Dtype::f32, backend, {{"dk", {static_cast<size_t>((n * z.K + h) * z.D + d)}}}, want);
    }
}

TEST_CASE("head_mix: refuses shapes that do not fit") {
  const HeadMixSize z{6, 3, 2, 4, 5, true};
  const std::vector<float> memory(48);
  const float* const x = memory.data();
  const std::vector<Tensor> sources(3, view(x, {1, 6, 5}));
  const HeadMix<Tensor> good{sources, view(x, {2, 3}), view(x, {5}), view(x, {8, 5}), view(x, {8, 5})};
  const Tensor heads = view(x, {1, z.N, z.K, z.D});
  const auto gradients_of = [](const HeadMix<Tensor>& d) {
    HeadMix<Grad, Tensor> gradients{{}, d.weight, d.gain, d.wk, d.wv};
    for (const Tensor& source : d.sources) gradients.sources.push_back({source, false});
    return gradients;
  };
  const auto refused = [&](const std::function<void(HeadMix<Tensor>&)>& spoil) {
    HeadMix<Tensor> bad = good;
    spoil(bad);
    CHECK_THROWS_AS(head_mix_forward(heads, heads, bad, fast), Error);
    CHECK_THROWS_AS(head_mix_backward(gradients_of(good), heads, heads, bad, fast), Error);
    CHECK_THROWS_AS(head_mix_backward(gradients_of(bad), heads, heads, good, fast), Error);
  };
  refused([](HeadMix<Tensor>& m) { m.sources.pop_back(); });
  refused([](HeadMix<Tensor>& m) { m.sources[1].shape = Shape{1, 5, 5}; });
  refused([](HeadMix<Tensor>& m) { m.weight.shape = Shape{2, 2}; });
  refused([](HeadMix<Tensor>& m) { m.gain.shape = Shape{4}; });
  refused([](HeadMix<Tensor>& m) { m.wk.shape = Shape{7, 5}; });
  refused([](HeadMix<Tensor>& m) { m.wv.shape = Shape{8, 4}; });
  CHECK_THROWS_AS(head_mix_forward(heads, view(x, {1, z.N, z.K, 2}), good, fast), Error);
}
