#include "kernels/depth/multiway_mix.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t N, C, S, W;
  bool prepost;
};

// The mixture of what `activation` and `other` make of the names.
template <class Activation, class Other>
auto mix_of(const Size& s, const Activation& activation, const Other& other) {
  MultiwayMix<decltype(activation("")), decltype(other(""))> m;
  m.sources = several(s.S, "source", activation);
  if (s.prepost) m.gains = several(s.S, "gain", other), m.post = several(s.W, "post", other);
  m.weight = activation("weight"), m.base = other("base");
  if (s.prepost) m.skip = activation("skip");
  return m;
}

// weight and base are `scale` times a random number.
Op multiway_mix(const Size& s, double scale = 1, double eps = 1e-6) {
  const Shape rows{1, s.N, s.C}, column{s.C};
  std::vector<Operand> values{never_added(input("weight", {1, s.N, s.W * s.S}, scale)),
                              parameter("base", {s.W, s.S}, scale)};
  for (int64_t i = 0; i < s.S; ++i) values.push_back(input(str("source", i), rows));
  for (int64_t i = 0; i < s.W; ++i) values.push_back(output(str("out", i), rows));
  for (int64_t i = 0; i < s.S && s.prepost; ++i) values.push_back(parameter(str("gain", i), column));
  for (int64_t i = 0; i < s.W && s.prepost; ++i) values.push_back(parameter(str("post", i), column));
  if (s.prepost) values.push_back(input("skip", rows)), values.push_back(saved("rstd", {1, s.N, s.W}));
  return {values,
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            multiway_mix_forward(several(s.W, "out", get), t["rstd"], mix_of(s, get, get), eps, stream);
          },
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            const auto d = [&](const std::string& name) { return t["d" + name]; };
            const auto grad = [&](const std::string& name) { return t.grad(name); };
            multiway_mix_backward(mix_of(s, grad, d), several(s.W, "dout", get), t["rstd"], mix_of(s, get, get),
                                  stream);
          },
          [=](auto& z) {
            const auto get = [&](const std::string& name) { return z[name]; };
            multiway_mix_forward_ref(several(s.W, "out", get), z["rstd"], mix_of(s, get, get), s.N, s.C, eps);
          }};
}

// f32 sums over S sources, C columns and N tokens, where the mean of the norm's backward cancels: some tens of 6e-8.
void check_fast(Dtype dtype, Backend backend, const Size& size, double scale) {
  CAPTURE(scale);
  const Op op = multiway_mix(size, scale);
  Tolerances tolerances;
  for (const Operand& v : op.values) tolerances.insert({{v.name, 5e-6}, {"d" + v.name, 2e-5}});
  check_backend(op, dtype, backend, tolerances);
}

}  // namespace

TEST_CASE("multiway_mix: reference forward, by hand") {
  for (const bool prepost : {true, false}) {
    const Op op = multiway_mix({1, 2, 2, 1, prepost}, 1, 0.5);
    Trial trial(op, Dtype::f64);
    trial.x["source0"] = {1, 2}, trial.x["source1"] = {3, 5};
    trial.x["weight"] = {0.5, 1}, trial.x["base"] = {1.5, -2};  // c = (2, -1)
    if (prepost) {  // a = 2 (1, -2) - (6, 5) = (-4, -9), whose mean square is 48.5
      trial.x["gain0"] = {1, -1}, trial.x["gain1"] = {2, 1}, trial.x["post0"] = {10, 100}, trial.x["skip"] = {7, 8};
      trial.forward(Backend::reference);
      check_close("rstd", trial["rstd"], std::vector<double>{1.0 / 7}, 1e-15);
      check_close("out", trial["out0"], std::vector<double>{7 - 40.0 / 7, 8 - 900.0 / 7}, 1e-15);
    } else {  // a = 2 (1, 2) - (3, 5)
      CHECK(trial.forward(Backend::reference)["out0"] == std::vector<double>{-1, -1});
    }
  }
}

TEST_CASE("multiway_mix: reference backward is the derivative of the reference forward") {
  for (bool prepost : {false, true})
    for (const Size& size :
         std::vector<Size>{{1, 3, 1, 1, prepost}, {2, 7, 3, 4, prepost}, {3, 5, 4, 2, prepost}, {2, 4, 5, 3, prepost}})
      for (double scale : {0.0, 1e-3, 1.0, 30.0})
        for (double eps : {1e-6, 0.1}) {
          CAPTURES(scale, eps);
          check_derivative(multiway_mix(size, scale, eps), {1e-10, 1e-15});
        }
}

