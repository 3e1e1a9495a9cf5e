#include "kernels/attention/attention.h"
#include "kernels/attention/depth_merge.h"
#include "kernels/attention/ops.h"
#include "kernels/devices.h"
#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

struct Size {
  int64_t S, B, T, G, K, D;
  Shape queries() const { return {B, T, G * K, D}; }
  Shape slots() const { return {B, T, K, D}; }
  Shape lse() const { return {B, G * K, T}; }
  DepthMergeSizes sizes() const { return {B, T, G * K, K, D, S}; }
};

// Attention over a sequence and S slots, as a whole: what a merge changes is what attention has put out.
Op joint(const Size& s, double scale, double queries = 1) {
  std::vector<Operand> operands = {input("q", s.queries(), queries), input("k", s.slots()), input("v", s.slots()),
                                   output("out", s.queries()), saved("lse", s.lse())};
  for (const char* name : {"kd", "vd"})
    for (int64_t i = 0; i < s.S; ++i) operands.push_back(input(str(name, i), s.slots()));
  const auto gradients = [=](auto& t, const char* name) {
    return several(s.S, name, [&](const std::string& one) { return t.grad(one); });
  };
  Op op{operands,
        [=](auto& t, Stream stream) {
          const auto get = [&](const std::string& name) { return t[name]; };
          attention_forward(t["out"], t["lse"], t["q"], t["k"], t["v"], scale, {}, stream);
          depth_merge_forward(t["out"], t["lse"], t["q"], several(s.S, "kd", get), several(s.S, "vd", get), scale,
                              stream);
        },
        [=](auto& t, Stream stream) {
          const auto get = [&](const std::string& name) { return t[name]; };
          attention_backward(t.grad("q"), t.grad("k"), t.grad("v"), t["dout"], t["out"], t["q"], t["k"], t["v"],
                             t["lse"], scale, {}, stream);
          depth_merge_backward(t["dq"], gradients(t, "kd"), gradients(t, "vd"), t["dout"], t["out"], t["lse"], t["q"],
                               several(s.S, "kd", get), several(s.S, "vd", get), scale, stream);
        },
        [=](auto& z) {
          const auto get = [&](const std::string& name) -> const Complex* { return z[name]; };
          attention_forward_ref<Complex>(z["out"], z["lse"], z["q"], z["k"], z["v"],
                                         {s.B, s.T, s.G * s.K, s.K, s.D, s.T, 0}, scale);
          depth_merge_forward_ref<Complex>(z["out"], z["lse"], z["q"], several(s.S, "kd", get), several(s.S, "vd", get),
                                           s.sizes(), scale);
        }};
  op.reads_outputs = true;
  return op;
}
Op joint(const Size& s) { return joint(s, 1 / std::sqrt(static_cast<double>(s.D))); }

Tolerances tolerances(const Size& s, Dtype dtype) {
  // Sums of D, T or S products that cancel: some ulps (6e-8) of the largest partial sum. In bf16 attention rounds the
  // weights and what it puts into dq, to which the slots share is added: two roundings of numbers up to 2.
  const double of_attention = dtype == Dtype::bf16 ? 0x1p-7 : 2e-6;
  Tolerances t{{"out", 4e-6},
               {"lse", 4e-6},
               {"dq", {2e-5, of_attention}},
               {"dk", {2e-5, of_attention}},
               {"dv", {1e-5, of_attention}}};
  for (int64_t i = 0; i < s.S; ++i) t.insert({{str("dkd", i), {2e-5, 2e-6}}, {str("dvd", i), {1e-5, 2e-6}}});
  return t;
}
// Where every token is a sequence of its own attention's output is v, which bf16 holds. test_attention.cpp has what
// bf16 costs longer ones.
Size for_dtype(const Size& s, Dtype dtype) { return dtype == Dtype::bf16 ? Size{s.S, s.B * s.T, 1, s.G, s.K, s.D} : s; }

