// The write of hyper-connections: the plain one, and the one that also reads for the next sublayer and takes the
// streams' squares, as mHC has it.
#include "kernels/depth/streams/hyper.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t B, T, E, C;
  int64_t rows() const { return B * T; }
};

// behind: whether next has a gradient, too. merged: whether the write also reads.
Op write(const Size& s, bool behind = true, bool merged = true) {
  const int64_t B = s.B, T = s.T, E = s.E, C = s.C;
  const Shape streams{B, T, E, C};
  std::vector<Operand> operands{input("streams", streams), input("y", {B, T, C}),
                                in_f32(input("coef", {B, T, E, E + 2})),
                                behind ? output("next", streams) : Operand{"next", streams, OperandRole::saved}};
  if (merged) operands.push_back(output("x", {B, T, C})), operands.push_back(saved("squares", {B, T}));
  return {
      operands,
      [](auto& t, Stream stream) {
        hyper_write_forward({t["next"], t["x"], t["squares"]}, t["streams"], t["coef"], t["y"], stream);
      },
      [](auto& t, Stream stream) {
        hyper_write_backward(t.grad("streams"), t.grad("coef"), t.grad("y"), {t["next"], t["dnext"], t["dx"]},
                             t["streams"], t["coef"], t["y"], stream);
      },
      [=](auto& z) {
        hyper_write_forward_ref<Complex>({z["next"], z["x"], nullptr}, z["streams"], z["coef"], z["y"], s.rows(), E, C);
      }};
}

Op reread(const Size& s) {
  const int64_t B = s.B, T = s.T, E = s.E, C = s.C;
  return {{input("streams", {B, T, E, C}), in_f32(input("coef", {B, T, E, E + 2})), output("x", {B, T, C})},
          [](auto& t, Stream stream) { hyper_reread_forward(t["x"], t["streams"], t["coef"], stream); },
          [](auto& t, Stream stream) {
            hyper_reread_backward(t.grad("streams"), t.grad("coef"), t["dx"], t["streams"], t["coef"], stream);
          },
          [=](auto& z) { hyper_reread_forward_ref<Complex>(z["x"], z["streams"], z["coef"], s.rows(), E, C); }};
}

// Puts x and squares to those of next as it is.
void read_next(Trial& a, const Size& s) {
  auto &x = a.x["x"], &squares = a.x["squares"];
  x.assign(x.size(), 0), squares.assign(squares.size(), 0);
  const auto E = static_cast<size_t>(s.E), C = static_cast<size_t>(s.C);
  for (size_t i = 0; i < a["next"].size(); ++i) {
    const size_t row = i / C;
    x[row / E * C + i % C] += a["coef"][row * (E + 2)] * a["next"][i];
    squares[row / E] += a["next"][i] * a["next"][i];
  }
}

}  // namespace

TEST_CASE("hyper_write: the reference backward is the derivative of the reference forward") {
  for (const int64_t E : {1, 2, 3, 4}) {
    check_derivative(write({1, 3, E, 5}, true, false), 1e-11);
    for (const bool behind : {false, true}) check_derivative(write({1, 3, E, 5}, behind), 1e-11);
  }
}

// Sums of so many terms: some ulps (6e-8) each.
constexpr double exact = 3e-6;

TEST_CASE("hyper_write: the fast backends equal the reference in a plain write, set and added") {
  const std::vector<Size> of_cpu{{1, 1, 1, 1},  {1, 3, 1, 33},   {2, 5, 2, 16},   {2, 100, 2, 129},
                                 {1, 7, 3, 40}, {3, 100, 4, 67}, {1, 200, 4, 64}, {1, 5, 5, 21},
                                 {1, 9, 6, 32}, {2, 65, 7, 18},  {1, 4, 8, 259}};
  const std::vector<Size> of_gpu{{1, 3, 3, 40},   {1, 5, 4, 24},   {1, 2, 2, 33},   {1, 3, 1, 72}, {1, 33, 4, 24},
                                 {1, 2, 6, 32},   {1, 1, 7, 259},  {1, 1, 2, 4104}, {1, 9, 8, 32}, {1, 2, 4, 2048},
                                 {1, 19, 2, 136}, {3, 7, 4, 1032}, {1, 1, 4, 2056}};
  for_sizes(of_cpu, of_gpu, [](Backend backend, const Size& s) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      check_backend(write(s, true, false), dtype, backend,
                    {{"next", exact}, {"dcoef", exact}, {"dy", exact}, {"dstreams", exact}});
  });
}