// Not with one source and one way: there da is orthogonal to the source, and all of dweight cancels.
TEST_CASE_TEMPLATE("multiway_mix: the fast backends equal the reference, set and added", S, float, bf16) {
  for (bool prepost : {false, true}) {
    CAPTURE(prepost);
    std::vector<Size> sizes{{1, 5, 2, 1, prepost},
                            {5, 31, 3, 2, prepost},
                            {70, 16, 4, 3, prepost},
                            {9, 64, 2, 4, prepost},
                            {6, 67, 3, 4, prepost}};
    const std::vector<Size> of_cpu{{300, 80, 7, 4, prepost},
                                   {33, 127, 5, 4, prepost},
                                   {3, 1027, 129, 4, prepost},
                                   {40, 112, 6, 1, prepost},
                                   {130, 67, 3, 3, prepost}};
    // Several tokens a block, with sums in shared memory and, for 30 sources, outside; several warps; a row of two
    // passes; more sources than sums at once; ways that not every thread has.
    const std::vector<Size> of_gpu{{17, 80, 30, 2, prepost}, {1, 1048, 3, 3, prepost}, {1, 531, 2, 2, prepost},
                                   {3, 136, 9, 4, prepost},  {9, 112, 11, 1, prepost}, {1, 16, 129, 4, prepost}};
    for_sizes(joined(sizes, of_cpu), joined(sizes, of_gpu), [](Backend backend, const Size& size) {
      check_fast(DtypeOf<S>::value, backend, size, 1.0);
      if (backend == Backend::cpu || size.N * size.C < 200) check_fast(DtypeOf<S>::value, backend, size, 1e-4);
    });
  }
}

TEST_CASE("multiway_mix: at the start the ways are the last source or the skip, exactly") {
  for (const Backend backend : fast_backends())
    for (const bool prepost : {false, true}) {
      const Size size{backend == Backend::cpu ? 37 : 9, 83, 6, 4, prepost};
      const Op op = multiway_mix(size, 0.0);
      Trial trial(op, Dtype::f32);
      for (size_t w = 0; w < 4 && !prepost; ++w) trial.x["base"][w * 6 + 5] = 1;
      const Trial before = trial;
      trial.run(backend);
      for (int w = 0; w < 4; ++w) CHECK(trial[str("out", w)] == trial[prepost ? "skip" : "source5"]);
      if (!prepost) continue;
      // With a = 0 the norm's slope is eps^(-1/2), and the gains and posts get nothing.
      for (double rstd : trial["rstd"]) CHECK(rstd == doctest::Approx(1000).epsilon(1e-6));
      for (int s = 0; s < 6; ++s) CHECK(trial[str("dgain", s)] == before[str("dgain", s)]);
      for (int w = 0; w < 4; ++w) CHECK(trial[str("dpost", w)] == before[str("dpost", w)]);
      check_fast(Dtype::f32, backend, size, 0.0);
    }
}

TEST_CASE("multiway_mix: NaN shows where it should, and threads do not matter") {
  for (const bool prepost : {false, true}) {
    check_threads(multiway_mix({700, 48, 5, 4, prepost}));
    const size_t in = 100 * 48 + 7, cotangent = 200 * 48 + 9;  // of the third source, of the second way
    const Where row = in_row(100, 48);
    std::map<std::string, Where> want{{"dskip", at({cotangent})}, {"rstd", in_row(100, 4)}};
    for (int w = 0; w < 4; ++w) want[str("out", w)] = prepost ? row : at({in}), want[str("dpost", w)] = everywhere;
    for (int s = 0; s < 5; ++s) {
      want[str("dsource", s)] = at({cotangent}), want[str("dgain", s)] = everywhere;
      if (prepost) want[str("dsource", s)] = [](size_t i) { return i / 48 == 100 || i / 48 == 200; };
    }
    want["dweight"] = [=](size_t i) { return i / 20 == 100 ? prepost || i % 5 == 2 : i / 20 == 200 && i / 5 % 4 == 1; };
    want["dbase"] = [=](size_t i) { return prepost || i % 5 == 2 || i / 5 == 1; };
    for (const Backend backend : fast_backends())
      check_nans(multiway_mix({backend == Backend::cpu ? 700 : 203, 48, 5, 4, prepost}), Dtype::f32, backend,
                 {{"source2", {in}}, {"dout1", {cotangent}}}, want);
  }
}

TEST_CASE("multiway_mix: shapes that do not fit") {
  const Size size{6, 9, 3, 2, true};
  const std::vector<double> memory(54);
  const Op op = multiway_mix(size);
  const auto tensor = [&](const std::string& name) {
    const auto is = [&](const Operand& v) { return v.name == name; };
    return view(memory, std::find_if(op.values.begin(), op.values.end(), is)->shape);
  };
  const auto grad = [&](const std::string& name) { return Grad{tensor(name), false}; };
  const Tensor saved = view(memory.data(), {2, 3, 2});
  const std::vector<Tensor> out(2, view(memory.data(), {2, 3, 9}));
  const MultiwayMix<Tensor> mix = mix_of(size, tensor, tensor);
  const MultiwayMix<Grad, Tensor> gradients = mix_of(size, grad, tensor);
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
  CHECK_THROWS_AS(multiway_mix_forward(std::vector<Tensor>(5, out[0]), saved, mix, 1e-6, fast), Error);
  MultiwayMix<Grad, Tensor> accumulates = gradients;
  accumulates.weight.accumulate = true;  // which is always set
  CHECK_THROWS_AS(multiway_mix_backward(accumulates, out, saved, mix, reference), Error);
}
