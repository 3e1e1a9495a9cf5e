#include "kernels/depth/depth_attention.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, G, T, K, D;
  Shape row() const { return {1, T, K, D}; }
  DepthAttentionSize sizes() const { return {T * K, G, D, S}; }
};

// S slots. queries: their scale, by which the logits grow.
Op depth_attention(const Size& s, double queries = 1) {
  std::vector<Operand> operands = {input("q", {1, s.T, s.G * s.K, s.D}, queries), output("out", s.row()),
                                   saved("weights", {1, s.T, s.K, s.S})};
  for (const char* name : {"k", "v"})
    for (int64_t i = 0; i < s.S; ++i) operands.push_back(input(str(name, i), s.row()));
  const auto gradients = [=](auto& t, const char* name) {
    return several(s.S, name, [&](const std::string& one) { return t.grad(one); });
  };
  return {operands,
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            depth_attention_forward(t["out"], t["weights"], t["q"], several(s.S, "k", get), several(s.S, "v", get),
                                    stream);
          },
          [=](auto& t, Stream stream) {
            const auto get = [&](const std::string& name) { return t[name]; };
            depth_attention_backward(t.grad("q"), gradients(t, "k"), gradients(t, "v"), t["dout"], t["weights"], t["q"],
                                     several(s.S, "k", get), several(s.S, "v", get), stream);
          },
          [=](auto& z) {
            const auto get = [&](const std::string& name) -> const Complex* { return z[name]; };
            depth_attention_forward_ref<Complex>(z["out"], z["weights"], z["q"], several(s.S, "k", get),
                                                 several(s.S, "v", get), s.sizes());
          }};
}

constexpr Dtype dtypes[] = {Dtype::f32, Dtype::bf16};

// Heads of one number, ragged ones, wider than a warp's lanes take at once; several blocks; more slots than are loaded
// together, and than a row has lanes.
const std::vector<Size> sizes{{1, 1, 1, 1, 1},    {2, 1, 5, 2, 3},   {3, 4, 70, 2, 16},   {4, 2, 31, 3, 33},
                              {13, 3, 40, 1, 64}, {5, 1, 3, 2, 257}, {3, 2, 500, 4, 128}, {40, 2, 9, 1, 8}};
const std::vector<Size> gpu_sizes{{1, 1, 1, 1, 1},  {2, 1, 5, 2, 3},   {3, 4, 70, 2, 16}, {4, 2, 31, 1, 33},
                                  {9, 3, 7, 1, 64}, {5, 1, 3, 2, 257}, {3, 2, 3, 1, 520}, {40, 2, 9, 1, 8}};

}  // namespace

TEST_CASE("depth_attention: reference backward is the derivative of the reference forward") {
  for (const Size& size : std::vector<Size>{{1, 2, 2, 1, 3}, {2, 1, 1, 2, 5}, {4, 3, 2, 2, 2}})
    for (const double queries : {1e-3, 1.0, 10.0}) check_derivative(depth_attention(size, queries), {1e-12, 1e-14});
}

TEST_CASE("depth_attention: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& size) {
    // Sums of D or S products that cancel: some ulps (6e-8) of the largest partial sum.
    Tolerances tolerances{{"out", 2e-6}, {"weights", 2e-6}, {"dq", 1e-5}};
    for (int64_t i = 0; i < size.S; ++i) tolerances.insert({{str("dk", i), {1e-5, 1e-6}}, {str("dv", i), 4e-6}});
    for (const Dtype dtype : dtypes) check_backend(depth_attention(size), dtype, backend, tolerances);
  });
}

TEST_CASE("depth_attention: one slot is copied bit for bit, and its gradients are exactly dout and 0") {
  const Size size{1, 2, 50, 2, 0};
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : dtypes)
      for (const int64_t D : {1, 15, 16, 67, 256}) {
        CAPTURES(backend, name_of(dtype), D);
        const Op op = depth_attention({size.S, size.G, is_slow(backend) ? 5 : size.T, size.K, D});
        Trial a(op, dtype);
        a.x["v0"][0] = -0.0;
        a.run(backend);
        CHECK(a["out"] == a["v0"]);
        CHECK(std::signbit(a["out"][0]));
        CHECK(a["dv0"] == a["dout"]);
        CHECK(a["weights"] == std::vector<double>(a["weights"].size(), 1));
        for (const char* name : {"dq", "dk0"})
          for (const double x : a[name]) CHECK(x == 0);
      }
}