// Heads of one number, ragged ones, wider than a warp's lanes take at once; several batches and blocks; more slots than
// are loaded together, and than a row has lanes.
const std::vector<Size> sizes{{1, 1, 1, 1, 1, 1},    {2, 2, 5, 1, 2, 3},   {3, 1, 70, 4, 2, 16},   {4, 3, 31, 2, 3, 33},
                              {13, 1, 40, 3, 1, 64}, {5, 1, 3, 1, 2, 257}, {3, 2, 200, 2, 2, 128}, {40, 1, 9, 2, 1, 8}};
const std::vector<Size> gpu_sizes{{1, 1, 1, 1, 1, 1},  {2, 2, 5, 1, 2, 3},   {3, 1, 20, 4, 2, 16}, {4, 2, 9, 2, 1, 33},
                                  {9, 1, 7, 3, 1, 64}, {5, 1, 3, 1, 2, 257}, {40, 1, 9, 2, 1, 8}};

}  // namespace

TEST_CASE("depth_merge: reference backward, with attention's, is the derivative of the reference forward") {
  for (const Size& s : std::vector<Size>{{1, 1, 1, 1, 1, 3}, {2, 2, 3, 2, 2, 2}, {3, 1, 4, 3, 1, 5}})
    for (const double queries : {1e-3, 1.0, 10.0}) check_derivative(joint(s, 0.6, queries), {1e-11, 1e-13});
}

TEST_CASE("depth_merge: the fast backends equal the reference, set and added") {
  for_sizes(sizes, gpu_sizes, [](Backend backend, const Size& s) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      check_backend(joint(for_dtype(s, dtype)), dtype, backend, tolerances(s, dtype));
  });
}

TEST_CASE("depth_merge: one softmax, worked by hand") {
  // The sequence's one key has logit 0 and value 2, two slots log 3 and log 4 and values 10 and 0: (2 + 30) / 8.
  for (const Backend backend : all_backends()) {
    CAPTURES(backend);
    const Op op = joint({2, 1, 1, 1, 1, 1}, 1);
    Trial c(op, Dtype::f32);
    c.x["q"] = {1}, c.x["k"] = {0}, c.x["v"] = {2};
    c.x["kd0"] = {std::log(3.0)}, c.x["vd0"] = {10}, c.x["kd1"] = {std::log(4.0)}, c.x["vd1"] = {0};
    c.run(backend);
    CHECK(c["out"][0] == doctest::Approx(4).epsilon(1e-6));
    CHECK(c["lse"][0] == doctest::Approx(std::log(8.0)).epsilon(1e-6));
    const double dy = c["dout"][0];
    CHECK(c["dv"][0] == doctest::Approx(dy / 8).epsilon(1e-6));
    CHECK(c["dvd0"][0] == doctest::Approx(dy * 3 / 8).epsilon(1e-6));
    CHECK(c["dk"][0] == doctest::Approx(dy * (2 - 4) / 8).epsilon(1e-6));
    CHECK(c["dkd1"][0] == doctest::Approx(dy * (0 - 4) / 2).epsilon(1e-6));
  }
}

TEST_CASE("depth_merge: a slot with a key and a value of 0 takes its share") {
  for (const Backend backend : fast_backends()) {
    const Op op = joint({1, 1, 1, 2, 1, 24}, 0);
    Trial c(op, Dtype::f32);
    c.x["vd0"].assign(24, 0);
    c.run(backend);
    for (size_t i = 0; i < c["out"].size(); ++i)
      CHECK(c["out"][i] == doctest::Approx(c["v"][i % 24] / 2).epsilon(1e-6));
  }
}

TEST_CASE("depth_merge: logits far beyond what exp can hold, of the sequence or of the slots") {
  for (const Backend backend : fast_backends())
    for (const char* large : {"k", "kd1"}) {
      CAPTURES(backend, large);
      const Op op = joint({2, 1, 8, 2, 1, 16});
      Trial a(op, Dtype::f32);
      for (double& x : a.x[large]) x *= 4096;
      Trial want = a.exact();
      a.run(backend), want.run(Backend::reference);
      for (const double x : a.all_results()) CHECK(std::isfinite(x));
      for (size_t i = 0; i < a["lse"].size(); ++i) CHECK(a["lse"][i] == doctest::Approx(want["lse"][i]).epsilon(1e-5));
    }
}