TEST_CASE("hyper_write: the fast backends equal the reference in a write that reads, set and added") {
  const std::vector<Size> of_cpu{{1, 1, 1, 1},    {1, 3, 1, 33}, {2, 5, 2, 16}, {1, 7, 3, 40},  {3, 100, 4, 67},
                                 {1, 200, 4, 64}, {1, 5, 5, 21}, {1, 9, 6, 32}, {2, 65, 7, 18}, {1, 4, 8, 259}};
  const std::vector<Size> of_gpu{{1, 3, 3, 40}, {1, 5, 4, 24},  {1, 2, 2, 33}, {1, 33, 4, 24},
                                 {1, 2, 6, 32}, {1, 1, 7, 259}, {1, 9, 8, 32}, {1, 2, 1, 72}};
  for_sizes(of_cpu, of_gpu, [&](Backend backend, const Size& s) {
    for (const bool behind : {false, true})
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        const Op op = write(s, behind);
        for (const unsigned adds : add_patterns(op)) {
          CAPTURES(s.E, s.C, behind, name_of(dtype), adds);
          Trial a(op, dtype, adds), b = a.exact();
          a.forward(backend), b.forward(Backend::reference);
          const double rounded = dtype == Dtype::bf16 ? 0x1p-8 : exact;
          check_close("next", a["next"], b["next"], rounded);
          b.x["next"] = a["next"];
          read_next(b, s);
          check_close("x", a["x"], b["x"], rounded);
          check_close("squares", a["squares"], b["squares"], exact);
          a.backward(backend), b.backward(Backend::reference);
          check_close("dcoef", a["dcoef"], b["dcoef"], exact);
          check_close("dy", a["dy"], b["dy"], rounded);
          check_close("dstreams", a["dstreams"], b["dstreams"], rounded);
        }
      }
  });
}

TEST_CASE("hyper_reread: the reference backward is the derivative of the reference forward") {
  for (const int64_t E : {1, 2, 3, 4, 8}) check_derivative(reread({1, 3, E, 5}), 1e-11);
}

TEST_CASE("hyper_reread: the fast backends equal the reference, set and added, on any threads") {
  const std::vector<Size> of_cpu{{1, 1, 1, 1},    {1, 3, 1, 33}, {2, 5, 2, 16},  {1, 7, 3, 40},
                                 {3, 100, 4, 67}, {1, 5, 5, 21}, {2, 65, 7, 18}, {1, 4, 8, 259}},
      of_gpu{{1, 3, 3, 40}, {1, 5, 4, 24}, {1, 2, 2, 33}, {1, 33, 4, 24}, {1, 2, 6, 32}, {1, 1, 7, 259}, {1, 9, 8, 32}};
  for_sizes(of_cpu, of_gpu, [](Backend backend, const Size& s) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      check_backend(reread(s), dtype, backend, {{"x", exact}, {"dcoef", exact}, {"dstreams", exact}});
  });
  check_threads(reread({2, 150, 4, 35}));
}

TEST_CASE("hyper_write: next has the bits of a plain write") {
  const Size s{1, 5, 4, 40};
  const Op merged = write(s), plain = write(s, true, false);
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      CHECK(Trial(merged, dtype).forward(backend)["next"] == Trial(plain, dtype).forward(backend)["next"]);
}

TEST_CASE("hyper_write: a NaN stays in its token") {
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Op op = write({1, 6, 4, 24});
      Trial a(op, dtype);
      a.x["streams"][2 * 96 + 30] = NAN;
      a.run(backend);
      for (size_t n = 0; n < 6; ++n) {
        CHECK(std::isnan(a["x"][n * 24 + 6]) == (n == 2));
        CHECK(std::isnan(a["squares"][n]) == (n == 2));
        CHECK(std::isnan(a["dcoef"][n * 24]) == (n == 2));
      }
    }
}

TEST_CASE("hyper_write: a plain write keeps a NaN to its token, adds y exactly, and has the same bits on any threads") {
  const Op op = write({2, 150, 4, 35}, true, false), small = write({1, 9, 4, 24}, true, false);
  check_threads(op);
  for (const Backend backend : fast_backends()) {
    const int64_t E = 4, C = backend == Backend::cpu ? 35 : 24;
    const auto stream = static_cast<size_t>(7 * E + 2), c = static_cast<size_t>(C);
    const Where next = [=](size_t i) { return i / c / 4 == 7 && i % c == 5; };
    const Where dcoef = [=](size_t i) { return i / 6 == stream && i % 6 >= 1 && i % 6 <= 4; };
    check_nans(backend == Backend::cpu ? op : small, Dtype::f32, backend, {{"streams", {stream * c + 5}}},
               {{"next", next}, {"dcoef", dcoef}});
  }
  for (const Backend backend : all_backends())
    for (const int64_t E : {1, 2, 3, 4, 8}) {
      CAPTURES(backend, E);
      const Op sum = write({2, 3, E, 37}, true, false);
      Trial a(sum, Dtype::f32);
      for (size_t at = 0; at < a["coef"].size(); ++at) {
        const auto i = static_cast<int64_t>(at) / (E + 2) % E, column = static_cast<int64_t>(at) % (E + 2);
        a.x["coef"][at] = column == i + 1 || column == E + 1 || (column == 0 && i == 5 % E);
      }
      a.forward(backend);
      for (size_t at = 0; at < a["next"].size(); ++at) {
        const size_t row = at / 37 / static_cast<size_t>(E);
        CHECK(a["next"][at] == static_cast<double>(static_cast<float>(a["streams"][at] + a["y"][row * 37 + at % 37])));
      }
    }
}