TEST_CASE("depth_attention: memory that begins between two multiples of 16 bytes") {
  for (const Dtype dtype : dtypes) {
    Tolerances tolerances{{"out", 1e-6}, {"weights", 1e-6}, {"dq", 4e-6}};
    for (int64_t i = 0; i < 3; ++i) tolerances.insert({{str("dk", i), {4e-6, 1e-6}}, {str("dv", i), 2e-6}});
    check_any_address(depth_attention({3, 2, 9, 2, 16}), dtype, tolerances);
  }
}

TEST_CASE("depth_attention: queries of 0 average the values, and a group's queries count by their mean") {
  for (const Backend backend : all_backends()) {
    CAPTURES(backend);
    const Size size{4, 2, 6, 3, 20};
    const Op op = depth_attention(size);
    Trial a(op, Dtype::f32);
    // The second query of each head takes the first back.
    for (size_t i = 0; i < a["q"].size(); ++i)
      if (i / 20 % 2 == 1) a.x["q"][i] = -a["q"][i - 20];
    a.run(backend);
    CHECK(a["weights"] == std::vector<double>(a["weights"].size(), 0.25));
    for (size_t i = 0; i < a["out"].size(); ++i)
      CHECK(a["out"][i] == doctest::Approx((a["v0"][i] + a["v1"][i] + a["v2"][i] + a["v3"][i]) / 4).epsilon(1e-5));
    for (size_t i = 0; i < a["dq"].size(); ++i)
      if (i / 20 % 2 == 1) CHECK(a["dq"][i] == a["dq"][i - 20]);
  }
}

TEST_CASE("depth_attention: logits far beyond what exp can hold") {
  for (const Backend backend : fast_backends()) {
    const Op op = depth_attention({5, 2, 20, 2, 64}, 16384);
    Trial a(op, Dtype::f32);
    Trial want = a.exact();
    a.run(backend), want.run(Backend::reference);
    for (size_t i = 0; i < a["weights"].size(); ++i) {
      CHECK(std::isfinite(a["weights"][i]));
      if (const double w = want["weights"][i]; w < 1e-9 || w > 1 - 1e-9) CHECK(std::abs(a["weights"][i] - w) < 1e-6);
    }
    for (const double x : a.all_results()) CHECK(std::isfinite(x));
  }
}

TEST_CASE("depth_attention: NaN stays in its row, and the threads do not matter") {
  const int64_t D = 40;
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : dtypes) {
      const Where row = in_row(5, D), query = [](size_t i) { return i / 40 / 2 == 5; };
      check_nans(depth_attention({3, 2, 6, 2, D}), dtype, backend, {{"k1", {5 * 40 + 7}}},
                 {{"out", row},
                  {"weights", in_row(5, 3)},
                  {"dq", query},
                  {"dk0", row},
                  {"dk1", row},
                  {"dk2", row},
                  {"dv0", row},
                  {"dv1", row},
                  {"dv2", row}});
    }
  for (const Dtype dtype : dtypes) check_threads(depth_attention({3, 4, 300, 2, 65}), dtype);
}

TEST_CASE("depth_attention: wrong shapes are errors") {
  const std::vector<float> x(48);
  const Tensor row = view(x.data(), {1, 2, 2, 3}), q = view(x.data(), {1, 2, 4, 3}), w = view(x.data(), {1, 2, 2, 2});
  const Tensor wide = view(x.data(), {1, 2, 4, 4}), few = view(x.data(), {1, 2, 2, 1});
  const Grad d{row, false}, dq{q, false};
  depth_attention_forward(row, w, q, {row, row}, {row, row}, fast);
  CHECK_THROWS_AS(depth_attention_forward(row, w, q, {}, {}, fast), Error);
  CHECK_THROWS_AS(depth_attention_forward(row, w, q, {row, row}, {row}, fast), Error);
  CHECK_THROWS_AS(depth_attention_forward(row, few, q, {row, row}, {row, row}, fast), Error);
  CHECK_THROWS_AS(depth_attention_forward(row, w, wide, {row, row}, {row, row}, fast), Error);
  CHECK_THROWS_AS(depth_attention_forward(row, w, q, {row, few}, {row, row}, fast), Error);
  CHECK_THROWS_AS(depth_attention_backward(dq, {d}, {d, d}, row, w, q, {row, row}, {row, row}, fast), Error);
  CHECK_THROWS_AS(depth_attention_backward(d, {d, d}, {d, d}, row, w, q, {row, row}, {row, row}, fast), Error);
}