TEST_CASE("depth_merge: memory that begins between two multiples of 16 bytes") {
  const Size s{3, 1, 9, 2, 2, 16};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    check_any_address(joint(for_dtype(s, dtype)), dtype, tolerances(s, dtype));
}

TEST_CASE("depth_merge: a NaN in a slot stays in its token, and the threads do not matter") {
  const Size s{2, 1, 6, 2, 2, 40};
  for (const Backend backend : fast_backends())
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      CAPTURES(backend, name_of(dtype));
      const Op op = joint(s);
      Trial c(op, dtype);
      c.x["kd1"][5 * 80 + 7] = NAN;  // token 5, head 0
      c.forward(backend);
      for (size_t i = 0; i < c["out"].size(); ++i) CHECK(std::isnan(c["out"][i]) == (i >= 5 * 160 && i % 160 < 80));
    }
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) check_threads(joint({3, 1, 300, 4, 2, 65}), dtype);
}

TEST_CASE("depth_merge: recorded, trained or cached, the slots are the token's own") {
  const Size s{2, 2, 5, 2, 2, 9};
  const Op op = joint(s, 1 / (3 * 2.5), 5);
  const Trial c(op, Dtype::f32), want = c.exact().forward(Backend::reference);
  for (const std::string& name : joined(fast_devices(), std::vector<std::string>{"reference"}))
    for (const int64_t cache : {int64_t{0}, s.T}) {
      CAPTURES(name, cache);
      const auto device = make_device(name);
      Tape tape(Dtype::f32, cache);
      const auto value = [&](const std::string& of, Shape shape) { return tape.input(of, shape, Dtype::f32); };
      std::vector<Value*> all{value("q", s.queries()), value("k", s.slots()), value("v", s.slots())};
      const auto keys = several(s.S, "kd", [&](const std::string& of) { return value(of, s.slots()); });
      const auto values = several(s.S, "vd", [&](const std::string& of) { return value(of, s.slots()); });
      const Value* out = ops::attention(tape, "a", all[0], all[1], all[2], {.divisor = 2.5}, keys, values);
      for (const auto* list : {&keys, &values}) all.insert(all.end(), list->begin(), list->end());
      tape.plan(PlanMode::reuse);
      tape.allocate(*device);
      for (const Value* x : all) device->copy_in(x->tensor.data, convert<float>(c[x->name]).data(), x->bytes());
      tape.forward(Step{});
      std::vector<float> got(c["q"].size());
      device->copy_out(got.data(), out->tensor.data, out->bytes());
      check_close("out", got, want["out"], 1e-5);
    }
}

TEST_CASE("depth_merge: wrong shapes are errors") {
  const std::vector<float> x(48);
  const Tensor q = view(x.data(), {1, 2, 4, 3}), lse = view(x.data(), {1, 4, 2}), slot = view(x.data(), {1, 2, 2, 3});
  const Tensor wide = view(x.data(), {1, 2, 2, 4}), three = view(x.data(), {1, 2, 3, 3});
  depth_merge_forward(q, lse, q, {slot}, {slot}, 1, fast);
  CHECK_THROWS_AS(depth_merge_forward(q, lse, q, {}, {}, 1, fast), Error);
  CHECK_THROWS_AS(depth_merge_forward(q, lse, q, {slot, slot}, {slot}, 1, fast), Error);
  CHECK_THROWS_AS(depth_merge_forward(q, lse, q, {slot}, {wide}, 1, fast), Error);
  CHECK_THROWS_AS(depth_merge_forward(q, lse, q, {three}, {three}, 1, fast), Error);
  CHECK_THROWS_AS(depth_merge_forward(q, slot, q, {slot}, {slot}, 1, fast), Error);
  const Grad d{slot, false};
  CHECK_THROWS_AS(depth_merge_backward(q, {d}, {}, q, q, lse, q, {slot}, {slot}, 1, fast), Error);
  CHECK_THROWS_AS(depth_merge_backward(slot, {d}, {d}, q, q, lse, q, {slot}, {slot}, 1, fast), Error);
}
